"""`check` finds differences: a staged run that has been tampered with is reported by name, step and size."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tanh_net import ByGradient, TanhNet
from torch import Tensor, nn

import lightning_holmes
from lightning_holmes.checking import simulated_pipeline


class Stack(TanhNet):
    """Logs its loss, and counts its calls in a buffer after the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.calls += 1
        self.log("train_loss", loss)
        return loss


def tampered(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any, Any], Any]
) -> lightning_holmes.CheckReport:
    """Return the report of a check in which the result of a method of the staged run is changed."""
    plain = getattr(simulated_pipeline._SimulatedPipeline, name)

    def altered(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        return change(self, found) if len(self.drivers) > 1 else found

    monkeypatch.setattr(simulated_pipeline._SimulatedPipeline, name, altered)
    return lightning_holmes.check(Stack(), torch.randn(8, 4))


def differing(report: lightning_holmes.CheckReport) -> list[tuple[str, str]]:
    return [(row.step, row.what) for row in report.rows if not row.ok]


def test_an_honest_run_is_equal() -> None:
    report = lightning_holmes.check(Stack(), torch.randn(8, 4))
    assert report.ok and {"log train_loss", "state buffer calls", "gradient layers.3.0.weight"} <= {
        row.what for row in report.rows
    }


def test_a_gradient_that_is_a_little_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "layers.2.0.weight"
    report = tampered(monkeypatch, "gradients", lambda cast, found: found | {name: found[name] * 1.001})
    assert not report.ok and differing(report) == [("training_step", f"gradient {name}")]
    (row,) = (row for row in report.rows if not row.ok)
    assert row.relative == pytest.approx(1e-3, rel=0.01)
    shown = str(report)
    assert "differs" in shown and f"1 of {len(report.rows)} values differ by more than 1e-05" in shown


def test_a_gradient_that_is_missing_is_found_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    report = tampered(monkeypatch, "gradients", lambda cast, found: found | {"layers.0.0.bias": None})
    assert differing(report) == [("training_step", "gradient layers.0.0.bias")]
    assert [row.reason for row in report.rows if not row.ok] == ["(has a gradient in one run only)"]


def test_a_changed_and_a_lost_log_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(cast: Any, found: Any) -> Any:
        for call in cast.results[0].calls:
            object.__setattr__(call, "value", call.value + 0.5)
        return found

    with monkeypatch.context() as patched:
        assert ("training_step", "log train_loss") in differing(tampered(patched, "run", change))

    def lose(cast: Any, found: Any) -> Any:
        cast.results[0].calls.clear()
        return found

    report = tampered(monkeypatch, "run", lose)
    assert ("training_step", "log train_loss") in differing(report)
    assert "(not logged by the staged run)" in [row.reason for row in report.rows]


def test_a_changed_buffer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    report = tampered(monkeypatch, "state", lambda cast, found: found | {"buffer calls": found["buffer calls"] + 1})
    assert differing(report) == [("training_step", "state buffer calls")]


def test_a_difference_says_where_it_arises_and_whether_it_may_be_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(factor: float) -> str:
        with monkeypatch.context() as patched:
            name = "layers.2.0.weight"
            report = tampered(patched, "gradients", lambda cast, found: found | {name: found[name] * factor})
        (row,) = (row for row in report.rows if not row.ok)
        return row.reason

    assert reason(1.5) == "(on stage 1)"
    assert reason(1.0001).startswith("(on stage 1: so little may be rounding")


def test_attributes_without_a_difference_to_take_are_no_trouble() -> None:
    class Odd(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.names = np.array(["a", "b"])
            self.started = np.datetime64("2026-11-22")
            self.large = 2**70
            self.mask = torch.eye(3).to_sparse()
            self.phase = torch.tensor(1j)

    report = lightning_holmes.check(Odd(), torch.randn(8, 4))
    assert report.ok, str(report)


class BuiltInSetup(ByGradient):
    """Has no layers before ``setup``; its steps use attributes from hooks, learning rates, and the trainer."""

    def setup(self, stage: str) -> None:
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def on_fit_start(self) -> None:
        self.layers[0].weight.data.zero_()
        self.scale = 2.0

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.factor = batch_idx + 1

    def on_validation_epoch_start(self) -> None:
        self.outs: list[Tensor] = []

    def loss(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = layer(batch).tanh()
        return batch.square().mean() * self.scale

    def training_step(self, batch: Tensor, batch_idx: int, hiddens: Any = None) -> Tensor:
        assert hiddens is None
        return self.loss(batch) * self.factor * (1 + self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.outs.append(self.loss(batch))


def test_a_module_is_checked_as_it_is_at_its_first_step() -> None:
    module, before = BuiltInSetup(), torch.get_rng_state()
    report = lightning_holmes.check(module, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert report.ok and not report.notes and len(report.stages) == 2, str(report)
    assert not hasattr(module, "layers") and not hasattr(module, "scale") and torch.equal(before, torch.get_rng_state())
    module.setup("fit")
    weights = module.layers[0].weight.clone()
    assert lightning_holmes.check(module, torch.randn(8, 4)).ok
    assert torch.equal(module.layers[0].weight, weights)


class AsksItsData(BuiltInSetup):
    def on_fit_start(self) -> None:
        self.scale = len(self.trainer.datamodule.classes)  # type: ignore[attr-defined]


def test_a_hook_that_needs_a_run_is_named() -> None:
    report = lightning_holmes.check(AsksItsData(), torch.randn(8, 4))
    assert "on_fit_start does not run without a run (AttributeError" in report.notes[0]
    assert report.refused is not None and "scale" in report.refused and "on_fit_start" in str(report)
