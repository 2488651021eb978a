"""Tensors built later: the constructor's operations on tensors without memory are repeated for some of them."""

import pytest
import torch
from torch import Tensor, nn

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline.deferred import DeferredModule, has_fake_tensors
from lightning_holmes.pipeline.tape import Tape, is_fake

CPU = torch.device("cpu")


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.copied = nn.Linear(6, 6)
        self.copied.weight.data.copy_(self.first.weight)
        self.half = nn.Linear(6, 6).to(torch.bfloat16)
        self.attention = nn.MultiheadAttention(6, 2)
        self.table = nn.Embedding(5, 6, padding_idx=0)
        self.tied = nn.Linear(6, 5, bias=False)
        self.tied.weight = self.table.weight
        self.register_buffer("angles", torch.outer(torch.arange(4.0), 10.0 ** -(torch.arange(3) / 3)).cos())
        self.rates = torch.linspace(0, 1, 5).tolist()
        nn.init.zeros_(self.second.weight[:2])


def deferred(seed: int = 3) -> tuple[DeferredModule, Parts]:
    made = DeferredModule(seed, CPU)
    with made.building():
        module = Parts()
    made.adopt(module)
    return made, module


def built(names: set[str] | None, seed: int = 3) -> dict[str, Tensor]:
    made, module = deferred(seed)
    assert all(is_fake(p) for p in module.parameters())
    made.materialise({n for n, _ in module.named_parameters()} if names is None else names)
    assert not has_fake_tensors(module)
    return {n: t.detach() for n, t in module.state_dict().items()}


def test_a_parameter_is_the_same_whichever_others_are_built() -> None:
    whole = built(None)
    for name in whole:
        alone = built({name})[name]
        assert name == "tied.weight" or torch.equal(alone, whole[name]), name
    assert not torch.equal(built(None, seed=4)["first.weight"], whole["first.weight"])
    assert not torch.equal(whole["first.weight"][2:], whole["second.weight"][2:])


def test_what_the_constructor_did_is_done() -> None:
    whole = built(None)
    torch.manual_seed(3)  # with one of forty seeds these few numbers scatter too differently
    real = Parts()
    assert torch.equal(whole["copied.weight"], whole["first.weight"])
    assert torch.equal(whole["angles"], real.angles)
    assert torch.equal(whole["tied.weight"], whole["table.weight"])
    assert not whole["table.weight"][0].any() and not whole["second.weight"][:2].any()
    assert deferred()[1].rates == real.rates
    for name, value in real.state_dict().items():
        assert whole[name].dtype == value.dtype and whole[name].stride() == value.stride(), name
        if value.is_floating_point() and value.numel() > 30 and name != "angles":
            assert float(whole[name].float().std()) == pytest.approx(float(value.float().std()), rel=0.4), name


def test_what_a_rank_lacks_is_nan_in_no_memory() -> None:
    value = built({"first.weight"})["second.weight"]
    assert value.isnan().all() and value.untyped_storage().nbytes() == 4


def test_stand_ins_run_and_go_away() -> None:
    made, module = deferred()
    with made.stand_ins():
        assert not has_fake_tensors(module)
        assert module.tied.weight is module.table.weight
        assert module.first(torch.ones(2, 6)).isfinite().all()
    assert all(is_fake(p) for p in module.parameters())


def test_weights_read_from_elsewhere_are_taken_and_their_shapes_compared() -> None:
    made, module = deferred()
    made.materialise({"first.weight"}, lambda names: {"first.weight": torch.ones(6, 6, dtype=torch.float64)})
    assert torch.equal(module.first.weight, torch.ones(6, 6))
    made, _ = deferred()
    with pytest.raises(UnsupportedModuleError, match=r"first\.weight has shape"):
        made.materialise({"first.weight"}, lambda names: {"first.weight": torch.ones(3)})


def test_a_module_made_on_meta_is_initialised_by_its_own_code() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    made = DeferredModule(1, CPU)
    made.adopt(module)
    made.materialise({n for n, _ in module.named_parameters()})
    assert module[1].running_var.tolist() == [1.0, 1.0, 1.0] and module[0].weight.std() > 0
    module.extra = nn.Parameter(torch.empty(2, device="meta"))
    made = DeferredModule(1, CPU)
    made.adopt(module)
    with pytest.raises(UnsupportedModuleError, match="nothing gives extra a value"):
        made.materialise({n for n, _ in module.named_parameters()})


def test_writing_absent_values_into_a_real_tensor_is_refused() -> None:
    real = torch.zeros(3)
    with pytest.raises(UnsupportedModuleError, match="real tensor"), Tape(0, CPU).recording():
        real.copy_(torch.rand(3))


def test_what_is_forgotten_comes_back_from_who_has_it() -> None:
    made, module = DeferredModule(0, CPU), nn.Linear(2, 2)
    kept = module.weight.detach().clone()
    made.adopt(module)
    made.forget({"weight"})
    assert has_fake_tensors(module)
    made.materialise({"weight"}, lambda names: {"weight": kept})
    assert torch.equal(module.weight, kept)


def test_what_nothing_initialises_is_zero_where_a_checkpoint_follows() -> None:
    made = DeferredModule(0, CPU)
    with made.building():
        module = nn.ParameterDict({"weight": nn.Parameter(torch.empty(3))})
    made.adopt(module)
    made.materialise({"weight"}, overwritten=True)
    assert module["weight"].tolist() == [0.0, 0.0, 0.0]
