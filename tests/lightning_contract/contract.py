"""Lightning's promises as cases: what a case is given, how cases are collected, and how many of them run in one launch.

A case is a function of a :class:`Run` that asserts what Lightning promises, in terms that hold for any strategy. What it
returns, if anything (numbers, lists, tensors), must equal what it returns under plain Lightning.

    def case_ends_after_max_epochs(run):          # in contract_loops.py: the case "loops.ends_after_max_epochs"
        trainer = run.fit(Net(), max_epochs=3)
        assert trainer.current_epoch == 3

    records = run_cases("two stages", ["loops.ends_after_max_epochs"])     # by name, one record a rank

Models and data are in contract_models.py; each other contract_*.py file holds one family of promises.
"""

import contextlib
import faulthandler
import importlib
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from comparing import state_of
from contract_models import batches
from covering import EXHAUSTIVE
from launch import Worker, keep_what_is_left, launch_raw
from lightning.pytorch import Trainer
from quiet import QUIET
from torch import Tensor

from lightning_holmes import HolmesStrategy

CASE_TIMEOUT_S = 60.0  # a case takes about a tenth of a second
FOLDER = Path(__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("contract_*.py") if path.stem != "contract_models")

PLAIN, ONE, TWO = "plain", "one process", "two stages"
LAYOUTS = {PLAIN: 1, ONE: 1, TWO: 2}
"""The number of processes of each layout."""


@dataclass
class Run:
    """Where a case runs: its layout, its own folder (the same on all ranks, and the working directory), and its strategy."""

    layout: str
    folder: Path
    num_microbatches: int = 1

    def strategy(self, **options: Any) -> Any:
        """Return the argument for ``Trainer(strategy=)``."""
        if self.layout == PLAIN:
            return "auto"
        defaults: dict[str, Any] = {"schedule": "1f1b"}
        if self.layout == TWO:
            # everything that a plan decides is given, so that nothing is measured for it
            defaults |= {"pipeline_parallel_size": 2, "num_microbatches": self.num_microbatches}
            defaults |= {"partition": [1, 1], "num_chunks": 1}
        return HolmesStrategy(**defaults | options)

    def trainer(self, **options: Any) -> Trainer:
        """Make a quiet Trainer for one epoch; ``options`` are Lightning's, and override the defaults."""
        defaults: dict[str, Any] = QUIET | {
            "devices": LAYOUTS[self.layout],
            "max_epochs": 1,
            "enable_checkpointing": "Checkpoint" in str(options.get("callbacks")),
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "default_root_dir": self.folder,
        }
        if options.get("barebones"):
            defaults = {name: defaults[name] for name in ("accelerator", "devices", "max_epochs", "default_root_dir")}
        if "strategy" not in options:
            options["strategy"] = self.strategy()
        return Trainer(**defaults | options)

    def fit(self, module: pl.LightningModule, *loaders: Any, ckpt_path: Any = None, **options: Any) -> Trainer:
        """Train with a trainer of these options, on four batches without validation or on ``loaders``; return the trainer."""
        trainer = self.trainer(**options)
        trainer.fit(module, *(loaders or (batches(),)), ckpt_path=ckpt_path)
        return trainer

    def weights_after(self, module: pl.LightningModule, *loaders: Any, **options: Any) -> dict[str, Tensor]:
        """Train likewise, and return the module's state."""
        self.fit(module, *loaders, **options)
        return state_of(module)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.layout != TWO or os.environ["RANK"] == "0"

    def meet(self) -> None:
        """Wait for the other processes."""
        if self.layout == TWO and dist.is_initialized():
            dist.barrier()

    def files(self, pattern: str) -> list[str]:
        """Return the sorted names of the files and folders in this run's folder that match, once all processes are here."""
        self.meet()
        found = sorted(str(path.relative_to(self.folder)) for path in self.folder.glob(pattern))
        self.meet()
        return found

    @contextlib.contextmanager
    def warning(self, match: str, category: type[Warning] = UserWarning) -> Iterator[None]:
        """Assert that Lightning warns inside the context; it warns in the first process only."""
        with pytest.warns(category, match=match) if self.is_first else contextlib.nullcontext():
            yield


@dataclass
class Case:
    """One promise: its function, and the value that it is called with, if any."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    place: int = 0
    """The index of the value among those of :func:`each`."""
    num_microbatches: int = 2
    refused: dict[str, str] = field(default_factory=dict)
    """By layout, what the strategy's error must say."""


@dataclass
class Record:
    """What one process saw of a case; ``error`` is set if the case failed or did not end."""

    result: Any = None
    error: str = ""
    seconds: float = 0.0


def each(**values: Any) -> Callable[[Any], Any]:
    """Make one case of the decorated promise for each value: it is called with the run and the value."""

    def mark(function: Any) -> Any:
        function.each = values
        return function

    return mark


def whole_batches(function: Any) -> Any:
    """Run the decorated promise without splitting batches, since it sees how often the module's own steps run."""
    function.num_microbatches = 1
    return function


