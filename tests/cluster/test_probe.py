"""Connection tests and measurements over loopback, and misbehaving peers."""

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import busyness

from lightning_holmes.cluster import measure
from lightning_holmes.cluster.network import Cluster, Host, Link, LinkSpeed, Nic
from lightning_holmes.cluster.probe import Endpoint, Listener, ProbeResult, ProbeTask, run_task, run_tasks, steady_rate
from lightning_holmes.cluster.topology import Topology

TOKEN = b"t" * 32


def nic(name: str, *addresses: str, up: bool = True, kind: str = "ethernet", rate: float | None = None) -> Nic:
    return Nic(name=name, kind=kind, addresses=addresses, up=up, bandwidth_bytes_per_s=rate, fabric=f"{kind}/x")  # type: ignore[arg-type]


@pytest.fixture
def listener() -> Iterator[Listener]:
    nics = [nic("eth0", "127.0.0.2"), nic("mlx5_0", "127.0.0.3", kind="roce"), nic("down0", "127.0.0.4", up=False)]
    with contextlib.closing(Listener(host="b", nics=nics, token=TOKEN)) as opened:
        yield opened


def task(target: Endpoint, *, seconds: float = 0.0, source: str = "127.0.0.9") -> ProbeTask:
    return ProbeTask(source_host="a", source_nic="eth0", source_address=source, target=target, seconds=seconds)


def test_latency_and_bandwidth(listener: Listener) -> None:
    assert [(e.nic, e.address) for e in listener.endpoints] == [("eth0", "127.0.0.2"), ("mlx5_0", "127.0.0.3")]
    first, second = listener.endpoints
    results = run_tasks([task(first), task(second, seconds=0.1)], token=TOKEN)
    assert [result.error for result in results] == [None, None]
    assert results[0].latency_s is not None and 0 < results[0].latency_s < 0.1
    assert results[1].bandwidth_bytes_per_s  # how much depends on how busy the machine is


def test_the_rate_is_that_of_the_link(listener: Listener) -> None:
    # a peer that takes 10 MB/s: bytes that the kernel buffers on the way must not be counted as sent
    rate = 10e6
    with socket.socket() as door:
        door.bind(("127.0.0.5", 0))
        door.listen()
        slow = Endpoint(host="b", nic="eth0", address="127.0.0.5", port=door.getsockname()[1])

        def relay() -> None:
            near, _ = door.accept()
            with near, socket.create_connection((listener.endpoints[0].address, listener.endpoints[0].port)) as far:
                back = threading.Thread(target=pump, args=(far, near, None))
                back.start()
                pump(near, far, rate)
                back.join()

        thread = threading.Thread(target=relay)
        thread.start()
        result = run_task(task(slow, seconds=0.5), token=TOKEN)
        thread.join()
    assert result.error is None, result.error
    assert result.bandwidth_bytes_per_s is not None
    assert 0.7 * rate / busyness() < result.bandwidth_bytes_per_s < 1.3 * rate


def arriving(*spans: tuple[float, float]) -> list[tuple[float, int]]:
    """Return a receiver's byte counts for each millisecond, for spans of (seconds, bytes per second)."""
    samples, now, total = [(0.0, 0)], 0.0, 0.0
    for seconds, rate in spans:
        for _ in range(round(seconds * 1000)):
            now, total = now + 0.001, total + rate / 1000
            if rate:
                samples.append((now, int(total)))
    return samples


@pytest.mark.parametrize(
    "spans",
    [
        [(0.5, 1e7)],
        [(0.1, 5e7), (0.4, 1e7)],  # a shaper's burst
        [(0.2, 1e7), (0.1, 0), (0.2, 1e7)],  # the sender is stopped
        [
            (0.2, 1e7),
            (0.1, 0),
            (0.002, 5e8),
            (0.2, 1e7),
        ],  # the receiver is stopped, and then reads all arrived bytes at once
        [(0.2, 1e7), *[(0.03, 0), (0.001, 5e7), (0.02, 1e7)] * 6],  # both, repeatedly
    ],
)
def test_a_host_that_stops_for_a_while_does_not_change_the_rate(spans: list[tuple[float, float]]) -> None:
    seconds, count = steady_rate(arriving(*spans))
    assert count / seconds == pytest.approx(1e7, rel=0.02)


