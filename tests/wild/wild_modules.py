"""LightningModules as users write them, each with a batch and the verdict that it must get.

These modules were not written for a pipeline. A module is either exact (its numbers are those of a plain loop) or refused
with a reason that names the cause. Run this file to print the table for docs/exactness.md:

    python tests/wild/wild_modules.py
"""

import copy
import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

WIDTH, CLASSES, TOKENS, LENGTH, SAMPLES = 8, 4, 12, 5, 7


@dataclasses.dataclass(frozen=True)
class Case:
    """One module to try: how to make it and its batch, what is unusual, and the expected verdict."""

    name: str
    unusual: str
    make: Callable[[], tuple[pl.LightningModule, Any]]
    refused: str = ""  # words that the reason must contain; empty: exact
    random: bool = False  # draws random numbers, which an independent loop cannot repeat
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Return "exact" or "refused"."""
        return "refused" if self.refused else "exact"


CASES: list[Case] = []


def case(
    unusual: str, *, name: str | None = None, batch: Callable[[], Any] | None = None, **rest: Any
) -> Callable[[Any], Any]:
    """Register a module class whose constructor needs no arguments, by its own name or another. Of several cases of a class
    the lowest comes first."""

    def register(cls: Any) -> Any:
        make_batch = batch or vectors

        def make() -> tuple[pl.LightningModule, Any]:
            torch.manual_seed(1)
            module = cls()
            torch.manual_seed(2)
            return module, make_batch()

        CASES.append(Case(name=name or cls.__name__, unusual=unusual, make=make, **rest))
        return cls

    return register


def vectors() -> tuple[Tensor, Tensor]:
    """Return seven vectors with one class each."""
    return torch.randn(SAMPLES, WIDTH), torch.randint(CLASSES, (SAMPLES,))


def tokens() -> Tensor:
    """Return seven short texts."""
    return torch.randint(TOKENS, (SAMPLES, LENGTH))


def images() -> tuple[Tensor, Tensor]:
    """Return seven small images with one class each."""
    return torch.randn(SAMPLES, 3, 8, 8), torch.randint(CLASSES, (SAMPLES,))


class Wild(pl.LightningModule):
    """Configures the usual optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def mlp(width: int = WIDTH, depth: int = 4) -> nn.ModuleList:
    """Return a list of small blocks."""
    return nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))


class WithLayers(Wild):
    """Runs ``layers`` one by one: four of class ``Layer``, or small blocks. The loss is the mean square of what comes out."""

    Layer: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp() if self.Layer is None else nn.ModuleList(self.Layer() for _ in range(4))

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch, batch_idx):
        return self.run(batch[0]).pow(2).mean()


class WithNet(Wild):
    """Has a Sequential, which the step calls whole; its loss is the distance to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[0])


class Classified(WithNet):
    """The loss is that of a classifier."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class OneLinear(nn.Module):
    """A layer with one linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Routed(nn.Module):
    """A gate and two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))


class Embedded(WithLayers):
    """Runs its layers on an embedding of tokens."""

    max_norm: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH, max_norm=self.max_norm)

    def training_step(self, batch, batch_idx):
        return self.run(self.embed(batch)).pow(2).mean()


