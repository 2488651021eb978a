"""Export a checkpoint of HFCausalLM as a folder for Hugging Face's from_pretrained: config.json and safetensors.

LoRACausalLM's adapters are merged into the weights, so that the result can be read without peft.
Tensors are written one at a time. A safetensors file is the length of a header, the header (JSON: name, type, shape
and place of each tensor), and the tensors' bytes (https://huggingface.co/docs/safetensors).
"""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_holmes.checkpoint import atomic
from lightning_holmes.checkpoint.adapters import load_transformers, with_adapters_added
from lightning_holmes.checkpoint.converting import Item, Source, weights
from lightning_holmes.comm.value_file import compact
from lightning_holmes.errors import CheckpointError

PREFIX = "model."
MAX_SHARD_BYTES = 5 * 10**9

# the files that save_pretrained of transformers' tokenizers writes
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja"),
)

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write_pretrained(source: Source, target: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write ``target``, a folder for from_pretrained.

    Raises:
        CheckpointError: the checkpoint is not one of HFCausalLM or LoRACausalLM.
        ConfigurationError: transformers is not installed.
    """
    tensors = with_adapters_added(_named_as_in_transformers(source), source.rest.get("hyper_parameters", {}))
    shards = _split(tensors, max_shard_bytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic.writing(target) as folder:
        folder.mkdir()
        _write_config(source, folder, tensors)
        where: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = "model.safetensors"
            if len(shards) > 1:
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_safetensors(folder / file, {name: tensors[name] for name in names}, source.read)
            where |= dict.fromkeys(names, file)
        if len(shards) > 1:
            total = sum(item.num_bytes for item in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": where}
            atomic.write_bytes(folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode())
        atomic.sync_folder(folder)


def write_safetensors(path: Path, items: dict[str, Item], read: Callable[[Item], Any]) -> None:
    """Write a safetensors file, one tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, item in items.items():
        assert item.dtype is not None
        if item.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} is of type {item.dtype}, which safetensors does not have; convert it with --format file"
            )
        places = [position, position + item.num_bytes]
        header[name] = {"dtype": _DTYPES[item.dtype], "shape": list(item.shape), "data_offsets": places}
        position += item.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for item in items.values():
            data: Any = compact(read(item)).reshape(-1).view(torch.uint8).numpy()
            file.write(memoryview(data))
    atomic.sync_file(path)


def _named_as_in_transformers(source: Source) -> dict[str, Item]:
    """The model's tensors without HFCausalLM's prefix; of tied tensors only the first, as in save_pretrained."""
    tensors: dict[str, Item] = {}
    places = set()
    for name, item in weights(source):
        if not name.startswith(PREFIX):
            raise CheckpointError(
                f"the checkpoint has {name}, and HFCausalLM has parameters below {PREFIX!r} only: safetensors are exported "
                f"for HFCausalLM; convert others to a plain file"
            )
        if item.place not in places:
            places.add(item.place)
            tensors[name.removeprefix(PREFIX)] = item
    return tensors


def _split(tensors: dict[str, Item], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, item in tensors.items():
        if shards[-1] and size + item.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += item.num_bytes
    return shards


def _write_config(source: Source, folder: Path, tensors: dict[str, Item]) -> None:
    """Write config.json, from the configuration or folder that HFCausalLM was built from."""
    given = source.rest.get("hyper_parameters", {})
    config, pretrained = given.get("config"), given.get("pretrained")
    dtype = next((i.dtype for i in tensors.values() if i.dtype is not None and i.dtype.is_floating_point), None)
    if isinstance(config, dict):
        transformers = load_transformers()
        settings = dict(config)
        made = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        made.architectures = [names[made.model_type]] if made.model_type in names else None
        made.dtype = dtype
        made.save_pretrained(folder)
        return
    if pretrained is None:
        raise CheckpointError(
            "the checkpoint's hyper-parameters name neither a config nor a pretrained folder: safetensors are exported for "
            "HFCausalLM; convert others to a plain file"
        )
    origin = Path(pretrained)
    if not (origin / "config.json").is_file():
        raise CheckpointError(
            f"the model came from the folder {pretrained!r}, and there is no {origin / 'config.json'} now, which the "
            f"export needs: put the folder back (looked in {Path.cwd()})"
        )
    described = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    # from_pretrained casts the weights to this dtype: the folder's may have less precision than the one used in training
    described.pop("torch_dtype", None)  # the older name of the entry
    described["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    for name in ("generation_config.json", *_TOKENIZER_FILES):
        if (origin / name).is_file():
            shutil.copy(origin / name, folder / name)
