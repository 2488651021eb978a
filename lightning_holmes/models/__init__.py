"""What the recipes train: a small GPT, and any Hugging Face causal language model, whole or by adapters."""

from typing import TYPE_CHECKING, Any

from lightning_holmes.models.gpt import GPT

if TYPE_CHECKING:
    from lightning_holmes.models.hf import HFCausalLM
    from lightning_holmes.models.lora import LoRACausalLM

__all__ = ["GPT", "HFCausalLM", "LoRACausalLM"]


def __getattr__(name: str) -> Any:
    if name == "HFCausalLM":  # lightning_holmes.models.hf, only when asked for
        from lightning_holmes.models.hf import HFCausalLM

        return HFCausalLM
    if name == "LoRACausalLM":
        from lightning_holmes.models.lora import LoRACausalLM

        return LoRACausalLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
