"""Cases that end badly, for the test of how cases are run."""

import os
import threading

from contract import Run


def wait_for_ever() -> None:
    threading.Event().wait()


def case_hangs(run: Run):
    if not run.is_first:
        wait_for_ever()
    run.meet()


def case_dies(run: Run):
    if run.is_first:
        os._exit(3)


def case_fails_on_one_process(run: Run):
    rank = int(os.environ["RANK"])
    assert rank == 0, "planned"


def case_holds(run: Run):
    assert run.layout == "two stages"
