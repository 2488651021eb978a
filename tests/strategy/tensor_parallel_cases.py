"""What the processes of test_tensor_parallel.py run: modules whose configure_model shards their layers."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from quiet import quiet_trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import HolmesError
from recipes.gpt import GPT

EPOCHS, STEPS, SAMPLES, LENGTH, WIDTH, VOCABULARY, CLASSES = 2, 3, 8, 6, 8, 12, 6


class Block(nn.Module):
    """A residual feed-forward block with dropout on a tensor that every rank holds whole."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.mesh: Any = None  # if given, the output is a DTensor on it

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = plain(hidden)
        output = hidden + self.drop(self.down(torch.tanh(self.up(self.norm(hidden)))))
        return output if self.mesh is None else DTensor.from_local(output, self.mesh, [Replicate()])


def plain(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Any) -> Tensor:
    """Return the full tensor of a DTensor; every rank of the tensor-parallel group must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Words(LightningModule):
    """Embedding, blocks and head. ``style``: how configure_model shards them over the tensor-parallel axis.

    "megatron": column then row inside a block, a sharded head; embedding and norms plain.
    "sequence": norms between activations that are sharded over positions (their gradients are partial sums).
    "dtensor": as megatron, but blocks return DTensors, which cannot be sent between stages.
    "none": nothing is sharded.
    "wrong": as sequence, but the norms are left plain, so that each rank has the gradient of its own positions.
    """

    def __init__(self, style: str = "megatron", dropout: float = 0.0) -> None:
        super().__init__()
        self.style = style
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.shared_out = False

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or self.shared_out:
            return
        self.shared_out = True
        tensor = mesh["tensor_parallel"]
        if self.style == "none":
            return
        if self.style in ("megatron", "dtensor"):
            plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
            for index in range(len(self.blocks)):
                plan |= {f"blocks.{index}.up": ColwiseParallel(), f"blocks.{index}.down": RowwiseParallel()}
                if self.style == "dtensor":
                    self.blocks[index].mesh = tensor
        else:
            plan = {
                "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(use_local_output=True),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            }
            for index in range(len(self.blocks)):
                plan |= {
                    f"blocks.{index}.norm": SequenceParallel(use_local_output=True),
                    f"blocks.{index}.up": ColwiseParallel(input_layouts=Shard(1)),
                    f"blocks.{index}.down": RowwiseParallel(output_layouts=Shard(1)),
                }
            if self.style == "wrong":
                plan = {name: how for name, how in plan.items() if "blocks.1.norm" not in name}
        parallelize_module(self, tensor, plan)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(plain(hidden)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        words, targets = batch
        loss = nn.functional.cross_entropy(self(words).flatten(0, 1), targets.flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        words, targets = batch
        self.log("val_loss", nn.functional.cross_entropy(self(words).flatten(0, 1), targets.flatten()))

    def loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        data = TensorDataset(
            torch.randint(0, VOCABULARY, (STEPS * SAMPLES, LENGTH), generator=generator),
            torch.randint(0, CLASSES, (STEPS * SAMPLES, LENGTH), generator=generator),
        )
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: Any = DistributedSampler(data, shuffle=False, **kwargs)
        return DataLoader(data, batch_size=SAMPLES // kwargs["num_replicas"], sampler=sampler)

    train_dataloader = val_dataloader = loader

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)


class Tokens(GPT):
    """The recipes' model, which shards itself, on windows of random tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def loader(self) -> DataLoader[Any]:
        tokens = torch.randint(0, VOCABULARY, (STEPS * SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(5))
        data = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: Any = DistributedSampler(data, shuffle=False, **kwargs)  # type: ignore[arg-type]
        return DataLoader(data, batch_size=SAMPLES // kwargs["num_replicas"], sampler=sampler)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = loader


def build(style: str, dropout: float) -> LightningModule:
    """Make a module: ``Words`` of a style; "gpt", built by configure_model; or "tied", a GPT built in __init__ whose head is
    its embedding."""
    if style not in ("gpt", "tied"):
        return Words(style, dropout)
    options: dict[str, Any] = {"defer_init": True} if style == "gpt" else {"tie_embeddings": True}
    return Tokens(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_layers=4,
        num_heads=4,
        sequence_length=LENGTH,
        dropout=dropout,
        learning_rate=0.005,  # at 0.02, where gradients are near zero, Adam's steps depend on rounding alone
        warmup_steps=2,
        **options,
    )


class Watch(Callback):
    """Records the losses of the steps and the gradient norms before clipping; saves after the first epoch if ``save`` is given.

    ``reads``: also norms of gradients and weights, taken parameter by parameter.
    """

    def __init__(self, save: str | None, reads: bool) -> None:
        self.save, self.reads = save, reads
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.read: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        if isinstance(trainer.strategy, HolmesStrategy):
            norm = trainer.strategy.global_grad_norm(module.parameters())
        else:
            norm = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        self.norms.append(float(norm))
        if self.reads:
            self.read.append({n: float(whole(p.grad).norm()) for n, p in module.named_parameters()})

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        if self.reads:
            self.read.append({n: float(whole(p.detach()).norm()) for n, p in module.named_parameters()})

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.save is not None and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.save)


def train(
    strategy: Any, *, devices: int = 1, style: str = "megatron", dropout: float = 0.0, **options: Any
) -> tuple[Trainer, Watch]:
    """Train two epochs, clipped by norm, with validation after each."""
    seed_everything(11, verbose=False)
    watch = Watch(options.pop("save", None), options.pop("reads", False))
    ckpt_path = options.pop("ckpt_path", None)
    scale = options.pop("scale", None)
    if scale is not None:  # 16-bit floats on the CPU, in torch's autocast
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    settings: dict[str, Any] = {"gradient_clip_val": 0.5, "limit_val_batches": 2, **options}
    trainer = quiet_trainer(
        strategy,
        devices=devices,
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[watch],
        **settings,
    )
    trainer.fit(build(style, dropout), ckpt_path=ckpt_path)
    return trainer, watch


def scale_of(trainer: Trainer) -> float | None:
    """Return the last loss scale, or None."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return None if scaler is None else scaler.get_scale()


def run(case: dict[str, Any]) -> dict[str, Any] | str:
    """Do one run of a job; return what it found on this rank, or the error of a case that is ``refused``."""
    case = dict(case)
    if case.pop("refused", False):
        try:
            run(case)
        except HolmesError as refusal:
            return str(refusal)
    arguments, devices = case.pop("strategy"), case.pop("devices")
    trainer, watch = train(HolmesStrategy(tensor_parallel_size=2, **arguments), devices=devices, **case)
    strategy = trainer.strategy
    assert isinstance(strategy, HolmesStrategy)
    weights = {n: whole(p).detach().clone() for n, p in trainer.lightning_module.named_parameters()}
    return {
        "losses": watch.losses,
        "norms": watch.norms,
        "read": watch.read,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "grid": strategy.plan.placement.grid,
        "coordinate": strategy.device_mesh.get_coordinate(),
        "scale": scale_of(trainer),
        "axes": strategy.device_mesh.mesh_dim_names,
        "weights": {n: p for n, p in weights.items() if not p.isnan().all()},  # of other stages: placeholders or whole
    }


def run_all(cases: list[dict[str, Any]]) -> list[dict[str, Any] | str]:
    """Do several runs of one job in turn."""
    return [run(case) for case in cases]
