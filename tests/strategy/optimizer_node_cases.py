"""Runs with optimizer nodes: fits by a pairwise selection of a product of options, checkpoints, and what is refused.

Everything is compared with plain Lightning in one process on the same samples; see test_optimizer_nodes.py.
"""

import os
import resource
import signal
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from comparing import state_of
from covering import selected
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from quiet import quiet_trainer, saves
from sharded_parameter_cases import Data as WholeBatches
from sharded_parameter_cases import Thawing, Tied, thaw_in_step
from tanh_net import Unfreezes
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy
from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.optim import host_memory

OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon")
OPTIONS: dict[str, dict[str, Any]] = {
    "no option": {},
    "clipped by norm": {"gradient_clip_val": 0.2},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "two batches a step": {"accumulate_grad_batches": 2},
    "two batches a clipped step": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2},
}
TWO_CLUSTERS = Topology(clusters=tuple(Cluster(name=n, hosts=(Host(name=n, devices=2),)) for n in "ab"))
LAYOUTS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2))
"""(pipeline ranks, workers of each pipeline rank)"""


class Case(NamedTuple):
    """A fit with ``num_nodes`` optimizer nodes.

    states: Where nodes keep optimizer states, "memory" or "disk".
    microbatches: The number of microbatches of each worker.
    tree: Whether workers sum inside their clusters: four are in two clusters, others in one, and the node is elsewhere.
    copies: Whether data are copied through host memory, as beside a GPU.
    """

    layout: tuple[int, int]
    num_nodes: int
    states: str
    optimizer: str
    option: str
    microbatches: int
    tree: bool
    copies: bool

    @property
    def world_size(self) -> int:
        return self.layout[0] * self.layout[1]

    @property
    def topology(self) -> Topology | str:
        return TWO_CLUSTERS if self.layout == (1, 4) and self.tree else "auto"

    def __str__(self) -> str:
        words = (
            f"pp{self.layout[0]}xdp{self.layout[1]}",
            f"{self.num_nodes} nodes",
            self.states,
            self.optimizer,
            self.option,
            "tree" if self.tree else "star",
            "copied" if self.copies else "direct",
        )
        return "-".join(words) + f"-{self.microbatches}"


PRODUCT = product(LAYOUTS, (1, 2), ("memory", "disk"), OPTIMIZERS, OPTIONS, (1, 2, 3), (False, True), (False, True))
CASES = [
    Case(*row)
    for row in selected(
        [row for row in PRODUCT if row[5] * row[0][1] <= 8 and (not row[6] or row[0][1] > 1)],
        cost=lambda row: 1 + row[0][0] * row[0][1],
    )
]


