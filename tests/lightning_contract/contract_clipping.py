"""Clipping of gradients: by norm, by value, and by the module's own hook."""

from typing import Any

import torch
from comparing import state_of
from contract import Run, each
from contract_models import Net


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
    return state_of(module)


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
    return state_of(module)


def case_the_hook_may_clip_as_it_likes(run: Run):
    class Own(Steep):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
            limit = 0.1 * (1 + self.trainer.global_step)
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")

    module = Own()
    run.fit(module)
    return state_of(module)
