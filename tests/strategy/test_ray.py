"""Ray Train starts the processes, and Lightning's environment plugin for Ray gives their ranks.

Baseline: plain Lightning in this process; loss to 1e-5. Skipped where ray, which is no dependency, is not installed.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from launch import TESTS

ray = pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")


def train(settings: dict[str, Any]) -> None:
    """Train in each Ray worker, as docs/launching.md says."""
    import ray.train
    from lightning.pytorch import Trainer, seed_everything
    from ray.train.lightning import RayLightningEnvironment
    from strategy_cases import build, samples
    from torch.utils.data import DataLoader

    from lightning_holmes import HolmesStrategy

    seed_everything(7, verbose=False)
    workers = ray.train.get_context()
    trainer = Trainer(
        accelerator="cpu",
        devices=workers.get_local_world_size(),
        num_nodes=workers.get_world_size() // workers.get_local_world_size(),
        plugins=[RayLightningEnvironment()],
        strategy=HolmesStrategy(pipeline_parallel_size=2, num_microbatches=2),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(build(), DataLoader(samples(), 8))
    assert type(trainer.strategy.cluster_environment) is RayLightningEnvironment and trainer.world_size == 2
    Path(settings["folder"], f"loss{trainer.global_rank}").write_text(str(float(trainer.callback_metrics["loss"])))


def test_two_workers_of_ray_are_two_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise Ray leaves a token in the home folder
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from strategy_cases import Setting, build, samples
    from torch.utils.data import DataLoader

    plain = Setting(tmp_path / "plain").trainer(max_epochs=1)
    plain.fit(build(), DataLoader(samples(), 8))
    paths = {
        "PYTHONPATH": f"{TESTS}:{TESTS / 'strategy'}:{TESTS.parent}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": paths})
    try:
        TorchTrainer(
            train,
            train_loop_config={"folder": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path / "ray")),
        ).fit()
    finally:
        ray.shutdown()
    losses = [float((tmp_path / f"loss{rank}").read_text()) for rank in range(2)]
    assert losses == pytest.approx([float(plain.callback_metrics["loss"])] * 2, rel=1e-5)
