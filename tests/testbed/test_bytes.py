"""How many bytes a step sends over which cards, by the kernel's counters.

P is the bytes of all parameters. A step's boundary is not visible in its traffic, so a test either takes the additional bytes of a
longer run, or counts what crosses in a whole run. At batches 2, 4, 8, ... a trial whether batches may be split passes forward three
times, over four samples and twice two of them."""

import json
from typing import Any

import pytest
from benchmarks import bench
from benchmarks.contenders import make_contender
from benchmarks.workload import Workload
from launch import forked_executable

from testbed import Testbed

pytestmark = [
    pytest.mark.usefixtures("testbed_works", "quick_start"),
    pytest.mark.xdist_group("testbed"),
    pytest.mark.timeout(900),
]
PASSES = 3  # of a trial
ACKNOWLEDGEMENTS = 0.05  # of the other direction's bytes, if each packet is acknowledged


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes that torchrun starts, since their imports would take most of so small a run."""
    monkeypatch.setenv("PYTHON_EXEC", forked_executable())


def workload_of(**changes: int) -> Workload:
    small = {"hidden_size": 192, "num_layers": 6, "sequence_length": 16, "batch_size": 8, "warmup_steps": 1, "steps": 2}
    return Workload(**{**small, **changes})


def carried(bed: Testbed, network: bench.Network, **arguments: Any) -> dict[str, tuple[float, float]]:
    """Run HolmesStrategy; return what the cards of each cluster's workers, and of each node's host, receive and send in the whole
    run, in units of P."""
    before, parameters = bed.counters(), 4 * network.workload.num_parameters
    contender = make_contender(f"holmes:{json.dumps(arguments)}")
    result = bench.run_contender(bed, contender, network, timeout_s=200)
    assert result.problem is None, result.problem
    found: dict[str, tuple[float, float]] = {}
    for host, cards in bed.counters().items():
        place = host if host.startswith("memory") else f"workers of {bed.layout.host(host).cluster}"
        for name, count in cards.items():
            key = f"{place}, {'Ethernet' if name == 'eth0' else 'fast'}"
            came, went = found.get(key, (0.0, 0.0))
            came += (count.received - before[host][name].received) / parameters
            found[key] = came, went + (count.sent - before[host][name].sent) / parameters
    print({key: f"{came:.2f} in, {went:.2f} out" for key, (came, went) in found.items()})
    return found


def test_layered_steps_send_three_times_the_parameters_however_many_microbatches() -> None:
    """Two workers: a layer's weights are gathered twice per step, except for the last two layers, and its gradient is reduced once.
    At most 1.10 of 3 P (D-1)/D for each worker."""
    sent: dict[int, float] = {}
    network = bench.Network(hosts=(2,), cpu_share=(0.4,))
    with bench.make_bed(network) as bed:
        for count in (1, 16):
            totals = []
            for steps in (1, 4):
                network = bench.Network(hosts=(2,), workload=workload_of(batch_size=32, steps=steps))
                layered = {"pipeline_parallel_size": 1, "sharding": "parameters", "gradient_sync": "p2p"}
                found = carried(bed, network, **layered, num_microbatches=count)
                totals.append(sum(went for _, went in found.values()) / 2)
            trial = PASSES / 2 if count > 1 else 0  # at batch 4, which the shorter run does not have
            sent[count] = (totals[1] - totals[0] - trial) / 3 / (3 / 2)
    print(sent)
    assert all(0.85 < ratio < 1.10 for ratio in sent.values()), sent
    assert sent[16] < 1.03 * sent[1], sent


def test_workers_fetch_parameters_twice_and_gradients_go_once() -> None:
    """Two workers and a node on its own host, in a whole run. The node receives at most 1.05 of P per worker and step, plus P
    before the first step; it sends at most 1.05 of 2 P per worker and step, 3 P for the trial, and P per worker after the last step."""
    workload, workers = workload_of(), 2
    network = bench.Network(hosts=(workers,), cpu_share=(0.4,), node_rate="4 Gbit/s", workload=workload)
    with bench.make_bed(network, num_nodes=1) as bed:
        found = carried(bed, network, pipeline_parallel_size=1, optimizer_nodes=1, num_microbatches=4)
    came, went = found["memory0, Ethernet"]
    steps = workload.warmup_steps + workload.steps
    wanted_in, wanted_out = workers * steps + 1, workers * (2 * steps + PASSES + 1)
    assert wanted_in < came < 1.05 * wanted_in + ACKNOWLEDGEMENTS * went
    # the last layers of a forward are still in memory for its backward
    assert 0.75 * wanted_out < went < 1.05 * wanted_out + ACKNOWLEDGEMENTS * came


def test_two_clusters_sum_among_themselves() -> None:
    """Two clusters of two workers and a node in the first cluster, in a whole run. The second cluster's Ethernet cards receive at
    most 1.05 of 2 P and send at most 1.05 of P per step, both workers together, and receive 3 P more for the trial and P after the
    last step. The first cluster's Ethernet cards carry none of this: its workers send and fetch over fast cards. They carry the
    messages of the job's store and of its heartbeats, 0.5 MB here and more in a slower run, whatever P is. The node's fast card
    receives at most 1.05 of P per step, plus P before the first step, and sends at most 1.05 of 2 P per step, plus 4 P."""
    workload = workload_of(hidden_size=324)
    network = bench.Network(cpu_share=(0.4,), node_rate="100 Mbit/s", workload=workload)
    steps = workload.warmup_steps + workload.steps
    fetched = 2 * steps + PASSES
    with bench.make_bed(network, node_clusters=(0,)) as bed:
        found = carried(bed, network, pipeline_parallel_size=1, optimizer_nodes=1, num_microbatches=2)
    first, second = (cluster.name for cluster in network.make_topology().clusters)
    came, went = found[f"workers of {second}, Ethernet"]
    assert 0.75 * fetched < came < 1.05 * (fetched + 1) + ACKNOWLEDGEMENTS * went
    assert steps < went < 1.05 * steps + ACKNOWLEDGEMENTS * came
    assert max(found[f"workers of {first}, Ethernet"]) < 0.05
    came, went = found["memory0, fast"]
    assert steps + 1 < came < 1.05 * (steps + 1) + ACKNOWLEDGEMENTS * went
    assert 0.75 * fetched < went < 1.05 * (fetched + 1) + ACKNOWLEDGEMENTS * came


def test_a_stage_and_a_node_in_each_cluster_leave_ethernet_to_activations() -> None:
    """In a whole run Ethernet carries the activations; at the end half of P each way, since every rank gets the whole module again;
    and at most 0.05 P of everything else. Each step's gradients and parameters, P/2 per stage, use the fast cards."""
    workload, chunks = workload_of(steps=3), 3
    network = bench.Network(hosts=(1, 1), cpu_share=(0.4,), node_rate="100 Mbit/s", workload=workload)
    steps = workload.warmup_steps + workload.steps
    with bench.make_bed(network, node_clusters=(0, 1)) as bed:
        staged = {"pipeline_parallel_size": 2, "num_chunks": chunks, "partition": "uniform", "optimizer_nodes": 2}
        found = carried(bed, network, **staged, num_microbatches=2)
    # from stage to stage, and as many gradients back: both together send the same number each way
    crossings = 2 * chunks - 1
    crossing = 8 * 16 * 192 * 4 / (4 * workload.num_parameters)
    # in each direction; and trials of all samples at batches 2 and 4, forward only
    activations = crossings * crossing * steps
    least, most = activations + 2 * (chunks - 1) * crossing, activations + 2 * chunks * crossing
    for cluster in network.make_topology().clusters:
        crossed = found[f"workers of {cluster.name}, Ethernet"]
        assert least < min(crossed) and max(crossed) < 1.1 * most + 0.5 + 0.05
    for node in ("memory0", "memory1"):
        assert max(found[f"{node}, Ethernet"]) < 0.01 and min(found[f"{node}, fast"]) > 0.9 * 0.5 * steps
