"""Faults during a run: a process that dies, a link that is cut for a while, a link that is cut for good.

No rank hangs beyond the timeout, no rank ends as if everything were well, the output names group, transport and peer,
and the last checkpoint is complete, so that a run restarted by torchrun resumes from it.
"""

import json
import re
import shutil
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_worker import KILLED_AT, SAVED_EVERY, STEPS, Counted, Progress, Stack, train
from launch import forked_executable, forked_python

from lightning_holmes import checkpoint
from lightning_holmes.checkpoint import Membership
from lightning_holmes.checkpoint.loading import load_folder
from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology
from testbed import HostResult, Testbed, TestbedOptions

pytestmark = [
    pytest.mark.usefixtures("testbed_works"),
    pytest.mark.xdist_group("testbed_faults"),
    pytest.mark.timeout(900),
]
PATIENCE = "last_call_timeout=30,keep_alive_interval=1,keep_alive_max_attempt=5"
"""torchrun's rendezvous settings: how long the first host waits for the second, which may start that much later if
other tests run, and how long a host may be silent until it counts as lost."""
GROWING = ("num_nodes", "grows", "every")
NODES = ("optimizer_nodes", "optimizer_states", "gradient_sync", "eager")
WAITING = ("waits", *NODES)
WORKER = Path(__file__).with_name("fault_worker.py")
TWO_HOSTS = Topology(
    clusters=tuple(
        Cluster(name=name, hosts=(Host(name=name, devices=1, nics=(Nic(name="eth0", kind="ethernet"),)),))
        for name in ("east", "west")
    )
)


@cache
def plain(*, counted: bool = False) -> dict[int, float]:
    """Return the losses of one process, by step."""
    progress = Progress()
    train(progress, devices=1, data=Counted(8) if counted else None)
    assert sorted(progress.losses) == list(range(1, STEPS + 1))
    return progress.losses


def losses(folder: Path, rank: int, attempt: int = 0) -> dict[int, float]:
    lines = (folder / f"losses.{rank}.{attempt}").read_text().splitlines()
    return {int(step): float(loss) for step, loss in map(str.split, lines)}


def assert_last_checkpoint_is_whole(folder: Path, at_least: int) -> int:
    """Check that every part of the last checkpoint can be read, and return its step."""
    path = folder / "checkpoints" / "last.ckpt"
    state = checkpoint.read_state_dict(path)
    assert list(state) == list(Stack().state_dict())
    assert all(bool(torch.isfinite(value).all()) for value in state.values())
    step: int = load_folder(path, Membership(), weights_only=True)["global_step"]
    assert step >= at_least and step % SAVED_EVERY == 0
    return step


class Cut:
    """An ``echo`` of Testbed.run that cuts a host's Ethernet when the output says that step ``at`` is done, or when
    the line ``at`` appears; for ``seconds``, or for good."""

    def __init__(self, bed: Testbed, nic: str, at: int | str, seconds: float | None = None) -> None:
        line = at if isinstance(at, str) else f"step {at} done"
        self.bed, self.nic, self.line, self.seconds = bed, nic, line, seconds
        self.began: float | None = None
        self.threads: list[threading.Thread] = []

    def __call__(self, host: str, line: str) -> None:
        if line == self.line and self.began is None:
            self.began = time.monotonic()
            self.threads.append(threading.Thread(target=self.bed.set_down, args=(self.nic,)))
            if self.seconds is not None:
                self.threads.append(threading.Timer(self.seconds, self.bed.set_up, args=(self.nic,)))
            for thread in self.threads:
                thread.start()

    def end(self) -> float:
        """Return the seconds since the cut began."""
        assert self.began is not None, f"no rank told {self.line!r}"
        for thread in self.threads:
            thread.join()
        return time.monotonic() - self.began


