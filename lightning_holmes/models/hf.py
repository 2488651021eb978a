"""HFCausalLM: any Hugging Face causal language model as an ordinary LightningModule.

This module builds the model (from a configuration, or from a local folder of weights), its token loss and its
optimizer. It never uses the network. Needs the extra: `pip install lightning-holmes[hf]`.

    HFCausalLM(config={"model_type": "llama", "hidden_size": 256, ...})   # random weights
    HFCausalLM(config="folder")                                           # folder/config.json, random weights
    HFCausalLM(pretrained="folder")                                       # folder's weights

A batch is a dict with "input_ids" (B, S), optionally "attention_mask" and "labels" (B, S), and any
other arguments of the model's forward. Labels are *not* shifted: as everywhere in Hugging Face, `labels[i]` is the
token at position i, predicted from the tokens before it; -100 is ignored. Without labels the input itself is
the target, except for padding.

The loss is the mean over the tokens that count, computed from the model's logits (causal_lm.py). A router's
load-balancing loss is not such a mean, and is refused.

Shapes: B samples, S positions, V vocabulary.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_holmes.errors import ConfigurationError, needs_extra, read_by_transformers
from lightning_holmes.lightning_private import trainer_of
from lightning_holmes.models.causal_lm import IGNORE_INDEX, CausalLM
from lightning_holmes.models.pretrained import PretrainedFolder
from lightning_holmes.torch_private import fake_mode_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class HFCausalLM(CausalLM):
    """A causal language model of Hugging Face transformers, trained on the mean loss of its tokens.

    Give either `config` (a dict with "model_type", a folder with config.json, or a PretrainedConfig) for
    random weights, or `pretrained` (a folder) for saved ones. Weights are kept in `dtype`, the name of a torch dtype;
    Lightning's `precision` decides the dtype of the computation. `attn_implementation` is passed to transformers
    ("eager", "sdpa", ...).

    A pretrained model is loaded at its first use, by the trainer or by other code: under HolmesStrategy a process
    reads only the weights of its layers. With `defer_init` random weights are also made only then, for models that do not
    fit in one process; they depend on the seed and their names.
    """

    shifts_labels = True  # so data modules must not shift them

    def __init__(
        self,
        *,
        config: str | dict[str, Any] | PretrainedConfig | None = None,
        pretrained: str | None = None,
        dtype: str = "float32",
        attn_implementation: str | None = None,
        gradient_checkpointing: bool = False,
        learning_rate: float = 3e-4,
        min_learning_rate_ratio: float = 0.1,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.95),
        defer_init: bool = False,
    ) -> None:
        super().__init__()
        betas = (betas[0], betas[1])
        if (config is None) == (pretrained is None):
            raise ConfigurationError(
                f"config={config!r} and pretrained={pretrained!r}: give exactly one of them, config for "
                "random weights or pretrained for a folder of saved ones."
            )
        torch_dtype = getattr(torch, dtype, None)
        if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
            raise ConfigurationError(f'dtype={dtype!r} holds no weights: give "float32" or "bfloat16".')
        options: dict[str, Any] = {"dtype": torch_dtype, "trust_remote_code": False}
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation
        self._pretrained, self._options = pretrained, options
        self._gradient_checkpointing = gradient_checkpointing
        self._folder: PretrainedFolder | None = None
        self._names_in_files: dict[str, str] = {}
        hf_config = _read_config(pretrained, "pretrained") if pretrained is not None else _build_config(config)
        if pretrained is None:
            config = hf_config.to_dict()  # plain data: checkpoints stay readable with weights_only=True
        if getattr(hf_config.get_text_config(), "output_router_logits", False):
            raise ConfigurationError(
                "output_router_logits=True asks for a router loss, which depends on how a batch is split "
                "into microbatches. HFCausalLM trains on the token loss alone: set it to False."
            )
        self._hf_config = hf_config
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.min_learning_rate_ratio = min_learning_rate_ratio
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.betas = betas
        self._is_built = False
        if pretrained is None and not defer_init:
            self.configure_model()

    def configure_model(self) -> None:
        """Build the model if it does not exist yet. The trainer calls this; without a trainer the first use of the model does.

        Under HolmesStrategy nothing is allocated here; a process later builds its own layers, or reads their weights.
        """
        if self._is_built:
            return
        self._is_built = True
        try:
            self._build()
        except BaseException:
            self._is_built = False
            raise

    def _build(self) -> None:
        if self._pretrained is None:
            model = _build_from_config(self._hf_config, self._options)
        elif fake_mode_of(torch.empty(0)) is not None:  # under a fake tensor mode: tensors take no memory
            folder = PretrainedFolder(self._pretrained)
            model = _build_from_config(self._hf_config, self._options)
            self._folder, self._names_in_files = folder, folder.match(model)
        else:
            model = _load_pretrained(self._pretrained, self._options)
        # a cache would pass keys and values between layers beside the hidden state, and training does not need it
        model.config.use_cache = False
        model.config.get_text_config().use_cache = False
        if self._gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        # from_pretrained returns a model in evaluation mode, and Trainer.fit leaves modes as they are.
        model.train(self.training)
        self.model = model

    def read_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read those of this module's parameters and buffers `names` that the pretrained folder has.

        HolmesStrategy calls this with the names that a process holds.
        """
        if self._folder is None:
            return {}
        places = {n: self._names_in_files.get(n.removeprefix("model.")) for n in names}
        wanted = {n: place for n, place in places.items() if place is not None}
        values = self._folder.read(list(dict.fromkeys(wanted.values())))
        return {n: values[place] for n, place in wanted.items()}

    # Access to the module's parts before a trainer has called configure_model builds the model.

    def _build_for_use(self) -> None:
        if self.__dict__.get("_is_built") is False and trainer_of(self) is None:
            self.configure_model()

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            self._build_for_use()
        return super().__getattr__(name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        self._build_for_use()
        return super().named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._build_for_use()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._build_for_use()
        return super().load_state_dict(*args, **kwargs)

    def apply(self, fn: Any) -> Any:
        self._build_for_use()
        return super().apply(fn)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._build_for_use()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, **inputs: Any) -> Tensor:
        """Logits (B, S, V)."""
        logits_BSV: Tensor = self.model(**inputs, use_cache=False).logits
        return logits_BSV

    def target_labels(self, batch: dict[str, Tensor]) -> Tensor:
        """The token that follows each position, (B, S - 1); -100 where a token does not count."""
        labels = batch.get("labels")
        if labels is None:
            labels = batch["input_ids"]
            attention_mask = batch.get("attention_mask")
            if attention_mask is not None:
                labels = labels.masked_fill(attention_mask == 0, IGNORE_INDEX)
        return labels[:, 1:]

    def compute_logits(self, batch: dict[str, Tensor]) -> Tensor:
        logits_BSV: Tensor = self(**{name: value for name, value in batch.items() if name != "labels"})
        return logits_BSV

    def scored_logits(self, batch: dict[str, Tensor]) -> Tensor:
        return self.compute_logits(batch)[:, :-1]


