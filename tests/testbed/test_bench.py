"""The benchmark: a small real run, and the figures computed from it."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import forked_executable

from lightning_holmes import HolmesStrategy
from lightning_holmes.cluster.testbed import Testbed, TestbedOptions
from lightning_holmes.commands import bench
from lightning_holmes.commands.bench_predict import run_bed
from lightning_holmes.commands.benchmark.bench_report import Report, Result
from lightning_holmes.commands.benchmark.contenders import CASES, CONTENDERS, BenchmarkJob, hosts_of_blind_stages
from lightning_holmes.commands.benchmark.prediction_beds import PredictionBed, PredictionCase
from lightning_holmes.commands.benchmark.workload import Workload
from lightning_holmes.errors import ConfigurationError

SMALL = "--hidden-size 64 --layers 2 --heads 2 --sequence-length 32 --batch-size 8 --steps 3 --warmup 1 --cpu-share 2"


def job_of(*sizes: int) -> BenchmarkJob:
    topology = bench.make_topology(sizes, devices=1, fast_bytes_per_s=125e6, ethernet_bytes_per_s=12.5e6)
    return BenchmarkJob(topology=topology, processes_per_host=1, workload=Workload())


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes that torchrun starts, since their imports would take most of so small a run."""
    monkeypatch.setenv("PYTHON_EXEC", forked_executable())


@pytest.mark.usefixtures("testbed_works", "quick_start")
@pytest.mark.xdist_group("testbed")
@pytest.mark.timeout(400)
def test_a_small_benchmark_measures_steps_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--hosts 1 1 {SMALL} --contenders floor ddp-fp16 sockets-once blind holmes --timeout 120 --timeline --output {tmp_path / 'out'}"
    bench.main(arguments.split())
    shown = capsys.readouterr().out
    data = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert arguments in data["command"] and data["hardware"] and data["commit"]
    floor, ddp, sockets, blind, holmes = data["results"]
    assert [len(steps) for steps in floor["rank_steps_s"]] == [6, 6], "first and last, three steps each"
    assert [len(steps) for steps in ddp["rank_steps_s"]] == [3, 3]
    assert floor["share"] == 1 and ddp["share"] == pytest.approx(floor["step_s"] / ddp["step_s"])
    assert floor["ethernet_bytes"] < 2000
    # A ring of two sends each gradient once in a step, here as two bytes, plus some bytes for headers and
    # acknowledgements.
    gradients = 2 * Workload(hidden_size=64, num_layers=2, num_heads=2).num_parameters
    assert gradients < ddp["ethernet_bytes"] < 1.2 * gradients and ddp["fast_bytes"] < 2000
    # half of the parameters' bytes, at four bytes per parameter
    assert gradients < sockets["ethernet_bytes"] < 1.2 * gradients, sockets
    # two hosts in two clusters form a pipeline: activations cross the link, not gradients
    assert holmes["share"] == pytest.approx(floor["step_s"] / holmes["step_s"])
    assert 2000 < holmes["ethernet_bytes"] < ddp["ethernet_bytes"] and holmes["fast_bytes"] < 2000
    assert floor["plans"] == ddp["plans"] == [] and len(holmes["plans"]) == 1
    assert "microbatches, layers 1, 1; " in holmes["plans"][0] and f"Holmes: {holmes['plans'][0]}" in shown
    by_kind, timeline = holmes["seconds_by_kind"], json.loads((tmp_path / "out" / "timeline-holmes.json").read_text())
    assert sum(by_kind.values()) == pytest.approx(sum(sum(r.values()) for r in timeline["seconds_by_kind"]) / 2)
    assert by_kind["forward"] > 0 < by_kind["backward"] and f"{by_kind['backward']:.2f}" in shown
    assert (tmp_path / "out" / "timeline-holmes.png").read_bytes().startswith(b"\x89PNG")
    assert not floor["seconds_by_kind"] and not (tmp_path / "out" / "timeline-floor.json").exists()
    assert blind["step_s"] is None and "two hosts or more" in blind["problem"] and blind["problem"] in shown


def test_the_default_workload_is_the_one_that_the_figures_are_quoted_for() -> None:
    workload = Workload()
    assert round(workload.num_parameters / 1e6, 1) == 11.6
    assert (workload.batch_size, workload.sequence_length) == (32, 128)
    assert Workload.from_json(workload.to_json()) == workload
    with pytest.raises(ConfigurationError, match=r"Workload: steps: 0 is not allowed; .* greater than or equal to 1"):
        Workload(steps=0)


