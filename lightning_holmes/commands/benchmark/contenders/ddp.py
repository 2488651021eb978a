"""Lightning's DDP, with gradients as they are and with gradients rounded to fp16 for the way."""

from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_holmes.commands.benchmark.contenders.contender import Contender, Job


class Fp16DDPStrategy(DDPStrategy):
    """DDPStrategy with torch's hook that halves the bytes of an all-reduce.

    Lightning's ddp_comm_hook is passed over, without a word, on anything but CUDA (2.6, `_register_ddp_hooks`).
    """

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)


def make_ddp(job: Job) -> Strategy:
    """As users write it."""
    return DDPStrategy(process_group_backend="gloo")


def make_ddp_fp16(job: Job) -> Strategy:
    """As users write it where there is CUDA."""
    return Fp16DDPStrategy(process_group_backend="gloo")


DDP = Contender(name="ddp", title="DDP", make_strategy=make_ddp)
DDP_FP16 = Contender(name="ddp-fp16", title="DDP, fp16 gradients", make_strategy=make_ddp_fp16)