class OfTexts(Wild):
    """Transformer blocks on an embedding, whose weight is that of the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def embedded(self, batch):
        return self.embed(batch)

    def training_step(self, batch, batch_idx):
        x = self.embedded(batch)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x.flatten(0, 1) @ self.embed.weight.T, batch.flatten())


# ---------------------------------------------------------------- plain networks


@case("one nn.Sequential, called whole")
class MLPClassifier(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))


@case("one nn.ReLU object used between all layers")
class SharedActivation(Classified):
    def __init__(self) -> None:
        super().__init__()
        act = nn.ReLU()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), act, nn.Linear(16, 16), act, nn.Linear(16, CLASSES))


@case("a Sequential of Sequentials", batch=images)
class NestedCNN(Wild):
    def __init__(self) -> None:
        super().__init__()

        def stage(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1), nn.GroupNorm(2, o), nn.ReLU(inplace=True))

        self.features = nn.Sequential(stage(3, 4), stage(4, 8), stage(8, 16))
        self.classifier = nn.Linear(16, CLASSES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.classifier(torch.flatten(self.features(x), 1)), y)


@case("BatchNorm in every stage, downsampling residual blocks", batch=images)
class SmallResNet(Wild):
    class Residual(nn.Module):
        def __init__(self, i, o, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(i, o, 3, stride, 1, bias=False)
            self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
            self.bn1, self.bn2 = nn.BatchNorm2d(o), nn.BatchNorm2d(o)
            self.relu = nn.ReLU(inplace=True)
            self.down = nn.Conv2d(i, o, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x):
            out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            out += self.down(x)
            return self.relu(out)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(self.Residual(4, 4, 1), self.Residual(4, 4, 1))
        self.layer2 = nn.Sequential(self.Residual(4, 8, 2), self.Residual(8, 8, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, CLASSES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.layer2(self.layer1(self.stem(x)))
        return F.cross_entropy(self.fc(self.pool(x).flatten(1)), y)


@case("x = x + block(x): the residual is added outside of the block", refused="output 0 of layer 0, read in layer 2")
class OuterResidual(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.blocks, self.out = nn.Linear(WIDTH, WIDTH), mlp(), nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch, batch_idx):
        x = self.inp(batch[0])
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.out(x), batch[1])


@case("x += pos before, x *= scale between the layers, in place", batch=tokens)
class InPlaceLoop(OfTexts):
    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.scales = nn.Parameter(torch.ones(4) + 0.1 * torch.randn(4))
        self.head = nn.Linear(WIDTH, TOKENS)

    def training_step(self, batch, batch_idx):
        x = self.embed(batch)
        x += self.pos
        for i in range(len(self.blocks)):
            x = self.blocks[i](x)
            x *= self.scales[i]
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


@case("ReLU(inplace=True) is the first thing in each layer")
class InPlaceFirst(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(4)))
        self.out = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.out(self.blocks(self.inp(batch[0]))), batch[1])


@case("blocks called by name: `for name, m in self.blocks.named_children()`")
class NamedChildren(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential()
        for i in range(5):
            self.blocks.add_module(f"dense_{i}", nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for name, m in self.blocks.named_children():
            x = m(x)
            if name != "dense_4":
                x = torch.sin(x)
        return F.mse_loss(x, batch[0])


@case("layers in an nn.ModuleDict", refused="no nn.ModuleList or nn.Sequential")
class LayerDict(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"l{i}": nn.Linear(WIDTH, WIDTH) for i in range(4)})

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers.values():
            x = layer(x).relu()
        return x.pow(2).mean()


@case("layers sliced: `self.layers[:2](x)`, `.forward` called directly")
class SlicedSequential(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        x = self.layers[:2](batch[0]).relu()
        x = self.layers[2].forward(x)
        return F.mse_loss(self.layers[-1](x), batch[0])


# ---------------------------------------------------------------- sequence models


@case("torch.nn.TransformerEncoder with padding mask and its fast path", batch=tokens)
class TorchTransformer(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        h = self.encoder(self.embed(ids), src_key_padding_mask=ids == 0)
        return self.head(h.mean(1))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch), batch[:, 0] % CLASSES)

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self(batch), batch[:, 0] % CLASSES))


@case("nn.Transformer: two stacks, cross attention in every decoder layer", batch=tokens)
class Seq2Seq(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.net = nn.Transformer(WIDTH, 2, 2, 4, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def training_step(self, batch, batch_idx):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1)
        h = self.net(self.embed(batch), self.embed(batch[:, :-1]), tgt_mask=mask)
        return F.cross_entropy(self.head(h).flatten(0, 1), batch[:, 1:].flatten())


@case("an LSTM whose state starts from the state of the layer below", batch=tokens)
class LSTMPassingState(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.lstms = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS)

    def training_step(self, batch, batch_idx):
        x, state = self.embed(batch), None
        for lstm in self.lstms:
            x, state = lstm(x, state)
        return F.cross_entropy(self.head(x[:, -1]), batch[:, -1])


@case("truncated backpropagation: self.state is kept for the next step", batch=tokens, refused="next step")
class StatefulRNN(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.memory = None

    def training_step(self, batch, batch_idx):
        x = self.embed(batch)
        if self.memory is not None:
            x = x + self.memory
        x = self.run(x)
        self.memory = x.mean((0, 1)).detach()
        return x.pow(2).mean()


@case("nn.MultiheadAttention blocks, head tied to the embedding", batch=tokens)
class TiedGPT(OfTexts):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.triu(torch.full((LENGTH, LENGTH), -math.inf), 1))

    def training_step(self, batch, batch_idx):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x, mask=self.mask)
        loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        self.log_dict({"loss": loss, "ppl": loss.exp()}, on_epoch=True)
        return {"loss": loss, "hidden": x.detach().mean((1, 2)), "step": batch_idx}


@case("ALBERT: one block, passed through four times", batch=tokens, refused="twice")
class Albert(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()] * 4)


@case("weights tied between layers: blocks[3].mlp is blocks[0].mlp", batch=tokens)
class TiedAcrossLayers(OfTexts):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].mlp = self.blocks[0].mlp


@case("U-Net skips between down and up path in one list", refused="output 0 of layer 0, read in layer")
class UNetSkips(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlp(depth=6)

    def training_step(self, batch, batch_idx):
        x, skips = batch[0], []
        for i, block in enumerate(self.blocks):
            if i >= 3:
                x = x + skips.pop()
            x = block(x)
            if i < 3:
                skips.append(x)
        return F.mse_loss(x, batch[0])


@case("DenseNet: every layer sees all outputs before it", refused="read in layer")
class DenseNet(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH * (i + 1), WIDTH) for i in range(4))

    def training_step(self, batch, batch_idx):
        features = [batch[0]]
        for layer in self.layers:
            features.append(torch.tanh(layer(torch.cat(features, -1))))
        return features[-1].pow(2).mean()


# ---------------------------------------------------------------- randomness


@case("VAE: encoder list, reparametrised noise, decoder list", random=True)
class VAE(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
        self.decoder = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def training_step(self, batch, batch_idx):
        mu, logvar = self.encoder(batch[0]).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(-1).mean()
        reconstruction = F.mse_loss(self.decoder(z), batch[0])
        self.log_dict({"kl": kl, "reconstruction": reconstruction})
        return reconstruction + kl


@case("diffusion step: noise, random timesteps, a time embedding that conditions every layer", random=True)
class Diffusion(Wild):
    class Film(OneLinear):
        def __init__(self):
            super().__init__()
            self.film = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x, t):
            scale, shift = self.film(t).chunk(2, -1)
            return x + torch.tanh(self.linear(x) * (1 + scale) + shift)

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU())
        self.blocks = nn.ModuleList(self.Film() for _ in range(4))
        self.register_buffer("alpha", torch.linspace(0.99, 0.01, 10))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        t = torch.randint(0, 10, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        a = self.alpha[t][:, None]
        h, cond = a.sqrt() * x + (1 - a).sqrt() * noise, self.time(t[:, None].float() / 10)
        for block in self.blocks:
            h = block(h, cond)
        return F.mse_loss(h, noise)


@case("LayerDrop inside the layers, by Python's random and NumPy's", random=True, options={"num_microbatches": 7})
class PythonRandom(WithLayers):
    class Layer(OneLinear):
        def forward(self, x):
            if self.training and random.random() < 0.5:
                return x
            return x + float(np.random.rand()) * self.linear(x).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch, batch_idx):
        return self.run(self.inp(batch[0]) + float(np.random.randn())).pow(2).mean()


@case("sparse experts, most of which no token chooses when the module is traced", batch=tokens)
class UnusedExperts(Embedded):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(TOKENS))

        def forward(self, x, ids):
            out = torch.zeros_like(x)
            for i in ids.unique().tolist():
                out[ids == i] += self.experts[i](x[ids == i])
            return out

    def training_step(self, batch, batch_idx):
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x, batch)
        return x.pow(2).mean()


@case("dropout around the layers inside of activation checkpoints", random=True)
class CheckpointedDropout(WithLayers):
    wrap = True

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:

            def run(x, layer=layer):
                return F.dropout(layer(F.dropout(x, 0.2)), 0.3).sin()

            x = checkpoint(run, x, use_reentrant=False) if self.wrap else run(x)
        return x.pow(2).mean()


@case("LayerDrop in the loop: some layers are not called", random=True, refused="layer")
class LayerDropLoop(WithLayers):
    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            if random.random() > 0.5:
                x = layer(x)
        return x.pow(2).mean()


@case("the same with one microbatch", name="OwnGeneratorWhole", options={"num_microbatches": 1})
@case("a torch.Generator of its own", refused="self.generator, a generator of its own")
class OwnGenerator(WithLayers):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch, batch_idx):
        return self.run(batch[0] + torch.randn(batch[0].shape, generator=self.generator)).pow(2).mean()


@case("SimCLR: both views go through the encoder in turn", refused="twice")
class TwoViews(WithNet):
    def training_step(self, batch, batch_idx):
        a, b = self.net(batch[0]), self.net(batch[0] + 0.1)
        return -F.cosine_similarity(a, b).mean()


# ---------------------------------------------------------------- several passes, several losses


@case("Siamese: both sides joined into one batch inside of the step")
class SiameseJoined(WithNet):
    def training_step(self, batch, batch_idx):
        a, b = self.net(torch.cat([batch[0], batch[0].flip(-1)])).chunk(2)
        return F.triplet_margin_loss(a, b, a.roll(1, 0).detach())


@case("GAN: manual optimization", refused="manual optimization")
class GAN(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        g, d = self.optimizers()
        loss = -self.discriminator(self.generator(batch[0])).mean()
        g.zero_grad()
        self.manual_backward(loss)
        g.step()
        d.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.discriminator.parameters())]


@case("MoE: a balancing loss kept on each layer as an attribute, summed later", batch=tokens, refused="inside layer 0")
class MoEAttribute(Embedded):
    class Layer(Routed):
        aux_loss = 0.0

        def forward(self, x):
            p = self.gate(x).softmax(-1)
            self.aux_loss = p.mean((0, 1)).pow(2).sum()
            return x + sum(p[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + sum(layer.aux_loss for layer in self.layers)


@case("MoE: sparse routing with index_add, the balancing loss handed on beside the hidden state", batch=tokens)
class MoERunningLoss(Embedded):
    class Layer(Routed):
        def forward(self, x, aux):
            flat = x.reshape(-1, WIDTH)
            p = self.gate(flat).softmax(-1)
            best, which = p.max(-1)
            out = torch.zeros_like(flat)
            for i, expert in enumerate(self.experts):
                (rows,) = torch.where(which == i)
                if len(rows) == 0:
                    continue
                out.index_add_(0, rows, expert(flat[rows]) * best[rows, None])
            return x + out.view_as(x), aux + p.mean(0).pow(2).sum()

    def training_step(self, batch, batch_idx):
        x, aux = self.embed(batch), torch.zeros(())
        for layer in self.layers:
            x, aux = layer(x, aux)
        self.log("aux", aux)
        return x.pow(2).mean() + 0.1 * aux


@case("layers keep a Python number from .item(); the step logs their sum", refused="density")
class LayerStatistics(WithLayers):
    class Layer(OneLinear):
        density = 0.0

        def forward(self, x):
            x = self.linear(x).relu()
            self.density = (x > 0).float().mean().item()
            return x

    def training_step(self, batch, batch_idx):
        x = self.run(batch[0])
        self.log("density", sum(layer.density for layer in self.layers) / 4)
        return x.pow(2).mean()


@case("the loss penalises all parameters of the module")
class PenaltyOnAllWeights(WithNet):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 1e-2 * sum(p.pow(2).sum() for p in self.parameters())


@case("gradient penalty by torch.autograd.grad inside of the step", refused="autograd.grad")
class GradientPenalty(WithNet):
    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        score = self.net(x).tanh().sum(-1)
        (g,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (g.norm(dim=-1) - 1).pow(2).mean()


@case("torch.func.functional_call with masked weights (pruning)")
class FunctionalCall(WithNet):
    def training_step(self, batch, batch_idx):
        weights = {k: p * (p.detach().abs() > 0.05) for k, p in self.net.named_parameters()}
        return F.mse_loss(torch.func.functional_call(self.net, weights, (batch[0],)), batch[0])


@case("the step calls loss.backward() on an auxiliary loss itself", refused="backward")
class OwnBackward(WithNet):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        out.abs().mean().backward(retain_graph=True)
        return F.mse_loss(out, batch[0])


@case("reads p.grad of the step before, to log a gradient norm", refused=".grad")
class LogsOldGradients(WithNet):
    def training_step(self, batch, batch_idx):
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        if norms:
            self.log("grad_norm", torch.stack(norms).norm())
        return super().training_step(batch, batch_idx)


# ---------------------------------------------------------------- state


@case("each layer counts its calls and keeps a running mean in a buffer")
class CountingLayers(WithLayers):
    class Layer(OneLinear):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.register_buffer("running", torch.zeros(WIDTH))

        def forward(self, x):
            self.calls += 1
            x = self.linear(x)
            self.running.lerp_(x.detach().mean(0), 0.1)
            return x - self.running


@case("the same counter, one chunk a rank", name="CounterBefore")
@case(
    "a counter raised before the layers; 2 chunks a rank",
    refused="samples_seen",
    options={"schedule": "interleaved_1f1b", "num_chunks": 2},
)
class CounterInterleaved(WithLayers):
    samples_seen = 0

    def training_step(self, batch, batch_idx):
        self.samples_seen += len(batch[0])
        return super().training_step(batch, batch_idx)


@case(
    "BatchNorm in the stem, 2 chunks a rank",
    refused="input_norm.running_mean",
    options={"schedule": "interleaved_1f1b", "num_chunks": 2},
)
class StemNormInterleaved(WithLayers):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm = nn.BatchNorm1d(WIDTH)

    def training_step(self, batch, batch_idx):
        return self.run(self.input_norm(batch[0])).pow(2).mean()


@case("a warm-up counter raised at the end of the step and read at its start", refused="num_steps")
class CounterAfter(WithLayers):
    num_steps = 0

    def training_step(self, batch, batch_idx):
        x = self.run(batch[0] * min(1.0, 0.1 * self.num_steps))
        self.num_steps += 1
        return x.pow(2).mean()


@case("an EMA teacher inside of the module, updated in the step", refused="in place")
class MeanTeacher(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                t.mul_(0.99).add_(s, alpha=0.01)
            target = self.teacher(batch[0])
        return F.mse_loss(self.student(batch[0]), target)


@case("a frozen teacher distils into the student")
class Distillation(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES)).requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def training_step(self, batch, batch_idx):
        student = self.student(batch[0])
        with torch.no_grad():
            target = self.teacher(batch[0]).softmax(-1)
        return F.cross_entropy(student, target) + F.cross_entropy(student, batch[1])


_ROPE: dict[tuple[int, int], Tensor] = {}


@case("position encodings in a cache at module level", batch=tokens)
class GlobalCache(OfTexts):
    @staticmethod
    def encoding(length: int, width: int) -> Tensor:
        if (length, width) not in _ROPE:
            angle = torch.arange(length)[:, None] / 10 ** (torch.arange(width) / width)
            _ROPE[length, width] = angle.sin()
        return _ROPE[length, width]

    def embedded(self, batch):
        return self.embed(batch) + self.encoding(batch.shape[1], WIDTH)


@case("forward hooks collect every layer's features, a loss uses them", refused="read after the last layer")
class FeatureHooks(WithLayers):
    def __init__(self) -> None:
        super().__init__()
        self.features = {}
        for i, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda m, a, out, i=i: self.features.__setitem__(i, out))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.features[1].abs().mean()


@case("forward hooks change the outputs of layers")
class ChangingHooks(WithLayers):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.5, 2.0, 1.5, 1.1]))
        for i, layer in enumerate(self.layers):
            layer.register_forward_hook(self.scaled(i))

    def scaled(self, i):
        return lambda m, a, out: out * i

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for i, layer in enumerate(self.layers):
            x = layer(x + 1) * self.gain[i]
        return x.pow(2).mean()


@case(
    "the labels are popped from the batch",
    batch=lambda: dict(zip(["x", "y"], vectors(), strict=True)),
    options={"num_microbatches": 1},
)
class PopsLabels(WithNet):
    def training_step(self, batch, batch_idx):
        y = batch.pop("y")
        return F.cross_entropy(self.net(batch["x"]), y % WIDTH)


@case("EEGNet: layers clamp the norm of their own weight in place before using it")
class MaxNorm(WithLayers):
    class Layer(OneLinear):
        def forward(self, x):
            self.linear.weight.data.renorm_(2, 0, 0.3)
            self.linear.bias.data = self.linear.bias.data.clamp(-0.1, 0.1)
            return self.linear(x).tanh()


@case("nn.Embedding(max_norm=...), which changes its weight in the forward", batch=tokens, refused="in place")
class EmbeddingMaxNorm(Embedded):
    max_norm = 1.0


@case("VQ-VAE: a codebook in the middle, moved in place by its layer, losses handed on")
class VectorQuantised(Wild):
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.randn(6, WIDTH))
            self.register_buffer("used", torch.ones(6))

        def forward(self, pair):
            x, loss = pair
            nearest = torch.cdist(x, self.codes).argmin(-1)
            onehot = F.one_hot(nearest, 6).to(x.dtype)
            quantised = self.codes[nearest].clone()
            if self.training:
                self.used.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
                self.codes.lerp_(onehot.T @ x.detach() / self.used[:, None], 0.1)
            return x + (quantised - x).detach(), loss + F.mse_loss(x, quantised)

    class Half(OneLinear):
        def forward(self, pair):
            return self.linear(pair[0]).tanh(), pair[1]

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.Half(), self.Codebook(), self.Half(), self.Half())

    def training_step(self, batch, batch_idx):
        x, commitment = self.net((batch[0], torch.zeros(())))
        return F.mse_loss(x, batch[0]) + 0.25 * commitment


@case("nn.Flatten and nn.Identity among the layers", batch=images)
class ViewLayers(Classified):
    def __init__(self) -> None:
        super().__init__()
        views = nn.Identity(), nn.Flatten(), nn.Unflatten(1, (2, 9)), nn.Flatten()
        self.net = nn.Sequential(nn.Conv2d(3, 2, 3, stride=2), *views, nn.Linear(18, 4))


class LoggingNet(WithLayers):
    """A LightningModule that is a part of another module and logs on its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        self.log("hidden", x.norm())
        return x


