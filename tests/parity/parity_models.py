"""The model families of the parity tests: small LightningModules as users write them, and their data.

    family = FAMILIES["vit"]
    module = family.build(num_layers=5)           # seeded by the caller
    train, validation = family.samples()          # lists of dicts, one entry a sample

These are ordinary Lightning modules without any code for pipelines. All but one (gpt_adamw) train by SGD with momentum,
which shows a wrong gradient in proportion: Adam divides a gradient that is zero except for rounding by its own size.

Shapes: B samples, S positions, D hidden size, P pixels a side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from recipes.gpt import GPT

NUM_TRAIN, NUM_VALIDATION = 22, 8
VOCABULARY, LENGTH, HIDDEN, CLASSES, PIXELS = 29, 10, 16, 4, 8


class Sgd(pl.LightningModule):
    """Trains by SGD with momentum, as all families but the recipes' GPT with AdamW."""

    sgd_learning_rate = 0.05

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, lr=self.sgd_learning_rate, momentum=0.9)


class Classifier(Sgd):
    """Classifies ``batch["x"]`` as ``batch["y"]``; logs before and after the model, per step and per epoch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log("train_input", batch["x"].float().mean(), batch_size=len(batch["y"]))
        loss, accuracy = self.evaluate(batch)
        self.log_dict({"train_loss": loss, "train_accuracy": accuracy}, batch_size=len(batch["y"]))
        self.log("epoch_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch["y"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, accuracy = self.evaluate(batch)
        self.log_dict({"val_loss": loss, "val_accuracy": accuracy}, sync_dist=True, batch_size=len(batch["y"]))

    def evaluate(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self(batch["x"])
        return F.cross_entropy(logits, batch["y"]), (logits.argmax(-1) == batch["y"]).float().mean()


# language models


class SgdGPT(Sgd, GPT):
    """The recipes' GPT, trained by SGD."""

    sgd_learning_rate = 0.2


def build_hf(model_type: str, **config: Any) -> Callable[[int], pl.LightningModule]:
    """Return a function that builds a causal language model of Hugging Face transformers from a small config."""

    def build(num_layers: int) -> pl.LightningModule:
        from lightning_holmes.models import HFCausalLM

        class SgdHFCausalLM(Sgd, HFCausalLM):
            pass

        sizes = {"n_embd": HIDDEN, "n_layer": num_layers, "n_head": 2, "n_positions": 16}
        if model_type != "gpt2":
            sizes = {
                "hidden_size": HIDDEN,
                "intermediate_size": 2 * HIDDEN,
                "num_hidden_layers": num_layers,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 16,
            }
        own = {key: value(num_layers) if callable(value) else value for key, value in config.items()}
        # wider than the usual 0.02, so that attention is far from uniform after a few steps
        base = {"model_type": model_type, "vocab_size": VOCABULARY, "initializer_range": 0.2}
        return SgdHFCausalLM(config=base | sizes | own)

    return build


def build_gpt(**options: Any) -> Callable[[int], pl.LightningModule]:
    def build(num_layers: int) -> pl.LightningModule:
        return SgdGPT(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, num_layers=num_layers, num_heads=2, sequence_length=16, **options
        )

    return build


class AdamWGPT(GPT):
    """The recipes' GPT and its AdamW, whose steps are as well conditioned as SGD's.

    With the usual epsilon of 1e-8, an entry whose gradient is little more than rounding moves as far as any other, in a
    direction that depends on the order in which the processor's matrix product adds.
    """

    def configure_optimizers(self) -> Any:
        found: Any = super().configure_optimizers()
        for group in found["optimizer"].param_groups:
            group["eps"] = 1e-4
        return found


def build_gpt_adamw(num_layers: int) -> pl.LightningModule:
    options = {"num_layers": num_layers, "num_heads": 2, "warmup_steps": 2, "learning_rate": 5e-4}
    return AdamWGPT(vocab_size=VOCABULARY, hidden_size=HIDDEN, **options)


