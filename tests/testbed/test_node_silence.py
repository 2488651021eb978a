"""The host of an optimizer node, or of a worker, falls silent without closing its connections: both ends notice
within 30 s, whether the connection is idle or busy."""

from pathlib import Path

import pytest
from launch import forked_python
from node_channel_worker import KINDS
from test_faults import TWO_HOSTS, Cut, shown

from testbed import Testbed, TestbedOptions

pytestmark = [pytest.mark.usefixtures("testbed_works"), pytest.mark.xdist_group("testbed_faults")]
NOTICED_S = 30.0


def test_a_host_that_falls_silent_is_noticed_at_both_ends() -> None:
    worker = str(Path(__file__).with_name("node_channel_worker.py"))
    with Testbed(TWO_HOSTS, TestbedOptions()) as bed:
        cut = Cut(bed, "west.eth0", at="connected")
        results = bed.run([*forked_python(), worker], timeout_s=90, echo=cut)
        cut.end()
    assert cut.began is not None and set(results) == {"east", "west"}
    for result in results.values():
        assert result.exit_code == 0, shown(results)
        lost = {
            kind: float(at)
            for kind, at in (line.split()[1:] for line in result.output.splitlines() if line.startswith("lost"))
        }
        assert set(lost) == set(KINDS), shown(results)
        assert all(0 < at - cut.began < NOTICED_S for at in lost.values()), (cut.began, lost)
