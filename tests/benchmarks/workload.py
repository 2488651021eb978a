"""Workload: the model, the batch and the steps that all contenders of a benchmark share.

workload = Workload()                        # a GPT of 11.6 million parameters, batch 32 x 128
"""

from dataclasses import dataclass
from typing import Any

from lightning_holmes.errors import ConfigurationError
from recipes.gpt import GPT
from recipes.text import FileBytes

_MIN_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A byte GPT, trained by AdamW in fp32 on the sources of Python's library.

    batch_size is the number of samples of a step of the whole job, whatever the number of replicas. microbatches: the batches of a
    gradient accumulation window, for contenders that do not split a batch themselves. The first warmup_steps are not measured.
    """

    hidden_size: int = 282
    num_layers: int = 12
    num_heads: int = 3
    sequence_length: int = 128
    batch_size: int = 32
    microbatches: int = 1
    warmup_steps: int = 2
    steps: int = 5

    @property
    def model_arguments(self) -> dict[str, Any]:
        """The arguments of GPT and its subclasses."""
        names = ("hidden_size", "num_layers", "num_heads", "sequence_length")
        return {name: getattr(self, name) for name in names}

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the whole model."""
        return sum(parameter.numel() for parameter in GPT(**self.model_arguments).parameters())


class SharedBatches(FileBytes):
    """Real text, in batches that are a replica's part of the whole job's batch.

    num_replicas: None to take it from the strategy. accumulated: the number of batches of a step.
    """

    def __init__(self, workload: Workload, num_replicas: int | None, accumulated: int = 1) -> None:
        samples = workload.batch_size * (workload.warmup_steps + workload.steps + 1)
        super().__init__(
            max_bytes=max(_MIN_BYTES, 2 * samples * workload.sequence_length),
            sequence_length=workload.sequence_length,
            batch_size=workload.batch_size,
        )
        self.whole_batch = workload.batch_size
        self.num_replicas = num_replicas
        self.accumulated = accumulated

    def setup(self, stage: str | None = None) -> None:
        num_replicas = self.num_replicas
        if num_replicas is None:
            assert self.trainer is not None
            num_replicas = self.trainer.strategy.distributed_sampler_kwargs["num_replicas"]
        parts = num_replicas * self.accumulated
        if self.whole_batch % parts:
            raise ConfigurationError(
                f"batch_size={self.whole_batch} does not divide among {num_replicas} replicas with {self.accumulated} "
                f"microbatches each; give a multiple"
            )
        self.batch_size = self.whole_batch // parts
        super().setup(stage)
