"""What the recipes train: a small GPT, and any Hugging Face causal language model."""

from typing import TYPE_CHECKING, Any

from lightning_holmes.models.gpt import GPT

if TYPE_CHECKING:
    from lightning_holmes.models.hf import HFCausalLM

__all__ = ["GPT", "HFCausalLM"]


def __getattr__(name: str) -> Any:
    if name == "HFCausalLM":  # lightning_holmes.models.hf, only when asked for
        from lightning_holmes.models.hf import HFCausalLM

        return HFCausalLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
