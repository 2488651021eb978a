"""Reducers: accumulate a rank's gradients over the microbatches and batches of a window, and reduce them over the ranks that share them.

The schedule decides when (comm/parameter_exchange.py). :class:`LocalReducer` leaves gradients to autograd; :class:`UnitReducer` is what
BucketReducer (bucket_reducer.py: parameters that stay) and LayeredReducer (layered.py: a stage at a time) have in common.

    reducer.forget()                        # before the first batch of a window
    reducer.begin(last=True)                # before a batch's microbatches; last: the last batch of an accumulation window
    ...                                     # backwards; backward(stage, ...), reduce(stage) for each stage
    reducer.end()                           # after them; p.grad is empty: Lightning calls zero_grad between a step and its backward
    reducer.finish(last=True)               # gradients are fully reduced
    reducer.show(reducer.reached())         # p.grad
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.collectives import Collective
from lightning_holmes.comm.mesh import ProcessGroups, join_shared
from lightning_holmes.comm.parameter_exchange import LocalExchange, ParameterExchange
from lightning_holmes.comm.queue import CommQueue, Work
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.optim.unit import Unit, sum_dtype
from lightning_holmes.plan.placement import Placement


class LocalReducer(LocalExchange):
    """For gradients that are neither reduced nor accumulated in another type: they stay the tensors that autograd makes, sparse ones, too,
    which costs neither memory nor time.

    Args:
        parameters: of this rank, by name.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(module)
        self.parameters = parameters
        self._gradients: dict[str, Tensor] = {}
        self._is_new = True

    def forget(self) -> None:
        """Forget the gradients of a window whose last batch has not come, as Lightning does by ``zero_grad`` before the first of the next."""
        self._gradients = {}

    def begin(self, *, last: bool) -> None:
        """Begin a batch: its backwards add to the gradients accumulated so far."""
        self._is_new = False
        self.show(self._gradients)

    def end(self) -> None:
        """End a batch: move the gradients out of ``p.grad``."""
        self._gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.show(())

    def finish(self, *, last: bool) -> None:
        """After the ``last`` batch of a window the next one begins without gradients."""
        self._is_new = last

    def reached(self) -> frozenset[str]:
        """Return the names of the parameters that have a gradient."""
        return frozenset(self._gradients)

    def show(self, names: Collection[str]) -> None:
        """Set ``p.grad`` of the parameters ``names`` to their gradients, and of the others to None."""
        for name, parameter in self.parameters.items():
            parameter.grad = self._gradients[name] if name in names else None
        if self._is_new:
            self._gradients = {}

    def close(self) -> None:
        """Forget the gradients."""
        self._gradients.clear()


