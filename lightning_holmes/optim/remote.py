"""The worker's side of training with optimizer nodes: gradients are sent stage by stage, and a commit tells the nodes to step.

The user's optimizer stays on the worker with its own groups, whose options schedulers change; the groups hold no parameters, so that
its own step does nothing. After it the commit is sent, with these options. Clipping asks the nodes for the norm, and is sent with the
commit.

    reducer = RemoteReducer(parameters, groups, placement, is_eager=True)           # in place of LayeredReducer
    host = RemoteHost(optimizer, names, parameters, reducer, groups, ...)                        # in place of ShardedHost
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.comm.freed_memory import give_back_freed_memory
from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.comm.objects import any_of
from lightning_holmes.comm.queue import Work
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.optim.after_step import AfterStep
from lightning_holmes.optim.elementwise import marks_of
from lightning_holmes.optim.host import OptimizerHost, in_precision_of
from lightning_holmes.optim.host_memory import HostMemory
from lightning_holmes.optim.layered import LayeredReducer
from lightning_holmes.optim.node.description import options_of
from lightning_holmes.optim.node.link import Action, Transfer
from lightning_holmes.optim.remote_parameters import RemoteParameters, answer_of
from lightning_holmes.optim.unit import Unit
from lightning_holmes.plan.placement import Placement


class RemoteReducer(LayeredReducer):
    """Sends the gradients of parameters that optimizer nodes hold; nodes sum them over the workers.

    Args:
        is_eager: whether nodes update a unit as soon as its last gradient has arrived.

    Attributes:
        window: counts the windows of accumulated batches; the optimizer steps after each.
        is_complete: whether all gradients of the window have been queued for sending.
        is_half_done: whether nodes may have updated some units already, while the others are updated only at the commit.
        options: returns the options of the optimizer's groups.
    """

    shards: RemoteParameters

    def __init__(
        self, shards: RemoteParameters, groups: ProcessGroups, placement: Placement, *, is_eager: bool
    ) -> None:
        super().__init__(shards, groups, placement, queue=shards.commands)
        self._host_memory = HostMemory(self._device)  # the queue's
        self.window = 0
        self.is_complete = self.is_half_done = False
        self.is_eager = is_eager
        self.options: Callable[[], list[dict[str, Any]]] = list
        self._is_last = False
        self._host_memory.reserve(map(self._sizes, (*self._stages, None)))

    def begin(self, *, last: bool) -> None:
        if self.is_half_done:
            raise UnsupportedModuleError(
                "the optimizer did not step after a batch, with whose gradients optimizer nodes had updated layers already; override "
                "on_before_optimizer_step, after which nodes wait for the step, or use optimizer_nodes=0"
            )
        if self._is_new:
            self.window += 1
        self.is_complete = False
        self._is_last = self.is_eager and last
        super().begin(last=last)
        if self._is_last:
            self.shards.perform(
                Action.BEGIN, everyone=True, waits=False, number=self.window, message={"options": self.options()}
            )

    def _start_reduction(self, units: Sequence[Unit], buffers: Sequence[Tensor], label: str) -> Work:
        """Start to send gradients; the work that is returned is done when their buffers may be used again."""
        window, is_last, tree = self.window, self._is_last, self.shards.tree
        touched = [torch.tensor([name in self._touched for name in unit.names], dtype=torch.uint8) for unit in units]
        self.is_half_done |= is_last
        hosts: list[Tensor] = []

        def push() -> None:
            self._host_memory.wait()
            transfers: list[Transfer] = []
            for unit, flags, host in zip(units, touched, hosts or buffers, strict=True):
                link, number = self.shards.link_of(unit)
                transfers += self.shards.order(link, Action.GRADIENT, unit=number, number=window, flag=is_last)
                transfers.append(link.send(flags))
                if tree.size > 1 or flags.any():
                    tree.sum(host)
                    transfers.append(link.send(tree.share(host)))
            for transfer in transfers:
                transfer.wait()

        if not self._host_memory.copies:
            return self.queue.start(push, "bucket_reduce", of=label)
        copied = self.queue.start(lambda: hosts.extend(self._host_memory.start_copying(buffers)))
        self._works.append(self.queue.start(push, "bucket_reduce", of=label))
        return copied

    def end(self) -> None:
        """End a batch: sum gradients of parameters that other pipeline ranks hold, too, over these ranks before they are sent."""
        for unit in self._trained[None] if None in self._open else ():
            if unit.ranks:  # every rank sends the union of the parameters that got a gradient on any of these ranks
                flags = torch.tensor([float(name in self._touched) for name in unit.names])
                dist.all_reduce(flags, group=self._shared[unit.ranks].host)
                self._touched |= {name for name, flag in zip(unit.names, flags.tolist(), strict=True) if flag}
        super().end()

    def finish(self, *, last: bool) -> None:
        """After the ``last`` batch of a window: note that all its gradients are on their way. Does not wait."""
        if not last:
            return
        self._works.clear()
        self._is_new = self.is_complete = True

    def close(self) -> None:
        super().close()
        self.shards.queue.close()


class RemoteHost(OptimizerHost):
    """Optimizer nodes step, and hold the states; implements OwnedStates, too. All replicas must create one, with equal arguments.

    Args:
        names: for each of the optimizer's groups, the names of the parameters that this rank's stages hold.
        is_owner: whether this rank's copy of a parameter, by name, is the one that counts in a norm.
        scaler: the scaler of ``precision="16-mixed"``, or None.
    """

    whole_gradients = False

    def __init__(
        self,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        parameters: RemoteParameters,
        reducer: RemoteReducer,
        groups: ProcessGroups,
        *,
        is_owner: Callable[[str], bool],
        scaler: Any,
    ) -> None:
        self.optimizer, self._scaler = optimizer, scaler
        self._edits: list[tuple[str, float]] = []
        """The changes that unscaling and clipping make to this window's gradients, in order; see ``Edit`` in node/unit.py."""
        self._stepped = {name for of_group in names for name in of_group}
        self._parameters, self._reducer = parameters, reducer
        self._num_groups = len(names)
        self._groups, self._is_owner = groups, is_owner
        held = parameters.parameters
        first = {n: dict(optimizer.state[held[n]]) for n in self._stepped if optimizer.state.get(held[n])}
        for group in optimizer.param_groups:
            group |= {key: [] for key in ("params", "param_names") if key in group}
        optimizer.state.clear()
        self.loaded(first)
        reducer.options = lambda: options_of(optimizer)
        self._hook = AfterStep(optimizer, self._commit)

    @property
    def shards(self) -> "RemoteHost":
        return self

    # a step

    def prepare(self) -> None:
        """Before a batch: check that the optimizer's groups are those that the nodes know.

        Raises:
            UnsupportedModuleError: groups were added, or given parameters.
        """
        groups = self.optimizer.param_groups
        if len(groups) != self._num_groups or any(group["params"] for group in groups):
            raise UnsupportedModuleError(
                f"the parameter groups of {type(self.optimizer).__name__} were changed while the module trains, and optimizer nodes step "
                f"those that they know: give it all groups in configure_optimizers, or use optimizer_nodes=0"
            )

    def _commit(self) -> None:
        self.prepare()
        message = {"edits": list(self._edits), "options": options_of(self.optimizer)}
        self._parameters.perform(
            Action.COMMIT, everyone=True, waits=False, number=self._reducer.window, message=message
        )
        self._reducer.is_half_done = False
        self._parameters.version += 1

    def take_gradients(self, *, last: bool, skipped: bool = False) -> None:
        """Show no gradients in ``p.grad``: the nodes have them. After the ``last`` batch of a window, forget the edits."""
        if last:
            self._edits.clear()

    def loss_factor(self) -> float | Tensor:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def unscale(self, factor: float) -> bool:
        """Let the nodes multiply gradients by ``factor`` before they step; returns whether any is not finite, on any stage. All ranks
        must call."""
        overflows = not all(self._parameters.ask(Action.FINITE, number=self._reducer.window))
        if self._groups.pipeline is not None:
            overflows = any_of(overflows, self._groups.pipeline)
        self._edits.append(("scale", factor))
        return overflows

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        given = {id(p) for p in parameters}
        return self._norm({name for name, p in self._parameters.parameters.items() if id(p) in given})

    def _norm(self, names: set[str]) -> Tensor:
        self._check_deferred("a norm of gradients is asked for")
        if not self._reducer.is_complete:
            raise UnsupportedModuleError(
                "a norm of gradients is asked for before the last batch of accumulate_grad_batches: optimizer nodes sum them, and "
                "know it after that batch; ask in on_before_optimizer_step, or use optimizer_nodes=0"
            )
        counted = [name for name in names if self._is_owner(name)]
        message = {"names": counted, "edits": list(self._edits)}
        squared = math.fsum(self._parameters.ask(Action.NORM, number=self._reducer.window, message=message))
        found = torch.tensor(squared, dtype=torch.float64, device=self._groups.builder.device)
        if self._groups.pipeline is not None:
            dist.all_reduce(found, group=self._groups.pipeline)
        return in_precision_of(self._parameters.parameters.values(), found.sqrt())

    def _check_deferred(self, what: str) -> None:
        if self._reducer.is_eager:
            raise UnsupportedModuleError(
                f"{what} where no hook announces it, and optimizer nodes have updated layers with them already: do it in "
                f"on_before_optimizer_step or configure_gradient_clipping, for which nodes wait"
            )

    def clip_by_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """Scale the gradients of all parameters that the optimizer steps, whatever ``parameters`` holds, to at most ``max_norm``."""
        factor = torch.clamp(max_norm / (self._norm(self._stepped) + 1e-6), max=1.0)
        self._edits.append(("scale", factor.item()))

    def clip_by_value(self, parameters: Iterable[nn.Parameter], max_value: float) -> None:
        self._check_deferred("gradients are clipped")
        self._edits.append(("clamp", float(max_value)))

    def abandon(self) -> None:
        self._parameters.abandon()

    # states

    @property
    def is_half_done(self) -> bool:
        """Whether nodes may hold values and states of two different steps, which give no checkpoint. After a failed run it may stay
        so."""
        return self._reducer.is_half_done

    @property
    def names(self) -> set[str]:
        """The parameters whose states this rank reads from a checkpoint: the first replica reads them all, and sends them to the nodes."""
        return self._stepped if self._parameters.replica == 0 else set()

    def cut_by_group(self, states: Mapping[str, Mapping[str, Any]]) -> list[list[dict[str, Any] | None]]:
        """Return no states: the groups hold no parameters on this rank."""
        return [[] for _ in self.optimizer.param_groups]

    def loaded(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Send ``states`` to the nodes, from the first replica."""
        parameters = self._parameters
        for unit in parameters.units if states and not parameters.replica else ():
            given = {n: dict(states[n]) for n in unit.names if n in states}
            parameters.perform(Action.LOAD, unit=unit, message=given)

    def _collected(self, unit: Unit, destination: Callable[[str], int] | None) -> dict[str, dict[str, Any]]:
        """Return the states of those of the unit's parameters that this replica wants. All replicas must call."""
        parameters, wanted = self._parameters, dict[int, list[str]]()
        for name in unit.names:
            for replica in range(parameters.num_replicas) if destination is None else [destination(name)]:
                wanted.setdefault(replica, []).append(name)

        takes = answer_of if parameters.replica in wanted else lambda link: {}
        (found,) = parameters.perform(Action.STATES, unit=unit, message=wanted, then=takes)
        return found  # type: ignore[no-any-return]

    def each_state(self, destination: Callable[[str], int] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the states, one unit at a time; see OwnedStates."""
        self._parameters.settle()
        for unit in self._parameters.units:
            give_back_freed_memory()  # of the unit before, which is large
            yield from self._collected(unit, destination).items()

    def destination(self, name: str) -> int:
        """Return the replica that saves a parameter's state."""
        return self._parameters.destination(name)

    def close(self) -> None:
        """Give parameters their own values again; states can still be collected. The optimizer object refuses to step afterwards."""
        self._hook.remove()
        self.optimizer.register_step_pre_hook(_refuse_step)
        self._parameters.close()


def marks_on(parameters: Mapping[str, nn.Parameter], names: Iterable[Iterable[str]]) -> dict[str, Any]:
    """Return the attributes that were set on the parameters ``names`` (of each group), by name, without parameters that have none."""
    found = {name: marks_of(parameters[name]) for of_group in names for name in of_group}
    return {name: marks for name, marks in found.items() if marks}


def _refuse_step(optimizer: Optimizer, *_: Any) -> None:
    raise UnsupportedModuleError(
        f"this {type(optimizer).__name__} steps after the fit for which it was made: optimizer nodes have taken its parameters and states; "
        f"make a new one, in configure_optimizers for a fit, or use optimizer_nodes=0"
    )
