"""Options: HolmesStrategy's arguments, checked, and what of them a plan depends on.

    options = Options(schedule="zero_bubble_v", num_chunks="auto", plan=None, ...)
    options.asked.num_chunks                # 2: what the schedule asks for
    options.arguments()                     # by name, to be compared between ranks

The defaults are in HolmesStrategy's signature, where users read them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_holmes.callbacks.timeline_monitor import make_monitor
from lightning_holmes.checkpoint import read_plan
from lightning_holmes.cluster.topology import OptimizerHost, Topology
from lightning_holmes.comm.collectives import COMPRESSIONS
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.plan.asked import SHARDINGS, Asked, AskedSharding
from lightning_holmes.plan.collective_choice import check_collective
from lightning_holmes.plan.partition import PARTITION_NAMES, Partition
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.saved_plan import asked_by, check_plan, place_again
from lightning_holmes.plan.schedule import SCHEDULE_NAMES, SCHEDULES


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments as they were given; HolmesStrategy's docstring documents each.

    Raises:
        ConfigurationError: an argument is impossible by itself, or together with another; the message names both and the fix.
    """

    topology: str | Topology
    pipeline_parallel_size: int | Literal["auto"]
    tensor_parallel_size: int
    num_microbatches: int | Literal["auto"]
    eval_num_microbatches: int | Literal["auto"]
    schedule: str
    num_chunks: int | Literal["auto"]
    partition: str | Sequence[int]
    plan: str | None
    layers: str
    broadcast_batch: bool
    save_distributed_checkpoint: bool | Literal["auto"]
    async_checkpoint: bool
    snapshot_every_n_steps: int | Literal["auto"] | None
    gradient_sync: str
    compression: str | None
    sharding: AskedSharding
    optimizer_nodes: int
    optimizer_states: str
    master_weights: bool
    monitor: bool | int
    timeout: timedelta | None

    def __post_init__(self) -> None:
        for name in ("layers", "schedule", "gradient_sync"):
            _check_text(name, getattr(self, name), 'a name, or "auto"')
        if not isinstance(self.topology, Topology):
            _check_text("topology", _path(self.topology), 'the path of a topology file, a Topology, or "auto"')
        if self.plan is not None:
            _check_text("plan", _path(self.plan), "the path of a plan file, or None")
        check_layout(
            pipeline_parallel_size=self.pipeline_parallel_size,
            tensor_parallel_size=self.tensor_parallel_size,
            num_microbatches=self.num_microbatches,
            eval_num_microbatches=self.eval_num_microbatches,
            num_chunks=self.num_chunks,
            schedule=self.schedule,
            schedules=("auto", *SCHEDULE_NAMES),
            partition=self.partition,
        )
        _check_one_of("compression", self.compression, (*COMPRESSIONS, None))
        _check_one_of("sharding", self.sharding, SHARDINGS)
        _check_one_of("save_distributed_checkpoint", self.save_distributed_checkpoint, (True, False, "auto"))
        for name in ("broadcast_batch", "async_checkpoint", "master_weights"):
            _check_one_of(name, getattr(self, name), (True, False))
        if self.timeout is not None and not (isinstance(self.timeout, timedelta) and self.timeout > timedelta()):
            raise ConfigurationError(
                f"timeout={self.timeout!r}: write how long ranks wait for each other, say timedelta(minutes=30), or None"
            )
        every = self.snapshot_every_n_steps
        if every not in (None, "auto") and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigurationError(
                f'snapshot_every_n_steps={every!r}: write after how many steps, "auto", or None for no snapshots'
            )
        make_monitor(self.monitor)
        hosts = len(self.optimizer_hosts)
        if hosts and self.optimizer_nodes == 0:
            # the topology file asks for them, and the cached views below read this field
            object.__setattr__(self, "optimizer_nodes", hosts)
        nodes = self.optimizer_nodes
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 0:
            raise ConfigurationError(f"optimizer_nodes={nodes!r}: write how many there are, or 0 for none")
        check_collective(self.gradient_sync)
        asked = self.asked  # a plan file is read here
        if hosts and nodes != hosts:
            raise ConfigurationError(
                f"optimizer_nodes={nodes!r}, but the topology has {hosts} hosts with role: optimizer; leave optimizer_nodes out"
            )
        _check_text("optimizer_states", self.optimizer_states, '"memory", or a folder of the optimizer nodes')
        if self.optimizer_states != "memory" and not nodes:
            raise ConfigurationError(
                f"optimizer_states={self.optimizer_states!r} is for optimizer nodes, of which there are none; set optimizer_nodes, or leave it out"
            )
        if nodes:
            self._check_optimizer_nodes(f"optimizer_nodes={nodes}")
        if asked.sharding == "parameters":
            self._check_sharded_parameters()
        if self.master_weights and self.sharding == "none":
            raise ConfigurationError(
                'master_weights=True keeps fp32 weights in the shards of the optimizer, but sharding is "none"; leave it at "auto"'
            )

    def _check_optimizer_nodes(self, asked: str) -> None:
        """Refuse arguments that do not go together with optimizer nodes."""
        self._check_layered(asked)
        for name, value, reason in (
            (
                "sharding",
                self.asked.sharding not in ("auto", "none"),
                "nodes hold parameters and states, and replicas no shares of them",
            ),
            (
                "tensor_parallel_size",
                self.tensor_parallel_size > 1,
                "nodes hold whole parameters, not a tensor group's parts",
            ),
            ("compression", self.compression, "workers send gradients and pull parameters as they are"),
            ("gradient_sync", self.gradient_sync != "auto", "nodes sum the gradients"),
        ):
            if value:
                raise ConfigurationError(f"{asked} with {name}={getattr(self.asked, name)!r}: {reason}; omit {name}")

    def _check_layered(self, asked: str) -> None:
        schedule = self.asked.schedule
        if schedule != "auto" and not SCHEDULES[schedule].is_layered:
            raise ConfigurationError(
                f"{asked} with schedule={schedule!r}: each stage would be gathered for each microbatch, or "
                f'stay whole; use schedule="breadth_first", under which all microbatches pass a stage before the next one'
            )

    def _check_sharded_parameters(self) -> None:
        """Refuse arguments that do not go together with sharded parameters."""
        self._check_layered("sharding='parameters'")
        if self.asked.tensor_parallel_size > 1:
            raise ConfigurationError(
                f"sharding='parameters' with tensor_parallel_size={self.asked.tensor_parallel_size}: parameters are sharded over "
                f"replicas or over a tensor group, not both; leave one of them out"
            )
        if self.compression is not None:
            raise ConfigurationError(
                f"sharding='parameters' with compression={self.compression!r}: compressed sums are not exact, and each "
                f"replica owns the only copy of its share; leave compression out"
            )

    @functools.cached_property
    def given_plan(self) -> Plan | None:
        """The plan of the file or checkpoint that ``plan`` names."""
        if self.plan is None:
            return None
        saved = read_plan(Path(self.plan))
        if saved == "":
            raise ConfigurationError(f"plan={self.plan!r} is a folder or checkpoint without a plan; name a plan file")
        return Plan.load(self.plan) if saved is None else Plan.from_yaml_text(saved, source=self.plan)

    @functools.cached_property
    def optimizer_hosts(self) -> tuple[OptimizerHost, ...]:
        """The optimizer hosts of the given topology. Empty if its file cannot be read: that error is raised when the job reads the file."""
        topology = self.topology
        if not isinstance(topology, Topology) and topology != "auto":
            try:
                topology = Topology.from_yaml(topology)
            except ConfigurationError:
                return ()
        return topology.optimizer_hosts if isinstance(topology, Topology) else ()

    @functools.cached_property
    def asked(self) -> Asked:
        """What the arguments, or the plan file, ask of a plan. With sharded parameters or optimizer nodes the schedule is "breadth_first" unless
        another one is named."""
        asked = Asked(**{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(Asked)})
        if self.given_plan is not None:
            return asked_by(self.given_plan, asked, source=str(self.plan))
        if asked.schedule != "auto":
            return dataclasses.replace(asked, num_chunks=SCHEDULES[asked.schedule].chunks(asked.num_chunks))
        layered = asked.sharding == "parameters" or asked.optimizer_nodes > 0
        return dataclasses.replace(asked, schedule="breadth_first") if layered else asked

    def describe_sharding(self, sharding: str) -> tuple[str, str]:
        """Return how ``sharding`` is asked for, and how to have none, for messages."""
        if self.plan is not None:
            return f"plan={self.plan!r} has sharding: {sharding}", "write sharding: none in that file"
        return f'sharding="{sharding}"', 'use sharding="none"'

    @property
    def is_layered(self) -> bool:
        """Whether it is decided that parameters are whole only while their stage is computed."""
        return self.asked.sharding == "parameters" or self.optimizer_nodes > 0

    @property
    def sent_dtype(self) -> torch.dtype | None:
        """The dtype of activations that cross between clusters; None for their own dtype."""
        return None if self.compression is None else COMPRESSIONS[self.compression]

    def check_given_plan(
        self, topology: Topology, *, world_size: int, structure: ModuleStructure | None = None
    ) -> None:
        """Refuse a plan file that was made for other clusters or, when the module's structure is known, other layers.

        Raises:
            ConfigurationError: the plan does not fit; the message names the differences.
        """
        if self.given_plan is None:
            return
        check_plan(
            self.given_plan,
            topology=topology,
            placement=place_again(self.given_plan, topology, world_size),
            layers=None if structure is None else structure.layers,
            num_layers=None if structure is None else structure.num_layers,
            source=f"the plan in {self.plan}",
        )

    def arguments(self) -> dict[str, Any]:
        """Return by name the arguments that must be the same on all ranks, without the topology; a plan file is replaced by the options that it
        asks for."""
        given = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        del given["topology"], given["plan"]
        return given | dataclasses.asdict(self.asked)


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_text(name: str, value: Any, what: str) -> None:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ConfigurationError(f"{name}={value!r} is not allowed; write {what}")


