"""Modules: their hooks and what they build there, what they know of their Trainer, and the precision they run in."""

from typing import Any

import lightning.pytorch as pl
import torch
from contract import TWO, Run, each, whole_batches
from contract_models import WIDTH, Calls, Net, batches, weights
from torch import nn


class Notes(Net):
    """A module with a list for the names of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []


def noted(names: Any) -> type[Notes]:
    """Make a module class that overrides these hooks and records their calls."""

    def hook(name: str) -> Any:
        def note(self: Any, *args: Any, **kwargs: Any) -> None:
            self.names.append(name)

        return note

    return type("Noted", (Notes,), {name: hook(name) for name in names})


def case_hooks_of_a_fit_come_in_their_order(run: Run):
    validation = [
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_epoch_end",
        "on_validation_end",
    ]
    names = [
        "setup",
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        *validation,
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]
    module = noted(names)()
    run.fit(module, batches(1), batches(1))
    assert module.names == names


@each(validate="validation", test="test", predict="predict")
def case_hooks_of_an_evaluation_come_in_their_order(run: Run, stage: str):
    steps = [f"on_{stage}_batch_start", f"on_{stage}_batch_end"]
    names = [f"on_{stage}_start", f"on_{stage}_epoch_start", *steps, f"on_{stage}_epoch_end", f"on_{stage}_end"]
    module = noted(["setup", *names, "teardown"])()
    getattr(run.trainer(), "validate" if stage == "validation" else stage)(module, batches(1))
    assert module.names == ["setup", *names, "teardown"]


BEFORE_STEPS = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")


@each(**{hook: hook for hook in BEFORE_STEPS})
def case_what_a_hook_makes_is_there_in_the_step(run: Run, hook: str):
    class Makes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.made

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        self.made = 2.0

    module = type("Made", (Makes,), {hook: make})()
    run.fit(module)
    return weights(module)


@each(validation_start="on_validation_start", validation_epoch_start="on_validation_epoch_start")
def case_what_a_hook_makes_is_there_in_the_validation_step(run: Run, hook: str):
    class Makes(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.made.append(float(self.loss(batch)))

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        self.made = []

    module = type("Made", (Makes,), {hook: make})()
    run.fit(module, batches(2), batches(2))
    return module.made


class Built(pl.LightningModule):
    """A module that has no layers until a hook builds them."""

    def build(self) -> None:
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    forward, loss = Net.forward, Net.loss  # type: ignore[assignment]
    training_step = Net.training_step  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@each(setup="setup", configure_model="configure_model")
def case_layers_may_be_built_in(run: Run, hook: str):
    def build(self: Any, **stage: Any) -> None:
        if not hasattr(self, "layers"):
            self.build()

    module = type("BuiltLater", (Built,), {hook: build})()
    trainer = run.fit(module, batches(4))
    assert trainer.global_step == 4 and len(list(module.parameters())) == 4


@each(fit="fit", validate="validate", test="test", predict="predict")
def case_setup_and_teardown_are_told_the_stage(run: Run, entry: str):
    told: list[Any] = []

    class Told(Net):
        def setup(self, stage: str) -> None:
            told.append(("setup", stage))

        def teardown(self, stage: str) -> None:
            told.append(("teardown", stage))

    getattr(run.trainer(), entry)(Told(), batches(1))
    assert told == [("setup", entry), ("teardown", entry)]


def case_data_are_prepared_once(run: Run):
    count = []

    class Prepares(Net):
        def prepare_data(self) -> None:
            count.append("prepared")

    run.fit(Prepares(), batches(1))
    assert len(count) == (1 if run.is_first else 0)


def case_a_module_knows_its_trainer(run: Run):
    calls = Calls(
        "on_train_batch_end",
        look=lambda trainer, module: (module.trainer is trainer, module.current_epoch, module.global_step),
    )
    run.fit(Net(), batches(1), callbacks=[calls], max_epochs=2)
    assert calls.seen == [(True, 0, 1), (True, 1, 2)]


def case_a_module_knows_its_place(run: Run):
    calls = Calls("on_train_start", look=lambda trainer, module: (str(module.device), module.dtype, module.local_rank))
    run.fit(Net(), batches(1), callbacks=[calls])
    (device, dtype, rank) = calls.seen[0]
    assert (device, dtype) == ("cpu", torch.float32) and rank == (0 if run.is_first else 1)


@whole_batches
def case_a_step_counts_its_batches(run: Run):
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.indices: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.indices.append(batch_idx)
            return super().training_step(batch, batch_idx)

    module = Counts()
    run.fit(module, batches(3))
    assert module.indices == [0, 1, 2]


@each(
    with_keyword=lambda self, batch, batch_idx, scale=2.0: self.loss(batch) * scale,
    with_anything=lambda self, *args: self.loss(args[0]) * (1 + args[1]),
    without_index=lambda self, batch: self.loss(batch),
)
def case_a_step_may_take(run: Run, step: Any):
    module = type("Takes", (Net,), {"training_step": step})()
    run.fit(module, batches(3))
    return weights(module)


@each(
    with_a_word=lambda self, batch, batch_idx, prefix="val": self.log(f"{prefix}_loss", self.loss(batch)),
    without_index=lambda self, batch: self.log("val_loss", self.loss(batch)),
)
def case_a_validation_step_may_take(run: Run, step: Any):
    module = type("Takes", (Net,), {"validation_step": step})()
    trainer = run.fit(module, batches(1), batches(2))
    assert "val_loss" in trainer.callback_metrics


@each(epoch="current_epoch", step="global_step")
def case_a_step_may_read(run: Run, name: str):
    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (1 + getattr(self.trainer, name))

    module = Reads()
    run.fit(module, batches(2), max_epochs=2)
    return weights(module)


@each(
    single=("32-true", torch.float32, torch.float32),
    double=("64-true", torch.float64, torch.float64),
    brain=("bf16-true", torch.bfloat16, torch.bfloat16),
    mixed=("bf16-mixed", torch.float32, torch.bfloat16),
)
def case_precision_is_kept(run: Run, value: Any):
    name, of_weights, of_outputs = value

    class Notes(Net):
        found: Any = None

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layers[1](self.layers[0](batch))

        def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
            self.found = (self.layers[0].weight.dtype, outputs.dtype)

    module = Notes()
    run.fit(module, batches(), batches(2), precision=name)
    assert module.found == (of_weights, of_outputs)
    assert module.layers[0].weight.dtype == of_weights


def case_hyper_parameters_are_the_arguments(run: Run):
    class Keeps(Net):
        def __init__(self, size: int, word: str = "one", *, more: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["more"])

    module = Keeps(3, more=object())
    run.fit(module, batches(1))
    assert dict(module.hparams) == {"size": 3, "word": "one"}


def case_an_untrained_part_stays(run: Run):
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

    module = Unused()
    before = module.unused.weight.detach().clone()
    run.fit(module)
    assert torch.equal(module.unused.weight, before)


def case_buffers_and_their_persistence_are_kept(run: Run):
    class Buffers(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(2))
            self.register_buffer("passing", torch.ones(2), persistent=False)

    module = Buffers()
    run.fit(module)
    assert "kept" in module.state_dict() and "passing" not in module.state_dict()


@each(freeze=True, unfreeze=False)
def case_a_module_is_frozen_by_its_method(run: Run, frozen: bool):
    module = Net()
    run.fit(module)
    module.freeze()
    if not frozen:
        module.unfreeze()
    assert all(p.requires_grad != frozen for p in module.parameters()) and module.training != frozen


def case_example_inputs_are_summarised(run: Run):
    module = Net()
    module.example_input_array = torch.zeros(2, WIDTH)
    trainer = run.fit(module, batches(2), enable_model_summary=True)
    assert trainer.global_step == 2


@each(
    properties=lambda trainer: (trainer.world_size, trainer.num_devices, trainer.num_nodes, trainer.node_rank),
    ranks=lambda trainer: (trainer.global_rank, trainer.local_rank, trainer.is_global_zero),
)
def case_a_trainer_knows_its_processes(run: Run, look: Any):
    calls = Calls("on_train_start", look=lambda trainer, module: look(trainer))
    run.fit(Net(), batches(1), callbacks=[calls])
    size, rank = (2 if run.layout == TWO else 1), (0 if run.is_first else 1)
    assert calls.seen[0] in [(size, size, 1, 0), (rank, rank, rank == 0)]


def case_a_trainer_knows_its_folder(run: Run):
    assert run.trainer().default_root_dir == str(run.folder)


def case_a_batch_gathered_from_all_is_a_batch(run: Run):
    """Outside of steps, ``all_gather`` and ``reduce`` act over replicas, of which there is one."""
    found: list[Any] = []

    class Gathers(Net):
        def on_train_epoch_end(self) -> None:
            found.append(self.all_gather(torch.ones(2)).shape)
            found.append(float(self.trainer.strategy.reduce(torch.tensor(3.0), reduce_op="sum")))

    run.fit(Gathers(), batches(1))
    assert found[0].numel() == 2 and found[0][-1] == 2
    assert found[1] == 3.0