def pump(source: socket.socket, sink: socket.socket, rate: float | None) -> None:
    source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    while data := source.recv(65536):
        sink.sendall(data)
        if rate is not None:
            threading.Event().wait(len(data) / rate)
    sink.shutdown(socket.SHUT_WR)


def test_who_cannot_be_reached_is_named(listener: Listener) -> None:
    target = listener.endpoints[0]
    with socket.socket() as unused:
        unused.bind(("127.0.0.2", 0))
        closed = Endpoint(host="b", nic="eth0", address="127.0.0.2", port=unused.getsockname()[1])
        result = run_task(task(closed), token=TOKEN)
    assert result.error is not None and result.latency_s is None
    assert f"from a eth0 (127.0.0.9) to b eth0 (127.0.0.2) port {closed.port}: " in result.error
    assert "refused" in result.error
    foreign = run_task(task(target, source="203.0.113.7"), token=TOKEN)
    assert foreign.error is not None and "assign" in foreign.error


def test_silence_ends_in_time() -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.6", 0))
        door.listen()
        silent = Endpoint(host="b", nic="eth0", address="127.0.0.6", port=door.getsockname()[1])
        start = time.monotonic()
        result = run_task(task(silent), token=TOKEN, timeout_s=0.2)
    assert time.monotonic() - start < 4
    assert result.error is not None and "no answer within" in result.error


def test_another_job_and_another_host_are_told_apart(listener: Listener) -> None:
    target = listener.endpoints[0]
    other_job = run_task(task(target), token=b"x" * 32)
    meant = Endpoint(host="c", nic="eth0", address=target.address, port=target.port)  # the same private address
    other_host = run_task(task(meant), token=TOKEN)
    for result in (other_job, other_host):
        assert result.error is not None and "another host or another job" in result.error


def test_hostile_peers_do_no_harm(listener: Listener) -> None:
    address = (listener.endpoints[0].address, listener.endpoints[0].port)
    before = threading.active_count()
    idle = socket.create_connection(address)
    for payload in (b"", b"GET / HTTP/1.0\r\n\r\n", secrets.token_bytes(52), b"\xff" * 100_000):
        received = b""
        # the listener may close the connection at any moment
        with contextlib.suppress(OSError), socket.create_connection(address) as hostile:
            hostile.sendall(payload)
            hostile.shutdown(socket.SHUT_WR)
            while part := hostile.recv(65536):
                received += part
        assert len(received) <= 24  # the greeting: without proof, nothing is revealed or echoed
    reset = socket.create_connection(address)
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.close()
    assert run_task(task(listener.endpoints[0]), token=TOKEN).error is None
    idle.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    assert threading.active_count() <= before


# The results of measurements, and how they are used


def two_clusters() -> Topology:
    def host(name: str, kind: str) -> Host:
        return Host(
            name=name, devices=1, nics=(nic("mlx5_0", "127.1.0.1", kind=kind, rate=25e9), nic("eth0", "127.0.0.1"))
        )

    a = Cluster(name="a", hosts=tuple(host(f"a{index}", "infiniband") for index in range(3)), fabric="infiniband")
    b = Cluster(name="b", hosts=(host("b0", "roce"),), fabric="roce")
    return Topology(clusters=(a, b))


def over_ethernet(**sizes: int) -> Topology:
    """Return clusters of these names and numbers of hosts, each of which has one Ethernet card."""
    card = nic("eth0", "127.0.0.1")
    hosts = {n: tuple(Host(name=f"{n}{i}", devices=1, nics=(card,)) for i in range(size)) for n, size in sizes.items()}
    return Topology(clusters=tuple(Cluster(name=name, hosts=of_cluster) for name, of_cluster in hosts.items()))


def result_of(*, rate: float | None = 1e8, error: str | None = None) -> ProbeResult:
    return ProbeResult(latency_s=None if error else 1e-4, bandwidth_bytes_per_s=None if error else rate, error=error)


