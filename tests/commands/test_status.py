"""The output of `lightning-holmes status` about jobs on this host."""

import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_holmes.checkpoint.snapshot_folder import SnapshotFolder
from lightning_holmes.commands.status import main
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.loggers import RunRecord

_NAME = f"lightning_holmes-{os.geteuid()}-a"


def test_a_job_that_was_started_again_tells_its_faults_and_what_they_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = SnapshotFolder(tmp_path, _NAME, 0, "first")
    fellow = SnapshotFolder(tmp_path, _NAME, 0, "first")
    assert (first.is_first, fellow.is_first) == (True, False)
    first.history.note("start", "starts with 2 ranks: train.py")
    first.note_step(12)
    first.history.note("failed", "[rank 0] ends, because rank 1 failed: ValueError: here\nand a traceback")
    for folder in (first, fellow):
        folder.release()
    main([str(tmp_path)])
    assert re.search(
        rf"{_NAME}: does not run; 1 start, 0 s lost.*\n  fit-0: step 12, \d s ago; snapshots here: none",
        capsys.readouterr().out,
    )
    past = time.time() - 41.0
    os.utime(first.path / "step", (past, past))

    again = SnapshotFolder(tmp_path, _NAME, 0, "second")
    again.history.note("start", "starts with 2 ranks: train.py")
    (again.path / "9").mkdir()
    for step in (10, 11, 12):
        again.note_step(step)
        assert again.history.read()[-1].kind == "start"
    again.note_step(13)
    again.note_step(14)
    with (tmp_path / _NAME / "history").open("a") as file:
        file.write('{"kind": "fai')
    main([str(tmp_path)])
    shown = capsys.readouterr().out
    assert re.search(
        r": trains; 2 starts, 41 s lost in faults\n  fit-0: step 14, 0 s ago; snapshots here: step 9, \d s ago\n", shown
    )
    assert [line[23:] for line in shown.splitlines()[2:]] == [
        "starts with 2 ranks: train.py",
        "[rank 0] ends, because rank 1 failed: ValueError: here",
        "starts with 2 ranks: train.py",
        "step 12 is done again, and step 13: 41 s lost",
    ]
    record, logger = RunRecord(), CSVLogger(tmp_path / "logs")
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(history=again.history.read()),
        loggers=[logger],
        fast_dev_run=False,
        is_global_zero=True,
    )
    record.on_fit_start(trainer, None)  # type: ignore[arg-type]
    record.on_train_batch_end(trainer, None)  # type: ignore[arg-type]
    recorded = (Path(logger.log_dir) / "history.txt").read_text().splitlines()
    assert recorded[0] == "2 starts, 41 s lost in faults" and len(recorded) == 5


def test_where_there_is_nothing_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path)])
    assert "no job of yours has snapshots" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        main([str(tmp_path / "other")])
