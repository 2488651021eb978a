"""State that steps leave on a module: changes are noticed, even when memory is reused, and reach the other ranks."""

from collections.abc import Sequence

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_holmes.comm.p2p import LocalMailbox, LocalP2P
from lightning_holmes.pipeline.module_state import ModuleState
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.plan.partition import Partition


class Keeper(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.last = torch.zeros(())
        self.losses: list[torch.Tensor] = []
        self.table = np.zeros(10_000)
        self.same: list[torch.Tensor] | None = None
        self.register_buffer("correct", torch.zeros(()))


def state_of(module: LightningModule, rank: int = 0, mailbox: LocalMailbox | None = None) -> ModuleState:
    pipeline = PipelineModule(module, None, Partition((1,)), [0], torch.device("cpu"))
    return ModuleState(pipeline, LocalP2P(rank, 2, mailbox or LocalMailbox()), torch.device("cpu"))


def joined(modules: Sequence[LightningModule]) -> list[ModuleState]:
    """Return the states of ranks that send to each other and know each other's current attributes."""
    mailbox = LocalMailbox()
    states = [state_of(module, rank, mailbox) for rank, module in enumerate(modules)]
    for state in states:
        state.watch()
    return states


def test_a_new_tensor_in_a_freed_ones_place_is_a_change() -> None:
    module = Keeper()
    state = state_of(module)
    for epoch in range(50):
        state.watch()
        for step in range(2):
            module.last = torch.full((), float(epoch * 2 + step))
        attributes, _, _ = state._changes()
        assert float(attributes["", ("last",)]) == epoch * 2 + 1


def test_arrays_lists_and_buffers_changed_in_place_are_seen_and_nothing_else() -> None:
    module = Keeper()
    state = state_of(module)
    state.watch()
    assert state._changes() == ({}, {}, {})
    module.table[0], module.table[1] = 1.0, -1.0
    module.losses.append(torch.ones(()))
    module.correct += 1
    attributes, buffers, _ = state._changes()
    assert sorted(path for _, path in attributes) == [("losses",), ("table",)] and list(buffers) == ["correct"]


def test_changes_are_put_on_another_ranks_module() -> None:
    source, target = Keeper(), Keeper()
    sender, receiver = state_of(source), state_of(target)
    sender.watch()
    kept = target.losses
    source.losses.append(torch.ones(()))
    source.correct = source.correct + 3
    receiver._apply(*sender._changes())
    assert target.losses is kept and float(kept[0]) == 1.0 and float(target.correct) == 3.0
    assert target.correct is dict(target.named_buffers())["correct"]


def test_what_is_sent_stays_away_until_it_is_received_and_does_not_come_back() -> None:
    modules = [Keeper(), Keeper()]
    states = joined(modules)
    modules[0].losses.append(torch.ones(()))
    modules[1].table[0] = 2.0
    for state in states:
        state.send()
    assert modules[1].losses == [] and modules[0].table[0] == 0.0
    modules[1].last = torch.ones(())  # a change after sending, and before the other rank's change arrives
    for state in states:
        state.receive()
        state.receive()  # nothing is left to receive
    assert float(modules[1].losses[0]) == 1.0 and modules[0].table[0] == 2.0
    for state in states:
        state.send()
    assert float(modules[0].last) == 0.0
    for state in states:
        state.send()  # it receives first
    assert float(modules[0].last) == 1.0
    for state in states:
        state.receive()
    assert all(state._changes() == ({}, {}, {}) for state in states)


def test_an_object_of_two_names_is_no_news_of_the_rank_that_has_received_it() -> None:
    modules = [Keeper(), Keeper()]
    for module in modules:
        module.same = module.losses
    states = joined(modules)
    for number in range(4):
        modules[0].losses.append(torch.tensor(float(number)))
        for state in states:
            state.send()
        for state in states:
            state.receive()
    assert [[float(v) for v in module.losses] for module in modules] == [[0.0, 1.0, 2.0, 3.0]] * 2


class Named(dict[str, int]):
    """A container with an attribute."""

    best = 0


class Count:
    def __init__(self) -> None:
        self.steps = 0


def test_objects_in_containers_and_attributes_of_containers_are_seen_and_changed_in_place() -> None:
    modules = [Keeper(), Keeper()]
    for module in modules:
        module.counts, module.named = {"train": [Count()]}, Named(a=1)
    states = joined(modules)
    source, target = modules
    kept, named = target.counts["train"][0], target.named
    source.counts["train"][0].steps = 3
    source.named.best = 2
    for state in states:
        state.send()
    for state in states:
        state.receive()
    assert target.counts["train"][0] is kept and kept.steps == 3
    assert target.named is named and named.best == 2
    assert all(state._changes() == ({}, {}, {}) for state in states)
