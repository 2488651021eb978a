"""A link becomes slow during a run: the candidate collectives are measured again, and the group changes to the one
that avoids the link."""

import itertools
import json
import statistics
import threading
import time
from pathlib import Path

import pytest
from launch import forked_python

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology
from lightning_holmes.plan.sync_choice import DRIFT_STEPS
from testbed import Testbed, TestbedOptions

pytestmark = [
    pytest.mark.usefixtures("testbed_works"),
    pytest.mark.xdist_group("testbed_training"),
    pytest.mark.timeout(240),
]
WORKER = Path(__file__).with_name("sync_worker.py")
STEPS, SLOWED_AT = 50, 14
INSIDE, BEFORE, AFTER = (
    12.5e6,
    125e6,
    0.5e6,
)  # bytes per second: so different that other work on the host does not change the result


def test_a_link_that_becomes_slow_changes_the_collective(tmp_path: Path) -> None:
    """At first Ethernet is ten times as fast as the cards inside the clusters, and everything uses it; then it is 25
    times as slow as they are, and only the bytes that must cross between clusters use it."""
    cards = (
        Nic(name="mlx5_0", kind="roce", bandwidth_bytes_per_s=INSIDE),
        Nic(name="eth0", kind="ethernet", bandwidth_bytes_per_s=BEFORE),
    )
    clusters = tuple(
        Cluster(name=name, hosts=tuple(Host(name=f"{name}{i}", devices=1, nics=cards) for i in range(2)))
        for name in ("a", "b")
    )
    options = json.dumps({"num_nodes": 4, "steps": STEPS, "strategy": {}})
    with Testbed(Topology(clusters=clusters), TestbedOptions()) as bed:
        slowed: list[str] = []

        def slow_down() -> None:
            path = tmp_path / "step"
            until = time.monotonic() + 150
            while time.monotonic() < until and not (path.exists() and int(path.read_text() or 0) >= SLOWED_AT):
                time.sleep(0.02)
            # read before the rates change: the first host's new rate already slows the step that is running
            slowed.append(path.read_text())
            for host in bed.hosts:
                bed.set_rate(f"{host}.eth0", AFTER)

        watching = threading.Thread(target=slow_down)
        watching.start()
        bed.run([*forked_python(), str(WORKER), str(tmp_path), options], timeout_s=200, check=True)
        watching.join()
    found = json.loads((tmp_path / "rank0.json").read_text())
    first, *later = found["choices"]
    sent = [after - before for before, after in itertools.pairwise(found["sent"])]
    print(f"\nslowed at step {slowed}; {sent} bytes over Ethernet a step")
    for choice in found["choices"]:
        print(choice)
    assert first["step"] == 0 and first["collective"] != "hierarchical" and len(first["seconds"]) == 4
    assert later, "nothing was measured again"
    changed = later[-1]
    assert changed["collective"] == "hierarchical" and "instead of" in " ".join(c["reason"] for c in later)
    # not from that step on alone: if other work slowed the steps just before, they count towards the DRIFT_STEPS, too
    # (tests/plan/test_sync_choice.py counts them exactly)
    assert changed["step"] > int(slowed[0]) and f"for {DRIFT_STEPS} steps" in changed["reason"]
    # a ring of four sends three quarters of the gradients twice; across two clusters, half of them once suffices
    before, after = sent[3 : int(slowed[0]) - 2], sent[changed["step"] + 1 : -1]
    assert statistics.median(after) < 0.5 * statistics.median(before)
