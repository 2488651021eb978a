"""Merge LoRA adapters into their weights: W + (alpha / rank) B A (arXiv 2106.09685, section 4.1).

This module interprets LoRACausalLM's parameter names (they are peft's) and computes the sum, one weight at a time; hf_export
writes the result.

    tensors = with_adapters_added(tensors, {"pretrained": "models/llama", "rank": 8, "alpha": 16.0})
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.checkpoint.converting import Item
from lightning_holmes.errors import CheckpointError, needs_extra

_BASE = ".base_layer."
_ADAPTER = ".lora_"


def with_adapters_added(tensors: dict[str, Item], hyper_parameters: Mapping[str, Any]) -> dict[str, Item]:
    """Return the model's tensors under their names without adapters, each merged with its adapter when it is read; ``tensors``
    itself if there are no adapters.

    Raises:
        CheckpointError: an adapter is of an unknown kind, or the pretrained folder cannot be read.
        ConfigurationError: transformers is not installed.
    """
    if not any(_ADAPTER in name for name in tensors):
        return tensors
    scale = float(hyper_parameters["alpha"]) / int(hyper_parameters["rank"])
    transposed = _transposed(str(hyper_parameters["pretrained"]))
    added: dict[str, Item] = {}
    used: set[str] = set()
    for name, item in tensors.items():
        if _ADAPTER in name:
            continue
        module, base, kind = name.partition(_BASE)
        names = [f"{module}.lora_{part}.default.{kind}" for part in "AB"]
        if base and all(n in tensors for n in names):
            down, up = (tensors[n] for n in names)
            used.update(names)
            read = _adding(item, down, up, scale, transposed=module in transposed)
            item = dataclasses.replace(item, place=("with its adapter", name), read=read)
        added[name.replace(_BASE, ".")] = item
    unknown = [name for name in tensors if _ADAPTER in name and name not in used]
    if unknown:
        raise CheckpointError(
            f"{unknown[0]} is no adapter of a matrix, and adding it to the weights is not supported: export the adapters "
            "instead, by LoRACausalLM.save_adapter"
        )
    return added


def _adding(item: Item, down: Item, up: Item, scale: float, *, transposed: bool) -> Callable[[], Any]:
    def read() -> Tensor:
        weight: Tensor = item.read()
        change = scale * (up.read().float() @ down.read().float())  # (outputs, inputs), fp32
        weight = (weight.float() + (change.T if transposed else change)).to(weight.dtype)
        return weight

    return read


def load_transformers() -> Any:
    """Import transformers, which an export needs. Raises ConfigurationError if it is not installed."""
    with needs_extra("exporting safetensors", "hf"):
        import transformers
    return transformers


def _transposed(folder: str) -> set[str]:
    """The modules whose weights are stored as (inputs, outputs): GPT-2's Conv1D."""
    transformers = load_transformers()
    from transformers.pytorch_utils import Conv1D

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            made_by: Any = transformers.AutoModelForCausalLM
            model = made_by.from_config(config, trust_remote_code=False)
    except Exception as error:  # the model code of transformers raises all kinds of exceptions
        raise CheckpointError(
            f"the model came from the folder {folder!r}, which the export needs and cannot read now: {error}"
        ) from error
    return {name for name, module in model.named_modules() if isinstance(module, Conv1D)}
