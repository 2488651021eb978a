"""Flags for debugging and measuring: fast_dev_run, overfit_batches, barebones, detect_anomaly, deterministic."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from contract import Run, each
from contract_models import Batches, Calls, Net, Rows, batches, weights
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader


@each(once=(True, 1), twice=(2, 2), off=(False, 4))
def case_a_fast_dev_run_is_short(run: Run, value: Any):
    flag, steps = value
    calls = Calls("on_train_batch_end", "on_validation_batch_end")
    trainer = run.fit(Net(), batches(4), batches(4), callbacks=[calls], fast_dev_run=flag)
    assert trainer.global_step == steps
    assert calls.count("on_validation_batch_end") == steps
    assert trainer.max_epochs == 1


def case_a_fast_dev_run_leaves_nothing(run: Run):
    checkpoint = ModelCheckpoint(run.folder / "kept")
    trainer = run.fit(
        Net(), callbacks=[checkpoint, EarlyStopping("loss")], fast_dev_run=True, logger=True, max_epochs=5
    )
    assert not run.files("**/*.ckpt") and not run.files("lightning_logs/**/*.csv")
    assert trainer.current_epoch == 1 and trainer.num_sanity_val_steps == 0
    assert trainer.loggers and not trainer.log_dir


@each(a_number=(2, 2), a_share=(0.5, 2), one=(1, 1))
def case_overfitting_takes_the_same_batches(run: Run, value: Any):
    flag, count = value
    seen, module = Batches(), Net()
    trainer = run.fit(module, batches(4), batches(4), callbacks=[seen], overfit_batches=flag, max_epochs=2)
    assert trainer.global_step == 2 * count
    assert seen.train == [[0, 1], [2, 3]][:count] * 2
    assert len(seen.validation) == 2 * count
    return weights(module)


def case_barebones_trains_alike(run: Run):
    module, bare = Net(), Net()
    bare.load_state_dict(module.state_dict())
    run.fit(module, batches(4), limit_val_batches=0)
    trainer = run.trainer(barebones=True)
    trainer.fit(bare, batches(4))
    assert trainer.global_step == 4
    for name, value in weights(module).items():
        torch.testing.assert_close(weights(bare)[name], value)
    assert not trainer.callback_metrics and not trainer.loggers


def case_anomalies_are_detected(run: Run):
    class Broken(Net):
        def loss(self, batch: Any) -> Any:
            return torch.sqrt(self(batch).sum() * 0.0)

    with pytest.raises(Exception, match=r"nan|NaN"):
        run.fit(Broken(), detect_anomaly=True)
    assert not torch.is_anomaly_enabled()


def case_a_sound_fit_has_no_anomalies(run: Run):
    module = Net()
    run.fit(module, detect_anomaly=True)
    return weights(module)


@each(on=True, warn="warn", off=False)
def case_determinism_is_torch_s(run: Run, flag: Any):
    calls = Calls("on_train_start", look=lambda *_: torch.get_deterministic_debug_mode())
    module = Net()
    try:
        run.fit(module, callbacks=[calls], deterministic=flag)
        assert calls.seen == [{True: 2, "warn": 1, False: 0}[flag]]
    finally:
        torch.use_deterministic_algorithms(False)
    return weights(module)


@each(twice_alike=1, by_another_seed=2)
def case_a_seed_decides(run: Run, second: int):
    def fitted(seed: int) -> Any:
        pl.seed_everything(seed, verbose=False)
        module = Net()
        run.fit(module, DataLoader(Rows(8), batch_size=2, shuffle=True))
        return weights(module)

    first, again = fitted(1), fitted(second)
    alike = all(torch.allclose(value, again[name]) for name, value in first.items())
    assert alike == (second == 1)
