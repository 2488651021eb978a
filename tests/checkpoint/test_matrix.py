"""Saved in one layout, resumed in another, in either format: the same losses as in a run without interruption.

Baseline: the same run, which continued after it had saved in the middle of an epoch. Tolerance 1e-5 relative (fp32).
"""

import statistics
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from checkpoint_cases import DROPOUT, FROM_FOLDER, MIDDLE, STEPS, SaveAt, build_module, fit, make_data_file, state_bytes
from launch import launch
from quiet import quiet_trainer

from lightning_holmes.cli import main

pytestmark = pytest.mark.xdist_group("checkpoint_matrix")


def plain_strategy() -> Any:
    return pl.strategies.SingleDeviceStrategy(device="cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results by rank, the folder, and the run with plain Lightning."""
    folder = tmp_path_factory.mktemp("matrix")
    data = make_data_file(folder)
    lightning = folder / "lightning.ckpt"
    plain = fit(data, "alone", strategy=plain_strategy(), callbacks=[SaveAt({MIDDLE: lightning})])
    payload = {"folder": str(folder), "data": str(data), "lightning": str(lightning)}
    results = launch(4, "checkpoint_cases:run_matrix", payload, timeout_s=200)
    return results, folder, plain


def mean_losses(results: list[dict[str, Any]], name: str) -> dict[int, float]:
    """Return each step's loss over all samples: the mean over the replicas, which have equal batch sizes."""
    by_replica = {result[name][0]: result[name][1] for result in results}
    steps = next(iter(by_replica.values()))
    return {step: statistics.fmean(losses[step] for losses in by_replica.values()) for step in steps}


def assert_goes_on(found: dict[int, float], whole: dict[int, float], first: int) -> None:
    assert list(found) == list(range(first, STEPS + 1))
    for step, loss in found.items():
        assert loss == pytest.approx(whole[step], rel=1e-5), f"step {step}"


def assert_ends_alike(results: list[dict[str, Any]], name: str, whole: str) -> None:
    for key, value in results[0][f"{whole} weights"].items():
        torch.testing.assert_close(results[0][f"{name} weights"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", FROM_FOLDER)
def test_any_layout_goes_on_in_mid_epoch_with_the_same_dropout(runs: Any, layout: str) -> None:
    results, _, plain = runs
    whole = mean_losses(results, "whole")
    assert_goes_on(mean_losses(results, f"folder to {layout}"), whole, MIDDLE + 1)
    assert_ends_alike(results, f"folder to {layout}", "whole")
    assert whole[STEPS] != pytest.approx(plain.losses[STEPS], rel=1e-3), "nothing was dropped"


RESHARDED = ["sharded to pp1xdp4", "lightning to sharded", "sharded to sharded"]


@pytest.mark.parametrize("name", RESHARDED)
def test_a_sharded_optimizers_state_goes_on_whole_and_the_other_way_round(runs: Any, name: str) -> None:
    results, _, plain = runs
    assert_goes_on(mean_losses(results, name), plain.losses, MIDDLE + 1)
    for trained in ("sharded", "sharded to file"):
        assert mean_losses(results, trained) == pytest.approx(plain.losses, rel=1e-5)
    for result in results:  # every rank has the whole module at the end
        for key, value in plain.weights.items():
            torch.testing.assert_close(result[f"{name} weights"][key], value, rtol=1e-4, atol=1e-5)


def test_a_whole_optimizers_folder_goes_on_divided(runs: Any) -> None:
    results = runs[0]
    assert_goes_on(mean_losses(results, "folder to sharded"), mean_losses(results, "whole"), MIDDLE + 1)
    assert_ends_alike(results, "folder to sharded", "whole")


def test_plain_lightning_goes_on_from_a_sharded_optimizers_file_and_folder(runs: Any) -> None:
    _, folder, plain = runs
    main(["convert", str(folder / "shares.ckpt"), str(folder / "shares_converted.ckpt")])
    for name in ("shares_plain", "shares_converted"):
        ran = fit(folder / "bytes", "alone", strategy=plain_strategy(), ckpt_path=folder / f"{name}.ckpt")
        assert_goes_on(ran.losses, plain.losses, MIDDLE + 1)
    ours, theirs = (torch.load(folder / f"{n}.ckpt", weights_only=True) for n in ("shares_plain", "lightning"))
    torch.testing.assert_close(
        ours["optimizer_states"][0]["state"], theirs["optimizer_states"][0]["state"], rtol=1e-3, atol=1e-6
    )


def test_four_replicas_hold_a_quarter_of_the_optimizers_state_each(runs: Any) -> None:
    results, _, plain = runs
    whole = state_bytes(plain.trainer)
    shares = [result["state bytes"] for result in results]
    assert max(shares) <= 0.30 * whole
    assert sum(shares) == pytest.approx(whole, rel=0.05)


def test_a_file_of_one_layout_goes_on_in_another_as_plain_lightning(runs: Any) -> None:
    results, _, plain = runs
    assert mean_losses(results, "to file") == pytest.approx(plain.losses, rel=1e-5)
    assert_goes_on(mean_losses(results, "file to interleaved"), plain.losses, MIDDLE + 1)
    assert_ends_alike(results, "file to interleaved", "to file")


def test_plain_lightnings_file_goes_on_under_the_strategy(runs: Any) -> None:
    assert_goes_on(mean_losses(runs[0], "lightning to pp2xdp2"), runs[2].losses, MIDDLE + 1)


def test_torchdatas_stateful_loader(runs: Any) -> None:
    results = runs[0]
    assert_goes_on(mean_losses(results, "torchdata resumed"), mean_losses(results, "torchdata"), MIDDLE + 1)
    for result in results:
        assert "samples_seen" in result["other replicas"] and "2 replicas" in result["other replicas"]


def test_one_process_under_the_strategy_and_plain_lightning_after_converting(runs: Any) -> None:
    results, folder, plain = runs
    data = folder / "bytes"
    alone = fit(data, "alone", ckpt_path=folder / "middle.ckpt", dropout=DROPOUT)
    assert_goes_on(alone.losses, mean_losses(results, "whole"), MIDDLE + 1)
    main(["convert", str(folder / "of_file.ckpt"), str(folder / "converted.ckpt")])
    converted = fit(data, "alone", strategy=plain_strategy(), ckpt_path=folder / "converted.ckpt")
    assert_goes_on(converted.losses, plain.losses, STEPS)
    direct = fit(data, "alone", strategy=plain_strategy(), ckpt_path=folder / "plain.ckpt")
    assert_goes_on(direct.losses, plain.losses, MIDDLE + 1)


def test_the_plain_file_is_plain_lightnings(runs: Any) -> None:
    _, folder, _ = runs
    ours, theirs = (torch.load(folder / f"{name}.ckpt", weights_only=True) for name in ("plain", "lightning"))
    assert set(ours) == set(theirs) | {"lightning_holmes"}
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    torch.testing.assert_close(ours["state_dict"], dict(theirs["state_dict"]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        ours["optimizer_states"][0]["state"], theirs["optimizer_states"][0]["state"], rtol=1e-3, atol=1e-6
    )
    assert ours["optimizer_states"][0]["param_groups"] == theirs["optimizer_states"][0]["param_groups"]


def test_evaluation_reads_a_folder(runs: Any, tmp_path: Path) -> None:
    results, folder, _ = runs
    module = build_module()
    main(["convert", str(folder / "of_file.ckpt"), str(tmp_path / "plain.ckpt")])
    module.load_state_dict(torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"])
    from checkpoint_cases import Bytes

    trainer = quiet_trainer(enable_checkpointing=True, enable_model_summary=True, devices=1)
    expected = trainer.validate(module, datamodule=Bytes(folder / "bytes", 1), verbose=False)
    for result in results:
        assert result["validated"][0] == pytest.approx(expected[0], rel=1e-4)
