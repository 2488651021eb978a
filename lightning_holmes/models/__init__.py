"""What the recipes train: a small GPT, and any Hugging Face causal language model, whole or by adapters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_holmes.models.gpt import GPT

if TYPE_CHECKING:
    from lightning_holmes.models.hf import HFCausalLM
    from lightning_holmes.models.lora import LoRACausalLM

__all__ = ["GPT", "HFCausalLM", "LoRACausalLM"]


def __getattr__(name: str) -> Any:
    modules = {"HFCausalLM": "hf", "LoRACausalLM": "lora"}  # imported only when asked for
    if name in modules:
        return getattr(import_module(f"lightning_holmes.models.{modules[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
