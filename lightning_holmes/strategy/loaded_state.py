"""LoadedState: keeps the states of a checkpoint, from when Lightning loads it until the run that continues from it is set up.

loaded_state.weights = (state_dict, strict)      # the layout is not known yet
loaded_state.put_weights(pipeline)               # now it is: each rank reads its part; all ranks must call
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from lightning_holmes import checkpoint
from lightning_holmes.pipeline.stage import PipelineModule

Load = Callable[[Optimizer, Mapping[str, Any]], None]
"""Puts a saved state into an optimizer."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An optimizer state that was loaded, and the number of groups that its optimizer had then: hooks may add some later."""

    optimizer: Optimizer
    state: Mapping[str, Any]
    num_groups: int

    def state_for(self, names: Sequence[Sequence[str]]) -> Mapping[str, Any]:
        """Return the state for the optimizer's present groups, with the parameters ``names``: groups that were added have no states."""
        groups = list(self.state["param_groups"])
        numbered = any(isinstance(name, int) for group in groups for name in group["params"])
        for group, own in list(zip(self.optimizer.param_groups, names, strict=True))[self.num_groups :]:
            first = sum(len(group["params"]) for group in groups)
            params = list(range(first, first + len(own))) if numbered else list(own)
            groups.append({**_settings(group), "params": params})
        return {**self.state, "param_groups": groups}


class LoadedState:
    """The loaded states for the next run of a strategy; each is removed when it is taken.

    Attributes:
        weights: the module's state by names, and whether it must fit exactly.
        seed: the base seed of the saved run, with which dropout continues.
        num_microbatches: the number of microbatches of a replica's batch with which the same samples get the same random numbers as in the saved
            run (see checkpoint.run_state.num_microbatches).
        optimizers: optimizer states that wait until it is known which parameters this rank holds.
    """

    def __init__(self) -> None:
        self.weights: tuple[Mapping[str, Any], bool] | None = None
        self.seed: int | None = None
        self.num_microbatches: int | None = None
        self.optimizers: list[_Waiting] = []

    def put_weights(self, pipeline: PipelineModule) -> None:
        """Load the weights, if there are any, into the parameters that this rank holds. All ranks must call."""
        if self.weights is not None:
            (saved, strict), self.weights = self.weights, None
            checkpoint.load_module_state(pipeline, saved, strict=strict)

    def take(self, name: Literal["weights", "seed", "num_microbatches"]) -> Any:
        """Take one of the attributes; None if there is none. Who takes the weights loads them."""
        found = getattr(self, name)
        setattr(self, name, None)
        return found

    def hold_optimizers(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
        """Keep states for later; set the groups' learning rates and other settings at once."""
        for optimizer, state in zip(optimizers, states, strict=False):  # there may be fewer states, as in Lightning
            _put_settings(optimizer, state)
            self.optimizers.append(_Waiting(optimizer, state, len(optimizer.param_groups)))

    def put_groups(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add the groups that optimizers had when their states were saved, if no hook has added them again; restore all groups' settings.

        Args:
            parameters: the module's parameters by name.
        """
        for place, each in enumerate(self.optimizers):
            saved, optimizer = each.state["param_groups"], each.optimizer
            for group in saved[len(optimizer.param_groups) :]:
                optimizer.add_param_group(
                    {**_settings(group), "params": [parameters[name] for name in group["params"]]}
                )
            _put_settings(optimizer, each.state)
            self.optimizers[place] = replace(each, num_groups=max(each.num_groups, len(saved)))

    def names_of_states(self, names_of: Callable[[Optimizer], Sequence[Sequence[str]]]) -> set[str]:
        """Return the names of the parameters whose states wait; ``names_of``: see :meth:`put_optimizers`."""
        found = set()
        for each in self.optimizers:
            saved = set(map(str, each.state["state"]))  # names, or numbers
            names = [name for of_group in names_of(each.optimizer) for name in of_group]
            found |= {name for number, name in enumerate(names) if name in saved or str(number) in saved}
        return found

    def put_optimizers(self, load: Load, names_of: Callable[[Optimizer], Sequence[Sequence[str]]]) -> None:
        """Load the waiting states into the optimizers of this rank; settings that have changed since they were loaded are kept.

        Args:
            load: loads a state into an optimizer.
            names_of: returns the names of all parameters in an optimizer's groups.
        """
        waiting, self.optimizers = self.optimizers, []
        for each in waiting:
            settings = [_settings(group) for group in each.optimizer.param_groups]
            load(each.optimizer, each.state_for(names_of(each.optimizer)))
            for group, own in zip(each.optimizer.param_groups, settings, strict=True):
                group.update(own)

    def show_optimizers(
        self, load: Load, names_of: Callable[[Optimizer], Sequence[Sequence[str]]]
    ) -> Callable[[], None]:
        """Load the waiting states temporarily, for example to save them; the returned function takes them out again."""
        waiting = list(self.optimizers)
        self.put_optimizers(load, names_of)

        def hide() -> None:
            self.optimizers = waiting
            for each in waiting:
                each.optimizer.state.clear()

        return hide


def _put_settings(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Set the learning rates and other settings of the groups that both have."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        group.update(_settings(saved))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
