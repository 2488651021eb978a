"""Messages between workers and optimizer nodes, and authentication; how units are summed and distributed."""

import socket
import threading
from typing import Any

import pytest
import torch
from torch import nn

from lightning_holmes.cluster.topology import OptimizerHost
from lightning_holmes.errors import ConfigurationError, ConnectionLostError
from lightning_holmes.optim.node.channel import Channel, decode, encode
from lightning_holmes.optim.node.description import UnitLayout, build_optimizer, describe_optimizer, find_class
from lightning_holmes.optim.node.server import Listener
from lightning_holmes.optim.node.unit import Unit
from lightning_holmes.optim.remote_parameters import assign
from lightning_holmes.strategy.optimizer_nodes import cluster_of, nodes_of, share_nodes

SECRET = "known to both"


@pytest.fixture
def answered() -> Any:
    """A listener that sends back each message, and the hellos that it has received."""
    heard: list[Any] = []

    def serve(channel: Channel, hello: Any) -> None:
        heard.append(hello)
        channel.send(channel.receive())

    listener = Listener("127.0.0.1", SECRET, "a test", serve)
    yield listener.address, heard
    listener.close()


def test_plain_values_and_tensors_travel(answered: Any) -> None:
    address, heard = answered
    channel = Channel.connect(address, SECRET, {"kind": "pull", "betas": (0.9, 0.99)}, peer="a test")
    message = {
        "plain": [None, True, 3, 0.1, float("inf"), "ä"],
        "betas": (0.9, (1, 2)),
        "numbered": {1: "one", "a": {}},
        "tensors": [torch.arange(6.0).view(2, 3), torch.ones(3, dtype=torch.bfloat16), torch.tensor(7), torch.zeros(0)],
    }
    channel.send(message)
    found = channel.receive()
    tensors = found.pop("tensors")
    assert found == {key: value for key, value in message.items() if key != "tensors"}
    for mine, theirs in zip(message["tensors"], tensors, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert heard == [{"kind": "pull", "betas": (0.9, 0.99)}]
    channel.close()


def test_a_tensor_is_received_where_it_shall_lie(answered: Any) -> None:
    channel = Channel.connect(answered[0], SECRET, {}, peer="a test")
    channel.send({"values": torch.arange(4.0)})
    place = torch.zeros(4)
    assert channel.receive(into=[place])["values"] is place and place.tolist() == [0, 1, 2, 3]
    channel.close()


def test_who_does_not_know_the_secret_is_not_heard(answered: Any) -> None:
    address, heard = answered
    with pytest.raises(ConnectionLostError, match="connection lost to a test"):
        Channel.connect(address, "another", {}, peer="a test")
    assert not heard


def test_a_listener_that_does_not_know_the_secret_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            channel = Channel(server.accept()[0], "a worker")
            channel.send({"nonce": "0"})
            channel.receive()
            channel.send({"proof": "0"})

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ConnectionLostError, match="does not know this job's secret"):
            Channel.connect(server.getsockname()[:2], SECRET, {}, peer="a node")
        thread.join()


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, [lambda: None], torch.float32])
def test_nothing_else_is_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="is no plain data"):
        encode(value, [])


def test_encoding_keeps_what_json_would_lose() -> None:
    value = {"lists": [[], ()], "dict": {"tensor": 3}}
    assert decode(encode(value, []), []) == value


def layout() -> UnitLayout:
    return UnitLayout(
        names=("a", "b"),
        shapes=((2,), (1, 3)),
        starts=(0, 2),
        numel=5,
        dtype=torch.float32,
        sent_dtype=torch.float32,
        gradient_dtype=torch.float32,
        is_trained=True,
    )


def unit_of(num_workers: int) -> Unit:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, 3))]
    told = describe_optimizer(torch.optim.SGD(parameters, lr=1.0), [["a", "b"]], {})
    unit = Unit(UnitLayout.from_plain(layout().to_plain()), torch.optim.SGD, told, num_workers=num_workers)
    unit.keep(torch.zeros(5), 1)
    return unit


