"""What is run: one Trainer.fit, as plain data that is sent to the processes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """HolmesStrategy's arguments."""

    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    schedule: str = "1f1b"
    num_chunks: int = 1
    num_microbatches: int = 1
    gradient_sync: str = "auto"
    """Small enough that gradients are reduced in several buckets."""
    sharding: str = "none"
    partition: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One Trainer.fit. ``layout`` None is plain Lightning; ``batch_size`` is that of all replicas together."""

    family: str
    num_layers: int = 5
    batch_size: int = 8
    layout: Layout | None = None
    precision: str = "32-true"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    limit_train_batches: int | None = None

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1 if self.layout is None else self.layout.pipeline_parallel_size * self.layout.data_parallel_size
