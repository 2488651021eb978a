"""lightning-holmes topology: one host, a file, a job of two processes, and invalid options."""

import json
import os
import sys
from pathlib import Path

import pytest
from launch import launch_raw
from trees import Machine

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.commands import run_command
from lightning_holmes.errors import ConfigurationError

FILE = """\
clusters:
  - name: berlin
    fabric: infiniband
    hosts:
      - {name: b, count: 20, devices: 2, nics: [{name: mlx5_0, kind: infiniband, bandwidth: 200 Gbit/s}]}
  - name: paris $x$
    fabric: roce
    fallback: p-1 has a NIC that is down
    hosts:
      - {name: p, count: 2, devices: 2, nics: [{name: mlx5_0, kind: roce, up: false}, {name: eth0, kind: ethernet}]}
  - name: rome
    hosts: [{name: r, devices: 2}]
links:
  - {ends: [berlin, paris $x$], transport: ethernet, bandwidth: 25 Gbit/s, latency: 50 us}
  - {ends: [rome, berlin], transport: ethernet, bandwidth: 1 Gbit/s, latency: 2 ms, measured: true}
warnings: ["[bold] is not markup"]
measured_at: 1700000000.0
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") or name.startswith("HOLMES_"):
            monkeypatch.delenv(name)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    gid = "fe80:0000:0000:0007:0c42:a103:0065:bd1e"
    Machine(tmp_path).rdma("mlx5_0", rate="400 Gb/sec (4X NDR)", gids=[(gid, None, None)])
    return tmp_path / "sys"


def test_one_host(sysfs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOLMES_SYSFS_ROOT", str(sysfs))
    monkeypatch.setenv("HOLMES_HOST_NAME", "node7")
    monkeypatch.setenv("HOLMES_CLUSTER", "berlin")
    run_command("topology", [])
    shown = capsys.readouterr().out
    for words in ("berlin", "node7", "mlx5_0", "infiniband", "400 Gbit/s", "up"):
        assert words in shown
    for form in ("yaml", "json"):
        run_command("topology", [f"--format={form}"])
        topology = Topology.from_yaml_text(capsys.readouterr().out)
        assert [cluster.name for cluster in topology.clusters] == ["berlin"]
        assert topology.hosts[0].ranks is None and topology.hosts[0].nics[0].bandwidth_bytes_per_s == 50e9
    monkeypatch.setenv("HOLMES_SYSFS_ROOT", "/nowhere")
    run_command("topology", [])
    captured = capsys.readouterr()
    assert "/nowhere/class/infiniband: No such file" in captured.err and "mlx5_0" not in captured.out


def test_a_file_as_table_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(FILE)
    run_command("topology", ["--topology", str(path)])
    shown = capsys.readouterr().out
    for words in (
        *("berlin (infiniband)", "b-19", "200 Gbit/s", "down", "2 ms", "measured", "measured 2023-11-1"),
        "warning: [bold] is not markup",
    ):
        assert words in shown, shown
    for form in ("yaml", "json"):
        run_command("topology", ["--topology", str(path), "--format", form])
        assert Topology.from_yaml_text(capsys.readouterr().out) == Topology.from_yaml(path)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--formt", "json"], ["--formt", "--format"]),
        (["--format=xml"], ["xml", "table", "yaml", "json"]),
        (["--format"], ["--format", "expected one argument"]),
        (["x.yaml"], ["x.yaml", "--topology"]),
        (["--refresh"], ["--refresh"]),
    ],
)
def test_wrong_options(args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command("topology", args)
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    for word in words:
        assert word in shown


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match=r"/nowhere/t\.yaml cannot be read"):
        run_command("topology", ["--topology", "/nowhere/t.yaml"])


def test_half_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigurationError, match="RANK=0 and WORLD_SIZE=None"):
        run_command("topology", [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="MASTER_ADDR=None"):
        run_command("topology", [])


def show(args: list[str]) -> None:
    """The code that each process of the job below runs."""
    sys.argv = ["lightning-holmes"]
    run_command("topology", args)


def test_a_job_of_two_hosts(sysfs: Path, tmp_path: Path) -> None:
    def environment(rank: int) -> dict[str, str]:
        return {"HOLMES_HOST_NAME": f"node{1 - rank}", "HOLMES_SYSFS_ROOT": str(sysfs)}

    workers = launch_raw(
        2,
        "test_topology_command:show",
        ["--no_probe", "--format", "json"],
        timeout_s=100,
        folder=tmp_path / "job",
        environment=environment,
    )
    assert [worker.exit_code for worker in workers] == [0, 0], [worker.output[-2000:] for worker in workers]
    assert "clusters" not in workers[1].output
    text = workers[0].output
    data = json.loads(text[text.index("{") : text.rindex("}") + 1])
    (cluster,) = data["clusters"]
    assert [(host["name"], host["ranks"]) for host in cluster["hosts"]] == [("node0", [1]), ("node1", [0])]
    assert cluster["speeds"][0]["bandwidth"] == 50e9
