"""What a worker does where optimizer nodes step: gradients go there stage by stage, and a commit says with which options to step.

The user's optimizer stays on the worker, with its real groups, whose options schedulers change; its groups hold no parameters, so that
its own step does nothing, and the commit goes out after it. Clipping asks the nodes for the norm, and travels with the commit.

    reducer = RemoteReducer(parameters, groups, placement, device, ...)      # LayeredReducer's part
    states = RemoteOptimizer(optimizer, names, parameters, reducer)          # ShardedOptimizer's
    host = RemoteHost(states, reducer, groups, is_owner=pipeline.is_owner)   # ShardedHost's
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.comm.objects import any_of
from lightning_holmes.comm.queue import OnRun, Work
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.optim.after_step import AfterStep
from lightning_holmes.optim.elementwise import Separability, marks_of, test_separability
from lightning_holmes.optim.host_memory import HostMemory
from lightning_holmes.optim.joined_steps import JoinedSteps
from lightning_holmes.optim.layered import LayeredReducer
from lightning_holmes.optim.node.description import options_of
from lightning_holmes.optim.node.link import NodeLink, at_once
from lightning_holmes.optim.node_writer import NodeWriter
from lightning_holmes.optim.part import Part
from lightning_holmes.optim.remote_parameters import RemoteParameters


class RemoteReducer(LayeredReducer):
    """Gradients of parameters that optimizer nodes hold; nodes sum them over the workers.

    Args:
        is_eager: nodes update a unit as soon as its last gradient has come.

    Attributes:
        window: counts the windows of batches after which the optimizer steps.
        is_complete: the window's last gradient is on its way.
        is_half_done: nodes may have updated some units, and step the others only at the commit.
        options: gives those of the optimizer's groups.
    """

    shards: RemoteParameters

    def __init__(self, shards: RemoteParameters, *args: Any, is_eager: bool, **kwargs: Any) -> None:
        super().__init__(shards, *args, **kwargs)
        self._host_memory = HostMemory(self._device)  # the queue's
        self.window = 0
        self.is_complete = self.is_half_done = False
        self.is_eager = is_eager
        self.options: Callable[[], list[dict[str, Any]]] = list
        self._is_last = False

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
            self.tell_all({"tell": "begin", "window": self.window, "options": self.options()})

    def _reduction(self, parts: Sequence[Part], buffers: Sequence[Tensor]) -> Callable[[], None]:
        about = {"tell": "gradient", "window": self.window, "is_last": self._is_last}
        touched = [[name for name in part.names if name in self._touched] for part in parts]
        self.is_half_done |= self._is_last

        def push() -> None:
            acts = []
            hosts = self._host_memory.sending(buffers)
            for part, names, host in zip(parts, touched, hosts, strict=True):
                link, unit = self.shards.link_of(part)
                aggregator = self.shards.aggregators.get(unit)
                all_names = names if aggregator is None else aggregator.sum(unit, host, names, of=part.names)
                sent = {} if all_names is None else {"touched": all_names, "values": host}
                acts.append((link, functools.partial(link.tell, about | {"unit": unit} | sent)))
            at_once(acts)

        return push

    def end(self) -> None:
        """After a batch: what other pipeline ranks have gradients of, too, is summed over these before it goes out."""
        for part in self._trained[None] if None in self._open else ():
            if part.ranks:  # a stage whose microbatches have not reached it says so for those that have
                flags = torch.tensor([float(name in self._touched) for name in part.names])
                dist.all_reduce(flags, group=self._shared[part.ranks].host)
                self._touched |= {name for name, flag in zip(part.names, flags.tolist(), strict=True) if flag}
        super().end()

    def finish(self, *, last: bool) -> None:
        """After the ``last`` batch of a window: tell the nodes that this worker has no more. Nothing is waited for."""
        if not last:
            return
        window = self.window
        self.tell_all({"tell": "done", "window": window})
        self._works.clear()
        self._is_new = self.is_complete = True

    def tell_all(self, message: Mapping[str, Any]) -> Work:
        """Tell every node, after the gradients that are on their way."""

        def tell() -> None:
            for link in self.shards.links:
                link.tell(message)

        return self.queue.start(tell)

    def watch(self, on_run: OnRun | None) -> None:
        super().watch(on_run)
        self.shards.queue.on_run = on_run

    def close(self) -> None:
        super().close()
        self.shards.queue.close()


class RemoteOptimizer:
    """``optimizer``, whose states optimizer nodes have. All replicas make one, alike.

    Args:
        names: for each of the optimizer's groups, the names of the parameters that this rank's stages hold.
        num_replicas: among which collected states are sharded.
        scales: a GradScaler looks for overflows.
    """

    whole_gradients = False

    def __init__(
        self,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        parameters: RemoteParameters,
        reducer: RemoteReducer,
        *,
        num_replicas: int,
        scales: bool = False,
    ) -> None:
        self.optimizer, self._scales = optimizer, scales
        self.edits: list[tuple[str, float]] = []
        """What clipping has done to this window's gradients."""
        self.stepped = {name for of_group in names for name in of_group}
        self._parameters, self._reducer = parameters, reducer
        self._groups = [list(of_group) for of_group in names]
        self._sizes: Mapping[str, Mapping[str, int]] = {}
        order = (name for part in parameters.parts for name in part.names)
        self._replica_of = {name: place % num_replicas for place, name in enumerate(order)}
        held = parameters.parameters
        first = {n: dict(optimizer.state[held[n]]) for n in self.stepped if optimizer.state.get(held[n])}
        for group in optimizer.param_groups:
            _empty(group)
        optimizer.state.clear()
        self.loaded(first)
        reducer.options = lambda: options_of(optimizer)
        self._hook = AfterStep(optimizer, self._commit)

    def prepare(self) -> None:
        """Before a batch: tell the nodes of groups that somebody has added meanwhile; the groups hold no parameters afterwards. All
        replicas.

        Raises:
            UnsupportedModuleError: what is in another group has changed.
        """
        groups = self.optimizer.param_groups
        if len(groups) == len(self._groups) and not any(group["params"] for group in groups):
            return
        added = self._added_groups()
        if added:
            self._take_groups(added)
        for group in groups:
            _empty(group)

    def _take_groups(self, names: Sequence[list[str]]) -> None:
        """Return when the nodes have added them: what they are asked next is about all that the optimizer steps."""
        groups, parameters = self.optimizer.param_groups[len(self._groups) :], self._parameters.parameters
        found = test_separability(self.optimizer, torch.device("cpu"), groups)  # where nodes step
        kind = type(self.optimizer)
        reason = refusal_of_groups(groups, found, scales=self._scales)
        if kind.add_param_group is not Optimizer.add_param_group:
            reason = reason or "it overrides add_param_group, which nodes do not call"
        if reason:
            raise UnsupportedModuleError(
                f"{kind.__name__} was given a parameter group while the module trains, which optimizer nodes cannot step: {reason}; use "
                f"optimizer_nodes=0"
            )
        marks = marks_on(parameters, names)
        options = options_of(self.optimizer)[len(self._groups) :]
        self._reducer.tell_all({"tell": "groups", "options": options, "names": list(names), "marks": marks}).wait()
        self._groups += names
        self._parameters.run = ""  # who is started again has the groups of configure_optimizers
        self.stepped |= {name for of_group in names for name in of_group}
        for link in self._parameters.links:
            link.ask({"ask": "groups", "count": len(self._groups)})

    def _added_groups(self) -> list[list[str]]:
        """The names of this rank's parameters in each; the groups before hold none, or theirs again (compat/finetuning.py)."""
        name_of = {id(p): n for n, p in self._parameters.parameters.items()}
        held = [[name_of[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        known = len(self._groups)
        if len(held) < known or any(now not in ([], then) for now, then in zip(held, self._groups, strict=False)):
            raise UnsupportedModuleError(
                f"the parameter groups of {type(self.optimizer).__name__} were changed while the module trains, and optimizer nodes step "
                f"those that they know: add groups by add_param_group, or use optimizer_nodes=0"
            )
        return held[known:]

    def _commit(self) -> None:
        if len(self.optimizer.param_groups) != len(self._groups):
            raise UnsupportedModuleError(
                f"{type(self.optimizer).__name__} was given a parameter group between a batch's beginning and its step, when optimizer nodes "
                f"may have updated layers already: add it in on_train_batch_start or before, or use optimizer_nodes=0"
            )
        commit = {
            "tell": "commit",
            "window": self._reducer.window,
            "edits": list(self.edits),
            "options": options_of(self.optimizer),
        }
        self._reducer.tell_all(commit)
        self._reducer.is_half_done = False
        self._parameters.version += 1
        self._parameters.committed = self._reducer.window

    # states

    @property
    def is_half_done(self) -> bool:
        """Nodes hold values and states of two steps: no checkpoint can be had of them. It stays so where a run has failed."""
        return self._reducer.is_half_done

    @property
    def names(self) -> set[str]:
        """The first replica reads states of checkpoints, and brings them to the nodes."""
        return self.stepped if self._parameters.replica == 0 else set()

    def cut_by_group(self, states: Mapping[str, Mapping[str, Any]]) -> list[list[dict[str, Any] | None]]:
        """None: the groups hold no parameters here."""
        return [[] for _ in self.optimizer.param_groups]

    def loaded(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Bring states to the nodes."""
        if self._parameters.replica or not states:
            return
        for part in self._parameters.parts:
            link, unit = self._parameters.link_of(part)
            link.ask({"ask": "load", "unit": unit, "states": {n: dict(states[n]) for n in part.names if n in states}})

    def collect(self, destination: Callable[[str], int] | None = None) -> dict[str, dict[str, Any]]:
        self._parameters.settle()
        replica = self._parameters.replica
        found: dict[str, dict[str, Any]] = {}
        for part in self._parameters.parts:
            names = [n for n in part.names if n in self.stepped and (destination is None or destination(n) == replica)]
            if names:
                link, question = self._about(part, names)
                found |= link.ask(question | {"ask": "states"})["states"]
        return found

    def _about(self, part: Part, names: Sequence[str]) -> tuple[NodeLink, dict[str, Any]]:
        link, unit = self._parameters.link_of(part)
        return link, {"unit": unit, "names": names, "version": self._parameters.version}

    def collect_in_steps(self) -> tuple[dict[str, list[str]], JoinedSteps]:
        """Unit by unit."""
        self._parameters.settle()
        replica = self._parameters.replica
        keys: dict[str, dict[str, int]] = {}
        steps = []
        for part in self._parameters.parts:
            wanted = [n for n in part.names if n in self.stepped and self.destination(n) == replica]
            if wanted:
                link, question = self._about(part, wanted)
                keys |= link.ask(question | {"ask": "keys"})["keys"]
                steps.append(functools.partial(_states, link, question | {"ask": "states"}))
        self._sizes = keys
        return {name: list(sizes) for name, sizes in keys.items()}, JoinedSteps(steps)

    def num_bytes(self, name: str, key: str) -> int:
        """Of an entry that :meth:`collect_in_steps` has found."""
        return self._sizes[name][key]

    def writer_of(self, name: str) -> NodeWriter:
        """Who can write a parameter's state to a file where it is."""
        return self._parameters.writer_of(name)

    def destination(self, name: str) -> int:
        """One replica after the other."""
        return self._replica_of.get(name, 0)

    def close(self) -> None:
        """Parameters have values of their own again; states can still be collected. The optimizer's object is of no use any more."""
        self._hook.remove()
        self.optimizer.register_step_pre_hook(_refuse_step)
        self._parameters.close()


def refusal_of_groups(groups: Sequence[Mapping[str, Any]], found: Separability, *, scales: bool) -> str:
    """Why optimizer nodes cannot step these groups of an optimizer with the same numbers; empty if they can.

    Args:
        found: how they can be stepped apart.
        scales: a GradScaler looks for overflows.
    """
    if found.level == "none":
        return found.reason
    if any(p.is_complex() for group in groups for p in group["params"]):
        return "it has complex parameters"
    if scales and any(group.get("fused") for group in groups):
        return "a step that overflows is left out inside the kernel that fused=True asks for, where nobody sees it"
    return ""


def marks_on(parameters: Mapping[str, nn.Parameter], names: Iterable[Iterable[str]]) -> dict[str, Any]:
    """What somebody has written on those of ``names``, of each group."""
    found = {name: marks_of(parameters[name]) for of_group in names for name in of_group}
    return {name: marks for name, marks in found.items() if marks}


def _empty(group: dict[str, Any]) -> None:
    group["params"] = []
    if "param_names" in group:
        group["param_names"] = []


def _refuse_step(optimizer: Optimizer, *_: Any) -> None:
    raise UnsupportedModuleError(
        f"this {type(optimizer).__name__} steps after the fit for which it was made: optimizer nodes have taken its parameters and states; "
        f"make a new one, in configure_optimizers for a fit, or use optimizer_nodes=0"
    )


def _states(link: NodeLink, question: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = link.ask(question)["states"]
    return found


class RemoteHost:
    """Implements OptimizerHost: the nodes step.

    Args:
        is_owner: whether this rank's copy of a parameter, by name, is the one that counts.
        scaler: of ``precision="16-mixed"``, or None.
    """

    def __init__(
        self,
        shards: RemoteOptimizer,
        reducer: RemoteReducer,
        groups: ProcessGroups,
        *,
        is_owner: Callable[[str], bool],
        scaler: Any,
    ) -> None:
        self._scaler = scaler
        self.shards: RemoteOptimizer = shards
        self._reducer, self._groups, self._is_owner = reducer, groups, is_owner

    def take_gradients(self, *, last: bool, skipped: bool = False) -> None:
        """Nothing is shown: the nodes have them."""
        if last:
            self.shards.edits.clear()

    def absorb(self) -> None:
        """Nothing: hooks cannot change what they do not see."""

    def loss_factor(self) -> float | Tensor:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def unscale(self, factor: float) -> bool:
        """Let the nodes multiply gradients by ``factor`` before they step; whether any is not finite, on any stage. All ranks call."""
        question = {"ask": "finite", "window": self._reducer.window}
        overflows = not all(link.ask(question)["finite"] for link in self._reducer.shards.links)
        if self._groups.pipeline is not None:
            overflows = any_of(overflows, self._groups.pipeline)
        self.shards.edits.append(("scale", factor))
        return overflows

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        given = {id(p) for p in parameters}
        return self._norm({name for name, p in self._reducer.parameters.items() if id(p) in given})

    def _norm(self, names: set[str]) -> Tensor:
        self._check_deferred("a norm of gradients is asked for")
        if not self._reducer.is_complete:
            raise UnsupportedModuleError(
                "a norm of gradients is asked for before the last batch of accumulate_grad_batches: optimizer nodes sum them, and "
                "know it after that batch; ask in on_before_optimizer_step, or use optimizer_nodes=0"
            )
        counted = [name for name in names if self._is_owner(name)]
        question = {"ask": "norm", "window": self._reducer.window, "names": counted, "edits": list(self.shards.edits)}
        squared = math.fsum(link.ask(question)["squared"] for link in self._reducer.shards.links)
        found = torch.tensor(squared, dtype=torch.float64, device=self._groups.builder.device)
        if self._groups.pipeline is not None:
            dist.all_reduce(found, group=self._groups.pipeline)
        return found.sqrt().float()

    def _check_deferred(self, what: str) -> None:
        if self._reducer.is_eager:
            raise UnsupportedModuleError(
                f"{what} where no hook announces it, and optimizer nodes have updated layers with them already: do it in "
                f"on_before_optimizer_step or configure_gradient_clipping, for which nodes wait"
            )

    def clip_by_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """Whatever the groups show: all that the optimizer steps."""
        factor = torch.clamp(max_norm / (self._norm(self.shards.stepped) + 1e-6), max=1.0)
        self.shards.edits.append(("scale", factor.item()))

    def clip_by_value(self, parameters: Iterable[nn.Parameter], max_value: float) -> None:
        self._check_deferred("gradients are clipped")
        self.shards.edits.append(("clamp", float(max_value)))

    def settle(self) -> None:
        """Who computes with parameters fetches them."""

    def abandon(self) -> None:
        self._reducer.shards.abandon()

    def close(self) -> None:
        self.shards.close()