def _check_one_of(name: str, value: Any, known: Sequence[Any]) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in known):  # 1 is not True
        *others, last = (f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in known)
        raise ConfigurationError(f"{name}={value!r} is not known; use {', '.join(others)} or {last}")


def check_layout(
    *,
    pipeline_parallel_size: Any,
    tensor_parallel_size: Any = 1,
    num_microbatches: Any,
    eval_num_microbatches: Any = "auto",
    num_chunks: Any,
    schedule: Any,
    schedules: Sequence[str],
    partition: Any = "self_adapting",
) -> None:
    """Refuse pipeline layout arguments that are wrong by themselves. ``schedules``: the known names.

    Raises:
        ConfigurationError: the message names the argument and the values that it may have.
    """
    for name, value, may_be_auto in (
        ("pipeline_parallel_size", pipeline_parallel_size, True),
        ("num_microbatches", num_microbatches, True),
        ("eval_num_microbatches", eval_num_microbatches, True),
        ("tensor_parallel_size", tensor_parallel_size, False),
        ("num_chunks", num_chunks, True),
    ):
        if may_be_auto and value == "auto":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            auto = '"auto" or ' if may_be_auto else ""
            raise ConfigurationError(f"{name}={value!r} must be {auto}a whole number of at least 1")
    if partition == "proportional":
        raise ConfigurationError(
            'partition="proportional" is gone; "self_adapting" knows the speeds of the hosts, and what the layers cost besides'
        )
    if isinstance(partition, str) and partition not in PARTITION_NAMES:
        known = ", ".join(f'"{name}"' for name in PARTITION_NAMES)
        raise ConfigurationError(f"partition={partition!r} is not known; write one of {known}, or layer counts")
    if not isinstance(partition, str):
        try:
            Partition(tuple(partition))
        except TypeError:
            raise ConfigurationError(
                f"partition={partition!r} is not allowed; write a rule's name or a list of layer counts, say [4, 4]"
            ) from None
    if schedule not in schedules:
        raise ConfigurationError(f"schedule={schedule!r} is unknown; choose one of {', '.join(schedules)}")
    if schedule == "auto":
        return
    spec = SCHEDULES[schedule]
    if num_chunks != "auto" and num_chunks > 1 and not spec.is_chunked:
        raise ConfigurationError(
            f'num_chunks={num_chunks} needs schedule="interleaved_1f1b" or "breadth_first" (or "auto"), not {schedule!r}'
        )
    if num_chunks not in ("auto", 1) and spec.chunks(num_chunks) != num_chunks:
        raise ConfigurationError(
            f"num_chunks={num_chunks} cannot be had with schedule={schedule!r}, which runs {spec.num_chunks} chunks a "
            f"rank; leave num_chunks out"
        )
    if tensor_parallel_size > 1 and spec.is_split:
        raise ConfigurationError(
            f"schedule={schedule!r} with tensor_parallel_size={tensor_parallel_size}: the order in which a split backward "
            f"calls the tensor group's collectives may differ between its ranks, which would hang; use "
            f'schedule="1f1b" or tensor_parallel_size=1'
        )
    if num_chunks == 1 and spec.is_interleaved:
        raise ConfigurationError(f'schedule="{schedule}" needs num_chunks of at least 2, say num_chunks=2')