class Model(Tied):
    """Tied weights, a frozen scale and a weight that nothing reads; two parameter groups and a learning rate schedule."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "adafactor":
            return torch.optim.Adafactor(trained, lr=0.02)
        if self.optimizer == "sgd":
            groups = [{"params": trained[:3], "lr": 0.05}, {"params": trained[3:]}]
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7), "interval": "step"}
            ]
        return super().configure_optimizers()


def build(optimizer: str = "adamw") -> Model:
    """Build a model with the same initial weights in every process."""
    torch.manual_seed(7)
    return Model(optimizer)


class Data(WholeBatches):
    """28 texts in batches of 8, so that the last batch is ragged."""

    def train_dataloader(self) -> DataLoader:
        return self.loader(1, 28)


def make_trainer(folder: Path, epochs: int = 1, strategy: HolmesStrategy | None = None, **options: Any) -> Trainer:
    """Make a trainer; without a strategy it is plain Lightning in one process."""
    return quiet_trainer(
        strategy or "auto",
        devices=int(os.environ.get("WORLD_SIZE", "1")) if strategy else 1,
        max_epochs=epochs,
        default_root_dir=folder,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **options,
    )


def with_nodes(count: int, microbatches: int = 2, pipeline: int = 1, **options: Any) -> HolmesStrategy:
    """Make a strategy with optimizer nodes; a rank of a pipeline of two has two layers, in two stages."""
    return HolmesStrategy(
        optimizer_nodes=count,
        pipeline_parallel_size=pipeline,
        num_chunks=4 // pipeline,
        num_microbatches=microbatches,
        save_distributed_checkpoint=options.pop("save_distributed_checkpoint", False),
        **options,
    )


def run_given(payload: tuple[str, str, list[Case]]) -> dict[str, Any]:
    """Run the given fits in each process. The optimizer nodes that they start are forked, too."""
    name, python, cases = payload
    os.environ["PYTHON_EXEC"] = python
    return run_cases(Path(name), cases)


def work(payload: tuple[str, str, list[Case]]) -> dict[str, Any]:
    """Run the given fits in each process; with two workers also checkpoints, with one worker also refusals."""
    name, size = payload[0], int(os.environ["WORLD_SIZE"])
    found = run_given(payload)
    if size == 2:
        found |= run_checkpoints(Path(name)) | run_eager_and_deferred(Path(name))
        found["learning rates"] = find_rates(Path(name), with_nodes(1))
        found["thawed"] = run_thawing(Path(name), with_nodes)
    if size == 1:
        found |= run_refusals(Path(name)) | {"scaled": run_scaled(Path(name), with_nodes)}
        found |= {f"raises in {where}": save_on_exception(Path(name), where, with_nodes(1)) for where in RAISES}
    return found


def run_cases(folder: Path, cases: list[Case]) -> dict[str, Any]:
    """Run cases of one number of workers; return by case the final weights, metrics and optimizer states."""
    found = {}
    for index, case in enumerate(cases):
        module = build(case.optimizer)
        host_memory._passes = lambda device, copies=case.copies: copies
        strategy = with_nodes(
            case.num_nodes,
            case.microbatches,
            case.layout[0],
            optimizer_states=str(folder / "states") if case.states == "disk" else "memory",
            topology=case.topology,
        )
        # that of the optimizer nodes, which rank 0 starts
        os.environ["HOLMES_CLUSTER"] = "elsewhere" if case.tree else ""
        trainer = make_trainer(folder, strategy=strategy, **OPTIONS[case.option])
        trainer.fit(module, datamodule=Data())
        file = folder / f"{case.world_size}-{index}.ckpt"
        trainer.save_checkpoint(file)
        found[str(case)] = {
            "weights": state_of(module),
            "groups": groups_after(trainer),
            "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
            "states": states_in(file) if trainer.global_rank == 0 else {},
        }
    return found


def groups_after(trainer: Trainer) -> list[list[str]]:
    """Return the names of the parameters in each of the optimizer's groups."""
    names = {id(p): name for name, p in trainer.lightning_module.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in trainer.optimizers[0].param_groups]


def states_in(file: Path) -> dict[str, Tensor]:
    """Return the optimizer states in a plain checkpoint file: "number key" to value."""
    (saved,) = torch.load(file, weights_only=False)["optimizer_states"]
    return {
        f"{number} {key}": torch.as_tensor(value)
        for number, entries in saved["state"].items()
        for key, value in entries.items()
    }


RESUMED = {
    "folder": ("two nodes", "a stage's node each", "no node"),
    "folder-after": ("no node",),
    "file": ("a stage's node each",),
    "file-after": ("two nodes with disks",),
    "plain": ("two nodes", "a stage's node each"),
}
"""By source of the checkpoint, the layouts in which it is resumed."""
TARGETS: dict[str, Any] = {
    "two nodes": lambda folder: with_nodes(2),
    "two nodes with disks": lambda folder: with_nodes(2, optimizer_states=str(folder / "states")),
    "a stage's node each": lambda folder: with_nodes(2, pipeline=2),
    "no node": lambda folder: HolmesStrategy(pipeline_parallel_size=1, num_microbatches=2),
}


