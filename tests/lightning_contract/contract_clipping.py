"""Clipping of gradients: by norm, by value, and by the module's own hook."""

from typing import Any

import pytest
import torch
from contract import Run, each
from contract_models import Calls, Net, weights
from lightning.pytorch.utilities import grad_norm


class Steep(Net):
    """A module with gradients large enough to clip and plain SGD, whose steps depend on the gradients alone."""

    def loss(self, batch: Any) -> Any:
        return 50 * super().loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


@each(
    by_norm={"gradient_clip_val": 0.5},
    by_norm_in_words={"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"},
    by_value={"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    by_nothing={"gradient_clip_val": 0},
    not_at_all={},
    by_more_than_there_is={"gradient_clip_val": 1e6},
    accumulated={"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
)
def case_clips(run: Run, options: Any):
    module = Steep()
    run.fit(module, **options)
    return weights(module)


def case_the_norm_is_at_most_the_value(run: Run):
    """``on_before_optimizer_step`` runs before clipping; the hook ``configure_gradient_clipping`` clips."""
    before: list[float] = []
    after: list[float] = []

    class Looks(Steep):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            before.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
            super().configure_gradient_clipping(optimizer, *args, **options)
            after.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))

    run.fit(Looks(), gradient_clip_val=0.5)
    assert min(before) > 0.5
    assert all(norm <= 0.501 for norm in after)
    return before, after


def case_the_hook_is_given_the_trainer_s_values(run: Run):
    class Notes(Steep):
        given: Any = None

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.given = (gradient_clip_val, str(gradient_clip_algorithm.value))

    module = Notes()
    run.fit(module, gradient_clip_val=0.5, gradient_clip_algorithm="value")
    assert module.given == (0.5, "value")
    return weights(module)


def case_the_hook_may_clip_as_it_likes(run: Run):
    class Own(Steep):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
            limit = 0.1 * (1 + self.trainer.global_step)
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")

    module = Own()
    run.fit(module)
    return weights(module)


def case_another_value_in_the_hook_than_the_trainer_s_is_refused(run: Run):
    class Own(Steep):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.1)

    with pytest.raises(Exception, match="gradient_clip_val"):
        run.fit(Own(), gradient_clip_val=0.5)


def case_clipping_comes_once_a_step(run: Run):
    class Counts(Steep):
        clipped = 0

        def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
            self.clipped += 1
            super().configure_gradient_clipping(*args, **options)

    module, calls = Counts(), Calls("on_before_optimizer_step")
    run.fit(module, callbacks=[calls], gradient_clip_val=0.5, accumulate_grad_batches=2)
    assert module.clipped == calls.count("on_before_optimizer_step") == 2


def case_norms_of_gradients_are_those_of_the_whole_module(run: Run):
    norms: list[Any] = []

    class Logs(Steep):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append({name: float(value) for name, value in grad_norm(self.layers, 2).items()})

    run.fit(Logs())
    assert len(norms) == 4 and len(norms[0]) == 5
    return norms
