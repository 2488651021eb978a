"""Hooks that the strategy refuses."""

import lightning.pytorch as pl
import pytest
from torch import nn

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.strategy.admission import check_module


def test_a_hook_behind_each_accumulation_is_refused_in_a_pipeline() -> None:
    module = pl.LightningModule()
    module.layer = nn.Linear(2, 2)
    hook = module.layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UnsupportedModuleError, match="weight has a hook by register_post_accumulate"):
        check_module(module, fitting=True)
    check_module(module, fitting=True, is_pipeline=False)
    check_module(module, fitting=False)
    hook.remove()
    check_module(module, fitting=True)
