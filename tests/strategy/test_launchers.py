"""The ways to start a job. Each trains the same model; baseline: plain Lightning in this process."""

import os
import re
import socket
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from launch import TESTS, forked_executable, forked_python, free_port
from quiet import quiet_trainer
from strategy_cases import build, samples
from torch.utils.data import DataLoader

pytestmark = pytest.mark.xdist_group("strategy_launchers")

SCRIPT = str(Path(__file__).parent / "launched_script.py")
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
_FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK")


@cache
def plain_loss() -> float:
    trainer = quiet_trainer(devices=1, max_epochs=1)
    trainer.fit(build(), DataLoader(samples(), 8))
    return float(trainer.callback_metrics["loss"])


def _environment(**more: str) -> dict[str, str]:
    clean = {
        k: v for k, v in os.environ.items() if k not in _FOREIGN and not k.startswith(("SLURM_", "LSB_", "TORCHEL"))
    }
    paths = os.pathsep.join([str(TESTS), str(TESTS / "strategy")])
    return clean | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": forked_executable()} | more


def _run(commands: list[list[str]], environments: list[dict[str, str]], folder: Path, *, fails: bool = False) -> str:
    started = [
        subprocess.Popen(c, env=e, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c, e in zip(commands, environments, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    whole = "\n".join(outputs)
    assert all((process.returncode != 0) == fails for process in started), whole[-4000:]
    return whole


def check(output: str, world_size: int, environment: str) -> None:
    found = re.findall(r"RESULT rank=(\d+) world=(\d+) environment=(\w+) loss=([0-9.]+)", output)
    assert sorted(int(f[0]) for f in found) == list(range(world_size)), output[-3000:]
    for _, world, name, value in found:
        assert (int(world), name) == (world_size, environment)
        assert float(value) == pytest.approx(plain_loss(), rel=1e-5)


def test_one_process(tmp_path: Path) -> None:
    output = _run([[*forked_python(), SCRIPT, "1"]], [_environment()], tmp_path)
    check(output, 1, "LightningEnvironment")


def test_lightnings_own_launcher(tmp_path: Path) -> None:
    output = _run([[*forked_python(), SCRIPT, "2"]], [_environment()], tmp_path)
    check(output, 2, "LightningEnvironment")


def test_each_process_takes_its_share_of_the_cores(tmp_path: Path) -> None:
    environment = _environment()
    del environment["OMP_NUM_THREADS"]
    output = _run([[*forked_python(), SCRIPT, "2"]], [environment], tmp_path)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert re.findall(r"threads=(\d+)", output) == [str(share)] * 2, output[-3000:]


def test_torchrun(tmp_path: Path) -> None:
    output = _run([[*forked_python(), *TORCHRUN, SCRIPT, "2"]], [_environment()], tmp_path)
    check(output, 2, "TorchElasticEnvironment")


@pytest.mark.parametrize("launcher", ["torchrun", "Lightning"])
def test_a_failure_of_one_rank_is_what_the_user_sees_first(launcher: str, tmp_path: Path) -> None:
    command = [*forked_python(), *(TORCHRUN if launcher == "torchrun" else []), SCRIPT, "2", "1", "1"]
    output = _run([command], [_environment()], tmp_path, fails=True)
    cause, consequence = output.find("ZeroDivisionError: planned failure"), output.find("by peer")
    assert cause >= 0 and (consequence < 0 or cause < consequence), output[-6000:]


def _slurm(rank: int, port: int, folder: Path) -> dict[str, str]:
    return {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NAME": "training",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _kubeflow(rank: int, port: int, folder: Path) -> dict[str, str]:
    return {
        "KUBERNETES_PORT": "tcp://127.0.0.1:443",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
    }


def _lsf(rank: int, port: int, folder: Path) -> dict[str, str]:
    hosts = folder / "hosts"
    hosts.write_text("batch\n" + f"{socket.gethostname()}\n" * 2)
    return {
        "LSB_JOBID": "4242",
        "LSB_DJOB_RANKFILE": str(hosts),
        "JSM_NAMESPACE_SIZE": "2",
        "JSM_NAMESPACE_RANK": str(rank),
        "JSM_NAMESPACE_LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.mark.parametrize(
    ("environment", "variables", "nodes"),
    [("SLURMEnvironment", _slurm, 1), ("LSFEnvironment", _lsf, 1), ("KubeflowEnvironment", _kubeflow, 2)],
)
def test_started_by_a_scheduler(
    environment: str, variables: Callable[[int, int, Path], dict[str, str]], nodes: int, tmp_path: Path
) -> None:
    port = free_port()
    environments = [_environment(**variables(rank, port, tmp_path)) for rank in range(2)]
    output = _run([[*forked_python(), SCRIPT, str(2 // nodes), str(nodes)]] * 2, environments, tmp_path)
    check(output, 2, environment)