def test_the_blind_pipeline_takes_a_host_of_every_cluster_for_each_stage() -> None:
    assert hosts_of_blind_stages(job_of(2, 2)) == [["node0", "node2"], ["node1", "node3"]]
    node_order, why_not = CONTENDERS["blind"].node_order, CONTENDERS["blind"].why_not
    assert node_order(job_of(2, 2)) == ["node0", "node2", "node1", "node3"]
    assert why_not(job_of(2, 2)) is None
    assert why_not(job_of(2, 4)) is not None and why_not(job_of(1, 1)) is not None


def test_shares_are_of_the_slowest_ranks_median_step() -> None:
    floor = Result(name="floor", title="floor", rank_steps_s=[[1.0, 9.0, 1.0], [2.0, 2.0, 9.0]])
    slow = Result(name="ddp", title="DDP", rank_steps_s=[[4.0], [3.0]])
    failed = Result(name="fsdp2", title="FSDP2", problem="it fell over")
    report = Report(results=[floor, slow, failed], floor="floor", network="n", command="c", facts={})
    assert report.floor_s == 2.0
    assert [result.failed for result in report.results] == [False, False, True]
    assert [report.share(result) for result in report.results] == [1.0, 0.5, None]
    unlike = dataclasses.replace(report, unlike_hosts=True)
    assert unlike.floor_s == pytest.approx(2 / (1 / 1.0 + 1 / 2.0)), "each rank has as much of the work as it is fast"


