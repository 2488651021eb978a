"""A batch for a step that is to be tried: what the step is called with, and batches that are looked at before their time.

    sample = StepSample(step_name="training_step", batch=batch, arguments=(0,))

A run learns its module from the batches that Lightning brings (learning.py). Only where a module has no memory yet
(building.py) must it be known before, which weights this rank will hold: then ``sample_batches`` asks for the loaders early.
"""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_private import before_batch_transfer, begin_epoch_data, combined_loader, forget_data
from lightning_holmes.pipeline.seeds import preserved_random_state
from lightning_holmes.strategy.compat.replacements import Replacements


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """What a step is called with: a batch, on the device, and the arguments after it."""

    step_name: str
    batch: Any
    arguments: tuple[Any, ...]


def step_arguments(module: nn.Module, step_name: str, *, num_loaders: int = 1) -> tuple[int, ...]:
    """What Lightning gives a step after its first batch: the index of the batch, if the step takes it, and that of the
    loader, where there are several."""
    takes_index = is_param_in_hook_signature(getattr(module, step_name), "batch_idx", min_args=2)
    return (0,) * (takes_index + (num_loaders > 1 and step_name != "training_step"))


def sample_batches(trainer: "pl.Trainer", device: torch.device, undo: Replacements) -> list[StepSample]:
    """A batch for each step that will run, from the trainer's own loaders.

    The loaders, and random generators, are left as plain Lightning would have them when it begins to train. All ranks must
    call: loaders are set up, which takes barriers.
    """
    if trainer.state.fn == TrainerFn.FITTING:
        return _samples_of_fit(trainer, device)
    evaluations: dict[Any, tuple[str, Any]] = {
        TrainerFn.VALIDATING: ("validation_step", trainer.validate_loop),
        TrainerFn.TESTING: ("test_step", trainer.test_loop),
        TrainerFn.PREDICTING: ("predict_step", trainer.predict_loop),
    }
    step_name, loop = evaluations[trainer.state.fn]
    loop.setup_data()
    undo.replace(loop, setup_data=_done_once(loop))
    loader = combined_loader(loop)
    return [] if loader is None or loop.skip else [_sample(trainer, step_name, loader, device)]


def _samples_of_fit(trainer: "pl.Trainer", device: torch.device) -> list[StepSample]:
    samples = []
    loop = trainer.fit_loop
    with preserved_random_state(device):
        loop.setup_data()
    loader = combined_loader(loop)
    trains = loader is not None and bool(loop.max_batches)
    if trains:
        samples.append(_sample(trainer, "training_step", loader, device))
    if trainer.enable_validation:
        trainer.validating = True
        validation = loop.epoch_loop.val_loop
        with preserved_random_state(device):
            validation.setup_data()
        loader = combined_loader(validation)
        if loader is not None and not validation.skip:
            samples.append(_sample(trainer, "validation_step", loader, device))
        trainer.training = True
    if trainer.ckpt_path is not None:
        # states of loaders are read when Lightning sets its data up, which it must do again after loading
        forget_data(loop)
    elif trains:
        begin_epoch_data(loop)
    return samples


def _sample(trainer: "pl.Trainer", step_name: str, loader: Any, device: torch.device) -> StepSample:
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(_first_batch(loader, device))
    batch = trainer.strategy.batch_to_device(before_batch_transfer(module, batch), dataloader_idx=0)
    arguments = step_arguments(module, step_name, num_loaders=len(loader.flattened))
    return StepSample(step_name=step_name, batch=batch, arguments=arguments)


def _done_once(loop: Any) -> Any:
    """A loop's ``setup_data``, which does nothing the first time: it has been called."""
    own, done = loop.setup_data, [True]

    def setup_data() -> None:
        if done:
            done.clear()
        else:
            own()

    return setup_data


def _first_batch(combined: Any, device: torch.device) -> Any:
    limits, combined.limits = combined.limits, None
    try:
        with preserved_random_state(device):  # even making an iterator draws a seed
            for loader in combined.flattened:
                if iter(loader) is loader:
                    raise ConfigurationError(
                        f"a data loader of type {type(loader).__name__} is an iterator, which cannot be read twice: a module "
                        f"that is built without memory needs a batch before it starts; wrap it in an IterableDataset and a "
                        f"DataLoader"
                    )
            batch, _, _ = next(iter(combined))
    except StopIteration:
        raise ConfigurationError(
            "a data loader is empty: a pipeline needs one batch to learn the module from"
        ) from None
    finally:
        combined.limits = limits
    return batch
