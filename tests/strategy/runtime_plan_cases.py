"""Runs whose plan is chosen from costs, on every rank."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from strategy_cases import Block, Classifier, Setting, build, numbers, samples
from torch import nn

from lightning_holmes import HolmesStrategy
from lightning_holmes.strategy import profiling, runtime_plan


class Wide(nn.Module):
    """A block that costs as much as many."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):  # both by FLOPs and by operators
            x = torch.tanh(self.down(self.up(x)))
        return x


class Uneven(Classifier):
    """Six blocks of which the first costs more than all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Wide(), *(Block() for _ in range(5))])


class Looks(Uneven):
    """Reads values where fake tensors have none, and would fail if it were run whole."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise_if_nan = float(batch[0].sum())
        assert raise_if_nan == raise_if_nan
        return super().training_step(batch, batch_idx)


def chosen(payload: Any) -> dict[str, Any]:
    """What plan comes of the options, and what a fit and a validation after it give."""
    classes = {"uneven": Uneven, "looks": Looks, "classifier": Classifier}
    setting = Setting(folder=Path(payload["folder"]), holmes=payload["holmes"])
    module = build(classes[payload["module"]])
    trainer = setting.trainer(max_epochs=1)
    trainer.fit(module, setting.loader(samples(32), 16))
    strategy: Any = trainer.strategy
    assert isinstance(strategy, HolmesStrategy)
    plan, prediction = strategy.plan, strategy.prediction
    trainer.validate(module, setting.loader(samples(16), 16), verbose=False)
    return {
        "layers": plan.partition.layer_counts,
        "schedule": (plan.schedule, plan.num_chunks, plan.num_microbatches),
        "notes": plan.notes,
        "predicted_s": None if prediction is None else prediction.step_s,
        "again": strategy.plan.partition.layer_counts,
        "metrics": numbers(trainer.callback_metrics),
        "plan": plan.to_yaml(),
    }


def refused(payload: Any) -> list[str]:
    """The messages of plan files that do not fit this run."""
    messages = []
    for path in payload["plans"]:
        setting = Setting(folder=Path(payload["folder"]), holmes={"plan": path})
        try:
            setting.trainer(max_epochs=1).fit(build(Classifier), setting.loader(samples(32), 16))
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("")
    return messages


def crowded(payload: Any) -> list[str]:
    """What comes of each set of arguments on devices of so little memory that no plan fits: a message, or a note."""
    probe = profiling.probe_device
    profiling.probe_device = lambda *args, **kwargs: dataclasses.replace(probe(*args, **kwargs), memory_bytes=2000.0)
    found = []
    for holmes in payload["holmes"]:
        setting = Setting(folder=Path(payload["folder"]), holmes=holmes)
        trainer = setting.trainer(max_epochs=1)
        try:
            trainer.fit(build(Classifier), setting.loader(samples(32), 16))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            strategy: Any = trainer.strategy
            found.append(next(note for note in strategy.plan.notes if note.startswith("memory: ")))
    return found


def settings(payload: Any) -> list[dict[str, Any] | None]:
    """For each set of arguments, what a run takes a step to be made of (Training); on rank 0, which predicts."""
    seen: list[dict[str, Any]] = []
    make = runtime_plan.make_training

    def noting(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        seen.append(dataclasses.asdict(made))
        return made

    runtime_plan.make_training = noting  # type: ignore[assignment]
    for case in payload["cases"]:
        setting = Setting(folder=Path(payload["folder"]), holmes=case["holmes"])
        trainer = setting.trainer(max_steps=1, precision=case["precision"])
        trainer.fit(build(Classifier), setting.loader(samples(32), 16))
    return list(seen)
