"""FSDP2 by Lightning's ModelParallelStrategy: parameters, gradients and optimizer states sharded over all hosts."""

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.fsdp import fully_shard

from lightning_holmes.commands.benchmark.contenders.contender import Contender, Job
from lightning_holmes.models import GPT


class ShardedGPT(GPT):
    """GPT with each block, and then the rest, sharded over the data-parallel axis."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)


def make_strategy(job: Job) -> Strategy:
    """All processes along one axis."""
    return ModelParallelStrategy(
        data_parallel_size=job.world_size, tensor_parallel_size=1, process_group_backend="gloo"
    )


def make_module(job: Job) -> LightningModule:
    """The model, which shards itself when the strategy asks it to."""
    return ShardedGPT(**job.workload.model_arguments)


FSDP = Contender(name="fsdp2", title="FSDP2", make_strategy=make_strategy, make_module=make_module)