def test_runs_of_one_contender_are_joined_and_a_failed_one_is_told() -> None:
    first = Result(name="x", title="X", rank_steps_s=[[1.0], [2.0]], ethernet_bytes=5.0, peak_bytes=8.0, plans=["a"])
    second = Result(name="x", title="X", rank_steps_s=[[3.0], [4.0]], ethernet_bytes=7.0, peak_bytes=9.0, plans=["b"])
    failed = Result(name="x", title="X", problem="it fell over")
    both = bench.join([first, second])
    assert both.rank_steps_s == [[1.0, 3.0], [2.0, 4.0]] and both.peak_bytes == 9.0
    assert both.plans == ["a", "b"]
    watched = [dataclasses.replace(first, seconds_by_kind={"forward": seconds}) for seconds in (1.0, 3.0)]
    assert (
        bench.join(watched).seconds_by_kind == {"forward": 2.0}
        and bench.join([watched[0], second]).seconds_by_kind == {}
    )
    joined = bench.join([first, failed])
    assert joined.rank_steps_s == [[1.0], [2.0]] and joined.problem == "1 of 2 runs failed: it fell over"
    assert bench.join([failed]).problem == "it fell over"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hosts 2 0", "--hosts 2 0: each cluster needs a host"),
        ("--hosts 2 1", "--batch-size 32 does not divide among 3 processes"),
        (
            "--cpu-share 0.4 0.3 0.2",
            "--cpu-share 0.4 0.3 0.2: give one for all hosts, or one for each of the 2 clusters",
        ),
        ("--fast quick", "--fast.*a positive bandwidth"),
    ],
)
def test_impossible_options_are_refused(arguments: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        bench.main(arguments.split())


def test_only_the_floors_are_alone_and_holmes_is_told_nothing() -> None:
    assert [n for n, contender in CONTENDERS.items() if contender.alone] == [
        "floor",
        "sockets",
        "sockets-kept",
        "sockets-layered",
        "sockets-once",
    ]
    for name, contender in CONTENDERS.items():
        if contender.why_not(job_of(2, 2)) is not None:
            continue
        is_ours = isinstance(contender.make_strategy(job_of(2, 2)), HolmesStrategy) and name != "blind"
        assert contender.gloo_on_ethernet != is_ours, name
    assert set(CONTENDERS) == {name for case in CASES.values() for name in case.contenders}
    for name in ("ddp", "ddp-fp16", "fsdp2", "holmes", "holmes-fast"):
        assert CONTENDERS[name].node_order(job_of(2, 2)) is None, f"{name}: nodes are numbered at random"


@pytest.mark.usefixtures("testbed_works", "quick_start")
@pytest.mark.xdist_group("testbed")
@pytest.mark.timeout(900)
def test_a_small_bed_is_predicted_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_bed(small_bed(), bench.make_topology, profile="measure", timeout_s=280, keep=tmp_path)
    assert [result["name"] for result in results] == ["by count", "by cost"]
    told = capsys.readouterr().out.splitlines()[-2:]
    assert told[0].startswith("[1/2] by count ... about ") and told[1].startswith("[2/2] by cost ... about ")
    by_count, by_cost = results
    assert by_count["layers"] == [4, 4]
    assert by_cost["layers"][0] > by_cost["layers"][1], "the host of half the share gets fewer"
    for result in results:
        assert result["predicted_s"] > 0 and result["measured_s"] > 0
        assert len(result["timeline"]["seconds_by_kind"]) == 2 and result["timeline"]["predicted"] is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["by-cost.json", "by-count.json"]


@pytest.mark.benchmark
@pytest.mark.usefixtures("testbed_works", "quick_start")
@pytest.mark.timeout(900)
def test_layers_by_cost_are_faster_than_by_count(tmp_path: Path) -> None:
    shown = []
    for _ in range(3):
        results = run_bed(small_bed(), bench.make_topology, profile="measure", timeout_s=280, keep=tmp_path)
        shown.append(tuple(result["measured_s"] for result in results))
    print("seconds a step, by count and by cost:", ", ".join(f"{a:.3f} {b:.3f}" for a, b in shown), "(best of three)")
    assert any(by_cost < by_count for by_count, by_cost in shown)


def small_bed() -> PredictionBed:
    """Two hosts, one with half the CPU share of the other."""
    workload = Workload(
        hidden_size=128, num_layers=8, num_heads=2, sequence_length=64, batch_size=8, steps=4, warmup_steps=1
    )
    return PredictionBed(
        name="small",
        hosts=(1, 1),
        cpu_shares=(0.5, 0.25),  # small enough to be available beside other work on two cores
        fast="1gbit",
        ethernet="100mbit",
        cases=(
            PredictionCase(
                name="by count",
                workload=workload,
                arguments={"partition": "uniform", "num_microbatches": 4, "num_chunks": 1},
            ),
            PredictionCase(name="by cost", workload=workload, arguments={"num_microbatches": 4, "num_chunks": 1}),
        ),
    )


@pytest.mark.usefixtures("testbed_works", "quick_start")
@pytest.mark.xdist_group("testbed")
@pytest.mark.timeout(900)
def test_layered_steps_send_three_times_the_parameters_however_many_microbatches() -> None:
    """Two workers, by the kernel's counters: a layer's weights are gathered twice per step, except for the last two
    layers, and its gradient is reduced once. At most 1.10 of 3 P (D-1)/D. Computed from the additional bytes of a
    longer run, since a step's boundary is not visible in its traffic."""
    sent: dict[int, float] = {}
    short, more = 1, 3
    with Testbed(job_of(2).topology, TestbedOptions(cpu_share=0.4)) as bed:
        for count in (1, 16):
            totals = []
            for steps in (short, short + more):
                workload = Workload(
                    hidden_size=192,
                    num_layers=6,
                    sequence_length=16,
                    batch_size=32,
                    microbatches=count,
                    warmup_steps=1,
                    steps=steps,
                )
                job = dataclasses.replace(job_of(2), workload=workload)
                before = bed.counters()
                result = bench.run_contender(bed, CONTENDERS["layered-p2p"], job, timeout_s=200, verbose=False)
                assert result.problem is None, result.problem
                after = bed.counters()
                totals.append([after[h][n].sent - before[h][n].sent for h in sorted(after) for n in sorted(after[h])])
            most = max(longer - shorter for shorter, longer in zip(*totals, strict=True))
            sent[count] = most / more / (4 * workload.num_parameters * 3 / 2)
    print(sent)
    assert all(0.85 < ratio < 1.10 for ratio in sent.values()), sent
    assert sent[16] < 1.03 * sent[1], sent


def test_what_fails_to_start_beside_the_workers_is_told() -> None:
    class Bed(Testbed):
        def run(self, *_: Any, **__: Any) -> Any:
            raise OSError("no such interpreter")

    job = job_of(1, 1)
    bed = Bed(bench.with_node_hosts(job.topology, 1, 1e9), TestbedOptions())
    options: Any = {"env": {}, "host_env": lambda host: {}, "timeout_s": 1.0, "echo": None}
    with (
        pytest.raises(OSError, match="no such interpreter"),
        bench._beside(bed, CONTENDERS["optimizer-node"], job, **options),
    ):
        pass


def test_every_case_has_its_floor_and_strategies_that_can_be_made() -> None:
    job = job_of(4)
    for name, case in CASES.items():
        assert case.contenders[0] == bench.FLOOR, name
        of_case = dataclasses.replace(job.workload, microbatches=case.microbatches)
        for contender in (CONTENDERS[each] for each in case.contenders):
            if contender.why_not(job) is None:
                contender.make_strategy(dataclasses.replace(job, workload=of_case))


def test_deepspeed_takes_part_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Testbed(job_of(2).topology, TestbedOptions())  # never started
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find_spec(name))
    result = bench.run_contender(bed, CONTENDERS["deepspeed"], job_of(2), timeout_s=1.0, verbose=False)
    assert result.problem is not None and "deepspeed is not installed" in result.problem and not result.failed
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert CONTENDERS["deepspeed"].why_not(job_of(2)) is None


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.timeout(300)
def test_deepspeed_on_processors_has_the_losses_of_ddp(tmp_path: Path) -> None:
    """Two processes, two microbatches, three steps. Tolerance 1e-4, since sums are computed in another order."""
    found = {}
    for name in ("ddp", "deepspeed"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(Path(__file__).parent / "contender_losses.py"), name, str(tmp_path / f"{name}.json")]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | CONTENDERS[name].env
        subprocess.run(command, env=env, check=True, timeout=140)
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(found["ddp"]) == 6
    assert found["deepspeed"] == pytest.approx(found["ddp"], abs=1e-4)


