"""Hugging Face's causal language models as LightningModules."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_holmes.models.hf import HFCausalLM

__all__ = ["HFCausalLM"]


def __getattr__(name: str) -> Any:
    if name == "HFCausalLM":  # imported on first use: transformers takes seconds
        return import_module("lightning_holmes.models.hf").HFCausalLM
    if name in (moved := {"GPT": "gpt", "LoRACausalLM": "lora"}):
        raise AttributeError(
            f"lightning_holmes.models.{name} is gone: it is recipes.{moved[name]}.{name} in the repository, of which you can copy it"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
