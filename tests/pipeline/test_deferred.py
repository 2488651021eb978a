"""Modules that are built without memory: what is fake, what stands in for it, and what a rank gets in the end."""

import pytest
import torch
from torch import nn

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline.deferred import DeferredModule, has_fake_tensors

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(300, 100)
        self.second = nn.Linear(100, 2)
        nn.init.normal_(self.second.weight, std=0.02)
        self.register_buffer("steps", torch.arange(4.0))


def build(seed: int = 3) -> tuple[DeferredModule, Net]:
    deferred = DeferredModule(seed, CPU)
    with deferred.building():
        module = Net()
    deferred.adopt(module)
    return deferred, module


def test_what_is_built_inside_has_shapes_and_names_but_no_values() -> None:
    _, module = build()
    assert has_fake_tensors(module)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == {
        n: tuple(p.shape) for n, p in Net().named_parameters()
    }
    assert not has_fake_tensors(Net())


def test_each_rank_builds_its_own_part_with_the_values_that_all_would_have() -> None:
    whole, part = build(), build()
    everything = {name for name, _ in whole[1].named_parameters()}
    whole[0].materialise(everything)
    part[0].materialise({"second.weight", "second.bias"})
    assert not has_fake_tensors(whole[1]) and not has_fake_tensors(part[1])
    for name in ("second.weight", "second.bias", "steps"):
        assert torch.equal(part[1].state_dict()[name], whole[1].state_dict()[name]), name
    assert part[1].first.weight.isnan().all(), "of other stages: loud where somebody reads it"
    assert part[1].first.weight.untyped_storage().nbytes() <= 4, "and without memory"
    assert torch.equal(part[1].steps, torch.arange(4.0))
    assert 0.015 < float(whole[1].second.weight.detach().std()) < 0.025, "as its initialisation says"


def test_another_seed_gives_other_values() -> None:
    values = []
    for seed in (3, 3, 4):
        deferred, module = build(seed)
        deferred.materialise({"first.weight"})
        values.append(module.first.weight.detach())
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


def test_stand_ins_can_be_computed_with_and_go_again() -> None:
    deferred, module = build()
    with deferred.stand_ins():
        assert not has_fake_tensors(module)
        out = module.second(module.first(torch.randn(5, 300)))
        assert out.shape == (5, 2) and out.isfinite().all()
    assert has_fake_tensors(module)


def test_values_may_come_from_a_file_and_must_fit() -> None:
    deferred, module = build()
    asked: list[str] = []

    def read(names):
        asked.extend(names)
        return {"second.bias": torch.tensor([7.0, 8.0])}

    deferred.materialise({"second.bias", "second.weight"}, read)
    assert set(asked) == {"second.bias", "second.weight", "steps"}, "asked for what this rank needs, and no more"
    assert module.second.bias.tolist() == [7.0, 8.0]
    deferred, _ = build()
    with pytest.raises(
        UnsupportedModuleError, match=r"second\.bias has shape \(2,\), but the weights given for it \(3,\)"
    ):
        deferred.materialise({"second.bias"}, lambda names: {"second.bias": torch.zeros(3)})


def test_a_tensor_that_nothing_initialises_is_refused_by_name_unless_a_checkpoint_follows() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    for overwritten in (False, True):
        deferred = DeferredModule(0, CPU)
        with deferred.building():
            module = Bare()
        deferred.adopt(module)
        if overwritten:
            deferred.materialise({"weight"}, overwritten=True)
            assert module.weight.tolist() == [0.0, 0.0, 0.0]
        else:
            with pytest.raises(UnsupportedModuleError, match="nothing gives weight a value"):
                deferred.materialise({"weight"})


def test_the_meta_device_is_initialised_by_reset_parameters() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(30, 30), nn.LayerNorm(30))
    deferred = DeferredModule(1, CPU)
    deferred.adopt(module)
    deferred.materialise({name for name, _ in module.named_parameters()})
    assert module[1].weight.tolist() == [1.0] * 30
    bound = 30**-0.5
    assert module[0].weight.device == CPU and 0.5 * bound < float(module[0].weight.abs().max()) <= bound


def test_what_is_forgotten_comes_back_from_who_has_it() -> None:
    deferred = DeferredModule(0, CPU)
    module = Net()
    kept = module.second.weight.detach().clone()
    deferred.adopt(module)
    deferred.forget({"second.weight"})
    assert has_fake_tensors(module)
    deferred.materialise({"second.weight"}, lambda names: {"second.weight": kept})
    assert torch.equal(module.second.weight, kept)


def test_tied_parameters_stay_one() -> None:
    deferred = DeferredModule(0, CPU)
    with deferred.building():
        module = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5)})
        module["head"].weight = module["embed"].weight
    deferred.adopt(module)
    deferred.materialise({"embed.weight", "head.bias"})
    assert module["head"].weight is module["embed"].weight and not has_fake_tensors(module)
