"""A stage's gates outside of steps: what user code in hooks may do with the module during training."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from simulated import structure_of
from tanh_net import TanhNet

from lightning_holmes.checking import first_step
from lightning_holmes.comm import dtensor
from lightning_holmes.errors import HolmesError
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.plan.partition import make_partition


def installed(module: LightningModule, num_stages: int) -> PipelineModule:
    """Install and return the first stage of the module's pipeline."""
    with first_step.attached(module):
        structure = structure_of(module, torch.randn(4, 4))
    partition = make_partition("uniform", structure.num_layers, num_stages)
    pipeline = PipelineModule(module, structure, partition, (0,), torch.device("cpu"))
    pipeline.install()
    return pipeline


def test_a_deep_copy_made_while_training_has_weights_of_its_own() -> None:
    """For example a teacher, or an average that is evaluated: later training does not change the copy."""
    module, x = TanhNet(), torch.randn(2, 4)
    expected = module(x)
    pipeline = installed(module, 1)
    teacher = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    torch.testing.assert_close(teacher(x), expected)
    assert not module(x).any()
    pipeline.uninstall()
    torch.testing.assert_close(copy.deepcopy(teacher)(x), expected)


@pytest.mark.parametrize("what", [lambda m: m, lambda m: m.layers])
def test_a_copy_of_a_stage_refuses_to_run_what_is_missing(what: Any) -> None:
    module = TanhNet()
    for parameter in installed(module, 2).parameters.values():  # a hook is given all values
        dtensor.replace_local(parameter, torch.zeros(parameter.shape))
    copied = copy.deepcopy(what(module))
    layers = getattr(copied, "layers", copied)
    assert layers[0](torch.randn(2, 4)).shape == (2, 4)
    with pytest.raises(HolmesError, match="layer 2 of layers lives on stage 1"):
        layers[2](torch.randn(2, 4))
