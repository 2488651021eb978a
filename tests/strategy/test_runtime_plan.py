"""Plans from costs, at the start of a run: all ranks choose the same one, and the numbers stay those of plain Lightning."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from comparing import differences
from launch import launch
from plans import plan_of
from runtime_plan_cases import Uneven
from strategy_cases import Classifier, Setting, build, numbers, samples

from lightning_holmes.commands.plan_command import PlanRequest, make_cost_model, run_plan, strategy_settings
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.plan import Plan


def plain_metrics(folder: Path, cls: Any) -> dict[str, float]:
    setting = Setting(folder=folder)
    module = build(cls)
    trainer = setting.trainer(max_epochs=1)
    trainer.fit(module, setting.loader(samples(32), 16))
    trainer.validate(module, setting.loader(samples(16), 16), verbose=False)
    return numbers(trainer.callback_metrics)


def run(folder: Path, module: str, **holmes: Any) -> list[dict[str, Any]]:
    payload = {"folder": str(folder), "module": module, "holmes": {"pipeline_parallel_size": 2, **holmes}}
    return launch(2, "runtime_plan_cases:chosen", payload, timeout_s=120)


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
    for messages in launch(2, "runtime_plan_cases:refused", payload, timeout_s=120):
        assert messages[0] == ""
        assert "ConfigurationError" in messages[1] and "assigns 7 layers, this model has 4" in messages[1]
        assert "is on cluster east, here that is cluster0" in messages[2] and str(other_topology) in messages[2]


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
        of_ranks = launch(4, "runtime_plan_cases:followed", payload, timeout_s=240)
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
    for found in launch(2, "runtime_plan_cases:chosen", payload, timeout_s=120):
        assert found["layers"] == result.best.partition.layer_counts == (3, 1)
        assert found["schedule"] == (result.best.run.schedule, 1, 4)
        assert found["metrics"] == pytest.approx(plain_metrics(tmp_path, Classifier), rel=1e-5)


def test_a_run_whose_plans_do_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    asked = [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "partition": [2, 2]}]
    for refused, by_hand in launch(
        2, "runtime_plan_cases:crowded", {"folder": str(tmp_path), "holmes": asked}, timeout_s=120
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
    first, _ = launch(2, "runtime_plan_cases:settings", {"folder": str(tmp_path), "cases": cases}, timeout_s=120)
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
        for measured in ("byte_s", "own_s"):
            assert commands.pop(measured) > 0 and lives.pop(measured) > 0
        assert commands == lives, case


def test_where_one_number_of_microbatches_is_exact_it_is_taken(tmp_path: Path) -> None:
    """Baseline of the resumed run: the uninterrupted run, with its dropout. Tolerance 1e-6, relative."""
    ranks = launch(4, "runtime_plan_cases:settled", {"folder": str(tmp_path)}, timeout_s=150)
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