def run(bed: Testbed, folder: Path, **options: Any) -> dict[str, HostResult]:
    given = {
        key: options.pop(key)
        for key in ("timeout_s", "kill_rank", "waits_for_cut", "snapshots", "attempt", "pipeline", *GROWING, *WAITING)
        if key in options
    }
    arguments = [str(WORKER), str(folder), json.dumps({"num_nodes": len(options.get("hosts", bed.hosts)), **given})]
    command = [*options.pop("before", [sys.executable]), *arguments]
    env = {"PYTHON_EXEC": forked_executable()} | options.pop("env", {})
    return bed.run(command, env=env, grace_s=150, timeout_s=options.pop("limit_s", 200), **options)


def elastic(bed: Testbed, name: str, port: int) -> list[str]:
    """Return torchrun's options for a job of one or two hosts."""
    given = ["--nnodes=1:2", "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-id={name}", f"--rdzv-conf={PATIENCE}"]
    return [*given, f"--rdzv-endpoint={bed.layout.host('east').ethernet.address}:{port}"]


def shown(results: dict[str, HostResult]) -> str:
    return "\n".join(
        f"--- {host}: {r.exit_code} after {r.seconds:.0f} s\n{r.output[-9500:]}" for host, r in results.items()
    )


def test_a_link_that_is_cut_for_five_seconds_delays_the_run_and_changes_nothing(tmp_path: Path) -> None:
    with Testbed(TWO_HOSTS, TestbedOptions()) as bed:
        cut = Cut(bed, "west.eth0", at=4, seconds=5.0)
        results = run(bed, tmp_path, echo=cut, before=forked_python())
        assert cut.end() >= 5.0
    assert all(result.exit_code == 0 for result in results.values()), shown(results)
    for rank in range(2):
        assert losses(tmp_path, rank) == pytest.approx(plain(), rel=1e-5)


def cut_for_good(bed: Testbed, folder: Path, at: str, **options: Any) -> dict[str, HostResult]:
    """Run until a host's Ethernet is cut at that line of the output; all ranks must end soon after the timeout."""
    timeout_s, cut = 8, Cut(bed, "west.eth0", at=at)
    results = run(bed, folder, timeout_s=timeout_s, echo=cut, before=forked_python(), **options)
    taken = cut.end()
    assert all(result.exit_code for result in results.values()), shown(results)
    assert taken < timeout_s + 15, shown(results)
    return results


def test_a_link_that_is_cut_for_good_ends_all_ranks_within_the_timeout_and_is_named(tmp_path: Path) -> None:
    with Testbed(TWO_HOSTS, TestbedOptions()) as bed:  # during a step, and not while a checkpoint is written
        results = cut_for_good(
            bed, tmp_path, "waiting", waits=("training_step", bed.layout.nic("west.eth0")[1].interface)
        )
    output = "".join(result.output for result in results.values())
    told = re.search(
        r"ConnectionLostError: connection lost on rank \d .*in the group (holmes_\S+|of all ranks) \((.*)\): nothing came "
        r"within the timeout",
        output,
    )
    assert told is not None, shown(results)
    assert re.search(r"gloo.*rank 0 on (east|west) \(eth0 [\d.]+\), rank 1 on (east|west) \(eth0", told[2]), told[0]
    assert_last_checkpoint_is_whole(tmp_path, at_least=6)


def test_a_link_that_is_cut_for_good_while_a_checkpoint_is_written_ends_all_ranks(tmp_path: Path) -> None:
    with Testbed(TWO_HOSTS, TestbedOptions()) as bed:
        results = cut_for_good(bed, tmp_path, "writing", waits_for_cut=1)
    named = r"ConnectionLostError: (connection lost on rank|nothing has been heard of rank \d on host (east|west))"
    assert all(re.search(named, r.output) for r in results.values()), shown(results)
    assert assert_last_checkpoint_is_whole(tmp_path, at_least=SAVED_EVERY) == SAVED_EVERY


