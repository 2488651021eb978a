"""Resumption: what a checkpoint has brought, from when Lightning opens it until the run that goes on from it is set up.

resumption.weights = (state_dict, strict)      # the layout is not known yet
resumption.put_weights(pipeline)               # now it is: each rank reads its part; all ranks must call
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_holmes import checkpoint
from lightning_holmes.pipeline.stage import PipelineModule

Load = Callable[[Optimizer, Mapping[str, Any]], None]
"""Puts a saved state into an optimizer."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A state that has been read, and how many groups its optimizer had then: hooks may add some."""

    optimizer: Optimizer
    state: Mapping[str, Any]
    num_groups: int

    def state_for(self, names: Sequence[Sequence[str]]) -> Mapping[str, Any]:
        """The state for the groups of today, with these parameters: those that were added have none."""
        groups = list(self.state["param_groups"])
        numbered = any(isinstance(name, int) for group in groups for name in group["params"])
        for group, own in list(zip(self.optimizer.param_groups, names, strict=True))[self.num_groups :]:
            first = sum(len(group["params"]) for group in groups)
            params = list(range(first, first + len(own))) if numbered else list(own)
            groups.append({**_settings(group), "params": params})
        return {**self.state, "param_groups": groups}


class Resumption:
    """Of the next run of a strategy; what is taken is gone.

    Attributes:
        weights: a module's state by names, and whether it must fit exactly.
        seed: of the run that was saved, from which dropout goes on.
        num_microbatches: with which it draws for the same samples.
        optimizers: states that wait until it is known which of them this rank holds.
    """

    def __init__(self) -> None:
        self.weights: tuple[Mapping[str, Any], bool] | None = None
        self.seed: int | None = None
        self.num_microbatches: int | None = None
        self.optimizers: list[_Waiting] = []

    def put_weights(self, pipeline: PipelineModule) -> None:
        """Put the weights, where there are any, into what this rank holds. All ranks must call."""
        if self.weights is not None:
            (saved, strict), self.weights = self.weights, None
            checkpoint.load_module_state(pipeline, saved, strict=strict)

    def take_weights(self) -> tuple[Mapping[str, Any], bool] | None:
        """The weights, once, for who puts them in himself, and whether all must fit."""
        weights, self.weights = self.weights, None
        return weights

    def take_seed(self) -> int | None:
        """The seed, once."""
        seed, self.seed = self.seed, None
        return seed

    def take_num_microbatches(self) -> int | None:
        """The number, once."""
        count, self.num_microbatches = self.num_microbatches, None
        return count

    def hold_optimizers(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
        """Keep states for later; learning rates and other settings are theirs at once."""
        for optimizer, state in zip(optimizers, states, strict=False):  # none, or fewer, as Lightning
            _put_settings(optimizer, state)
            self.optimizers.append(_Waiting(optimizer, state, len(optimizer.param_groups)))

    def put_groups(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give optimizers the groups that they had when their states were saved, where no hook has given them again; all with the settings of then.

        Args:
            parameters: the module's, by name.
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
        """The parameters of which states wait; ``names_of``: as below."""
        found = set()
        for each in self.optimizers:
            saved = set(map(str, each.state["state"]))  # names, or numbers
            names = [name for of_group in names_of(each.optimizer) for name in of_group]
            found |= {name for number, name in enumerate(names) if name in saved or str(number) in saved}
        return found

    def put_optimizers(self, load: Load, names_of: Callable[[Optimizer], Sequence[Sequence[str]]]) -> None:
        """Put the states, where some wait, into what this rank holds; settings that have changed meanwhile stay.

        Args:
            names_of: the names of all parameters in an optimizer's groups.
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
        """Put waiting states in for a moment, say to save them; what this returns takes them out again."""
        waiting = list(self.optimizers)
        self.put_optimizers(load, names_of)

        def hide() -> None:
            self.optimizers = waiting
            for each in waiting:
                each.optimizer.state.clear()

        return hide


def _put_settings(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Learning rates and their like of the groups that both have."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        group.update(_settings(saved))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
