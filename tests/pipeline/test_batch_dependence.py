"""Modules that no split into microbatches can run exactly are found by a trial, and named."""

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_holmes
from lightning_holmes.pipeline.attributes import plain_content
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.batch_dependence import find_batch_dependence


class Classifier(LightningModule):
    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), *extra, nn.Linear(4, 3))

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.layers(batch["x"]), batch["y"])


class Contrastive(Classifier):
    def training_step(self, batch: Any) -> Tensor:
        z = F.normalize(self.layers(batch["x"]), dim=-1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))


class TokenMean(Classifier):
    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.layers(batch["x"]), batch["y"], ignore_index=0)


class WeightedTokenMean(TokenMean):
    def microbatch_weight(self, batch: Any) -> Tensor:
        return (batch["y"] != 0).sum()


class Warming(TokenMean):
    """Its loss grows with each step, so that steps on one copy differ."""

    def __init__(self, *, over_tokens: bool) -> None:
        super().__init__()
        self.over_tokens, self.steps = over_tokens, 0

    def training_step(self, batch: Any) -> Tensor:
        self.steps += 1
        step = TokenMean.training_step if self.over_tokens else Classifier.training_step
        return self.steps * step(self, batch)


class KeepsFirst(Classifier):
    """Keeps something of the first batch that it sees: its scale, a mask of its size, or its first sample."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.kept = what, None

    def training_step(self, batch: Any) -> Tensor:
        x = batch["x"]
        y = self.layers(x)
        made = {"scale": y.detach().std(0), "mask": torch.ones(len(x), 1), "sample": x[0]}[self.what]
        self.kept = made if self.kept is None else self.kept
        if self.what == "sample":
            return y.square().mean() * (1 if torch.equal(x[0], self.kept) else 2)
        return (y * self.kept if self.what == "mask" else y / self.kept).square().mean()


class Queue(Classifier):
    """MoCo: negatives are those of earlier batches, kept in a queue; however the batch is split, it ends up in the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(16, 3))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any) -> Tensor:
        z = F.normalize(self.layers(batch["x"]), dim=-1)
        loss = F.cross_entropy(z @ self.queue.clone().T, batch["y"])
        self.queue[(self.place + torch.arange(len(z))) % 16] = z.detach()
        self.place += len(z)
        return loss


class Noisy(Classifier):
    def training_step(self, batch: Any) -> Tensor:
        return self.layers(batch["x"] + torch.randn_like(batch["x"])).square().mean()


