"""Plans from costs, at the start of a run: all ranks choose the same one, and the numbers stay those of plain Lightning."""

import dataclasses
import os
import unittest.mock
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from comparing import differences
from launch import launch
from plans import plan_of
from strategy_cases import Block, Classifier, Setting, build, numbers, samples
from torch import nn

from lightning_holmes import HolmesStrategy
from lightning_holmes.commands.plan_command import PlanRequest, make_cost_model, run_plan, strategy_settings
from lightning_holmes.pipeline.steps import StepDriver
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.plan import Plan
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


def plain_metrics(folder: Path, cls: Any) -> dict[str, float]:
    setting = Setting(folder=folder)
    module = build(cls)
    trainer = setting.trainer(max_epochs=1)
    trainer.fit(module, setting.loader(samples(32), 16))
    trainer.validate(module, setting.loader(samples(16), 16), verbose=False)
    return numbers(trainer.callback_metrics)


def run(folder: Path, module: str, **holmes: Any) -> list[dict[str, Any]]:
    payload = {"folder": str(folder), "module": module, "holmes": {"pipeline_parallel_size": 2, **holmes}}
    return launch(2, "test_runtime_plan:chosen", payload, timeout_s=120)


def note(result: dict[str, Any], name: str) -> str:
    return next(note for note in result["notes"] if note.startswith(f"{name}: "))


def test_layers_go_by_cost_and_a_validation_behind_keeps_them(tmp_path: Path) -> None:
    first, second = run(tmp_path, "uneven", num_chunks=1)
    assert first["layers"] == second["layers"] == (1, 5)
    assert first["again"] == (1, 5), "parameters stay where they are"
    assert first["notes"] == second["notes"] and first["predicted_s"] == second["predicted_s"] > 0
    assert "self_adapting" in note(first, "partition") and "FLOPs counted" in note(first, "prediction")
    assert "samples" in note(first, "num_microbatches")
    assert first["metrics"] == pytest.approx(plain_metrics(tmp_path, Uneven), rel=1e-5)


def test_where_everything_is_said_nothing_is_profiled(tmp_path: Path) -> None:
    (first, _) = run(tmp_path, "uneven", partition="uniform", num_microbatches=2, schedule="1f1b")
    assert first["layers"] == (3, 3) and first["predicted_s"] is None
    assert not any(text.startswith(("partition", "schedule", "num_microbatches")) for text in first["notes"])


def test_a_plan_file_is_followed_or_refused_with_the_difference(tmp_path: Path) -> None:
    (first, _) = run(tmp_path, "classifier", partition=[1, 3], num_microbatches=2)
    good, other_model, other_topology = (tmp_path / f"{name}.yaml" for name in ("good", "model", "topology"))
    good.write_text(first["plan"])
    other_model.write_text(first["plan"].replace("- 1\n- 3\n", "- 4\n- 3\n", 1))
    other_topology.write_text(
        first["plan"].replace("clusters:\n- cluster0\n- cluster0\n", "clusters:\n- east\n- west\n")
    )
    assert Plan.load(other_model).partition.num_layers == 7 and Plan.load(other_topology).clusters == ("east", "west")
    paths = [good, other_model, other_topology]
    payload = {"folder": str(tmp_path), "plans": [str(path) for path in paths]}
    for messages in launch(2, "test_runtime_plan:refused", payload, timeout_s=120):
        assert messages[0] == ""
        assert "ConfigurationError" in messages[1] and "assigns 7 layers, this model has 4" in messages[1]
        assert "is on cluster east, here on cluster0" in messages[2] and str(other_topology) in messages[2]


def test_each_choice_of_a_plan_file_is_followed(tmp_path: Path) -> None:
    """Each plan differs from the first in one choice, and no argument or measurement would choose that on one host."""
    base = plan_of(
        (0, 1),
        (2, 3),
        stages=(2, 2),
        num_microbatches=2,
        layers="blocks",
        clusters=("cluster0", "cluster0"),
        sharding="none",
        collectives=("all_reduce", "all_reduce"),
    )
    changes: list[dict[str, Any]] = [
        {},
        {"num_microbatches": 4},
        {"eval_num_microbatches": 2},
        {"schedule": "gpipe"},
        {"schedule": "interleaved_1f1b", "num_chunks": 2, "partition": Partition((1, 1, 1, 1))},
        {"partition": Partition((3, 1))},
        {"collectives": ("p2p", "all_reduce")},
        {"sharding": "optimizer", "collectives": ("all_reduce", "p2p")},
        {"sharding": "parameters", "schedule": "breadth_first", "collectives": ("p2p", "p2p")},
        {
            "pipeline_parallel_size": 4,
            "data_parallel_size": 1,
            "partition": Partition((1, 1, 1, 1)),
            "placement": Placement(((0,), (1,), (2,), (3,))),
            "clusters": ("cluster0",) * 4,
            "collectives": (),
        },
    ]
    plans = [dataclasses.replace(base, **change) for change in changes]
    for number, plan in enumerate(plans):
        plan.save(tmp_path / f"{number}.yaml")
    found: list[list[dict[str, Any]]] = []
    for replicas, numbers_of in ((2, range(len(plans) - 1)), (1, [len(plans) - 1])):
        paths = [str(tmp_path / f"{number}.yaml") for number in numbers_of]
        payload = {"folder": str(tmp_path), "plans": paths, "replicas": replicas}
        of_ranks = launch(4, "test_runtime_plan:followed", payload, timeout_s=240)
        found += [[of_rank[place] for of_rank in of_ranks] for place in range(len(paths))]
    for plan, of_ranks in zip(plans, found, strict=True):
        for rank, did in enumerate(of_ranks):
            own, _, _ = plan.placement.coordinate(rank)
            assert did["schedule"] == (plan.schedule, plan.num_chunks)
            assert (did["training_step"], did["validation_step"]) == (plan.num_microbatches, plan.eval_num_microbatches)
            assert did["layers"] == [list(plan.partition.layers_of(stage)) for stage in plan.stages_of(own)]
            assert did["sharding"] == plan.sharding
            assert did["collective"] == (plan.collectives[own] if plan.collectives else None)
            saved = Plan.from_yaml_text(did["plan"])
            assert saved.groups
            assert dataclasses.replace(saved, groups=(), notes=()) == plan, "it can be followed again"