def test_workers_are_summed_in_the_order_of_their_ranks() -> None:
    values = [torch.full((5,), v) for v in (1e8, -1e8, 1.0)]  # any other order gives 0 or another rounding
    expected = values[0] + values[1] + values[2]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        unit = unit_of(3)
        for worker in order:
            unit.arrive(worker, 1, ["a"], values[worker].clone())
        unit.update(1, [("scale", 0.5)], [{"lr": 1.0}])
        assert torch.equal(unit.parameters["a"].detach(), -0.5 * expected[:2])
        assert not unit.parameters["b"].any(), "which no worker has reached"


def test_a_worker_that_another_one_speaks_for_counts_and_adds_nothing() -> None:
    unit = unit_of(3)
    arrived = [
        unit.arrive(worker, 1, touched, gradient, is_last=True)
        for worker, touched, gradient in ((1, (), None), (2, ["a"], torch.full((5,), 2.0)), (0, [], torch.ones(5)))
    ]
    assert arrived == [False, False, True]
    unit.update(1, [], [{"lr": 1.0}])
    assert unit.parameters["a"].tolist() == [-3.0, -3.0] and not unit.parameters["b"].any()


def test_gradients_that_were_not_committed_are_dropped() -> None:
    unit = unit_of(1)
    unit.arrive(0, 1, ["a", "b"], torch.ones(5))
    unit.arrive(0, 2, ["a", "b"], torch.full((5,), 3.0))
    assert unit.norm_squared(2, {"b"}, []) == pytest.approx(27.0)
    unit.update(2, [("clamp", 2.0)], [{"lr": 1.0}])
    assert unit.version == 2
    with unit.values() as values:
        assert values.tolist() == [-2.0] * 5


def test_states_come_back_as_torch_loads_them() -> None:
    unit = unit_of(1)
    unit.load({"a": {"momentum_buffer": torch.ones(2)}})
    with unit.states({"a", "b"}) as found:
        assert torch.equal(found["a"]["momentum_buffer"], torch.ones(2)) and "b" not in found


def test_an_optimizer_without_a_parameter_of_the_unit_is_none() -> None:
    told = describe_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), [["c"]], {})
    assert build_optimizer(torch.optim.SGD, told, {"a": nn.Parameter(torch.zeros(2))}) is None


def test_a_class_that_the_script_has_not_imported_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"antigravity.Mine is not known"):
        find_class({"module": "antigravity", "name": "Mine"}, may_import=False)
    with pytest.raises(ConfigurationError, match="is not known"):
        find_class({"module": "os", "name": "system"}, may_import=False)


def test_nodes_are_shared_out() -> None:
    assert [nodes_of(rank, 2, 1) for rank in (0, 1)] == [[0], [0]]
    assert [nodes_of(rank, 2, 3) for rank in (0, 1)] == [[0, 2], [1]]
    assert [nodes_of(rank, 4, 2) for rank in range(4)] == [[0], [1], [0], [1]]
    assert share_nodes([None, None], [None]) == [[0], [0]]
    assert share_nodes(["a", "b"], ["b", "a"]) == [[1], [0]]
    assert share_nodes(["a", "b", "b"], ["b", "a", "b", "a"]) == [[1, 3], [0], [2]]
    assert share_nodes(["a", None], ["a", "c"]) == [[0], [1]], "those of no rank's cluster"
    assert share_nodes(["a", "b"], ["a"]) == [[0], [0]], "where there is no other"
    hosts = [OptimizerHost(name="cpu.example.org", cluster="a"), OptimizerHost(name="far")]
    assert [cluster_of(name, hosts) for name in ("cpu", "cpu.example.org", "far", "who")] == ["a", "a", None, None]
    places = assign({0: 10, 1: 40, 2: 30, 3: 20}, 2)
    assert places == {1: 0, 2: 1, 3: 1, 0: 0}
    of_stages = assign({0: 10, 1: 40, 2: 30, 3: 30}, 2, stage_of={0: 0, 1: 0, 2: 1, 3: None})
    assert of_stages == {1: 0, 2: 1, 3: 1, 0: 1}, "a stage has several, though the other one holds less"
