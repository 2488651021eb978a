"""A folder of safetensors as `save_pretrained` writes it, read one weight at a time.

    folder = PretrainedFolder("llama")
    folder.read(["model.norm.weight"])      # opens the file that holds this weight and reads only this weight

Needs the extra: `pip install lightning-holmes[hf]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_holmes.errors import ConfigurationError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHOWN = 5


class PretrainedFolder:
    """The weights of one folder by their names in its files; `files[name]` is the name of the file with weight `name`."""

    def __init__(self, folder: str) -> None:
        from safetensors import safe_open

        self.folder = Path(folder)
        self.files: dict[str, str] = {}
        if (self.folder / _INDEX).is_file():
            weight_map = json.loads((self.folder / _INDEX).read_text())["weight_map"]
            self.files = {str(name): Path(str(file)).name for name, file in weight_map.items()}
        elif (self.folder / _SINGLE).is_file():
            with safe_open(self.folder / _SINGLE, framework="pt") as opened:
                self.files = dict.fromkeys(opened.keys(), _SINGLE)
        else:
            raise ConfigurationError(
                f"pretrained={folder!r} has no safetensors files, so it cannot be read in parts: save the model again by save_pretrained"
            )

    def match(self, model: Any) -> dict[str, str]:
        """For each parameter and saved buffer of a Hugging Face `model`, its name in the files.

        Raises:
            ConfigurationError: the names of the weights in the files differ from the model's, so that transformers
                would convert them on loading; or the model is quantised.
        """
        if getattr(model.config, "quantization_config", None) is not None:
            raise ConfigurationError(
                f"pretrained={str(self.folder)!r}: its weights are quantised: not to be read in parts"
            )
        prefix = f"{model.base_model_prefix}."
        aliases: dict[int, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            aliases.setdefault(id(tensor), []).append(name)
        found, missing, used = {}, [], set()
        for names in aliases.values():
            saved = [n for n in names if n in self.files]
            saved += [n.removeprefix(prefix) for n in names if n.removeprefix(prefix) in self.files]
            if saved:
                found.update(dict.fromkeys(names, saved[0]))
                used.update(saved)
            else:
                missing.append(names[0])
        ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        further = [n for n in self.files if n not in used and not any(p.search(n) for p in ignored)]
        if missing or further:
            raise ConfigurationError(
                f"pretrained={str(self.folder)!r}: its files lack {missing[:_SHOWN]} and have {further[:_SHOWN]}, which are no names of the "
                "model's: load the folder with transformers, and save it again by save_pretrained(..., save_original_format=False)"
            )
        return found

    def read(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the weights `names`, which are names in the files."""
        from safetensors import safe_open

        values: dict[str, Tensor] = {}
        for name in names:
            # the file is memory-mapped, and pages that were read stay in memory until it is closed: so open it for one weight at a time
            with safe_open(self.folder / self.files[name], framework="pt") as opened:
                values[name] = opened.get_tensor(name).clone()
        return values