class UnitReducer(ParameterExchange):
    """Accumulates gradients in flat tensors, a unit each, and reduces them in a queue. All ranks must create one, since it creates process
    groups.

    While a unit is attached, its gradients accumulate; before its reduction it is detached.

    Args:
        parameters: this rank's, by name.
        stages: the stages of this rank.
        shared: the sets of pipeline ranks that hold the same parameters; the same on all ranks.
        queue: runs the collectives.
        collective: reduces a unit over the replicas; None if there is one replica.

    Attributes:
        units: those of the parameters that are trained now.
        on_laid_out: called when a batch begins and its units are known: a sharded optimizer takes up changes and new parameter groups.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: ProcessGroups,
        placement: Placement,
        *,
        stages: Sequence[int],
        shared: Iterable[tuple[int, ...]],
        queue: CommQueue,
        collective: Collective | None,
    ) -> None:
        self.parameters, self.groups, self.queue, self.collective = parameters, groups, queue, collective
        self.units: list[Unit] = []
        self.on_laid_out: Callable[[], None] = lambda: None
        self._stages = tuple(stages)
        self._shared = join_shared(groups, placement, list(shared))
        self._views: dict[str, Tensor] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._direct: set[str] = set()  # parameters whose gradients autograd adds into their views
        self._touched: set[str] = set()
        self._reached: frozenset[str] = frozenset()
        self._unreduced: set[int] = set()  # stages of this batch whose gradients may still grow
        self._works: list[Work] = []
        self._is_new = True  # no batch of the window has begun yet
        self._in_batch = False

    def reached(self) -> frozenset[str]:
        """Return the names of the parameters that have a gradient: after the last batch of a window on any replica, before on this rank."""
        return self._reached

    def forget(self) -> None:
        """Forget the gradients of a window whose last batch has not come, as Lightning does by ``zero_grad`` before the first of the next."""
        if not self._is_new:
            for work in self._works:
                work.wait()
            self._works.clear()
            self._is_new = True

    def _attach(self, views: Mapping[str, Tensor]) -> None:
        """Let gradients accumulate in ``views``, by name; those of hooked parameters only, so that others show in ``p.grad``."""
        for name, view in views.items():
            if name in self._hooks:
                self.parameters[name].grad = view if name in self._direct else None
                self._views[name] = view

    def _detach(self, unit: Unit) -> None:
        for name in unit.names:
            if self._views.pop(name, None) is not None:
                self.parameters[name].grad = None

    def _hook_parameters(self, names: Iterable[str]) -> None:
        """Hook those of the parameters that are trained now."""
        for name in names:
            parameter = self.parameters[name]
            if name not in self._hooks and parameter.requires_grad:
                if sum_dtype(parameter.dtype) == parameter.dtype and not dtensor.is_dtensor(parameter):
                    self._direct.add(name)
                self._hooks[name] = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        is_direct = name in self._direct

        def arrived(parameter: Tensor) -> None:
            if not self._in_batch:
                return  # the user's own backward, between batches
            if not is_direct or name not in self._views:
                if parameter.grad is not None:
                    self._accumulate(name, parameter.grad)
                parameter.grad = None
            self._touched.add(name)
            self._passed(name)

        return arrived

    def _accumulate(self, name: str, gradient: Tensor) -> None:
        """Add a gradient; a DTensor may have any placement."""
        view = self._views.get(name)
        if view is None:
            view = self._place_of_late(name)
        view.add_(dtensor.gradient_part(gradient, self.parameters[name]))

    def _place_of_late(self, name: str) -> Tensor:
        """Return where a gradient is added whose unit is not attached."""
        raise NotImplementedError

    def _refuse_thawed(self) -> None:
        """At the end of a batch, refuse gradients of parameters that were frozen when it began.

        Raises:
            UnsupportedModuleError: names the first of them.
        """
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and name not in self._hooks:
                raise thawed_late(name)

    def _passed(self, name: str) -> None:
        """Note that a gradient of a parameter has been accumulated."""

    def _sum_flags(self, *, late: bool = False) -> bool:
        """Find the parameters that got a gradient on any replica, and return whether any has ``late``. All ranks must call.

        A parameter that no replica reached keeps no gradient, as in plain Lightning: AdamW would decay it otherwise."""
        names = [name for unit in self.units for name in unit.names]
        flags = torch.tensor([*(float(name in self._touched) for name in names), float(late)])
        place = {name: index for index, name in enumerate(names)}
        for unit in self.units:
            if unit.ranks:
                of_unit = [place[name] for name in unit.names]
                own = flags[of_unit]
                dist.all_reduce(own, group=self._shared[unit.ranks].host)
                flags[of_unit] = own
        sync = self.groups.gradients
        if sync is not None and names:
            self.queue.start(lambda: dist.all_reduce(flags, group=sync.host)).wait()
        self._reached = frozenset(name for name, flag in zip(names, flags[:-1].tolist(), strict=True) if flag)
        return bool(flags[-1])

    def close(self) -> None:
        """Free memory, remove hooks and close the queue."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._views.clear()
        self.units.clear()
        self.queue.close()


def thawed_late(name: str) -> UnsupportedModuleError:
    """Return the refusal of a parameter that is trained in a batch in which it has no place for its gradient."""
    return UnsupportedModuleError(
        f"{name} was frozen when the batch began, and is trained in it: its gradient would be lost. Set requires_grad in "
        f"on_train_batch_start or before"
    )