class BertClassifier(Sgd):
    """A BERT encoder with pooler and classifier, its loss taken from the model's own output."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            intermediate_size=2 * HIDDEN,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
            initializer_range=0.2,
        )
        self.bert = BertForSequenceClassification(config)
        self.bert.train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.bert(**batch)
        self.log("train_loss", output.loss)
        return output.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.bert(**batch).loss, sync_dist=True, batch_size=len(batch["labels"]))


# vision


class ViT(Classifier):
    """A vision transformer whose cls token and positions are parameters of the module itself."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, HIDDEN, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, HIDDEN) * 0.3)
        self.positions = nn.Parameter(torch.randn(1, 1 + (PIXELS // 4) ** 2, HIDDEN) * 0.3)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, 2, 2 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches_BSD = self.patches(x).flatten(2).transpose(1, 2)
        hidden_BSD = torch.cat((self.cls_token.expand(len(x), -1, -1), patches_BSD), dim=1) + self.positions
        for index in range(len(self.blocks)):
            hidden_BSD = self.blocks[index](hidden_BSD)
        return self.head(self.norm(hidden_BSD[:, 0]))


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, x_BSD: Tensor, condition_BD: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition_BD).unsqueeze(1).chunk(3, dim=-1)
        return x_BSD + gate * self.mlp(self.norm(x_BSD) * (1 + scale) + shift)


class DiT(Sgd):
    """A diffusion transformer: the time embedding, computed once, conditions every layer and the output."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.time_embedding = nn.Sequential(nn.Linear(8, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.patch_embedding = nn.Linear(PIXELS, HIDDEN)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(num_layers))
        self.modulation = nn.Linear(HIDDEN, HIDDEN)
        self.output = nn.Linear(HIDDEN, PIXELS)

    def forward(self, x_BSP: Tensor, time_B: Tensor) -> Tensor:
        angles = time_B[:, None] * torch.arange(1, 5)
        condition_BD = self.time_embedding(torch.cat((angles.sin(), angles.cos()), dim=-1))
        hidden_BSD = self.patch_embedding(x_BSP)
        for block in self.blocks:
            hidden_BSD = block(hidden_BSD, condition_BD)
        return self.output(hidden_BSD * (1 + self.modulation(condition_BD)[:, None]))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        images, noise, time = batch["x"].squeeze(1), batch["noise"], batch["time"]
        noisy = images * time.cos()[:, None, None] + noise * time.sin()[:, None, None]
        return F.mse_loss(self(noisy, time), noise)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["x"]))


class UnlikeLayers(Classifier):
    """An nn.Sequential of eight unlike layers, some without parameters, one in place."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(36, 12),
            nn.Tanh(),
            nn.Linear(12, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


# stacks of residual MLPs over pixels, each with one peculiarity


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, checkpointed: bool = False, batch_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN) if batch_norm else nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * HIDDEN, HIDDEN)
        )
        self.checkpointed = checkpointed

    def forward(self, x_BD: Tensor) -> Tensor:
        if self.checkpointed:
            return x_BD + checkpoint(lambda x: self.mlp(self.norm(x)), x_BD, use_reentrant=False)
        return x_BD + self.mlp(self.norm(x_BD))


class Stack(Classifier):
    """Residual MLPs. Options: dropout, batch normalisation, and checkpointing ("inside" a layer or "around" each)."""

    def __init__(self, num_layers: int, *, dropout: float = 0.0, batch_norm: bool = False, checkpointing: str = ""):
        super().__init__()
        self.embedding = nn.Linear(PIXELS * PIXELS, HIDDEN)
        self.layers = nn.ModuleList(Block(dropout, checkpointing == "inside", batch_norm) for _ in range(num_layers))
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.around = checkpointing == "around"

    def forward(self, x: Tensor) -> Tensor:
        hidden_BD = self.embedding(x.flatten(1))
        for layer in self.layers:
            hidden_BD = checkpoint(layer, hidden_BD, use_reentrant=False) if self.around else layer(hidden_BD)
        return self.head(hidden_BD)


class FrozenStart(Stack):
    """The embedding and the first half of the layers, hence at least the first stage, are frozen."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        for part in (self.embedding, *self.layers[: (num_layers + 1) // 2]):
            part.requires_grad_(False)


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


class Lora(Stack):
    """Only small adapters beside the linear layers of each layer, and the head, are trained."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.embedding.requires_grad_(False)
        for layer in self.layers:
            layer.requires_grad_(False)
            for index in (0, 3):
                layer.mlp[index] = LoraLinear(layer.mlp[index])


class TupleLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * HIDDEN, HIDDEN)
        self.memory = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden_BD: Tensor, extra_BD: Tensor) -> tuple[Tensor, Tensor]:
        hidden_BD = hidden_BD + torch.tanh(self.mix(torch.cat((hidden_BD, extra_BD), dim=-1)))
        return hidden_BD, 0.5 * extra_BD + torch.sigmoid(self.memory(hidden_BD))


class TupleStack(Classifier):
    """Each layer passes a pair (hidden, extra) to the next."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(PIXELS * PIXELS, HIDDEN)
        self.layers = nn.ModuleList(TupleLayer() for _ in range(num_layers))
        self.head = nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x.flatten(1))
        extra = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, extra = layer(hidden, extra)
        return self.head(torch.cat((hidden, extra), dim=-1))


# data


def make_images(generator: torch.Generator) -> list[dict[str, Tensor]]:
    return [
        {
            "x": torch.randn(1, PIXELS, PIXELS, generator=generator),
            "y": torch.randint(CLASSES, (), generator=generator),
            "noise": torch.randn(PIXELS, PIXELS, generator=generator),
            "time": torch.rand((), generator=generator),
        }
        for _ in range(NUM_TRAIN + NUM_VALIDATION)
    ]


def make_texts(generator: torch.Generator) -> list[dict[str, Tensor]]:
    """Make full-length texts for the recipes' GPT: labels are already shifted."""
    tokens = torch.randint(VOCABULARY, (NUM_TRAIN + NUM_VALIDATION, LENGTH + 1), generator=generator)
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]