def test_a_killed_process_ends_all_ranks_and_its_neighbours_name_it(tmp_path: Path) -> None:
    hosts = [Cluster(name=c, hosts=tuple(Host(name=f"{c}{i}", devices=1, nics=()) for i in range(2))) for c in "ab"]
    with Testbed(Topology(clusters=tuple(hosts)), TestbedOptions()) as bed:
        results = run(bed, tmp_path, kill_rank=3, before=forked_python())
    codes = [result.exit_code for result in results.values()]
    assert codes.count(-9) == 1 and all(codes), shown(results)
    last = max(result.seconds for result in results.values()) - min(result.seconds for result in results.values())
    assert last < 25, shown(results)
    output = "".join(result.output for result in results.values())
    named = r"ConnectionLostError: (connection lost on rank \d .*rank 3 on b1 \(eth0|nothing has been heard of rank 3 on host b1)"
    assert re.search(named, output), shown(results)
    assert_last_checkpoint_is_whole(tmp_path, at_least=KILLED_AT)


def test_torchrun_starts_again_from_the_last_checkpoint_and_the_losses_go_on(tmp_path: Path) -> None:
    with Testbed(TWO_HOSTS, TestbedOptions()) as bed:
        results = run(bed, tmp_path, kill_rank=1, before=["--max-restarts=1"], processes_per_host=1)
    assert all(result.exit_code == 0 for result in results.values()), shown(results)
    for rank in range(2):
        before, after = losses(tmp_path, rank), losses(tmp_path, rank, attempt=1)
        assert max(before) == KILLED_AT and min(after) == KILLED_AT + 1 and max(after) == STEPS
        assert before | after == pytest.approx(plain(), rel=1e-5)


def test_a_host_that_is_lost_for_good_leaves_copies_of_its_state_from_which_the_other_goes_on_alone(
    tmp_path: Path,
) -> None:
    """Two clusters of one host each, two stages, under torchrun; then one host, one stage, resumed from the copies of
    the lost host's state. Baseline: one process; losses to 1e-5."""
    with Testbed(TWO_HOSTS, TestbedOptions()) as bed:
        killing: list[threading.Thread] = []

        def lose_power(host: str, line: str) -> None:
            if line == "killed" and not killing:
                killing.append(threading.Thread(target=bed.kill, args=("west",)))
                killing[0].start()

        options = {"snapshots": str(tmp_path / "memory"), "kill_rank": 1, "pipeline": "hosts"}
        options["before"] = elastic(bed, "two-clusters", 29411)
        results = run(bed, tmp_path, processes_per_host=1, node_order=["east", "west"], echo=lose_power, **options)
        for thread in killing:
            thread.join()
    assert killing and results["west"].exit_code != 0 and results["east"].exit_code == 0, shown(results)
    attempts = sorted(int(path.suffix[1:]) for path in tmp_path.glob("losses.0.*"))
    before, after = losses(tmp_path, 0), losses(tmp_path, 0, attempt=attempts[-1])
    assert KILLED_AT - 2 <= min(after) - 1 <= KILLED_AT and max(after) == STEPS, shown(results)
    assert f"goes on from the snapshot of step {min(after) - 1}" in results["east"].output, shown(results)
    assert before | after == pytest.approx(plain(), rel=1e-5)


