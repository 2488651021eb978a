"""monitor=True: Chrome traces of one step on the ranks of the first pipeline, and a picture of them, in the run's folder."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from launch import launch
from strategy_cases import Classifier, Setting, build, samples

from lightning_holmes import HolmesStrategy
from lightning_holmes.callbacks.timeline_monitor import TimelineMonitor
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.optim import bucket_reducer
from lightning_holmes.plan.measured import make_measured_timeline, spans_of_trace
from lightning_holmes.plan.timeline import BESIDE_KINDS, COMPUTE_KINDS, Timeline


class MonitorCounter(pl.Callback):
    """Counts the TimelineMonitors of a trainer while it trains."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = sum(isinstance(c, TimelineMonitor) for c in trainer.callbacks)  # type: ignore[attr-defined]


def monitored(payload: Any) -> dict[str, Any]:
    """Train two epochs of four batches, with a validation between, or with a hook that waits for the parameters of each step; return on
    rank 0 what was written, and on every rank the number of monitors."""
    bucket_reducer.LEAST_BUCKET_BYTES = 256  # so that a small module has several buckets
    setting = Setting(folder=Path(payload["folder"]), holmes=payload["holmes"], replicas=payload["replicas"])
    counter, validation = MonitorCounter(), setting.loader(samples(16, seed=1), 16)
    reading = pl.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, module, *__: [p.sum() for p in module.parameters()]
    )
    trainer = setting.trainer(max_epochs=2, callbacks=[counter, reading] if payload.get("waits") else [counter])
    trainer.fit(build(Classifier), setting.loader(samples(64), 16), None if payload.get("waits") else validation)
    return {
        "ranks": trainer.strategy.plan.placement.pipeline_group(0, 0),  # type: ignore[attr-defined]
        "drawn": (Path(payload["folder"]) / "timeline.png").exists() if trainer.is_global_zero else None,
        "monitors": counter.found,
    }


def timeline_of(folder: Path, ranks: Sequence[int]) -> Timeline:
    """The timeline of the traces that a run has written."""
    traces = [folder / f"trace-rank{rank}.json" for rank in ranks]
    return make_measured_timeline([spans_of_trace(json.loads(path.read_text())) for path in traces])


def labels_of(trace: Path) -> list[str]:
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert any(name.startswith("Optimizer.step#") for name in names), "torch's own label"
    return [name for name in names if name.startswith("holmes: ")]


@pytest.mark.parametrize(
    ("holmes", "replicas"),
    [
        ({"pipeline_parallel_size": 2, "num_microbatches": 4}, 2),
        ({"pipeline_parallel_size": 2, "num_microbatches": 4, "num_chunks": 2}, 1),
    ],
)
def test_a_monitored_run_writes_what_every_rank_did(tmp_path: Path, holmes: dict, replicas: int) -> None:
    payload = {"folder": str(tmp_path), "holmes": {**holmes, "monitor": True}, "replicas": replicas}
    results = launch(2 * replicas, "test_monitor:monitored", payload, timeout_s=120)
    assert [result["monitors"] for result in results] == [1] * 2 * replicas
    assert results[0]["drawn"]
    ranks, num_chunks = results[0]["ranks"], holmes.get("num_chunks", 1)
    assert sorted(path.name for path in tmp_path.glob("trace-*")) == sorted(f"trace-rank{rank}.json" for rank in ranks)
    for rank in ranks:
        labels = labels_of(tmp_path / f"trace-rank{rank}.json")
        assert sum("forward of stage" in label for label in labels) == 4 * num_chunks
        assert any("sums of gradients" in label for label in labels)
        assert any("bucket reduce of " in label for label in labels) == (replicas > 1)
    timeline = timeline_of(tmp_path, ranks)
    assert timeline.num_ranks == 2 and timeline.source == "measured"
    for pipeline_rank, row in enumerate(timeline.spans):
        own = [span for span in row if span.kind not in BESIDE_KINDS]
        assert {"forward", "backward", "wait", "reduce", "update"} == {span.kind for span in own}
        assert all(0 <= span.start_s <= span.end_s <= timeline.step_s for span in row)
        for kind in ("forward", "backward"):
            done = sorted((span.stage, span.microbatch) for span in own if span.kind == kind)
            stages = range(pipeline_rank, 2 * num_chunks, 2)
            assert done == [(stage, microbatch) for stage in stages for microbatch in range(4)]
        computed = [span for span in own if span.kind in COMPUTE_KINDS]
        assert all(one.end_s <= other.start_s + 1e-6 for one, other in itertools.pairwise(computed))
    done = {(s.stage, s.microbatch): s for row in timeline.spans for s in row if s.kind == "forward"}
    for microbatch in range(4):  # no microbatch is computed before it was sent
        assert done[0, microbatch].end_s <= done[1, microbatch].start_s


@pytest.mark.parametrize("sharded", [False, True])
def test_the_buckets_of_replicas_are_noted_beside_the_backward(tmp_path: Path, sharded: bool) -> None:
    holmes = {"num_microbatches": 1, "monitor": True, "sharding": "optimizer" if sharded else "none"}
    payload = {"folder": str(tmp_path), "holmes": holmes, "replicas": 2, "waits": True}
    launch(2, "test_monitor:monitored", payload, timeout_s=120)
    (row,) = timeline_of(tmp_path, (0,)).spans
    found = {kind: [span for span in row if span.kind == kind] for kind in BESIDE_KINDS}
    reduced = found["bucket_reduce"]
    assert len(reduced) > 2
    assert all(one.end_s <= other.start_s + 1e-6 for one, other in itertools.pairwise(reduced)), "one queue"
    first = max(span.start_s for span in row if span.kind == "backward")
    waited = max(span.end_s for span in row if span.kind == "reduce")
    assert first < reduced[0].start_s and reduced[-1].end_s <= waited
    assert bool(found["bucket_gather"]) == sharded


def test_one_process_is_monitored_by_the_callback_and_keeps_its_numbers(tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], [TimelineMonitor(every_n_steps=4)]):
        setting = Setting(folder=tmp_path)
        module = build(Classifier)
        trainer = setting.trainer(max_epochs=1, callbacks=callbacks, strategy=HolmesStrategy(num_microbatches=2))
        trainer.fit(module, setting.loader(samples(64), 16))
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert (tmp_path / "trace-rank0.json").exists() and (tmp_path / "timeline.png").exists()
    assert all(one.equal(other) for one, other in zip(*weights, strict=True))


def test_bad_arguments_and_other_strategies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="monitor=0"):
        HolmesStrategy(monitor=0)
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        TimelineMonitor(every_n_steps=0)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[TimelineMonitor()], logger=False, default_root_dir=tmp_path
    )
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy"):
        trainer.fit(build(Classifier), Setting(folder=tmp_path).loader(samples(16), 8))