class AttendingTokenMean(TokenMean):
    """Dropout in attention, which is no layer, must not hide that the loss is a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5)

    def training_step(self, batch: Any) -> Tensor:
        x = batch["x"][None]
        return super().training_step({**batch, "x": self.attention(x, x, x)[0][0] + batch["x"]})


class ChoosingTokens(Classifier):
    """A mean over tokens that are chosen at random, as for masked language models."""

    def training_step(self, batch: Any) -> Tensor:
        ignored = torch.rand(len(batch["y"])) * torch.arange(len(batch["y"])) > 1
        return F.cross_entropy(self.layers(batch["x"]), batch["y"].masked_fill(ignored, -100))


class Scaled(nn.Module):
    """A layer with a buffer: the number of its calls, the mean or the sum of its inputs, or a constant."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps = keeps
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps == "count":
            self.kept += 1
        elif self.keeps == "mean":
            self.kept = 0.9 * self.kept + 0.1 * x.detach().mean(0)
        elif self.keeps == "sum":
            self.kept += x.detach().sum(0)
        return x * self.kept if self.keeps == "nothing" else x


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, 4), "y": torch.tensor([1, 2, 1, 0, 0, 0, 1, 2])}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Classifier(), None),
        (Classifier(nn.Dropout(0.5)), None),
        (Classifier(nn.BatchNorm1d(4)), ["layers.1", "batch normalisation"]),
        (Contrastive(nn.BatchNorm1d(4)), ["batch normalisation", "negatives"]),
        (Contrastive(), ["Contrastive", "negatives", "microbatch_weight"]),
        (TokenMean(), ["TokenMean", "microbatch_weight"]),
        (WeightedTokenMean(), None),
        (AttendingTokenMean(), ["AttendingTokenMean", "microbatch_weight"]),
        (ChoosingTokens(), ["ChoosingTokens", "not each sample has as many", "microbatch_weight"]),
        (Noisy(), None),
        (KeepsFirst("scale"), ["KeepsFirst", "microbatch_weight"]),
        (KeepsFirst("mask"), ["self.kept"]),
        (KeepsFirst("sample"), ["KeepsFirst", "state", "come next"]),
        (Queue(), ["Queue", "state", "come next"]),
        (Warming(over_tokens=False), ["self.steps"]),
        (Warming(over_tokens=True), ["Warming", "microbatch_weight"]),
        (
            Classifier(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
            ["buffers", "layers.1.parametrizations"],
        ),
        (Classifier(Scaled("count")), ["buffers (layers.1.kept)", "once for each microbatch"]),
        (Classifier(Scaled("mean")), ["buffers (layers.1.kept)"]),
        (Classifier(Scaled("sum")), None),
        (Classifier(Scaled("nothing")), None),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, LightningModule) else None,
)
def test_what_depends_on_company_is_named(module: LightningModule, words: list[str] | None) -> None:
    found = find_batch_dependence(module, "training_step", batch(), (), BatchSplitter()).dependence
    assert (found is None) == (words is None), found
    assert found is None or all(word in found.reason for word in words or [])
    assert found is None or not found.is_cut_along_time


