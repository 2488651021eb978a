"""Options: which are refused on their own, and the views that are made of the arguments."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from plans import plan_of

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import ConfigurationError

SWITCHES = ("broadcast_batch", "async_checkpoint", "master_weights", "save_distributed_checkpoint")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pipeline_parallel_size": 0}, 'pipeline_parallel_size=0 must be "auto" or a whole number'),
        ({"num_microbatches": True}, "num_microbatches=True"),
        ({"tensor_parallel_size": "auto"}, "tensor_parallel_size='auto' must be a whole number"),
        ({"num_chunks": 0}, "num_chunks=0"),
        ({"schedule": "2f2b"}, "schedule='2f2b' is unknown"),
        ({"partition": "equal"}, "partition='equal' is not known"),
        ({"num_chunks": 2, "schedule": "gpipe"}, "num_chunks=2 needs"),
        ({"num_chunks": 3, "schedule": "zero_bubble_v"}, "leave num_chunks out"),
        ({"num_chunks": 1, "schedule": "interleaved_1f1b"}, "needs num_chunks of at least 2"),
        ({"tensor_parallel_size": 2, "schedule": "zero_bubble"}, "split backward"),
        ({"compression": "fp16"}, '"bf16" or None'),
        ({"sharding": True}, "sharding=True is not known"),
        ({"master_weights": 1}, "master_weights=1"),
        ({"sharding": "none", "master_weights": True}, 'sharding is "none"'),
        ({"sharding": "all"}, '"auto", "none", "optimizer" or "parameters"'),
        ({"save_distributed_checkpoint": "yes"}, 'True, False or "auto"'),
        ({"monitor": 0}, "monitor=0"),
        ({"snapshot_every_n_steps": 0}, "snapshot_every_n_steps=0: write after how many steps"),
        ({"snapshot_every_n_steps": "always"}, "snapshot_every_n_steps='always'"),
        ({"timeout": 10}, "timeout=10: write how long"),
        ({"timeout": timedelta(seconds=-1)}, "timeout=datetime"),
        ({"topology": None}, "topology=None is not allowed"),
        ({"topology": {"clusters": []}}, "topology={'clusters'.* is not allowed; write the path"),
        ({"topology": "a\0b"}, "topology="),
        ({"plan": "a\0b"}, "plan="),
        ({"partition": []}, "there are no counts"),
        ({"partition": [4, -1]}, "stage 1 has -1 layers"),
        ({"partition": [True, 2]}, "stage 0 has True layers"),
        ({"partition": None}, "partition=None is not allowed"),
        ({"layers": None}, "layers=None is not allowed"),
        ({"layers": " "}, "layers=' ' is not allowed"),
        ({"schedule": None}, "schedule=None is not allowed"),
        ({"gradient_sync": []}, "gradient_sync=.* is not allowed"),
        ({"compression": []}, "compression=.* is not known"),
        *(({name: "true"}, f"{name}='true' is not known") for name in SWITCHES),
        ({"gradient_sync": "ring"}, "'all_reduce', 'reduce_scatter', 'p2p', 'hierarchical'"),
    ],
)
def test_what_is_wrong_by_itself_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        HolmesStrategy(**arguments)


def test_a_plan_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"plan\.yaml"):
        HolmesStrategy(plan=str(tmp_path / "plan.yaml"))


def test_a_timeout_may_be_none_and_a_path_an_object(tmp_path: Path) -> None:
    HolmesStrategy(timeout=None, topology=tmp_path / "later.yaml", partition=(2, 2))  # type: ignore[arg-type]


def test_a_topology_file_asks_for_optimizer_nodes(tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text("clusters: [{name: a, hosts: [{name: gpu, devices: 2}, {name: cpu, count: 2, role: optimizer}]}]")
    options = HolmesStrategy(topology=str(path))._options
    assert options.optimizer_nodes == options.asked.optimizer_nodes == 2
    assert options.asked.schedule == "breadth_first"
    with pytest.raises(
        ConfigurationError, match="optimizer_nodes=3, but the topology has 2 hosts with role: optimizer"
    ):
        HolmesStrategy(topology=str(path), optimizer_nodes=3)


def test_a_folder_for_states_needs_an_optimizer_node() -> None:
    with pytest.raises(ConfigurationError, match="is for optimizer nodes, of which there are none"):
        HolmesStrategy(optimizer_states="/disk")


@pytest.mark.parametrize("collective", ["all_reduce", "hierarchical"])
def test_what_sums_over_replicas_is_no_way_to_optimizer_nodes(collective: str) -> None:
    with pytest.raises(ConfigurationError, match=f"gradient_sync='{collective}': nodes sum the gradients; omit"):
        HolmesStrategy(optimizer_nodes=1, gradient_sync=collective)


PLAN = plan_of((0, 1), stages=(1,) * 4, schedule="breadth_first", sharding="parameters", collectives=("p2p",))


def test_a_plan_file_stands_for_all_arguments_that_it_decides(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    PLAN.save(path)
    options = HolmesStrategy(plan=str(path))._options
    assert (options.asked.sharding, options.asked.gradient_sync, options.is_layered) == ("parameters", ("p2p",), True)
    assert options.describe_sharding("parameters")[1] == "write sharding: none in that file"
    for arguments, words in (
        ({"sharding": "none"}, "leave out sharding='none'"),
        ({"gradient_sync": "p2p"}, "leave out gradient_sync='p2p'"),
        ({"num_microbatches": 4, "partition": [2, 2]}, r"leave out num_microbatches=4, partition=\[2, 2\]"),
        ({"compression": "bf16"}, "compressed sums are not exact"),
        ({"optimizer_nodes": 1}, "optimizer_nodes=1 with sharding='parameters'"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            HolmesStrategy(plan=str(path), **arguments)
    replace(PLAN, sharding="none").save(path)
    with pytest.raises(
        ConfigurationError, match="has sharding: none; leave master_weights out, or write sharding: opt"
    ):
        HolmesStrategy(plan=str(path), master_weights=True)