def run_checkpoints(folder: Path) -> dict[str, Any]:
    """Return weights after two epochs, the second of which is resumed from each source; "plain.ckpt" lies in ``folder``."""
    found = {}
    disk = str(folder / "states")
    kinds = {"folder": (True, "memory", True), "disk": (True, disk, False), "file": (False, disk, False)}
    for kind, (folders, states, later) in kinds.items():
        strategy = with_nodes(1, save_distributed_checkpoint=folders, optimizer_states=states, async_checkpoint=later)
        trainer = make_trainer(folder, strategy=strategy)
        trainer.callbacks.append(saves(folder / f"{kind}.ckpt"))  # type: ignore[attr-defined]
        if folders:
            early = saves(folder / f"{kind}-early.ckpt", "on_train_batch_end", lambda trainer: trainer.global_step == 2)
            trainer.callbacks.append(early)  # type: ignore[attr-defined]
        trainer.fit(build(), datamodule=Data())
        trainer.save_checkpoint(folder / f"{kind}-after.ckpt")
    for source, targets in RESUMED.items():
        for target in targets:
            module = build()
            make_trainer(folder, 2, strategy=TARGETS[target](folder)).fit(
                module, datamodule=Data(), ckpt_path=folder / f"{source}.ckpt"
            )
            found[f"{source} to {target}"] = state_of(module)
    return found


def find_rates(folder: Path, strategy: HolmesStrategy | None = None) -> dict[str, Any]:
    """Return the learning rates that Tuner.lr_find tries on a module, which is trained afterwards from its initial weights."""
    module, trainer = build("adamw"), make_trainer(folder, strategy=strategy)
    module.lr = 0.01
    found = Tuner(trainer).lr_find(module, datamodule=Data(), num_training=6, early_stop_threshold=None)
    assert found is not None
    trainer.fit(module, datamodule=Data())
    return {"losses": found.results["loss"], "rate": module.lr, "weights": state_of(module)}


def run_eager_and_deferred(folder: Path) -> dict[str, Any]:
    """Return by optimizer the weights of three fits: nodes need not wait for the step; a hook makes them wait; and the two workers sum
    their shares before they send them."""
    found: dict[str, Any] = {}
    waits = {"on_before_optimizer_step": lambda trainer, module, optimizer: None}
    for optimizer in ("adamw", "muon"):
        weights = []
        for hooks, cluster in (({}, ""), (waits, ""), ({}, "elsewhere")):
            module, strategy = build(optimizer), with_nodes(2)
            os.environ["HOLMES_CLUSTER"] = cluster
            trainer = make_trainer(folder, strategy=strategy, callbacks=[pl.callbacks.LambdaCallback(**hooks)])
            trainer.fit(module, datamodule=Data())
            weights.append(state_of(module))
            os.environ["HOLMES_CLUSTER"] = ""
        found[f"eager and deferred {optimizer}"] = weights
    return found


def run_scaled(folder: Path, strategy: Any = lambda *_: None) -> dict[str, Any]:
    """Return weights and loss scale after fits in 16-mixed precision, with a scale that fits and one that overflows at first."""
    found: dict[str, Any] = {}
    for name, first, options in (("fits", 2.0**8, {"gradient_clip_val": 0.2}), ("overflows", 2.0**40, {})):
        scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=3)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        module = build()
        trainer = make_trainer(folder, 6, strategy=strategy(1, 1), plugins=plugins, **options)
        trainer.fit(module, datamodule=Data())
        found[name] = {"weights": state_of(module), "scale": scaler.get_scale()}
    return found


