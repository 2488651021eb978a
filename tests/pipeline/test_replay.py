"""Logged values over microbatches: one call a batch, with the value that the whole batch would give."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline.replay import LogCall, LogRecorder, merge_calls
from lightning_holmes.pipeline.stage import PipelineModule, StageRun


def call(name: str, value: float, microbatch: int, position: int = 3, **arguments: Any) -> LogCall:
    return LogCall(name=name, value=torch.tensor(value), arguments=arguments, position=position, microbatch=microbatch)


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        *(("mean", (3 * 1.0 + 1 * 5.0) / 4), ("sum", 6.0), ("max", 5.0), ("min", 1.0), (torch.mean, 2.0), (sum, 6.0)),
        (max, 5.0),
    ],
)
def test_reductions_over_microbatches(reduce_fx: Any, expected: float) -> None:
    calls = [call("v", 1.0, 0, reduce_fx=reduce_fx), call("v", 5.0, 1, reduce_fx=reduce_fx)]
    (merged,) = merge_calls(calls, [3, 1], [3.0, 1.0], "M")
    assert float(merged.value) == pytest.approx(expected)
    assert merged.arguments["reduce_fx"] is reduce_fx


def test_explicit_batch_sizes_weigh_and_add_up() -> None:
    calls = [call("v", 1.0, 0, batch_size=10), call("v", 2.0, 1, batch_size=30)]
    (merged,) = merge_calls(calls, [2, 2], [2.0, 2.0], "M")
    assert float(merged.value) == pytest.approx(1.75) and merged.arguments["batch_size"] == 40


def test_a_batch_size_of_one_for_many_samples_stays_one() -> None:
    calls = [call("v", 1.0, 0, batch_size=1), call("v", 2.0, 1, batch_size=1)]
    (merged,) = merge_calls(calls, [4, 4], [4.0, 4.0], "M")
    assert merged.arguments["batch_size"] == 1


def test_the_logged_loss_is_averaged_as_the_loss_is_whatever_batch_size_says() -> None:
    calls = [call("loss", 1.0, 0, batch_size=2), call("loss", 4.0, 1, batch_size=2)]
    other = [call("accuracy", 0.0, 0, batch_size=2), call("accuracy", 1.0, 1, batch_size=2)]
    roots = [call("root", 1.0, 0, batch_size=2), call("root", 2.0, 1, batch_size=2)]
    losses, ways = [torch.tensor(1.0), torch.tensor(4.0)], {"root": "quadratic"}
    merged = {c.name: c for c in merge_calls(calls + other + roots, [2, 2], [30.0, 10.0], "M", losses, ways)}
    assert float(merged["loss"].value) == pytest.approx(1.75) and merged["loss"].arguments["batch_size"] == 4
    assert [float(merged[name].value) for name in ("accuracy", "root")] == pytest.approx([0.5, 1.75**0.5])


def test_an_unknown_reduction_is_refused_by_name() -> None:
    calls = [call("v", 1.0, 0, reduce_fx="median"), call("v", 2.0, 1, reduce_fx="median")]
    with pytest.raises(UnsupportedModuleError, match="median"):
        merge_calls(calls, [1, 1], [1.0, 1.0], "M")


def test_options_are_recorded_as_log_names_them_however_they_are_given() -> None:
    module = LightningModule()
    recorder = LogRecorder(PipelineModule.whole(module, torch.device("cpu")))
    with recorder.recording():
        recorder.enter(StageRun(stage=0, step_name="training_step", seed=0), 0)
        module.log("by_name", torch.tensor(1.0), prog_bar=True, on_epoch=True)
        module.log("by_place", torch.tensor(1.0), True, on_epoch=True)
        module.log(name="all_by_name", value=torch.tensor(1.0), prog_bar=True, on_epoch=True)
        with pytest.raises(TypeError, match="on_epochs"):
            module.log("misspelt", torch.tensor(1.0), on_epochs=True)
    assert [call.name for call in recorder.calls] == ["by_name", "by_place", "all_by_name"]
    assert all(call.arguments == {"prog_bar": True, "on_epoch": True} for call in recorder.calls)