class SameLoss(TokenMean):
    """At its first step the loss is that of a uniform guess, whatever the samples."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.layers[-1].weight)
        nn.init.zeros_(self.layers[-1].bias)


def test_losses_that_are_alike_by_chance_do_not_hide_other_gradients() -> None:
    found = find_batch_dependence(SameLoss(), "training_step", batch(), (), BatchSplitter()).dependence
    assert found is not None and "gradients of SameLoss" in found.reason and "microbatch_weight" in found.reason


class Logs(Classifier):
    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        out = self.layers(batch["x"]).detach()
        self.log("loss", loss)
        self.log("worst", loss, reduce_fx="max")
        self.log("tokens", (batch["y"] > 0).sum().float())
        self.log_dict({"samples": float(len(out)), "rows": len(out)}, reduce_fx=torch.sum)
        self.log("highest", out.max())
        self.log("lowest", out.min(), False, True, True, reduce_fx=torch.min)
        self.log("noise", torch.rand(()))
        return loss


class LogsFunctions(Logs):
    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        self.log_dict({"perplexity": loss.exp(), "root": loss.sqrt(), "inverse": 1 / loss})
        return loss


def test_how_logged_values_are_put_together_is_found_for_each() -> None:
    ways = {"worst": "mean", "tokens": "sum", "highest": "max"}
    tried = find_batch_dependence(Logs(), "training_step", batch(), (), BatchSplitter())
    assert tried.dependence is None and tried.merges == ways
    tried = find_batch_dependence(LogsFunctions(), "training_step", batch(), (), BatchSplitter())
    assert tried.dependence is not None and "logs as inverse is no mean" in tried.dependence.reason
    assert tried.merges == ways | {"perplexity": "geometric", "root": "quadratic"}


def test_what_evaluation_logs_is_tried_too() -> None:
    class Evaluated(Classifier):
        def validation_step(self, batch: Any) -> None:
            loss = self.training_step(batch)
            self.log_dict({"loss": loss, "perplexity": loss.exp(), "inverse": 1 / loss, "samples": len(batch["x"])})

    tried = find_batch_dependence(Evaluated(), "validation_step", batch(), (), BatchSplitter())
    assert tried.merges == {"perplexity": "geometric", "samples": "sum"} and tried.dependence is not None
    assert re.search("logs as inverse is no mean.* use eval_num_microbatches=1", tried.dependence.reason)


def test_a_step_that_needs_more_samples_than_are_tried_is_tried_over_the_batch() -> None:
    class Needs(Classifier):
        def validation_step(self, batch: Any) -> None:
            self.log("highest", self.layers(batch["x"])[:, 0].topk(5).values.sum())

    tried = find_batch_dependence(Needs(), "validation_step", {"x": torch.randn(16, 4)}, (), BatchSplitter())
    assert tried.samples > 4 and tried.dependence is not None and "highest is no mean" in tried.dependence.reason


def test_a_function_of_a_mean_is_told_from_a_mean_where_the_samples_are_nearly_alike() -> None:
    class Alike(Classifier):
        def training_step(self, batch: Any) -> Tensor:
            loss = 2 + 0.1 * batch["x"].mean() + 0 * super().training_step(batch)
            self.log_dict({"loss": loss, "mean": 3 * loss + 1, "perplexity": loss.exp(), "of a part": (3 * loss).exp()})
            return {"loss": loss, "perplexity": loss.exp()}

    tried = find_batch_dependence(Alike(), "training_step", batch(), (), BatchSplitter())
    assert tried.merges == {"perplexity": "geometric", "of a part": "geometric"}
    assert tried.dependence is not None and "returns is no mean" in tried.dependence.reason


def test_a_loss_of_zero_or_one_says_nothing_of_what_is_logged_beside_it() -> None:
    class Begins(Classifier):
        def training_step(self, batch: Any) -> Tensor:
            loss = 0 * super().training_step(batch) + self.begins
            self.log_dict({"zero": loss - self.begins, "one": loss - self.begins + 1})
            return loss

    for begins in (0.0, 1.0):
        module = Begins()
        module.begins = begins
        assert find_batch_dependence(module, "training_step", batch(), (), BatchSplitter()).merges == {}


class Returns(Classifier):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        out = self.layers(batch["x"]).detach()
        found = {
            "rows": out,
            "mean": out.mean(),
            "name": "a",
            "count": len(out),
            "two": torch.stack([loss, loss]).detach(),
            "exp": loss.exp(),
        }
        return {"loss": loss, self.what: found[self.what]}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("rows", ""),
        ("mean", ""),
        ("name", ""),
        ("count", "put together"),
        ("two", "cannot be put together"),
        ("exp", "no mean over the parts"),
    ],
)
def test_what_a_step_returns_is_compared(what: str, words: str) -> None:
    found = find_batch_dependence(Returns(what), "training_step", batch(), (), BatchSplitter()).dependence
    assert (found is None) == (not words) and (found is None or words in found.reason), found


LEFT: dict[str, tuple[Callable[[Any, Tensor, Any], Any], bool]] = {
    "last": (lambda m, loss, batch: setattr(m, "last", loss), True),
    "latest": (lambda m, loss, batch: setattr(m, "latest", loss), True),
    "losses": (lambda m, loss, batch: m.losses.append(loss), True),
    "sizes": (lambda m, loss, batch: m.sizes.add(len(batch["x"])), True),
    "deep": (lambda m, loss, batch: m.deep["a"]["b"][0]["c"]["d"][0].append(0), True),
    "table": (lambda m, loss, batch: m.table.put([0, len(batch["x"])], [m.table[0] - 1, 1.0]), True),  # the sum stays
    "seen": (lambda m, loss, batch: m.see(batch["x"]), False),
    "labels": (lambda m, loss, batch: m.labels.update(batch["y"].tolist()), False),
    "time": (lambda m, loss, batch: setattr(m, "when", time.perf_counter()), False),
}
"""What a step leaves on its module, and whether it differs with the number of parts of a batch."""


class Leaves(Classifier):
    """Leaves something on itself."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.losses, self.seen, self.when = what, [torch.zeros(())], 0, 0.0
        self.sums, self.latest, self.table = {"x": torch.zeros(4)}, torch.zeros(()), np.zeros(10_000)
        self.sizes, self.labels = set[int](), set[int]()
        self.deep: Any = {"a": {"b": [{"c": {"d": [[]]}}]}}

    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        LEFT[self.what][0](self, loss.detach(), batch)
        return loss

    def see(self, x: Tensor) -> None:
        self.seen += len(x)
        self.sums["x"] = self.sums["x"] + x.sum(0)


