"""Sharded parameters give the numbers of plain Lightning, and their checkpoints can be resumed in every layout. Tolerance 1e-5
(fp32) of the largest entry."""

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_same, state_of
from launch import chosen, launch
from sharded_parameter_cases import (
    OPTIMIZERS,
    REFUSED,
    Counting,
    Data,
    Outside,
    Thawing,
    build,
    make_trainer,
    run_all,
    run_late,
    run_watched,
)

from lightning_holmes.checkpoint import read_state_dict
from lightning_holmes.checkpoint.folder import part_file
from lightning_holmes.checkpoint.manifest import Manifest

pytestmark = pytest.mark.xdist_group("sharded_parameters")
Ranks = list[dict[str, Any]]
WHOLE_GRADIENT = "the gradient of layers.0.up.weight, but each replica holds"
RESUMES = [f"{s} to {into}" for s in ("folder", "folder-after", "file", "plain") for into in ("layered", "replicated")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of plain Lightning in one process: a fit with each optimizer, and a resumed fit."""
    folder = tmp_path_factory.mktemp("plain")
    found: dict[str, Any] = {"folder": folder}
    for optimizer in OPTIMIZERS:
        module, trainer = build(optimizer), make_trainer(folder)
        trainer.fit(module, datamodule=Data())
        found[optimizer] = state_of(module), dict(trainer.callback_metrics)
        if optimizer == "adamw":
            trainer.save_checkpoint(folder / "plain.ckpt")
            found["test"] = trainer.validate(module, datamodule=Data(), verbose=False)
            found["predict"] = torch.cat(trainer.predict(module, datamodule=Data()))  # type: ignore[arg-type]
    for kind in (Outside, Counting, Thawing):
        module = build(kind=kind)
        make_trainer(folder).fit(module, datamodule=Data())
        found[kind.__name__] = state_of(module)
    module = build()
    make_trainer(folder, 2).fit(module, datamodule=Data())
    found["two epochs"] = state_of(module)
    return found


@pytest.fixture(scope="module")
def ranks(plain: dict[str, Any], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    payload = {"folder": plain["folder"]} | {name: chosen(request, name) for name in ("late", "resume", "why")}
    return launch(2, f"{run_all.__module__}:run_all", payload, timeout_s=240)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fit_gives_the_numbers_of_plain_lightning(optimizer: str, plain: dict[str, Any], ranks: Ranks) -> None:
    expected, metrics = plain[optimizer]
    for rank in ranks:
        state, logged = rank[f"fit {optimizer}"]
        assert_same(state, expected)
        assert logged["val_loss"] == pytest.approx(float(metrics["val_loss"]), rel=1e-5)


def test_auto_takes_shards_where_nothing_else_fits_and_says_why(plain: dict[str, Any], ranks: Ranks) -> None:
    for rank in ranks:
        for taken in (False, True):
            state, plan = rank[f"auto {taken}"]
            assert_same(state, plain["adamw"][0])
            (note,) = (note for note in plan.notes if note.startswith("sharding"))
            assert note.startswith("sharding: parameters, since otherwise" if taken else "sharding: none, "), note
            assert (plan.schedule == "breadth_first" and plan.num_chunks > 1) == taken


@pytest.mark.parametrize(("kind", "layers"), [("Outside", (1, 1, 1, 1)), ("Counting", (4,))])
def test_auto_takes_the_stages_that_are_allowed_in_shards(
    kind: str, layers: tuple[int, ...], plain: dict[str, Any], ranks: Ranks
) -> None:
    for rank in ranks:
        state, plan = rank[f"auto {kind}"]
        assert (plan.schedule, plan.partition.layer_counts) == ("breadth_first", layers), plan.notes
        assert_same(state, plain[kind])


def test_what_was_frozen_at_first_is_trained(plain: dict[str, Any], ranks: Ranks) -> None:
    before = state_of(build(kind=Thawing))
    for name in ("scale", "layers.1.up.weight", "layers.2.up.weight"):
        assert not torch.equal(plain["Thawing"][name], before[name])
    for rank in ranks:
        state, plan = rank["auto Thawing"]
        assert plan.schedule == "breadth_first"
        assert_same(state, plain["Thawing"])


def test_the_schedule_is_chosen_and_evaluation_is_that_of_plain_lightning(plain: dict[str, Any], ranks: Ranks) -> None:
    assert ranks[0]["plan"] == ("breadth_first", (1, 1, 1, 1))
    for rank in ranks:
        assert rank["test"][0]["val_loss"] == pytest.approx(plain["test"][0]["val_loss"], rel=1e-5)
    texts = torch.stack([rank["predict"] for rank in ranks], dim=1).flatten(0, 1)
    assert torch.equal(texts, plain["predict"])


@pytest.mark.parametrize("late", ["adamw", "muon"])
def test_a_module_without_memory_lives_in_shards_also_between_runs(
    late: str, plain: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    """Baseline: the strategy on one process, whose initial weights are the same. Neither rank holds any parameter after the fit."""
    expected = run_late(tmp_path, late, num_microbatches=2)
    assert expected.pop("blank") == 0
    texts = [expected.pop(f"{kind} predicted") for kind in ("folder", "file")]
    for rank in ranks:
        found = dict(rank[f"late {late}"])
        assert found.pop("blank") == len(list(build().parameters()))
        assert {k: v for k, v in found.items() if "predicted" not in k} == pytest.approx(expected, rel=1e-5)
    for kind, text in zip(("folder", "file"), texts, strict=True):
        mine = [rank[f"late {late}"][f"{kind} predicted"] for rank in ranks]
        assert torch.equal(torch.stack(mine, dim=1).flatten(0, 1), text)
    state = read_state_dict(plain["folder"] / late / "folder-evaluated.ckpt")
    alone = torch.load(tmp_path / "file.ckpt", weights_only=True)["state_dict"]
    assert_same({k: v for k, v in state.items() if k != "seen"}, {k: v for k, v in alone.items() if k != "seen"})


def test_hooks_see_and_change_weights_a_stage_at_a_time(plain: dict[str, Any], ranks: Ranks) -> None:
    expected = run_watched(plain["folder"])
    alone = run_watched(plain["folder"], sharding="parameters")
    for found in (alone, *(rank["watched"] for rank in ranks)):
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert_same(found["state"], expected["state"])
        assert found["whole"] == 4, "those of one layer"
    assert ranks[1]["watched"]["sampled"] == []
    torch.testing.assert_close(ranks[0]["watched"]["sampled"], expected["sampled"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("resume", RESUMES)
def test_a_checkpoint_is_resumed_in_and_out_of_shards(resume: str, plain: dict[str, Any], ranks: Ranks) -> None:
    for rank in ranks:
        assert_same(rank[resume], plain["two epochs"])


@pytest.mark.parametrize("source", ["file", "file-after"])
def test_plain_lightning_goes_on_from_a_file(source: str, plain: dict[str, Any], ranks: Ranks) -> None:
    module = build()
    make_trainer(plain["folder"], 2).fit(module, datamodule=Data(), ckpt_path=plain["folder"] / f"{source}.ckpt")
    assert_same(state_of(module), plain["two epochs"])


def test_each_replica_writes_its_part_of_a_folder(plain: dict[str, Any], ranks: Ranks) -> None:
    manifest = Manifest.load(plain["folder"] / "folder.ckpt")
    assert list(manifest.state_dict) == list(build().state_dict())
    assert {entry.file for entry in manifest.state_dict.values()} == {part_file(0), part_file(1)}
    layers = {name for name, _ in build().named_parameters() if "layers" in name}
    assert set(manifest.optimizers[0]) == {"embedding.weight", *layers}


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("an average of weights", 'sharding="parameters": the callback WeightAveraging reads whole parameters'),
        ("thawed in a step", "scale was frozen when the batch began, and is trained in it: its gradient would be lost"),
        ("a gradient is read", f"Use.on_after_backward reads {WHOLE_GRADIENT}"),
        ("a gradient is written", f"Use.on_after_backward writes {WHOLE_GRADIENT}"),
    ],
)
def test_what_needs_whole_parameters_is_refused(why: str, reason: str, ranks: Ranks) -> None:
    assert why in REFUSED
    for rank in ranks:
        assert rank[why].startswith("UnsupportedModuleError") and reason in rank[why]
