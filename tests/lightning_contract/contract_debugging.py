"""Flags for debugging and measuring: fast_dev_run, overfit_batches, barebones, detect_anomaly, deterministic."""

from typing import Any

import pytest
import torch
from comparing import state_of
from contract import Run, each
from contract_models import Batches, Calls, Net, batches


@each(once=(True, 1), twice=(2, 2), off=(False, 4))
def case_a_fast_dev_run_is_short(run: Run, value: Any):
    flag, steps = value
    calls = Calls("on_train_batch_end", "on_validation_batch_end")
    trainer = run.fit(Net(), batches(4), batches(4), callbacks=[calls], fast_dev_run=flag)
    assert trainer.global_step == steps
    assert calls.count("on_validation_batch_end") == steps
    assert trainer.max_epochs == 1


@each(a_number=(2, 2), a_share=(0.5, 2), one=(1, 1))
def case_overfitting_takes_the_same_batches(run: Run, value: Any):
    flag, count = value
    seen, module = Batches(), Net()
    trainer = run.fit(module, batches(4), batches(4), callbacks=[seen], overfit_batches=flag, max_epochs=2)
    assert trainer.global_step == 2 * count
    assert seen.train == [[0, 1], [2, 3]][:count] * 2
    assert len(seen.validation) == 2 * count
    return state_of(module)


def case_barebones_trains_alike(run: Run):
    module, bare = Net(), Net()
    bare.load_state_dict(module.state_dict())
    run.fit(module, batches(4), limit_val_batches=0)
    trainer = run.trainer(barebones=True)
    trainer.fit(bare, batches(4))
    assert trainer.global_step == 4
    for name, value in state_of(module).items():
        torch.testing.assert_close(state_of(bare)[name], value)
    assert not trainer.callback_metrics and not trainer.loggers


def case_anomalies_are_detected(run: Run):
    class Broken(Net):
        def loss(self, batch: Any) -> Any:
            return torch.sqrt(self(batch).sum() * 0.0)

    with pytest.raises(Exception, match=r"nan|NaN"):
        run.fit(Broken(), detect_anomaly=True)
    assert not torch.is_anomaly_enabled()


def case_a_sound_fit_has_no_anomalies(run: Run):
    return run.weights_after(Net(), detect_anomaly=True)


@each(on=True, warn="warn", off=False)
def case_determinism_is_torch_s(run: Run, flag: Any):
    calls = Calls("on_train_start", look=lambda *_: torch.get_deterministic_debug_mode())
    module = Net()
    try:
        run.fit(module, callbacks=[calls], deterministic=flag)
        assert calls.seen == [{True: 2, "warn": 1, False: 0}[flag]]
    finally:
        torch.use_deterministic_algorithms(False)
    return state_of(module)