def test_each_class_of_link_is_measured_once() -> None:
    topology = two_clusters()
    pairs = measure.choose_pairs(topology)
    assert [(pair.clusters, pair.transport) for pair in pairs] == [
        (("a", "a"), "infiniband"),
        (("a", "a"), "ethernet"),
        (("a", "b"), "ethernet"),
    ]
    results = {pair.key: result_of() for pair in pairs}
    measured = measure.with_speeds(topology, pairs, results)
    speed = measured.clusters[0].speed("infiniband")
    assert speed == LinkSpeed(
        transport="infiniband", bandwidth_bytes_per_s=1e8, latency_s=1e-4, nic_bytes_per_s=25e9, measured=True
    )
    assert measured.links[0].measured and measured.measured_at_s is not None
    assert measure.choose_pairs(measured) == []


@pytest.mark.parametrize("lost", [0, 1])
def test_all_hosts_of_two_clusters_measure_their_link_at_once(lost: int) -> None:
    topology = over_ethernet(a=10, b=12, c=1)
    pairs = measure.choose_pairs(topology)
    between = [pair.hosts for pair in pairs if pair.clusters == ("a", "b")]
    assert between == [(f"a{index}", f"b{index}") for index in range(10)], "each host once"
    assert len({pair.key for pair in pairs}) == len(pairs)
    failed = [pair.key for pair in pairs if pair.hosts in between[:lost]]
    results = {pair.key: result_of(error="gone" if pair.key in failed else None) for pair in pairs}
    measured = measure.with_speeds(topology, pairs, results)
    links = {link.ends: link.bandwidth_bytes_per_s for link in measured.links}
    assert links == {("a", "b"): pytest.approx((10 - lost) * 1e8), ("a", "c"): 1e8, ("b", "c"): 1e8}
    assert [" and ".join(pair) in warning for pair, warning in zip(between, measured.warnings, strict=False)] == [
        True
    ] * lost


def test_a_peer_that_does_not_answer_is_unreachable() -> None:
    topology = two_clusters()
    pairs = measure.choose_pairs(topology)
    results = {pair.key: result_of(error="port 7: refused") for pair in pairs}
    measured = measure.with_speeds(topology, pairs, results)
    one, other = pairs[-1].hosts
    assert measured.warnings[-1] == f"{one} and {other} do not reach each other over ethernet: port 7: refused"
    assert measured.links == () and measured.measured_at_s is None
    stated = measured.clusters[0].speed("infiniband")
    assert stated is not None and not stated.measured and stated.bandwidth_bytes_per_s == 25e9


def test_what_a_file_states_is_not_measured() -> None:
    topology = two_clusters()
    link = Link(ends=("b", "a"), transport="ethernet", bandwidth_bytes_per_s=1.0, latency_s=0.0)
    stated = Topology(clusters=topology.clusters, links=(link,))
    assert [pair.clusters for pair in measure.choose_pairs(stated)] == [("a", "a"), ("a", "a")]


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=64))
@settings(max_examples=30, deadline=None)
def test_rounds_fit_the_time_and_no_host_is_in_two_pairs_at_once(sizes: list[int]) -> None:
    pairs = measure.choose_pairs(over_ethernet(**{f"c{index}h": size for index, size in enumerate(sizes)}))
    inside = sum(size > 1 for size in sizes)
    assert len({pair.clusters for pair in pairs}) == inside + len(sizes) * (len(sizes) - 1) // 2
    slots, seconds, interval = measure.schedule(pairs)
    slot_of = {}
    for pair, slot in zip(pairs, slots, strict=True):
        assert slot_of.setdefault((pair.clusters, pair.transport), slot) == slot, "of one link, at once"
    seen = set()
    for pair, slot in zip(pairs, slots, strict=True):
        for host in pair.hosts:
            assert (host, slot) not in seen
            seen.add((host, slot))
    assert 0 < seconds < interval
    assert (max(slots, default=0) + 1) * interval < 8.0 or sum(sizes) > 64