class Counts(torch.optim.SGD):
    """An optimizer that counts its steps in its parameter group."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return loss


def _with(optimizer: Any) -> Any:
    def change(module: pl.LightningModule, trainer: Trainer) -> None:
        module.configure_optimizers = lambda: optimizer(list(module.layers.parameters()))  # type: ignore[method-assign]

    return change


def _local(parameters: Any) -> torch.optim.Optimizer:
    class Mine(torch.optim.SGD):
        pass

    return Mine(parameters, lr=0.1)


def _by_hook(hook: str, act: Any) -> Any:
    def change(module: pl.LightningModule, trainer: Trainer) -> None:
        callback = pl.callbacks.LambdaCallback(**{hook: lambda trainer, module, *_: act(module)})
        trainer.callbacks.append(callback)  # type: ignore[attr-defined]

    return change


def _average(module: pl.LightningModule, trainer: Trainer) -> None:
    trainer.callbacks.append(pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1))  # type: ignore[attr-defined]


def _step_twice(module: pl.LightningModule, trainer: Trainer) -> None:
    def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        optimizer.step()

    module.optimizer_step = optimizer_step  # type: ignore[method-assign, assignment]


def _in_step(act: Any) -> Any:
    """Return a case's change: each step begins with ``act(trainer, batch_idx)``."""

    def change(module: pl.LightningModule, trainer: Trainer) -> None:
        own = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            act(trainer, batch_idx)
            return own(batch, batch_idx)

        module.training_step = training_step  # type: ignore[method-assign]

    return change


