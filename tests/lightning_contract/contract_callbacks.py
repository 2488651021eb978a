"""Callbacks: the order and arguments of hooks, which state is kept, and callbacks that a module brings."""

from typing import Any

import pytest
from comparing import state_of
from contract import TWO, Run, each, refused
from contract_models import Calls, Net, batches, same
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LambdaCallback, WeightAveraging


def case_the_module_brings_callbacks(run: Run):
    class Brings(Net):
        def configure_callbacks(self) -> Any:
            return [brought]

    brought, given = Calls("on_train_end"), LambdaCallback(on_train_end=lambda *_: None)
    trainer = run.fit(Brings(), callbacks=[given])
    assert brought.names == ["on_train_end"] and brought in trainer.callbacks and given in trainer.callbacks


@each(
    validation=("validate", "on_validation_batch_end"),
    test=("test", "on_test_batch_end"),
    predict=("predict", "on_predict_batch_end"),
)
def case_batch_hooks_are_given_what_the_step_returned(run: Run, value: Any):
    entry, hook = value
    found: list[Any] = []

    class Returns(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"out": self(batch), "index": batch_idx}

        test_step = predict_step = validation_step

    class Given(Callback):
        pass

    def given(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        found.append((outputs["out"].clone(), outputs["index"]))

    callback = Given()
    setattr(callback, hook, given)
    getattr(run.trainer(callbacks=[callback]), entry)(Returns(), batches(2))
    assert [index for _, index in found] == [0, 1] and found[0][0].shape == (2, 4)
    return found


def case_the_loss_that_is_shown_is_whole_when_accumulating(run: Run):
    """The loss in the backward hook is divided by the number of accumulated batches; the step's output is not."""
    outputs: list[float] = []

    class Given(Callback):
        def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
            outputs.append(float(loss))

        def on_train_batch_end(self, trainer: Any, module: Any, output: Any, batch: Any, batch_idx: int) -> None:
            outputs.append(float(output["loss"]))

    run.fit(Net(), callbacks=[Given()], accumulate_grad_batches=2, limit_train_batches=2)
    return outputs


class Keeps(Callback):
    """Counts batches, keeps the count in checkpoints, and records the hooks about checkpoints."""

    def __init__(self) -> None:
        self.count = 0
        self.told: list[str] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        checkpoint["extra"] = "keeps"
        self.told.append("save")

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.told.append(f"load {checkpoint['extra']}")


def case_state_of_callbacks_goes_through_checkpoints(run: Run):
    first, second = Keeps(), Keeps()
    trainer = run.fit(Net(), callbacks=[first])
    trainer.save_checkpoint(run.folder / "kept.ckpt")
    run.meet()
    assert first.count == 4 and first.told == ["save"]
    run.fit(Net(), callbacks=[second], ckpt_path=run.folder / "kept.ckpt", max_epochs=2)
    assert second.count == 8 and second.told == ["load keeps"]


def case_a_callback_may_log(run: Run):
    class Logs(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            module.log("from_module", float(batch_idx))
            self.log("from_callback", float(batch_idx), on_step=False, on_epoch=True)

    trainer = run.fit(Net(), callbacks=[Logs()])
    assert float(trainer.callback_metrics["from_module"]) == 3.0
    assert float(trainer.callback_metrics["from_callback"]) == 1.5


@each(ema=EMAWeightAveraging, mean=WeightAveraging)
def case_averages_are_shown_to_a_validation_of_its_own(run: Run, kind: Any):
    module = Net()
    trainer = run.fit(module, batches(4), batches(2), callbacks=[kind()], max_epochs=2)
    trained = state_of(module)
    found = trainer.validate(module, batches(2), verbose=False)
    assert same(state_of(module), trained)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, batches(4), batches(2))
    return [list(values.values()) for values in found], state_of(module)


@refused("parameters of Fails have been NaN since a run before has failed", TWO)
def case_a_module_is_trained_after_a_fit_that_has_failed(run: Run):
    class Fails(Net):
        fails = True

        def on_train_batch_end(self, *_: Any) -> None:
            if self.fails:
                raise ValueError("once")

    module = Fails()
    with pytest.raises(ValueError, match="once"):
        run.fit(module)
    module.fails = False
    run.fit(module)
    return state_of(module)
