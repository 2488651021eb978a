"""Hugging Face's causal language models as LightningModules, trained fully or by LoRA adapters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_holmes.models.hf import HFCausalLM
    from lightning_holmes.models.lora import LoRACausalLM

__all__ = ["HFCausalLM", "LoRACausalLM"]


def __getattr__(name: str) -> Any:
    modules = {"HFCausalLM": "hf", "LoRACausalLM": "lora"}  # imported on first use: transformers takes seconds
    if name in modules:
        return getattr(import_module(f"lightning_holmes.models.{modules[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