def test_a_plan_that_the_command_writes_is_followed(tmp_path: Path) -> None:
    batch = next(iter(Setting(folder=tmp_path).loader(samples(32), 16)))
    request = PlanRequest(device_type="here", output=str(tmp_path / "plan.yaml"))
    asked: dict[str, Any] = {"pipeline_parallel_size": 2, "partition": [3, 1], "num_microbatches": 4}
    result = run_plan(
        request,
        build_model=lambda: build(Classifier),
        load_batch=lambda module: batch,
        strategy={"class_path": "lightning_holmes.HolmesStrategy", "init_args": asked},
        trainer={"devices": "2"},
    )
    path = str(tmp_path / "plan.yaml")
    payload = {"folder": str(tmp_path), "module": "classifier", "holmes": {"plan": path}}
    for found in launch(2, "test_runtime_plan:chosen", payload, timeout_s=120):
        assert found["layers"] == result.best.partition.layer_counts == (3, 1)
        assert found["schedule"] == (result.best.run.schedule, 1, 4)
        assert found["metrics"] == pytest.approx(plain_metrics(tmp_path, Classifier), rel=1e-5)


def test_a_run_whose_plans_do_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    asked = [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "partition": [2, 2]}]
    for refused, by_hand in launch(
        2, "test_runtime_plan:crowded", {"folder": str(tmp_path), "holmes": asked}, timeout_s=120
    ):
        assert "Classifier" in refused and "GiB a device are missing at the least" in refused
        assert "What can make it fit: " in refused and "partition=[...]" in refused
        assert "GiB a device are missing" in by_hand


def test_the_command_and_a_run_take_a_step_to_be_made_of_the_same(tmp_path: Path) -> None:
    arguments: list[dict[str, Any]] = [
        {},
        {"sharding": "optimizer", "compression": "bf16"},
        {"sharding": "none"},
        {"master_weights": True},
    ]
    layout = {"pipeline_parallel_size": 2}
    cases = [
        {"holmes": {**layout, **given}, "precision": "bf16-true" if "master_weights" in given else "32-true"}
        for given in arguments
    ]
    first, _ = launch(2, "test_runtime_plan:settings", {"folder": str(tmp_path), "cases": cases}, timeout_s=120)
    assert len(first) == len(cases)
    for case, lives in zip(cases, first, strict=True):
        given = strategy_settings({"class_path": "HolmesStrategy", "init_args": case["holmes"]})
        batch = next(iter(Setting(folder=tmp_path).loader(samples(32), 16)))
        planned = make_cost_model(
            PlanRequest(device_type="here"),
            given,
            build_model=lambda: build(Classifier),
            load_batch=lambda module: batch,  # noqa: B023 - called at once
            trainer={"devices": "2", "precision": case["precision"]},
        ).training
        commands = dataclasses.asdict(planned)
        for measured in ("byte_s", "own_s", "update_s_per_byte"):
            assert commands.pop(measured) > 0 and lives.pop(measured) > 0
        assert commands == lives, case


def test_where_one_number_of_microbatches_is_exact_it_is_taken(tmp_path: Path) -> None:
    """Baseline of the resumed run: the uninterrupted run, with its dropout. Tolerance 1e-6, relative."""
    ranks = launch(4, "test_runtime_plan:settled", {"folder": str(tmp_path)}, timeout_s=150)
    assert {found["deterministic"]["sync"] for found in ranks} == {("all_reduce", "all_reduce")}
    for found in ranks:
        company, fixed, whole = found["company"], found["deterministic"], found["whole"]
        assert company["num_microbatches"] == 1
        assert "the loss depends on which samples are in it" in note(company, "num_microbatches")

        assert (fixed["num_microbatches"], fixed["schedule"]) == (8, "1f1b")
        assert "nothing that is measured decides" in note(fixed, "partition")

        for name, count in (("resumed", 4), ("resumed without stages", 2)):
            assert found[name]["num_microbatches"] == count
            assert "as in the run that is resumed" in note(found[name], "num_microbatches")
        assert not differences(whole["weights"], found["resumed"]["weights"], relative=1e-6)
