"""tensor_parallel_size: modules that shard their layers with parallelize_module train as in one process.

Baseline: the same module, whole, in plain Lightning in one process, fp32. Tolerance, relative: 1e-5 for losses and norms,
1e-4 for weights.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from quiet import quiet_trainer
from tanh_net import dealt
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.checkpoint import read_state_dict
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
        return dealt(data, SAMPLES, self.trainer)

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
        return dealt(data, SAMPLES, self.trainer)  # type: ignore[arg-type]

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
    ckpt_path, factored = options.pop("ckpt_path", None), options.pop("factored", False)
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
    module = build(style, dropout)
    if factored:
        vars(module)["configure_optimizers"] = lambda: torch.optim.Adafactor(module.parameters(), lr=0.02)
    trainer.fit(module, ckpt_path=ckpt_path)
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


REL = 1e-5


class Baseline:
    """A run in one process: its losses, norms and final weights."""

    def __init__(self, strategy: Any = "auto", **options: Any) -> None:
        trainer, watch = train(strategy, **options)
        self.losses, self.norms, self.read = watch.losses, watch.norms, watch.read
        self.val_loss = float(trainer.callback_metrics["val_loss"])
        self.weights = {n: p.detach().clone() for n, p in trainer.lightning_module.named_parameters()}

    def is_met_by(self, ranks: list[dict[str, Any]], *, skip: int = 0) -> None:
        """Compare with what the ranks of a job found; the baseline's losses are means over the replicas' batches."""
        replicas = [found for found in ranks if found["coordinate"][0] == found["coordinate"][2] == 0]
        losses = torch.tensor([found["losses"] for found in replicas]).mean(dim=0).tolist()
        assert losses == pytest.approx(self.losses[skip:], rel=REL)
        val_losses = [found["val_loss"] for found in replicas]
        assert sum(val_losses) / len(val_losses) == pytest.approx(self.val_loss, rel=REL)
        for found in ranks:
            assert found["norms"] == pytest.approx(self.norms[skip:], rel=REL)
            same = [other for other in ranks if other["coordinate"][1] == found["coordinate"][1]]
            assert all(other["losses"] == found["losses"] for other in same)
            same = [other for other in ranks if other["coordinate"][1:] == found["coordinate"][1:]]  # all stages
            assert set().union(*(other["weights"] for other in same)) == set(self.weights)
            self.has_weights(found["weights"])

    def has_weights(self, weights: dict[str, Any]) -> None:
        """Compare full parameters: all of them, or those of one stage if the module is never gathered."""
        for name, weight in weights.items():
            assert type(weight) is torch.Tensor, name
            torch.testing.assert_close(weight, self.weights[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    return Baseline(reads=True)


def test_four_processes(baseline: Baseline, tmp_path: Path) -> None:
    """Pipeline x tensor, whose hooks read parameter by parameter, and tensor x data. Each saves one checkpoint format; both
    are resumed in the other layout, and the file in one process."""
    folder, file = tmp_path / "folder.ckpt", tmp_path / "file.ckpt"
    pipeline = {"pipeline_parallel_size": 2, "num_microbatches": 4}
    data = {"pipeline_parallel_size": 1}
    cases: list[dict[str, Any]] = [
        {"strategy": pipeline, "save": folder, "reads": True},
        {"strategy": data | {"save_distributed_checkpoint": False}, "save": file},
        {"strategy": data, "ckpt_path": folder},
        {"strategy": pipeline, "style": "sequence", "ckpt_path": file},
        {"strategy": pipeline, "style": "dtensor", "refused": True},
    ]
    ranks = launch(4, "test_tensor_parallel:run_all", [{"devices": 4, **case} for case in cases], timeout_s=150)
    found = [[of_rank[index] for of_rank in ranks] for index in range(len(cases))]
    baseline.is_met_by(found[0])
    assert all(f["weights"].keys() == baseline.weights.keys() for f in found[0]), "built in __init__: whole at the end"
    assert found[0][0]["axes"] == ("pipeline", "data_parallel", "tensor_parallel")
    assert sorted(f["coordinate"] for f in found[0]) == [(p, 0, t) for p in (0, 1) for t in (0, 1)]
    assert found[0][0]["grid"] == ((0, 1), (2, 3)) and found[1][0]["grid"] == ((0, 1, 2, 3),)
    for of_rank in found[0]:  # what a hook reads: the parameters of all stages, each sharded over two ranks
        assert len(of_rank["read"]) == len(baseline.read) == 4 * STEPS
        assert all(
            r == pytest.approx(b, rel=1e-4, abs=1e-6) for r, b in zip(of_rank["read"], baseline.read, strict=True)
        )
    baseline.is_met_by(found[1])
    baseline.is_met_by(found[2], skip=STEPS)
    baseline.is_met_by(found[3], skip=STEPS)

    for refusal in found[4]:
        assert "splitting blocks after layer 1 would lose the layout of output 0 of layer 1, a DTensor" in refusal

    saved = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in saved["state_dict"].values())
    in_folder = read_state_dict(folder)
    assert list(in_folder) == list(saved["state_dict"])
    for name, value in in_folder.items():
        torch.testing.assert_close(value, saved["state_dict"][name], rtol=1e-4, atol=1e-6, msg=name)
    trainer, watch = train("auto", ckpt_path=file)  # plain Lightning resumes from the tensor-parallel file
    assert watch.losses == pytest.approx(baseline.losses[STEPS:], rel=REL) and len(watch.losses) == STEPS
    baseline.has_weights({n: p.detach() for n, p in trainer.lightning_module.named_parameters()})


def test_all_three_axes_at_once(baseline: Baseline) -> None:
    """Pipeline x data x tensor, two ranks on each axis, so that a rank's neighbours differ between axes."""
    case = {"devices": 8, "strategy": {"pipeline_parallel_size": 2, "num_microbatches": 2}, "style": "sequence"}
    found = [of_rank[0] for of_rank in launch(8, "test_tensor_parallel:run_all", [case], timeout_s=200)]
    assert sorted(f["coordinate"] for f in found) == [(p, d, t) for p in (0, 1) for d in (0, 1) for t in (0, 1)]
    assert found[0]["grid"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    baseline.is_met_by(found)


def test_the_gpt_of_the_recipes_shares_itself_out(tmp_path: Path) -> None:
    """Built without memory: the weights of one process with the strategy. Built in __init__: those of plain Lightning."""
    pipeline = {"pipeline_parallel_size": 2, "num_microbatches": 4}
    folder = tmp_path / "folder.ckpt"
    cases: list[dict[str, Any]] = [
        {"strategy": pipeline, "style": "gpt", "save": folder},
        {"strategy": pipeline, "style": "tied"},
        {"strategy": {"pipeline_parallel_size": 1}, "style": "gpt", "ckpt_path": folder},
    ]
    ranks = launch(4, "test_tensor_parallel:run_all", [{"devices": 4, **case} for case in cases], timeout_s=150)
    found = [[of_rank[index] for of_rank in ranks] for index in range(len(cases))]
    alone = Baseline(HolmesStrategy(), style="gpt")
    alone.is_met_by(found[0])
    assert all(len(f["weights"]) < len(alone.weights) for f in found[0]), "a stage has all weights"
    Baseline(style="tied").is_met_by(found[1])
    alone.is_met_by(found[2], skip=STEPS)


def test_two_processes(baseline: Baseline) -> None:
    """A tensor-parallel group alone: clipped by norm and by value; dropout; 16-mixed, whose first steps overflow (16-bit sums
    are taken in another order: 1e-3); a module that is sharded wrongly or not at all is refused, and so are fp32 masters for an optimizer
    that reads whole matrices."""
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    cases: list[dict[str, Any]] = [
        {"strategy": {}},
        {"strategy": {"num_microbatches": 2}, "style": "sequence", **by_value},
        {"strategy": {}, "style": "dtensor", "dropout": 0.1},
        {"strategy": {}, "scale": 2.0**20},
        {"strategy": {}, "style": "wrong", "refused": True},
        {"strategy": {}, "style": "none", "refused": True},
        {"strategy": {"master_weights": True}, "precision": "bf16-true", "factored": True, "refused": True},
    ]
    ranks = launch(2, "test_tensor_parallel:run_all", [{"devices": 2, **case} for case in cases], timeout_s=120)
    baseline.is_met_by([found[0] for found in ranks])
    Baseline(**by_value).is_met_by([found[1] for found in ranks])
    Baseline(HolmesStrategy(), dropout=0.1).is_met_by([found[2] for found in ranks])
    scaled, watch = train("auto", scale=2.0**20)
    for *_, found, _, _, _ in ranks:
        assert found["losses"] == pytest.approx(watch.losses, rel=1e-3) and found["scale"] == scale_of(scaled)
        assert found["norms"] == pytest.approx(watch.norms, rel=1e-3, nan_ok=True)
    assert 0 < sum(map(math.isfinite, watch.norms)) < len(watch.norms), "some steps overflow, and some do not"
    for *_, refusal, nothing, masters in ranks:
        assert (
            "each rank would step its part of the fp32 weights as a matrix of its own; use master_weights=False"
            in masters
        )
        assert "no parameter of Words is sharded" in nothing
        assert "the gradients of blocks.1.norm.bias (and 1 more parameters) differ between the ranks" in refusal
        assert "SequenceParallel()" in refusal


def test_without_a_mesh_the_module_is_whole() -> None:
    module: LightningModule = Words()
    module.configure_model()
    assert all(type(p) is torch.nn.Parameter for p in module.parameters())
