"""LoRACausalLM: a pretrained Hugging Face model with frozen weights and trainable low-rank adapters.

This module decides where the adapters go and how they are saved. The adapters are peft's (LoRA, arXiv 2106.09685): to a frozen
matrix W is added B A, scaled by alpha / rank; B is initialised to zero. Needs the extra: `pip install lightning-holmes[lora]`.

    LoRACausalLM(pretrained="models/llama", rank=8)
    LoRACausalLM.load_from_checkpoint("plain.ckpt").save_adapter("adapter")     # PeftModel.from_pretrained reads and merges it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_holmes.errors import ConfigurationError, needs_extra
from lightning_holmes.models.hf import HFCausalLM

_ALL_LINEAR = "all-linear"


class LoRACausalLM(HFCausalLM):
    """An HFCausalLM that trains only adapters of `rank`.

    `target_modules` are the last parts of the names of the matrices that get an adapter, or "all-linear" for all but the
    output head. The other arguments are HFCausalLM's. Checkpoints hold the frozen weights, too, like those of any module;
    `save_adapter` writes only the adapters.
    """

    def __init__(
        self,
        *,
        pretrained: str,
        rank: int = 8,
        alpha: float = 16.0,
        adapter_dropout: float = 0.0,
        target_modules: str | list[str] = _ALL_LINEAR,
        dtype: str = "float32",
        attn_implementation: str | None = None,
        gradient_checkpointing: bool = False,
        learning_rate: float = 2e-4,
        min_learning_rate_ratio: float = 0.1,
        weight_decay: float = 0.0,
        warmup_steps: int = 20,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        if rank < 1 or not 0.0 <= adapter_dropout < 1.0:
            raise ConfigurationError(
                f"rank={rank}, adapter_dropout={adapter_dropout}: give a rank of at least 1, and a dropout of at least 0 and less than 1."
            )
        self._rank, self._alpha, self._adapter_dropout = rank, alpha, adapter_dropout
        self._target_modules = target_modules
        super().__init__(
            pretrained=pretrained,
            dtype=dtype,
            attn_implementation=attn_implementation,
            gradient_checkpointing=gradient_checkpointing,
            learning_rate=learning_rate,
            min_learning_rate_ratio=min_learning_rate_ratio,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            betas=betas,
        )
        betas = (betas[0], betas[1])
        self.save_hyperparameters()

    def _build(self) -> None:
        super()._build()
        peft = _import_peft()
        targets: Any = self._target_modules
        try:
            peft.inject_adapter_in_model(
                peft.LoraConfig(
                    r=self._rank,
                    lora_alpha=self._alpha,
                    lora_dropout=self._adapter_dropout,
                    target_modules=targets,
                    task_type="CAUSAL_LM",
                ),
                self.model,
            )
        except ValueError as error:
            raise ConfigurationError(f"target_modules={targets!r}: {error}") from error

    def read_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """See HFCausalLM. A matrix with an adapter has `base_layer` in its name in the model, but not in the folder."""
        plain = {name.replace(".base_layer.", "."): name for name in names if ".lora_" not in name}
        return {plain[name]: value for name, value in super().read_weights(list(plain)).items()}

    def save_adapter(self, folder: str) -> None:
        """Write the adapters in peft's format. The module must be whole on this process: after training, load a plain checkpoint first."""
        peft = _import_peft()
        base, config = self.model, self.model.peft_config["default"]
        config.base_model_name_or_path = self.hparams["pretrained"]
        config.inference_mode = True
        state = {
            f"base_model.model.{name.replace('.default.', '.')}": value.detach().cpu().contiguous()
            for name, value in base.state_dict().items()
            if ".lora_" in name
        }
        from safetensors.torch import save_file

        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(state, Path(folder) / peft.utils.SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        config.save_pretrained(folder)


def _import_peft() -> Any:
    with needs_extra("LoRACausalLM", "lora"):
        import peft
    return peft