@case("a LightningModule inside, which calls self.log of its own", refused="logs through net")
class NestedLightning(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.net = LoggingNet()

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()


# ---------------------------------------------------------------- control flow, logging, Python


@case("logs the norm of the hidden state from between the layers, and the inputs' from before them")
class LogsBetween(WithLayers):
    def training_step(self, batch, batch_idx):
        x = batch[0]
        self.log("input", x.norm(dim=-1).mean())
        for i, layer in enumerate(self.layers):
            x = layer(x)
            self.log(f"norm_{i}", x.norm(dim=-1).mean(), on_step=True, on_epoch=True)
        return x.pow(2).mean()


@case("logs float(norm) from between the layers", refused="read")
class LogsFloatBetween(WithLayers):
    def training_step(self, batch, batch_idx):
        x = batch[0]
        for i, layer in enumerate(self.layers):
            x = layer(x)
            self.log(f"norm_{i}", float(x.norm(dim=-1).mean()))
        return x.pow(2).mean()


class LastValue(torchmetrics.Metric):
    """A metric that reads no value in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.total = self.total + value.sum()

    def compute(self) -> Tensor:
        return self.total


@case(
    "a torchmetrics object updated with the hidden state from between the layers", refused="read after the last layer"
)
class MetricBetween(WithLayers):
    def __init__(self) -> None:
        super().__init__()
        self.mean_norm = LastValue()

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
            self.mean_norm.update(x.norm(dim=-1))
        self.log("norm", self.mean_norm, on_step=False, on_epoch=True)
        return x.pow(2).mean()


@case("early exit by .item() between the layers", refused="read")
class EarlyExit(WithLayers):
    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
            if x.abs().max().item() > 1e3:
                break
        return x.pow(2).mean()


@case("a branch on .item() of the embedded input before the layers", batch=tokens)
class BranchBefore(Embedded):
    def training_step(self, batch, batch_idx):
        x = self.embed(batch)
        if x.mean().item() > 0:
            x = -x
        gain = 2.0 if x.std().item() > 0.5 else 1.0
        for layer in self.layers:
            x = layer(x) * gain
        return x.pow(2).mean()


@case("a count by nonzero() of an early layer divides the loss", refused="read")
class CountBetween(WithLayers):
    def training_step(self, batch, batch_idx):
        x, active = batch[0], 1
        for layer in self.layers:
            x = layer(x)
            active += len((x > 0).nonzero())
        return x.pow(2).sum() / active


@case("activations pass through NumPy between two layers", refused="read")
class NumpyBetween(WithLayers):
    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
            x = x * float(np.clip(x.detach().cpu().numpy(), -1, 1).std())
        return x.pow(2).mean()


@case("try / except Exception around the model call, log in finally")
class CatchesExceptions(WithNet):
    def training_step(self, batch, batch_idx):
        try:
            out = self.net(batch[0])
        except Exception:
            out = torch.zeros_like(batch[0], requires_grad=True)
        finally:
            self.log("done", 1.0)
        return F.mse_loss(out, batch[0])


@case("a bare except around the model call", refused="bare `except:`")
class CatchesAll(WithNet):
    def training_step(self, batch, batch_idx):
        try:
            out = self.net(batch[0])
        except:  # noqa: E722
            out = torch.zeros_like(batch[0], requires_grad=True)
        return F.mse_loss(out, batch[0])


@case("a frozen backbone under no_grad, a trained head")
class FrozenBackbone(WithNet):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch, batch_idx):
        self.net.eval()
        with torch.no_grad():
            features = self.net(batch[0])
        return F.cross_entropy(self.head(features), batch[1])


@case("a backbone under inference_mode, a trained head")
class InferenceBackbone(FrozenBackbone):
    def training_step(self, batch, batch_idx):
        with torch.inference_mode():
            features = self.net(batch[0])
        return F.cross_entropy(self.head(features.clone()), batch[1])


@case("self.logger.experiment used in the step", refused="self.logger directly")
class UsesLogger(WithLayers):
    def training_step(self, batch, batch_idx):
        x = self.run(batch[0])
        self.logger.experiment.add_histogram("hidden", x, 0)
        return x.pow(2).mean()


# ---------------------------------------------------------------- activation checkpointing


@case("checkpoint_sequential in two segments, which are the stages")
class CheckpointSequential(Wild):
    depth = 4

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*mlp(depth=self.depth))

    def training_step(self, batch, batch_idx):
        return checkpoint_sequential(self.net, 2, batch[0], use_reentrant=False).pow(2).mean()


@case(
    "checkpoint_sequential whose segments cross the split points",
    options={"pipeline_parallel_size": 3, "partition": [1, 2, 3]},
)
class CheckpointAcross(CheckpointSequential):
    depth = 6


# ---------------------------------------------------------------- parametrised and unusual layers


@case("weight_norm and spectral_norm on the layers themselves, as hooks (old) and parametrisations")
class Normed(WithNet):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
            torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
            torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
            torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
            torch.nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
        )


@case("complex numbers: FNet mixing by FFT, a complex weight", batch=tokens)
class Fourier(Embedded):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.cfloat) * 0.1 + 1)

        def forward(self, x):
            return torch.fft.fft(x) * self.weight

    def training_step(self, batch, batch_idx):
        x = self.embed(batch).to(torch.cfloat)
        for layer in self.layers:
            x = layer(x) / 2
        return x.abs().pow(2).mean()


@dataclasses.dataclass
class LayerState:
    """What the layers of `DataclassLayers` return."""

    hidden: Tensor
    gate: Tensor
    depth: int
    extra: Any = None


@case("layers return a dataclass with tensors, a number and None")
class DataclassLayers(WithLayers):
    class Layer(OneLinear):
        def forward(self, state):
            h = self.linear(state.hidden).tanh()
            return LayerState(h * state.gate, h.mean(-1, keepdim=True), state.depth + 1)

    def training_step(self, batch, batch_idx):
        state = self.run(LayerState(batch[0], torch.ones(len(batch[0]), 1), 0))
        return state.hidden.pow(2).mean() * state.depth


@case("layers return (hidden, None, dict), taken by keyword")
class TupleLayers(WithLayers):
    class Layer(OneLinear):
        def forward(self, hidden, *, cache=None, info=None):
            return self.linear(hidden).sin(), cache, {"mean": hidden.mean(), "kind": "plain"}

    def training_step(self, batch, batch_idx):
        x, cache, info = batch[0], None, None
        for layer in self.layers:
            x, cache, info = layer(hidden=x, cache=cache, info=info)
        return x.pow(2).mean() + info["mean"]


class Tally:
    """A plain object that layers pass on."""

    def __init__(self) -> None:
        self.depth = 0


@case("layers hand on an object of a class of their own, and count in it", refused="changes Python values")
class ObjectLayers(WithLayers):
    class Layer(OneLinear):
        def forward(self, x, tally):
            tally.depth += 1
            return self.linear(x) / tally.depth, tally

    def training_step(self, batch, batch_idx):
        x, tally = batch[0], Tally()
        for layer in self.layers:
            x, tally = layer(x, tally)
        return x.pow(2).mean() * tally.depth


@case("T5: the first layer computes a position bias, later ones reuse it", batch=tokens)
class PositionBias(Embedded):
    class Layer(OneLinear):
        def forward(self, x, bias=None):
            if bias is None:
                i = torch.arange(x.shape[1])
                bias = self.bias(i[:, None] - i[None, :] + LENGTH).squeeze(-1)
            scores = (x @ self.linear(x).transpose(1, 2) + bias).softmax(-1)
            return x + scores @ x, bias

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].bias = nn.Embedding(2 * LENGTH, 1)

    def training_step(self, batch, batch_idx):
        x, bias = self.embed(batch), None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return F.cross_entropy(x.flatten(0, 1) @ self.embed.weight.T, batch.flatten())


@case("TorchScript layers", refused="TorchScript")
class Scripted(WithLayers):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(torch.jit.script(nn.Linear(WIDTH, WIDTH)) for _ in range(4))


@case("layers compiled one by one (eager backend)")
class CompiledLayers(WithLayers):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.compile(backend="eager")


class _Net(nn.Module):
    """A stem, layers and a head, as the network inside a LightningModule is usually written."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(WIDTH, WIDTH), mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@case("self.model = torch.compile(net) (eager backend)")
class CompiledNet(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(_Net(), backend="eager")

    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).pow(2).mean()


@case("self.model.compile() around the layer list (eager backend)")
class CompiledInPlace(CompiledNet):
    def __init__(self) -> None:
        super().__init__()
        self.model = _Net()
        self.model.compile(backend="eager")


# ---------------------------------------------------------------- batches


def detection_batch() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return images of different sizes with different numbers of boxes."""
    pictures = [torch.randn(3, 4 + i % 3, 5) for i in range(SAMPLES)]
    return pictures, [{"boxes": torch.rand(1 + i % 2, 4), "labels": torch.ones(1 + i % 2)} for i in range(SAMPLES)]


@case("detection: lists of images of unlike sizes and dicts of boxes", batch=detection_batch)
class Detection(WithLayers):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 1), nn.Linear(WIDTH, 4)

    def training_step(self, batch, batch_idx):
        pictures, targets = batch
        boxes = self.head(self.run(torch.stack([self.stem(p).mean((1, 2)) for p in pictures])))
        return torch.stack([(b - t["boxes"].mean(0)).abs().mean() for b, t in zip(boxes, targets, strict=True)]).mean()


def graph_batch() -> dict[str, Tensor]:
    """Return a graph of seven nodes and ten edges."""
    return {"x": torch.randn(SAMPLES, WIDTH), "edge_index": torch.randint(SAMPLES, (2, 10))}


@case("the same graph as one microbatch", name="GraphWhole", batch=graph_batch, options={"num_microbatches": 1})
@case("a graph: nodes and edges differ in number", name="GraphMicrobatches", batch=graph_batch, refused="edge_index")
class GraphNet(WithLayers):
    class Layer(OneLinear):
        def forward(self, x, edge_index):
            return self.linear(torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])).relu()

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x, batch["edge_index"])
        return F.mse_loss(x, batch["x"])


def bags() -> tuple[Tensor, Tensor, Tensor]:
    """Return seven bags of tokens, where each begins, and targets."""
    return torch.randint(TOKENS, (20,)), torch.arange(0, 20, 3), torch.randn(7, WIDTH)


@case("nn.EmbeddingBag with offsets", batch=bags, refused="split_batch")
class Bags(WithLayers):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(TOKENS, WIDTH)

    def training_step(self, batch, batch_idx):
        ids, offsets, target = batch
        return F.mse_loss(self.run(self.embed(ids, offsets)), target)


@case("the same, with its own split_batch", batch=bags)
class BagsSplit(Bags):
    def split_batch(self, batch, num_microbatches):
        ids, offsets, target = batch
        return [(ids[:12], offsets[:4], target[:4]), (ids[12:], offsets[4:] - 12, target[4:])]

    def microbatch_weight(self, batch):
        return len(batch[1])


@case("its own split_batch, but nothing says what its parts weigh", batch=bags, refused="microbatch_weight")
class BagsUnweighted(Bags):
    split_batch = BagsSplit.split_batch


# ---------------------------------------------------------------- libraries


class HuggingFace(Wild):
    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = build()

    def training_step(self, batch, batch_idx):
        out = self.model(input_ids=batch, labels=batch)
        self.log("loss", out.loss)
        return out.loss


def build_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": TOKENS, "n_positions": 8, "n_embd": WIDTH, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def build_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=TOKENS, d_model=WIDTH, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def build_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        build_gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    )


for _name, _unusual, _build in [
    ("T5", "Hugging Face T5, encoder and decoder, position bias of the first layers", build_t5),
    ("LoRA", "PEFT LoRA on GPT-2, all else frozen", build_lora),
]:
    case(_unusual, name=_name, batch=tokens)(functools.partial(HuggingFace, _build))


def make_table() -> str:
    """Return the table "Modules tried" of docs/exactness.md."""
    lines = ["| Module | What is unusual about it | Verdict | Reason, in short |", "| --- | --- | --- | --- |"]
    for c in CASES:
        reason = c.refused.replace("|", "\\|")
        lines.append(f"| {c.name} | {c.unusual} | {c.verdict} | {reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(make_table(), end="")
