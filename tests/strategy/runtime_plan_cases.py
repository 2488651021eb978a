"""Runs whose plan is chosen from costs; each function runs on every rank."""

import dataclasses
import os
import unittest.mock
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from strategy_cases import Block, Classifier, Setting, build, numbers, samples
from torch import nn

from lightning_holmes import HolmesStrategy
from lightning_holmes.pipeline.steps import StepDriver
from lightning_holmes.strategy import profiling


class Wide(nn.Module):
    """A block that costs as much as many ordinary blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):  # in FLOPs and in the number of operators
            x = torch.tanh(self.down(self.up(x)))
        return x


class Uneven(Classifier):
    """Six blocks, the first of which costs more than all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Wide(), *(Block() for _ in range(5))])


def chosen(payload: Any) -> dict[str, Any]:
    """Return the plan that follows from the options, and the metrics of a fit and a validation after it."""
    classes = {"uneven": Uneven, "classifier": Classifier}
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
    """Return the error messages of plan files that do not fit this run."""
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


def followed(payload: Any) -> list[dict[str, Any]]:
    """Return for each plan file what the run really did, and the plan that it saves itself."""
    found = []
    for path in payload["plans"]:
        setting = Setting(folder=Path(payload["folder"]), holmes={"plan": path}, replicas=payload["replicas"])
        trainer, counts = setting.trainer(max_steps=1, limit_val_batches=1), {}
        run = StepDriver.run

        def noting(driver: StepDriver, request: Any, run: Any = run, counts: Any = counts) -> Any:
            counts[request.step_name] = request.num_microbatches
            return run(driver, request)

        class Looks(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
                fit: Any = trainer.strategy._training  # type: ignore[attr-defined]
                host, collective = fit.gradients.host, getattr(fit.gradients.reducer, "collective", None)
                self.seen = {
                    "schedule": (fit.driver.schedule, fit.driver.num_chunks),
                    "layers": [list(fit.pipeline.partition.layers_of(stage)) for stage in fit.pipeline.stages],
                    "sharding": "parameters" if fit.stage_shards else "none" if host.shards is None else "optimizer",
                    "collective": collective and collective.name,
                }

        looks = Looks()
        trainer.callbacks.append(looks)  # type: ignore[attr-defined]
        with unittest.mock.patch.object(StepDriver, "run", noting):
            trainer.fit(build(Classifier), setting.loader(samples(32), 16), setting.loader(samples(16), 16))
        strategy: Any = trainer.strategy
        found.append({**looks.seen, **counts, "plan": strategy.plan.to_yaml()})
    return found


def crowded(payload: Any) -> list[str]:
    """Return for each set of arguments the error, or the plan's note on memory, on devices with so little memory that no plan fits."""
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
    """Return what profiling.make_training made for each set of arguments; empty on ranks other than 0, which alone predicts."""
    seen: list[dict[str, Any]] = []
    make = profiling.make_training

    def noting(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        seen.append(dataclasses.asdict(made))
        return made

    profiling.make_training = noting  # type: ignore[assignment]
    for case in payload["cases"]:
        setting = Setting(folder=Path(payload["folder"]), holmes=case["holmes"])
        trainer = setting.trainer(max_steps=1, precision=case["precision"])
        trainer.fit(build(Classifier), setting.loader(samples(32), 16))
    return list(seen)


class Drops(Classifier):
    """Draws random numbers, which depend on the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.drop(x))


class Whitens(Classifier):
    """Its loss depends on which samples are together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


def settled(payload: Any) -> dict[str, Any]:
    """Return numbers of microbatches that no measurement decides, and what the runs with them give: the smallest exact number,
    the one of deterministic=True, and the one of the resumed run. Runs on four ranks; two stages unless a run says
    otherwise."""
    folder, holmes = Path(payload["folder"]), {"pipeline_parallel_size": 2}
    found: dict[str, Any] = {}

    def fit(name: str, cls: Any, *, ckpt_path: str | None = None, max_epochs: int = 2, **given: Any) -> pl.Trainer:
        trainer_options = given.pop("trainer", {})
        asked = holmes | given
        replicas = int(os.environ["WORLD_SIZE"]) // asked["pipeline_parallel_size"]
        setting = Setting(folder=folder, holmes=asked, replicas=replicas)
        pl.seed_everything(3, verbose=False)
        module = build(cls)
        trainer = setting.trainer(max_epochs=max_epochs, **trainer_options)
        trainer.fit(module, setting.loader(samples(32), 16), ckpt_path=ckpt_path)
        strategy: Any = trainer.strategy
        found[name] = {
            "num_microbatches": strategy.plan.num_microbatches,
            "schedule": strategy.plan.schedule,
            "notes": strategy.plan.notes,
            "sync": strategy.plan.collectives,
            "weights": {k: v.detach().clone() for k, v in module.state_dict().items()},
        }
        return trainer

    fit("company", Whitens)
    fit("deterministic", Drops, trainer={"deterministic": True}, max_epochs=1)
    torch.use_deterministic_algorithms(False)
    saved = str(folder / "saved.ckpt")
    fit("whole", Drops, num_microbatches=4, schedule="1f1b")
    fit("first", Drops, num_microbatches=4, schedule="1f1b", max_epochs=1).save_checkpoint(saved)
    fit("resumed", Drops, schedule="1f1b", ckpt_path=saved)
    fit("resumed without stages", Drops, pipeline_parallel_size=1, sharding="none", ckpt_path=saved)
    return found