def _change_in_step(first: int) -> Any:
    def change(trainer: Trainer, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups if batch_idx >= first else ():
            group["lr"] = 0.5 ** (2 + batch_idx)

    return _in_step(change)


def _changed(change: Any) -> Any:
    """Return a case's change: the module's optimizer is an SGD that ``change`` has modified as an object."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        change(optimizer)
        return optimizer

    return _with(make)


def _replace_step(optimizer: torch.optim.Optimizer) -> None:
    own = optimizer.step
    optimizer.step = lambda closure=None: own(closure)  # type: ignore[method-assign, assignment]


def _forget_states(replaced: bool) -> Any:
    def forget(module: pl.LightningModule) -> None:
        (optimizer,) = module.trainer.optimizers
        if replaced:
            optimizer.state = defaultdict(dict)
        else:
            optimizer.state.clear()

    return _by_hook("on_train_batch_end", forget)


def _add_the_scale(module: Any) -> None:
    module.optimizers().add_param_group({"params": [module.scale]})


REFUSED: dict[str, Any] = {
    "a hook of the step": _changed(lambda optimizer: optimizer.register_step_post_hook(lambda *_: None)),
    "a step that is replaced": _changed(_replace_step),
    "states are cleared": _forget_states(False),
    "states are replaced": _forget_states(True),
    "states are read": _in_step(lambda trainer, i: i == 1 and list(trainer.optimizers[0].state.values())),
    "an option that changes in a step": _change_in_step(0),
    "an option that changes in the last step": _change_in_step(3),
    "an average of weights": _average,
    "a weight is read": _by_hook("on_train_batch_end", lambda module: module.layers[0].up.weight.norm()),
    "a weight's data is read": _by_hook("on_train_batch_end", lambda module: module.layers[0].up.weight.data.sum()),
    "a frozen weight is compared": _by_hook("on_train_batch_end", lambda module: bool(module.scale == 1.0)),
    "a gradient is read": _by_hook("on_before_zero_grad", lambda module: module.layers[0].up.weight.grad),
    "counted in a group": _with(lambda parameters: Counts(parameters, lr=0.1)),
    "a class in a function": _with(_local),
    "a tensor as an option": _with(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1))),
    "two steps": _step_twice,
    "a group before a step": _by_hook("on_after_backward", _add_the_scale),
    "a group in mid-run": _by_hook(
        "on_train_batch_start", lambda module: module.global_step and _add_the_scale(module)
    ),
    "finetuning": lambda module, trainer: trainer.callbacks.append(Unfreezes()),
    "thawed in a step": thaw_in_step,
    "a parameter in another group": _by_hook(
        "on_train_batch_start",
        lambda module: (
            module.global_step and module.optimizers().param_groups[0].update(params=[module.layers[3].up.bias])
        ),
    ),
}


REASONS = {
    "an average of weights": "UnsupportedModuleError: optimizer_nodes=1: the callback StochasticWeightAveraging reads",
    "a weight is read": "reads layers.0.up.weight, but optimizer nodes hold it between steps",
    "a weight's data is read": "reads layers.0.up.weight, but optimizer nodes hold it between steps",
    "a frozen weight is compared": "reads scale, but optimizer nodes hold it between steps",
    "a gradient is read": "reads the gradient of layers.0.up.weight, but optimizer nodes hold it between steps",
    "states are read": "the state of SGD is read, which optimizer nodes hold: read it in a checkpoint",
    "states are cleared": "the state of SGD is cleared, which optimizer nodes hold",
    "states are replaced": "the state of SGD is cleared, which optimizer nodes hold",
    "a hook of the step": "is called with each step of SGD (register_step_pre_hook or the like)",
    "a step that is replaced": "SGD.step was replaced on this optimizer",
    "a step after the fit": "this SGD steps after the fit for which it was made",
    "a fit with nodes": "this SGD was trained with before, when nodes took its parameters and states",
    "a fit without": "this SGD steps after the fit for which it was made",
    "counted in a group": "Counts changes 'count' of its parameter group 0 in each step",
    "a class in a function": "is defined inside a function, where an optimizer node cannot find it",
    "a tensor as an option": "param_groups[0]['lr'] is a tensor, and only plain numbers are sent",
    "an option that changes in a step": "training_step of Model changes lr of the optimizer, while optimizer nodes update a layer",
    "an option that changes in the last step": "training_step of Model changes lr of the optimizer, while optimizer nodes update a layer",
    "thawed on disk": "is trained from now on, but was frozen when its place on disk was taken",
    "thawed without a master": "is trained from now on, but was frozen when optimizer nodes were given it",
    "a group in mid-run": "the parameter groups of SGD were changed while the module trains, and optimizer nodes step those",
    "finetuning": "the callback Unfreezes adds parameters to the optimizer while the module trains",
    "thawed in a step": "scale was frozen when the batch began, and is trained in it: its gradient would be lost",
    "a group before a step": "the parameter groups of SGD were changed while the module trains, and optimizer nodes step those",
    "a parameter in another group": "a hook has changed which parameters are in a group of SGD while the module trains",
    "two steps": "the optimizer steps twice with the gradients of one batch",
}
"""By what is refused, a part of the error."""


def error_of(run: Callable[[], Any]) -> str | None:
    """Return the error that ``run`` raises, or None."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def run_refusals(folder: Path) -> dict[str, Any]:
    """Return by reason the error that each refused run raises, on one worker."""
    found: dict[str, Any] = {}
    for why, change in REFUSED.items():
        module, trainer = build("sgd"), make_trainer(folder, strategy=with_nodes(1))
        change(module, trainer)
        found[why] = error_of(partial(trainer.fit, module, datamodule=Data()))
    return found | run_used_optimizers(folder) | run_thawing_in_vain(folder)


def run_thawing(folder: Path, strategy: Any = lambda *_: None) -> dict[str, Any]:
    """Return the weights of fits in which parameters thaw: where nodes update layers at once, and between two batches of an
    accumulation window."""
    found = {}
    for name, options in (("at once", {}), ("in a window", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2})):
        torch.manual_seed(7)
        module = Thawing()
        make_trainer(folder, strategy=strategy(2, 2), **options).fit(module, datamodule=Data())
        found[name] = state_of(module)
    return found


def run_thawing_in_vain(folder: Path) -> dict[str, Any]:
    """Return the errors of runs in which parameters thaw and a node has no place for the state they need."""
    disk: dict[str, Any] = {"optimizer_states": str(folder / "states")}
    found = {}
    for name, strategy, precision in (
        ("thawed on disk", disk, "32-true"),
        ("thawed without a master", {"master_weights": True}, "bf16-true"),
    ):
        trainer = make_trainer(folder, strategy=with_nodes(1, **strategy), precision=precision)
        found[name] = error_of(partial(trainer.fit, Thawing(), datamodule=Data()))
    return found


