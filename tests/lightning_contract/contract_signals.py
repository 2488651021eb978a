"""Signals: which ones end a fit in good order, and whose handlers are installed before, during and after it."""

import os
import signal
from typing import Any

import pytest
from contract import Run
from contract_models import Net, batches
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException


class Sends(Callback):
    """Sends a signal to its own process after the second batch."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            os.kill(os.getpid(), self.number)


def case_sigterm_leaves_a_checkpoint_where_it_is_asked_for(run: Run):
    checkpoint = ModelCheckpoint(run.folder / "kept", save_on_exception=True, filename="told")
    with pytest.raises((SIGTERMException, SystemExit)):
        run.fit(Net(), batches(4), callbacks=[checkpoint, Sends(signal.SIGTERM)])
    assert run.files("kept/*.ckpt") == ["kept/told.ckpt"]


def case_handlers_are_given_back(run: Run):
    def mine(number: int, frame: Any) -> None:
        pass

    before = signal.signal(signal.SIGTERM, mine)
    try:
        run.fit(Net(), batches(1))
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def case_a_handler_of_the_user_s_is_called_too(run: Run):
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        with pytest.raises((SIGTERMException, SystemExit)):
            run.fit(Net(), batches(4), callbacks=[Sends(signal.SIGTERM)])
        assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