def test_a_lost_host_that_is_back_joins_again_and_both_go_on_with_the_same_batches(tmp_path: Path) -> None:
    """Two replicas under torchrun, then one of them alone, then two again. The lost host comes back without any
    state. Baseline: one process, whose loss is the mean of the replicas' losses, to 1e-5."""
    memory = tmp_path / "memory"
    options: dict[str, Any] = {"snapshots": str(memory), "every": 3, "kill_rank": 1, "pipeline": 1, "grows": True}
    returned: dict[str, HostResult] = {}
    with Testbed(TWO_HOSTS, TestbedOptions()) as bed:
        options |= {"before": elastic(bed, "growing", 29412), "processes_per_host": 1, "num_nodes": 2}
        options["env"] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # docs/faults.md
        threads: dict[str, threading.Thread] = {}

        def come_back() -> None:
            shutil.rmtree(f"{memory}.west")
            returned.update(run(bed, tmp_path, hosts=["west"], **options))

        def act(host: str, line: str) -> None:
            what = {"killed": lambda: bed.kill("west"), "alone": come_back}.get(line)
            if what is not None and line not in threads:
                threads[line] = threading.Thread(target=what)
                threads[line].start()

        results = run(bed, tmp_path, node_order=["east", "west"], echo=act, **options)
        for thread in threads.values():
            thread.join()
    everything = f"{shown(results)}\nwest, when it was back: {shown(returned)}"
    east = results["east"].output
    assert results["west"].exit_code and results["east"].exit_code == returned["west"].exit_code == 0, everything
    lost, alone, both = (losses(tmp_path, 0, attempt) for attempt in range(3))
    lost_too, both_too = (losses(tmp_path, 1, attempt) for attempt in range(2))
    step = min(alone) - 1
    assert step in (1, 4), "the last one may not have been written"
    assert [max(lost), max(alone), min(both), max(both)] == [KILLED_AT, KILLED_AT + 1, KILLED_AT + 2, STEPS], everything
    assert list(both) == list(both_too), everything
    assert f"goes on from the snapshot of step {step}: " in east, everything
    assert "2 replicas took it; 1 go on with batches of 8 in 4 microbatches each" in east, everything
    assert f"goes on from the snapshot of step {KILLED_AT + 1}: " in east, everything
    assert "1 replicas took it; 2 go on with batches of 4 in 2 microbatches each" in east, everything
    means = [{s: (a[s] + b[s]) / 2 for s in a} for a, b in ((lost, lost_too), (both, both_too))]
    for part in (means[0], alone, means[1]):
        assert part == pytest.approx({step: plain(counted=True)[step] for step in part}, rel=1e-5)


def test_a_fast_card_that_goes_down_is_named_within_seconds_and_the_restart_goes_on_over_ethernet(
    tmp_path: Path,
) -> None:
    """Two replicas. Baseline: one process, whose loss is the mean of the replicas' losses, to 1e-5. The timeout is
    five minutes."""
    nics = (Nic(name="mlx5_0", kind="roce"), Nic(name="eth0", kind="ethernet"))
    hosts = tuple(Host(name=f"a{i}", devices=1, nics=nics) for i in range(2))
    options: dict[str, Any] = {"snapshots": str(tmp_path / "memory"), "before": forked_python()}
    options |= {"env": {"TORCHELASTIC_RUN_ID": "cards"}, "pipeline": 1}
    with Testbed(Topology(clusters=(Cluster(name="a", hosts=hosts),)), TestbedOptions()) as bed:
        cut = Cut(bed, "a1.mlx5_0", at=4)
        results = run(bed, tmp_path, timeout_s=300, echo=cut, **options)
        assert all(result.exit_code for result in results.values()), shown(results)
        assert cut.end() < 30, shown(results)
        for result in results.values():
            assert re.search(
                r"\[rank \d\] ends, because .*the roce card mlx5_0 \(\S+, [\d.]+\) of host a1 went down, which the group "
                r"holmes_\S+ \(.*\).* uses?",
                result.output,
            ), shown(results)
        results = run(bed, tmp_path, attempt="1", **options)
    assert all(result.exit_code == 0 for result in results.values()), shown(results)
    assert "uses Ethernet" in "".join(result.output for result in results.values()), shown(results)
    known = [losses(tmp_path, rank) | losses(tmp_path, rank, attempt=1) for rank in range(2)]
    assert {step: (known[0][step] + known[1][step]) / 2 for step in known[0]} == pytest.approx(plain(), rel=1e-5)
