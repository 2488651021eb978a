"""Contenders of the benchmark: ways of training the same model on the same hosts.

contender = make_contender("ddp")
contender = make_contender('holmes:{"pipeline_parallel_size": 1}')       # with arguments of HolmesStrategy
strategy = contender.make_strategy(world_size=4)
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch.distributed.fsdp import fully_shard

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import ConfigurationError
from recipes.gpt import GPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of training, a process on each host.

    Attributes:
        name: on the command line, with the arguments.
        title: in the table.
        build_strategy: makes the Trainer's strategy, on every rank, of the number of processes and the arguments.
        module: the model's class.
        arguments: of HolmesStrategy.
        accumulates: microbatches are batches of a gradient accumulation window; otherwise the strategy splits a batch.
        alone: each process trains independently, on its part of the batch.
        gloo_on_ethernet: GLOO_SOCKET_IFNAME is set to the Ethernet card, as a careful user would do.
        env: environment variables of its processes, in addition to those of all contenders.
        why_not: returns why it cannot run; None: it can.
    """

    name: str
    title: str
    build_strategy: Callable[[int, Mapping[str, Any]], Strategy]
    module: type[LightningModule] = GPT
    arguments: Mapping[str, Any] = field(default_factory=dict)
    accumulates: bool = True
    alone: bool = False
    gloo_on_ethernet: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    why_not: Callable[[], str | None] = lambda: None

    @property
    def optimizer_nodes(self) -> int:
        """The number of additional hosts that hold parameters and optimizer states."""
        return int(self.arguments.get("optimizer_nodes", 0))

    def make_strategy(self, world_size: int) -> Strategy:
        """Make the Trainer's strategy."""
        return self.build_strategy(world_size, self.arguments)


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeedStrategy on CPUs.

    Lightning's strategy refuses any accelerator other than CUDA (2.6, `setup_environment`) and needs devices with an index. DeepSpeed
    itself runs on CPUs, over gloo, for which torch has a single device.
    """

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        assert self.parallel_devices is not None
        self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]
        super(DeepSpeedStrategy, self).setup_environment()  # skip the check of the accelerator


class ShardedGPT(GPT):
    """GPT with each block, and the remaining parameters, sharded over all processes by FSDP2."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)


class UnsyncedGPT(ShardedGPT):
    """ShardedGPT whose gradients are reduced after the last microbatch only, and unsharded until then."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        made: Any = self  # fully_shard has made it an FSDPModule
        made.set_requires_gradient_sync((batch_idx + 1) % self.trainer.accumulate_grad_batches == 0)


def _build_fsdp2(world_size: int, arguments: Mapping[str, Any]) -> Strategy:
    return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1, process_group_backend="gloo")


def _why_not_deepspeed() -> str | None:
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install -c constraints.txt deepspeed)"
    return None


_ALL = (
    # the lower bound: no way of training on these hosts computes or waits less
    Contender(
        name="floor",
        title="no communication (the floor)",
        build_strategy=lambda world_size, arguments: SingleDeviceStrategy(device="cpu"),
        alone=True,
    ),
    Contender(
        name="ddp",
        title="DDP",  # Lightning reduces after the last microbatch only (no_sync)
        build_strategy=lambda world_size, arguments: DDPStrategy(process_group_backend="gloo"),
    ),
    Contender(name="fsdp2", title="FSDP2", build_strategy=_build_fsdp2, module=ShardedGPT),
    Contender(
        name="fsdp2-no-sync",
        title="FSDP2, reduced after the last microbatch",
        build_strategy=_build_fsdp2,
        module=UnsyncedGPT,
    ),
    Contender(
        name="deepspeed",
        title="DeepSpeed ZeRO-3",
        build_strategy=lambda world_size, arguments: CPUDeepSpeedStrategy(stage=3, process_group_backend="gloo"),
        env={"DS_ACCELERATOR": "cpu"},  # otherwise it uses a GPU if there is one
        why_not=_why_not_deepspeed,
    ),
    Contender(
        name="holmes",
        title="Holmes",
        build_strategy=lambda world_size, arguments: HolmesStrategy(**arguments),
        accumulates=False,
        gloo_on_ethernet=False,
    ),
)
CONTENDERS: dict[str, Contender] = {contender.name: contender for contender in _ALL}


def make_contender(text: str) -> Contender:
    """Return the contender of a name, or of 'holmes:' and HolmesStrategy's arguments as JSON. Raises ConfigurationError."""
    name, _, arguments = text.partition(":")
    if name not in CONTENDERS or (arguments and name != "holmes"):
        raise ConfigurationError(f"{text!r} is no contender; there are {', '.join(CONTENDERS)} and holmes:{{...}}")
    contender = CONTENDERS[name]
    if not arguments:
        return contender
    try:
        given = json.loads(arguments)
    except ValueError as error:
        raise ConfigurationError(f"{text!r}: the arguments are no JSON ({error})") from None
    shown = ", ".join(f"{key}={value}" for key, value in given.items())
    return dataclasses.replace(contender, name=text, title=f"Holmes, {shown}", arguments=given)
