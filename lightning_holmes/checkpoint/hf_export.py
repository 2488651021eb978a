"""Export a checkpoint of HFCausalLM as a folder for Hugging Face's from_pretrained: config.json and safetensors.

transformers builds the model from its configuration and writes it. The model's weights are in memory, and nothing else of the checkpoint.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.checkpoint import atomic
from lightning_holmes.checkpoint.converting import Source
from lightning_holmes.errors import CheckpointError, needs_extra

_PREFIX = "model."
_ADAPTER = ".lora_"
MAX_SHARD_BYTES = 5 * 10**9

# what save_pretrained of transformers' tokenizers writes, and how the model generates
_BESIDE_WEIGHTS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "generation_config.json"),
)


def write_pretrained(source: Source, target: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write ``target``, a folder for from_pretrained.

    Raises:
        CheckpointError: the checkpoint is not one of HFCausalLM, or the folder that its model came from cannot be read.
        ConfigurationError: transformers is not installed.
    """
    with needs_extra("exporting safetensors", "hf"):
        import transformers

    given = source.rest.get("hyper_parameters", {})
    origin = given.get("pretrained")
    config = _config(transformers, given)
    with torch.device("meta"):
        made_by: Any = transformers.AutoModelForCausalLM
        model = made_by.from_config(config, trust_remote_code=False)
    state = _state(source)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights are not those of a {type(model).__name__}: {' '.join(str(error).split())}"
        ) from error
    model.tie_weights()
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic.writing(target) as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_bytes)
        for name in _BESIDE_WEIGHTS if origin is not None else ():
            if (Path(origin) / name).is_file():
                shutil.copy(Path(origin) / name, folder / name)
        for path in folder.iterdir():
            atomic.sync_file(path)
        atomic.sync_folder(folder)


def _config(transformers: Any, given: Mapping[str, Any]) -> Any:
    """The model's configuration, from the configuration or the folder that HFCausalLM was built from."""
    config, origin = given.get("config"), given.get("pretrained")
    if isinstance(config, dict):
        settings = dict(config)
        return transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    if origin is None:
        raise CheckpointError(
            "the checkpoint's hyper-parameters name neither a config nor a pretrained folder: safetensors are exported for "
            "HFCausalLM; convert others to a plain file"
        )
    try:
        return transformers.AutoConfig.from_pretrained(origin, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the model came from the folder {origin!r}, whose config.json the export needs and cannot read now: put the folder "
            f"back (looked in {Path.cwd()}): {error}"
        ) from error


def _state(source: Source) -> dict[str, Tensor]:
    """The model's tensors without HFCausalLM's prefix."""
    state = source.weights()
    if any(_ADAPTER in name for name in state):
        raise CheckpointError(
            "the checkpoint has LoRA adapters: convert it to a plain file, save the adapters in peft's format (recipes/lora.py: "
            "save_adapter), and merge them by PeftModel.from_pretrained(model, folder).merge_and_unload()"
        )
    for name in state:
        if not name.startswith(_PREFIX):
            raise CheckpointError(
                f"the checkpoint has {name}, and HFCausalLM has parameters below {_PREFIX!r} only: safetensors are exported "
                f"for HFCausalLM; convert others to a plain file"
            )
    return {name.removeprefix(_PREFIX): value for name, value in state.items()}