def make_ragged_texts(generator: torch.Generator) -> list[dict[str, Tensor]]:
    """Make texts of 2 to LENGTH tokens, padded at the end, with Hugging Face's labels, which are not shifted."""
    samples = []
    for text in make_texts(generator):
        length = int(torch.randint(2, LENGTH + 1, (), generator=generator))
        mask = (torch.arange(LENGTH) < length).long()
        labels = text["input_ids"].masked_fill(mask == 0, -100)
        samples.append({"input_ids": text["input_ids"] * mask, "attention_mask": mask, "labels": labels})
    return samples


def make_full_texts(generator: torch.Generator) -> list[dict[str, Tensor]]:
    return [{"input_ids": text["input_ids"]} for text in make_texts(generator)]


def make_classified_texts(generator: torch.Generator) -> list[dict[str, Tensor]]:
    return [
        sample | {"labels": torch.randint(CLASSES, (), generator=generator)} for sample in make_ragged_texts(generator)
    ]


def make_unequal_texts(generator: torch.Generator) -> list[dict[str, Tensor]]:
    """Make ragged texts for the recipes' GPT: the first batches are short, later ones long, and the last short again."""
    samples = []
    for index, text in enumerate(make_texts(generator)):
        longest = 5 if index < 6 else LENGTH if index < 15 else 7
        length = int(torch.randint(2, longest + 1, (), generator=generator))
        ignored = torch.arange(LENGTH) >= length
        labels = text["labels"].masked_fill(ignored, -100)
        samples.append({"input_ids": text["input_ids"].masked_fill(ignored, 0), "labels": labels})
    return samples


def cut_padding(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch that is as long as its longest text."""
    batch = default_collate(samples)
    longest = int((batch["labels"] != -100).sum(1).max())
    return {name: value[:, :longest] for name, value in batch.items()}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of module with its data.

    ``draws``: whether the module draws random numbers in training, which plain Lightning draws in another order.
    ``microbatch_is_batch``: whether the baseline trains on microbatches as batches.
    """

    build: Callable[[int], pl.LightningModule]
    data: Callable[[torch.Generator], list[dict[str, Tensor]]] = make_images
    collate: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]] = default_collate
    draws: bool = False
    microbatch_is_batch: bool = False

    def samples(self) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """Return the training and validation samples, always the same ones."""
        samples = self.data(torch.Generator().manual_seed(11))
        return samples[:NUM_TRAIN], samples[NUM_TRAIN:]


def alternating_attention(num_layers: int) -> list[str]:
    return ["full_attention" if index % 3 == 1 else "sliding_attention" for index in range(num_layers)]


FAMILIES = {
    "gpt": Family(build=build_gpt(), data=make_texts),
    "gpt_adamw": Family(build=build_gpt_adamw, data=make_texts),
    "gpt_tied": Family(build=build_gpt(tie_embeddings=True), data=make_texts),
    "gpt_dropout": Family(build=build_gpt(dropout=0.2), data=make_texts, draws=True),
    "gpt_unequal_lengths": Family(build=build_gpt(), data=make_unequal_texts, collate=cut_padding),
    "llama_ragged": Family(build=build_hf("llama"), data=make_ragged_texts, collate=cut_padding),
    "qwen2": Family(build=build_hf("qwen2"), data=make_full_texts),
    "gemma3": Family(
        build=build_hf(
            "gemma3_text", head_dim=8, sliding_window=4, query_pre_attn_scalar=8, layer_types=alternating_attention
        ),
        data=make_ragged_texts,
    ),
    "mixtral": Family(build=build_hf("mixtral", num_local_experts=4, num_experts_per_tok=2), data=make_full_texts),
    "gpt2_tied": Family(
        build=build_hf("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), data=make_ragged_texts
    ),
    "bert": Family(build=BertClassifier, data=make_classified_texts),
    "vit": Family(build=ViT),
    "dit": Family(build=DiT),
    "unlike_layers": Family(build=UnlikeLayers),
    "batch_norm": Family(build=lambda n: Stack(n, batch_norm=True), microbatch_is_batch=True),
    "tuples": Family(build=TupleStack),
    "lora": Family(build=Lora),
    "frozen_start": Family(build=FrozenStart),
    "checkpoint_inside": Family(build=lambda n: Stack(n, checkpointing="inside")),
    "checkpoint_around": Family(build=lambda n: Stack(n, checkpointing="around")),
    "checkpoint_dropout": Family(build=lambda n: Stack(n, checkpointing="around", dropout=0.3), draws=True),
}