def _import_transformers() -> Any:
    with needs_extra("HFCausalLM", "hf"):
        import transformers
    return transformers


def _build_config(config: str | dict[str, Any] | PretrainedConfig | None) -> Any:
    transformers = _import_transformers()
    if isinstance(config, str):
        return _read_config(config, "config")
    if isinstance(config, dict):
        settings = dict(config)
        model_type = settings.pop("model_type", None)
        if model_type not in transformers.CONFIG_MAPPING:
            raise ConfigurationError(
                f'config["model_type"]={model_type!r} is not one that transformers '
                f'{transformers.__version__} knows: give one like "llama" or "gpt2".'
            )
        with read_by_transformers(f"config={config!r} is no {model_type} model"):
            return transformers.AutoConfig.for_model(model_type, **settings)
    if isinstance(config, transformers.PretrainedConfig):
        return copy.deepcopy(config)  # the caller's object is not changed
    raise ConfigurationError(f"config={config!r} is a {type(config).__name__}: give a dict, folder or PretrainedConfig")


def _build_from_config(config: Any, options: dict[str, Any]) -> Any:
    with read_by_transformers(f"transformers made no causal language model from this {config.model_type!r} config"):
        return _import_transformers().AutoModelForCausalLM.from_config(config, **options)


def _read_config(folder: str, argument: str) -> Any:
    if not Path(folder, "config.json").is_file():
        raise ConfigurationError(
            f"{argument}={folder!r}: there is no file {Path(folder, 'config.json')} (from {Path.cwd()}). "
            "Give a local folder that save_pretrained wrote; nothing is downloaded."
        )
    with read_by_transformers(f"{argument}={folder!r} holds no causal language model"):
        return _import_transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _load_pretrained(folder: str, options: dict[str, Any]) -> Any:
    transformers = _import_transformers()
    try:
        with read_by_transformers(f"pretrained={folder!r} holds no causal language model"):
            return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    except ConfigurationError as error:
        if isinstance(error.__cause__, pickle.UnpicklingError):
            raise ConfigurationError(
                f"pretrained={folder!r}: its .bin file is damaged, or holds more than tensors, which could run code. "
                "Give a folder with safetensors."
            ) from error.__cause__
        raise