def run_used_optimizers(folder: Path) -> dict[str, Any]:
    """Return the errors raised where the optimizer of a fit that has ended steps, or is used in another fit, with nodes and without."""
    found = {}
    for name, strategy in (("a step after the fit", None), ("a fit with nodes", with_nodes(1)), ("a fit without", "")):
        module = build("sgd")
        optimizer = torch.optim.SGD(list(module.layers.parameters()), lr=0.1)
        module.configure_optimizers = lambda made=optimizer: made  # type: ignore[method-assign]
        make_trainer(folder, strategy=with_nodes(1)).fit(module, datamodule=Data())
        again = partial(make_trainer(folder, strategy=strategy or None).fit, module, datamodule=Data())
        found[name] = error_of(optimizer.step if strategy is None else again)
    return found


RAISES = ("forward", "backward")


class Raises(pl.Callback):
    """Raises in the second batch, before any layer's gradient is known ("forward") or when only the first layer's is missing
    ("backward"); saves on the exception."""

    def __init__(self, where: str, path: Path) -> None:
        self.where, self.path = where, path

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("stop here")

        if batch_idx == 1 and self.where == "forward":
            pl_module.layers[3].register_forward_pre_hook(fail)
        elif batch_idx == 1:
            pl_module.layers[0].up.weight.register_hook(fail)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


def save_on_exception(folder: Path, where: str, strategy: HolmesStrategy | None = None) -> dict[str, Any]:
    """Return what a callback saved of a run that failed, the warnings, and whether a save after it wrote a file."""
    path = folder / f"raised-{where}-{strategy is None}.ckpt"
    module, trainer = build(), make_trainer(folder, strategy=strategy)
    trainer.callbacks.append(Raises(where, path))  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, datamodule=Data())
        except RuntimeError as error:
            assert "stop here" in str(error)
        trainer.save_checkpoint(path.with_suffix(".later"))
    said = [str(warning.message) for warning in caught]
    saved = torch.load(path, weights_only=False)["state_dict"] if path.exists() else None
    return {
        "said": said,
        "weights": saved,
        "states": states_in(path) if path.exists() else None,
        "later": path.with_suffix(".later").exists(),
    }


class Loses(pl.Callback):
    """In the second batch, kills or stops the node that rank 0 started, lets it write nothing more to its disk, or ends the last worker without
    a message. Before the disk fails a checkpoint is written."""

    def __init__(self, what: str, folder: Path) -> None:
        self.what, self.folder = what, folder

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.what == "disk":
            trainer.save_checkpoint(self.folder / "before.ckpt")
        if batch_idx == 1 and self.what in ("node", "stopped", "disk") and trainer.global_rank == 0:
            strategy: Any = trainer.strategy
            pid = strategy._job._nodes._nodes[0]["pid"]
            if self.what != "disk":
                self.note()
                (self.folder / "pid").write_text(str(pid))
                os.kill(pid, signal.SIGKILL if self.what == "node" else signal.SIGSTOP)
            else:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        if batch_idx == 1 and self.what == "disk":
            trainer.strategy.barrier()  # so that no rank has read ahead for the next step
        if batch_idx == 1 and self.what == "worker" and trainer.global_rank == trainer.world_size - 1:
            self.note()
            os._exit(9)

    def note(self) -> None:
        """Write down the time of the loss."""
        (self.folder / "lost").write_text(str(time.monotonic()))


def lose(payload: tuple[str, str]) -> None:
    """Run a fit in which a node, its file or a worker is lost."""
    what, folder = payload[0], Path(payload[1])
    states = str(folder / "states") if what == "disk" else "memory"
    what, _, tree = what.partition(" by ")
    os.environ["HOLMES_CLUSTER"] = "elsewhere" if tree else ""
    count, what = (2, "node") if what == "one of two nodes" else (1, what)
    strategy = with_nodes(count, optimizer_states=states, save_distributed_checkpoint=False)
    trainer = make_trainer(folder, strategy=strategy)
    trainer.callbacks.append(Loses(what, folder))  # type: ignore[attr-defined]
    trainer.fit(build(), datamodule=Data())
