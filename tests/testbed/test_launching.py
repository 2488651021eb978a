"""Launchers over two hosts: which program starts the processes, and which variables give each process its rank.

Each launcher trains the model of tests/strategy/test_launchers.py in two stages, one on each host. Baseline: plain
Lightning, loss to 1e-5.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import TESTS, forked_executable, forked_python
from test_faults import TWO_HOSTS
from test_launchers import SCRIPT, check

from testbed import Testbed, TestbedOptions

pytestmark = [pytest.mark.usefixtures("testbed_works"), pytest.mark.xdist_group("testbed_launchers")]
HOSTS = ("east", "west")


@pytest.fixture(scope="module")
def bed(testbed_works: None) -> Iterator[Testbed]:
    with Testbed(TWO_HOSTS, TestbedOptions()) as made:
        yield made


def _slurm(host: str) -> dict[str, str]:
    rank = str(HOSTS.index(host))
    return {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NAME": "training",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": rank,
        "SLURM_NODELIST": ",".join(HOSTS),
    }


def _kubeflow(host: str) -> dict[str, str]:
    return {"KUBERNETES_PORT": "tcp://10.0.0.1:443", "WORLD_SIZE": "2", "RANK": str(HOSTS.index(host))}


LAUNCHERS: dict[str, tuple[str, Callable[[str], dict[str, str]] | None]] = {
    "torchrun": ("TorchElasticEnvironment", None),
    "Lightning's own": ("LightningEnvironment", lambda host: {}),
    "SLURM": ("SLURMEnvironment", _slurm),
    "Kubeflow": ("KubeflowEnvironment", _kubeflow),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_hosts_are_two_stages(launcher: str, bed: Testbed, tmp_path: Path) -> None:
    environment, variables = LAUNCHERS[launcher]
    paths = f"{TESTS}:{TESTS / 'strategy'}:{TESTS.parent}"
    how: dict[str, Any] = {"processes_per_host": 1} if variables is None else {"host_env": variables}
    started = [] if variables is None else forked_python()
    results = bed.run(
        [*started, SCRIPT, "1", "2"],
        env={"PYTHONPATH": paths, "PYTHON_EXEC": forked_executable()},
        folder=tmp_path,
        timeout_s=120,
        check=True,
        **how,
    )
    check("\n".join(result.output for result in results.values()), 2, environment)