def test_what_is_exposed_is_told_as_shares(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"forward": 2.0, "backward": 4.0, "wait": 0.3, "reduce": 0.5, "update": 0.2, "other": 1.0}
    watched = Result(name="x", title="X", rank_steps_s=[[8.0]], seconds_by_kind=seconds)
    Report(results=[watched], floor="x", network="none", command="none", facts={}).print()
    shown = [line for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert "5.0%" in shown[0] and "forward and backward" in shown[0]
    assert "10.0%" in shown[1] and "of the step" in shown[1]


@pytest.mark.usefixtures("testbed_works", "quick_start")
@pytest.mark.xdist_group("testbed")
@pytest.mark.timeout(900)
def test_workers_that_keep_parameters_fetch_them_once_and_gradients_go_once() -> None:
    """Two workers and a node on its own host, by the kernel's counters of that host over the whole run, since a
    step's boundary is not visible in its traffic. The node receives at most 1.05 of P per worker and step, plus P
    before the first step; it sends at most 1.05 of P per worker and step, plus P per worker after the last step."""
    workload = Workload(
        hidden_size=192, num_layers=6, sequence_length=16, batch_size=8, microbatches=4, warmup_steps=1, steps=2
    )
    job, workers = dataclasses.replace(job_of(2), workload=workload), 2
    with Testbed(bench.with_node_hosts(job.topology, 1, 500e6), TestbedOptions(cpu_share=0.4)) as bed:
        result = bench.run_contender(bed, CONTENDERS["optimizer-node-kept"], job, timeout_s=200, verbose=False)
        assert result.problem is None, result.problem
        (count,) = bed.counters()["memory0"].values()
    parameters, steps = 4 * workload.num_parameters, workload.warmup_steps + workload.steps
    came, went = count.received / parameters, count.sent / parameters
    wanted_in, wanted_out = workers * steps + 1, workers * (steps + 1)
    print(f"in {came:.2f} of {wanted_in} P, out {went:.2f} of {wanted_out} P")
    acknowledgements = 0.05  # of the other direction's bytes, if each packet is acknowledged
    assert wanted_in < came < 1.05 * wanted_in + acknowledgements * went
    # the last layers of a forward are still in memory for its backward
    assert 0.75 * wanted_out < went < 1.05 * wanted_out + acknowledgements * came


def carried(bed: Testbed, contender: str, job: BenchmarkJob) -> dict[str, tuple[float, float]]:
    """Return the bytes that the Ethernet and the fast cards of each cluster's workers, and of each node's host,
    receive and send in a whole run, in units of P."""
    before, parameters = bed.counters(), 4 * job.workload.num_parameters
    result = bench.run_contender(bed, CONTENDERS[contender], job, timeout_s=200, verbose=False)
    assert result.problem is None, result.problem
    found: dict[str, tuple[float, float]] = {}
    for host, cards in bed.counters().items():
        place = host if host.startswith("memory") else f"workers of {bed.layout.host(host).cluster}"
        for name, count in cards.items():
            key = f"{place}, {'Ethernet' if name == 'eth0' else 'fast'}"
            came, went = found.get(key, (0.0, 0.0))
            came += (count.received - before[host][name].received) / parameters
            found[key] = came, went + (count.sent - before[host][name].sent) / parameters
    print(contender, {key: f"{came:.2f} in, {went:.2f} out" for key, (came, went) in found.items()})
    return found


@pytest.mark.usefixtures("testbed_works", "quick_start")
@pytest.mark.xdist_group("testbed")
@pytest.mark.timeout(900)
def test_a_cluster_apart_from_the_node_speaks_once() -> None:
    """Two clusters of two workers and a node in the first cluster, by the kernel's counters over the whole run. The
    second cluster's Ethernet cards receive at most 1.05 of 2 P and send at most 1.05 of P per step, both workers
    together, and receive P more after the last step. The first cluster's Ethernet cards carry none of this: each of
    its workers sends and fetches by itself over fast cards. The node's fast card receives at most 1.05 of 2 P per
    step, plus P before the first step, and sends at most 1.05 of 2 P per worker and step, plus P per worker."""
    workload = Workload(
        hidden_size=192, num_layers=6, sequence_length=16, batch_size=8, microbatches=2, warmup_steps=1, steps=2
    )
    job, steps = dataclasses.replace(job_of(2, 2), workload=workload), workload.warmup_steps + workload.steps
    hosts = bench.with_node_hosts(job.topology, 1, 12.5e6, in_clusters=(0,))
    with Testbed(hosts, TestbedOptions(cpu_share=0.4)) as bed:
        found = carried(bed, "optimizer-node-aggregator", job)
    first, second = (cluster.name for cluster in job.topology.clusters)
    acknowledgements = 0.05  # of the other direction's bytes, if each packet is acknowledged
    came, went = found[f"workers of {second}, Ethernet"]
    assert 0.75 * 2 * steps < came < 1.05 * (2 * steps + 1) + acknowledgements * went
    assert steps < went < 1.05 * steps + acknowledgements * came
    assert max(found[f"workers of {first}, Ethernet"]) < 0.05
    came, went = found["memory0, fast"]
    assert 2 * steps + 1 < came < 1.05 * (2 * steps + 1) + acknowledgements * went
    assert 0.75 * 2 * 2 * steps < went < 1.05 * 2 * (2 * steps + 1) + acknowledgements * came


@pytest.mark.usefixtures("testbed_works", "quick_start")
@pytest.mark.xdist_group("testbed")
@pytest.mark.timeout(900)
def test_a_stage_and_a_node_in_each_cluster_leave_ethernet_to_activations() -> None:
    """By the kernel's counters over a whole run: Ethernet carries the activations; at the end half of P each way,
    since every rank gets the whole module again; and at most 0.05 P of everything else. Each step's gradients and
    parameters, P/2 per stage, use the fast cards."""
    workload = Workload(hidden_size=192, num_layers=6, sequence_length=16, batch_size=8, warmup_steps=1, steps=3)
    job, steps = dataclasses.replace(job_of(1, 1), workload=workload), workload.warmup_steps + workload.steps
    hosts = bench.with_node_hosts(job.topology, 2, 12.5e6, in_clusters=(0, 1))
    with Testbed(hosts, TestbedOptions(cpu_share=0.4)) as bed:
        found = carried(bed, "optimizer-nodes-staged", job)
    chunks = 3
    # from stage to stage, and as many gradients back: both together send the same number each way
    crossings = 2 * chunks - 1
    activations = crossings * 8 * 16 * 192 * 4 / (4 * workload.num_parameters)  # per step and direction
    for cluster in job.topology.clusters:
        crossed = found[f"workers of {cluster.name}, Ethernet"]
        assert activations * steps < min(crossed) and max(crossed) < 1.1 * activations * steps + 0.5 + 0.05
    for node in ("memory0", "memory1"):
        assert max(found[f"{node}, Ethernet"]) < 0.01 and min(found[f"{node}, fast"]) > 0.9 * 0.5 * steps