@pytest.mark.parametrize(("what", "named"), [(what, named) for what, (_, named) in LEFT.items()])
def test_what_a_step_leaves_on_the_module_is_compared(what: str, named: bool) -> None:
    module = Leaves(what)
    found = find_batch_dependence(module, "training_step", batch(), (), BatchSplitter()).dependence
    assert (found is not None and f"leaves self.{what} on the module" in found.reason) == named
    assert found is None or named
    assert not hasattr(module, "last") and len(module.losses) == 1 and module.seen == 0


class Member:
    value = 0


def test_contents_differ_after_one_of_two_places_or_an_object_in_a_set_has_changed() -> None:
    one, other, member = (0, 0), (1, 1), Member()
    pairs, members = [one, other, one], {member}
    before = plain_content(pairs), plain_content(members)
    pairs[2], member.value = other, 1
    assert plain_content(pairs) != before[0] and plain_content(members) != before[1]


class Recurrent(LightningModule):
    """A GRU on sequences; with ``turned``, the step swaps the batch's first two dimensions before the layer."""

    def __init__(self, *, turned: bool = False, **options: Any) -> None:
        super().__init__()
        self.turned = turned
        self.rnn = nn.GRU(4, 4, **options)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))

    def step(self, batch: Any) -> Tensor:
        x = batch.transpose(0, 1) if self.turned else batch
        return self.layers(self.rnn(x)[0] + torch.randn(()))

    def training_step(self, batch: Any) -> Tensor:
        return self.step(batch).square().mean()

    def predict_step(self, batch: Any) -> Tensor:
        return self.step(batch)


class Attends(Recurrent):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rnn = nn.TransformerEncoderLayer(4, 2, 8, **options)

    def step(self, batch: Any) -> Tensor:
        return self.layers(self.rnn(batch))


class SplitsItself(Recurrent):
    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        return list(batch.chunk(num_microbatches, dim=1))


@pytest.mark.parametrize("step_name", ["training_step", "predict_step"])
@pytest.mark.parametrize(
    ("module", "layer"),
    [
        (Recurrent(), "rnn"),
        (Recurrent(batch_first=True), None),
        (Recurrent(turned=True), None),
        (Recurrent(turned=True, batch_first=True), "rnn"),
        (Attends(), "rnn.self_attn"),
        (Attends(batch_first=True), None),
        (SplitsItself(), None),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, LightningModule) else None,
)
def test_a_batch_that_is_cut_along_time_is_told_by_the_layers_that_read_it(
    module: Recurrent, layer: str | None, step_name: str
) -> None:
    for length in (8, 4, 6):  # of samples or time, including as many as the trial uses
        found = find_batch_dependence(module, step_name, torch.randn(8, length, 4), (), BatchSplitter()).dependence
        if layer is None:
            assert found is None or not found.is_cut_along_time, found
        else:
            assert found is not None and found.is_cut_along_time and f"is time to {layer}:" in found.reason


def test_check_has_it_in_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    report = lightning_holmes.check(Contrastive(), batch())
    report.print()
    assert report.ok and not report.exact
    shown = capsys.readouterr().out
    assert "exact with num_microbatches=1 only" in shown and "negatives" in shown
    refused = lightning_holmes.check(Recurrent(), torch.randn(8, 6, 4))
    assert not refused.ok and "time" in str(refused.refused)
