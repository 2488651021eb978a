"""Modules: their hooks and what they build there, what they know of their Trainer, and the precision they run in."""

from typing import Any

import torch
from contract import TWO, Run, each, whole_batches
from contract_models import WIDTH, Calls, Net, batches
from tanh_net import ByGradient
from torch import nn


class Built(ByGradient):
    """A module that has no layers until a hook builds them."""

    def build(self) -> None:
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    forward, loss = Net.forward, Net.loss  # type: ignore[assignment]
    training_step = Net.training_step  # type: ignore[assignment]


@each(setup="setup", configure_model="configure_model")
def case_layers_may_be_built_in(run: Run, hook: str):
    def build(self: Any, **stage: Any) -> None:
        if not hasattr(self, "layers"):
            self.build()

    module = type("BuiltLater", (Built,), {hook: build})()
    trainer = run.fit(module, batches(4))
    assert trainer.global_step == 4 and len(list(module.parameters())) == 4


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
    return run.weights_after(type("Takes", (Net,), {"training_step": step})(), batches(3))


@each(
    with_a_word=lambda self, batch, batch_idx, prefix="val": self.log(f"{prefix}_loss", self.loss(batch)),
    without_index=lambda self, batch: self.log("val_loss", self.loss(batch)),
)
def case_a_validation_step_may_take(run: Run, step: Any):
    module = type("Takes", (Net,), {"validation_step": step})()
    trainer = run.fit(module, batches(1), batches(2))
    assert "val_loss" in trainer.callback_metrics


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


def case_buffers_and_their_persistence_are_kept(run: Run):
    class Buffers(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(2))
            self.register_buffer("passing", torch.ones(2), persistent=False)

    module = Buffers()
    run.fit(module)
    assert "kept" in module.state_dict() and "passing" not in module.state_dict()


@each(
    properties=lambda trainer: (trainer.world_size, trainer.num_devices, trainer.num_nodes, trainer.node_rank),
    ranks=lambda trainer: (trainer.global_rank, trainer.local_rank, trainer.is_global_zero),
)
def case_a_trainer_knows_its_processes(run: Run, look: Any):
    calls = Calls("on_train_start", look=lambda trainer, module: look(trainer))
    run.fit(Net(), batches(1), callbacks=[calls])
    size, rank = (2 if run.layout == TWO else 1), (0 if run.is_first else 1)
    assert calls.seen[0] in [(size, size, 1, 0), (rank, rank, rank == 0)]


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
