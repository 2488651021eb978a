"""Modules and callbacks as users write them, which no promise of Lightning covers."""

import copy
import functools
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torchmetrics
from comparing import state_of
from contract import PLAIN, TWO, Run, each
from contract_models import WIDTH, Lines, Rows, same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader


class Labelled(Rows):
    """The rows, each with one of three classes."""

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index % 3


def labelled(count: int = 4, **options: Any) -> Any:
    return DataLoader(Labelled(4 * count), batch_size=4, **options)


class Classifier(pl.LightningModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0, labels: Any = None) -> Any:
        logits = self.head(self.layers(x)) * scale
        return logits if labels is None else (F.cross_entropy(logits, labels), logits)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss, _ = self(x, labels=y, scale=2.0)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("val_loss", self(x, labels=y)[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def outcome(run: Run, module: Any, *loaders: Any, **options: Any) -> Any:
    lines = Lines()
    trainer = run.fit(module, *(loaders or (labelled(),)), logger=lines, **options)
    return lines.lines, {k: float(v) for k, v in trainer.callback_metrics.items()}, state_of(module)


def case_forward_with_keywords(run: Run):
    return outcome(run, Classifier(), labelled(), labelled(2), max_epochs=2)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        for b in self.blocks:
            x = b(x).relu()
        return x


class Keeps(Classifier):
    """Takes its network, loss and optimizer as arguments, as templates do."""

    def __init__(self, net: nn.Module, criterion: Any, optimizer: Any) -> None:
        super().__init__()
        del self.layers
        self.save_hyperparameters(logger=False)
        self.net, self.criterion = net, criterion

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.criterion(self.head(self.hparams.net(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return self.hparams.optimizer(params=self.parameters())


@each(folder=True, file=False)
def case_hyper_parameters_may_be_the_network(run: Run, folder: bool):
    strategy = run.strategy() if run.layout == PLAIN else run.strategy(save_distributed_checkpoint=folder)
    saving = pl.callbacks.ModelCheckpoint(dirpath=run.folder / "saved", save_last=True)
    module = Keeps(Backbone(), nn.CrossEntropyLoss(), functools.partial(torch.optim.AdamW, lr=0.05))
    found = outcome(run, module, labelled(), labelled(2), max_epochs=2, callbacks=[saving], strategy=strategy)
    run.meet()
    again = Keeps.load_from_checkpoint(saving.last_model_path, weights_only=False)
    assert again.hparams.net is again.net and same(state_of(again), state_of(module))
    run.fit(again, labelled())
    run.meet()
    kept = None
    if not folder:
        kept = state_of(torch.load(saving.last_model_path, weights_only=False)["hyper_parameters"]["net"])
        assert same(kept, state_of(module.net))
    return found, state_of(again)


@each(all_layers=lambda module: module.net, one_layer=lambda module: module.net.blocks[1])
def case_a_part_is_saved_by_torch_in_a_hook(run: Run, part: Any):
    class Saves(Keeps):
        def on_train_epoch_end(self) -> None:
            torch.save(part(self), f"{'first' if run.is_first else 'second'}.pt")

    module = Saves(Backbone(), nn.CrossEntropyLoss(), functools.partial(torch.optim.SGD, lr=0.05))
    run.fit(module, labelled())
    found = torch.load(f"{'first' if run.is_first else 'second'}.pt", weights_only=False)
    assert same(state_of(found), state_of(part(module)))
    return found(torch.ones(2, WIDTH)).detach()


def case_metrics_in_a_dict(run: Run):
    class Metrics(Classifier):
        def __init__(self):
            super().__init__()

            def make():
                return nn.ModuleDict(
                    {
                        "acc": torchmetrics.Accuracy(task="multiclass", num_classes=3),
                        "f1": torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
                        "mean": torchmetrics.MeanMetric(),
                    }
                )

            self.metrics = nn.ModuleDict({"fit": make(), "val": make()})

        def shared(self, batch, stage):
            x, y = batch
            loss, logits = self(x, labels=y)
            for name, metric in self.metrics[stage].items():
                if name == "mean":
                    metric(loss, weight=len(x))
                else:
                    metric(logits, y)
                self.log(
                    f"{stage}_{name}", metric, on_step=stage == "fit", on_epoch=True, prog_bar=True, batch_size=len(x)
                )
            self.log(f"{stage}_loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(x))
            return {"loss": loss, "logits": logits.detach()}

        def training_step(self, batch, batch_idx):
            return self.shared(batch, "fit")

        def validation_step(self, batch, batch_idx):
            return self.shared(batch, "val")

    return outcome(run, Metrics(), labelled(), labelled(2), max_epochs=2)


@each(batch_end="on_train_batch_end", zero="on_before_zero_grad")
def case_a_teacher_is_an_average(run: Run, hook: str):
    class Teacher(Classifier):
        def __init__(self):
            super().__init__()
            self.teacher = copy.deepcopy(nn.Sequential(self.layers, self.head)).requires_grad_(False)

        @torch.no_grad()
        def follow(self, *args):
            for old, new in zip(
                self.teacher.parameters(), (*self.layers.parameters(), *self.head.parameters()), strict=True
            ):
                old.mul_(0.9).add_(new, alpha=0.1)

        def training_step(self, batch, batch_idx):
            x, y = batch
            with torch.no_grad():
                target = self.teacher(x).softmax(-1)
            logits = self(x)
            loss = F.cross_entropy(logits, target) + F.cross_entropy(logits, y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)

    return outcome(run, type("Teaches", (Teacher,), {hook: Teacher.follow})(), max_epochs=2)


@each(weight=parametrizations.weight_norm, orthogonal=parametrizations.orthogonal)
def case_parametrized(run: Run, parametrize: Any):
    class Parametrized(Classifier):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(parametrize(layer) for layer in self.layers))

    return outcome(run, Parametrized(), labelled(), labelled(2), max_epochs=2)


class Spectral(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(parametrizations.spectral_norm(layer) for layer in self.layers))


class Weighted(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("class_weights", torch.tensor([0.2, 1.0, 2.0]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1], weight=self.class_weights, label_smoothing=0.1)


@each(spectral_norm=Spectral, weights_of_classes=Weighted)
def case_what_microbatches_would_change_is_not_split_unasked(run: Run, make: Any):
    module = make()
    if run.layout == TWO:
        with run.warning("changes buffers" if make is Spectral else "which samples are together"):
            run.fit(make(), labelled())  # the number of microbatches is given
    strategy = run.strategy() if run.layout == PLAIN else run.strategy(num_microbatches="auto")
    return outcome(run, module, strategy=strategy, max_epochs=2)


class Texts(Labelled):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "y": y, "name": f"row {index}", "meta": {"weight": 1.0 + index, "path": ["a", str(index)]}}


def case_batches_with_strings(run: Run):
    class Named(Classifier):
        def __init__(self):
            super().__init__()
            self.names = []

        def training_step(self, batch, batch_idx):
            each = F.cross_entropy(self(batch["x"]), batch["y"], reduction="none")
            scale = torch.tensor([float(len(n)) for n in batch["name"]])
            assert len(batch["meta"]["path"][1]) == len(each)
            return (each * scale * batch["meta"]["weight"]).mean().float()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.names += batch["name"]

    module = Named()
    return outcome(run, module, DataLoader(Texts(16), batch_size=4)), module.names


class Out(NamedTuple):
    hidden: Tensor
    total: Tensor


class NamedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Out:
        x = self.linear(value.hidden).relu()
        return Out(hidden=x, total=value.total + x.square().mean(-1))


def case_layers_give_named_tuples(run: Run):
    class Uses(Classifier):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([NamedLayer(), NamedLayer()])

        def training_step(self, batch, batch_idx):
            x, y = batch
            value = Out(x, x.new_zeros(len(x)))
            for layer in self.layers:
                value = layer(value)
            return F.cross_entropy(self.head(value.hidden), y) + 0.1 * value.total.mean()

    return outcome(run, Uses())


def case_a_schedule_in_the_step(run: Run):
    class Anneals(Classifier):
        def training_step(self, batch, batch_idx):
            x, y = batch
            progress = self.trainer.current_epoch / self.trainer.max_epochs
            share = min(1.0, self.global_step / max(1, self.trainer.estimated_stepping_batches))
            logits = self(x)
            loss = F.cross_entropy(logits / (1 + progress), y) * (1 + share)
            if self.global_step > 3 and self.trainer.num_training_batches > batch_idx + 1:
                loss = loss + logits.square().mean()
            if self.trainer.is_last_batch:
                loss = loss * 0.5
            self.log_dict(
                {"loss": loss, "share": share, "progress": progress, "lr": self.optimizers().param_groups[0]["lr"]}
            )
            return loss

    return outcome(run, Anneals(), max_epochs=3)


@each(last=1, first=0)
def case_hooks_keep_activations_for_a_loss(run: Run, layer: int):
    class Hooked(Classifier):
        def __init__(self):
            super().__init__()
            self.kept = {}
            self.layers[layer].register_forward_hook(self.keep)

        def keep(self, module, args, output):
            self.kept["features"] = output

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + 0.1 * self.kept.pop("features").square().mean()

    return outcome(run, Hooked())


def case_a_loss_that_learns_its_weights(run: Run):
    class Uncertain(Classifier):
        def __init__(self):
            super().__init__()
            self.log_vars = nn.ParameterDict({"a": nn.Parameter(torch.zeros(())), "b": nn.Parameter(torch.zeros(()))})

        def training_step(self, batch, batch_idx):
            x, y = batch
            hidden = self.layers(x)
            losses = {"a": F.cross_entropy(self.head(hidden), y), "b": F.mse_loss(hidden, x)}
            total = sum(torch.exp(-self.log_vars[k]) * v + self.log_vars[k] for k, v in losses.items())
            self.log_dict({f"train/{k}": v.detach() for k, v in losses.items()}, on_step=False, on_epoch=True)
            return total

    return outcome(run, Uncertain(), max_epochs=2)


def case_validation_by_an_averaged_copy(run: Run):
    class Averages(Classifier):
        def __init__(self):
            super().__init__()
            self.shadow = {}

        def on_train_batch_end(self, *args):
            for n, p in self.named_parameters():
                self.shadow[n] = p.detach().clone() if n not in self.shadow else 0.9 * self.shadow[n] + 0.1 * p.detach()

        def on_validation_start(self):
            self.backup = {n: p.detach().clone() for n, p in self.named_parameters()}
            self.load_state_dict(self.shadow, strict=False)

        def on_validation_end(self):
            self.load_state_dict(self.backup, strict=False)

    module = Averages()
    return outcome(run, module, labelled(), labelled(2), max_epochs=2), module.shadow