def refused(match: str, *layouts: str, only: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Expect the decorated promise to be refused on these layouts (default: all layouts of the strategy): the case ends on
    every process in an error of this package that matches ``match``.

    Args:
        only: The keys of :func:`each` whose values are refused; empty for all.
    """

    def mark(function: Any) -> Any:
        function.refused = [*getattr(function, "refused", ()), (match, layouts or (ONE, TWO), only)]
        return function

    return mark


def collect(files: Sequence[str] = FILES) -> dict[str, Case]:
    """Return all cases of these files by name, which consists of the family, the promise, and the value's key in brackets."""
    cases = {}
    for file in files:
        for name, function in vars(importlib.import_module(file)).items():
            if not name.startswith("case_"):
                continue
            marks = getattr(function, "refused", ())
            promise = f"{file.removeprefix('contract_')}.{name.removeprefix('case_')}"
            for place, (key, value) in enumerate(getattr(function, "each", {None: None}).items()):
                case = Case(
                    name=promise if key is None else f"{promise}[{key}]",
                    function=function,
                    arguments=() if key is None else (value,),
                    place=place,
                    num_microbatches=getattr(function, "num_microbatches", 2),
                    refused={
                        layout: match for match, layouts, only in marks if not only or key in only for layout in layouts
                    },
                )
                cases[case.name] = case
    return cases


def select(cases: dict[str, Case], layout: str) -> list[str]:
    """Return the names of the cases that run on a layout. On two stages, where a case costs most: every third value of a
    promise, and the cases that are refused; all under `make exhaustive`."""
    if layout != TWO or EXHAUSTIVE:
        return list(cases)
    return [name for name, case in cases.items() if case.place % 3 == 0 or TWO in case.refused]


# running


def run_cases(
    layout: str, names: Sequence[str], *, files: Sequence[str] = FILES, timeout_s: float = CASE_TIMEOUT_S
) -> dict[str, list[Record]]:
    """Run these cases; return their records by name, one a process. Each case may take ``timeout_s`` seconds.

    A case that fails, hangs or crashes ends a launch of several processes, since the ranks may be out of step after it. Its
    record says so, and the cases after it run in a new launch.
    """
    records: dict[str, list[Record]] = {}
    cases = collect(files)
    # cases that end in a refusal come last
    remaining = sorted(names, key=lambda name: layout in cases[name].refused)
    while remaining:
        with tempfile.TemporaryDirectory(prefix="holmes-contract-") as folder:
            records |= _launch(layout, remaining, Path(folder), files, timeout_s)
        remaining = [name for name in remaining if name not in records]
    return records


def _launch(
    layout: str, names: Sequence[str], folder: Path, files: Sequence[str], timeout_s: float
) -> dict[str, list[Record]]:
    """Launch the cases once; return the records up to the first case that ended badly."""
    payload = (str(folder), layout, list(names), list(files), timeout_s)
    longest = timeout_s + 5.0 * len(names)
    workers = launch_raw(LAYOUTS[layout], "contract:work", payload, timeout_s=longest, folder=folder / "launch")
    records = {}
    for index, name in enumerate(names):
        records[name] = [_read(folder / f"{index}.{rank}", rank, worker) for rank, worker in enumerate(workers)]
        complete = all((folder / f"{index}.{rank}").exists() for rank in range(len(workers)))
        if not complete or (len(workers) > 1 and any(record.error for record in records[name])):
            break
    return records


def _read(path: Path, rank: int, worker: Worker) -> Record:
    if path.exists():
        record: Record = pickle.loads(path.read_bytes())
        return record
    ending = "did not end" if worker.exit_code is None else f"ended with code {worker.exit_code}"
    return Record(error=f"process {rank} {ending} in this case, or waited for another:\n{worker.output[-4000:]}")


def work(payload: tuple[str, str, list[str], list[str], float]) -> None:
    """Run the cases in turn; runs in each process of a launch. With several processes, stop at the first case that fails."""
    folder, layout, names, files, timeout_s = payload
    warnings.filterwarnings("ignore")
    rank, cases = int(os.environ["RANK"]), collect(files)
    for index, name in enumerate(names):
        print(f"CASE {name}", flush=True)
        record = run_case(cases[name], layout, Path(folder) / f"case{index}", timeout_s)
        temporary = Path(folder) / f"{index}.{rank}.part"
        try:
            temporary.write_bytes(pickle.dumps(record))
        except Exception as exception:
            temporary.write_bytes(pickle.dumps(Record(error=f"what it returns cannot be sent: {exception}")))
        temporary.rename(temporary.with_suffix(""))
        if record.error and LAYOUTS[layout] > 1:
            return
        keep_what_is_left()


def run_case(case: Case, layout: str, folder: Path, timeout_s: float) -> Record:
    """Run one case in this process and restore the process's state. A case that hangs ends the process with a traceback."""
    folder.mkdir(exist_ok=True)
    environment, before, record = dict(os.environ), Path.cwd(), Record()
    started = time.monotonic()
    os.chdir(folder)
    pl.seed_everything(7, verbose=False)
    os.environ.pop("PL_GLOBAL_SEED", None)
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    try:
        record.result = case.function(Run(layout, folder, case.num_microbatches), *case.arguments)
    except BaseException as exception:  # an interrupted Trainer raises SystemExit
        record.error = describe(exception)
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)
    record.seconds = time.monotonic() - started
    return record


def describe(exception: BaseException) -> str:
    """Return the exception's traceback, and the local variables of a case's innermost frame."""
    text = "".join(traceback.format_exception(exception))
    frames = [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
    mine = [f for f in frames if Path(f.f_code.co_filename).parent == FOLDER and f.f_code.co_filename != __file__]
    if mine:
        values = [f"{name} = {value!r}" for name, value in mine[-1].f_locals.items()]
        text += "".join(f"    {value[:500]}\n" for value in values if "\n" not in value)
    return text
