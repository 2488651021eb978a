"""GPT: a small decoder-only transformer, the model of the recipes.

An ordinary LightningModule: pre-norm blocks with rotary positions in `self.layers`, AdamW with warm-up and a
cosine decay. It has no code for pipelines except one optional method, `microbatch_weight`.

    GPT(hidden_size=128, num_layers=4, num_heads=4, sequence_length=128)

A batch is `{"input_ids": (B, S), "labels": (B, S)}`; the labels are already shifted, -100 is ignored.

Shapes: B samples, S positions, D hidden size, H heads, K head size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.models.causal_lm import CausalLM


class RotaryEmbedding(nn.Module):
    """Angles of rotary positions (RoFormer, arXiv 2104.09864, eq. 15). The module has no parameters and no buffers."""

    def __init__(self, head_size: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.head_size = head_size
        self.base = base

    def forward(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines, (S, K / 2) each, fp32."""
        exponents = torch.arange(0, self.head_size, 2, device=device, dtype=torch.float32) / self.head_size
        positions = torch.arange(length, device=device, dtype=torch.float32)
        angles_SK = torch.outer(positions, self.base**-exponents)
        return angles_SK.cos(), angles_SK.sin()


def rotate(x_BHSK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs formed by the two halves of each head by the angles of their position."""
    first, second = x_BHSK.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHSK.dtype)


class ResidualLinear(nn.Linear):
    """A projection whose output is added to the residual; the deeper the model, the smaller its initial weights."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.dropout = dropout
        # rows are ordered by head, then query, key and value: so a shard of the rows is a shard of the heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.output = ResidualLinear(hidden_size, hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape
        qkv = self.qkv(x_BSD).view(B, S, -1, 3, self.head_size)
        q_BHSK, k_BHSK, v_BHSK = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        mixed_BHSK = F.scaled_dot_product_attention(
            rotate(q_BHSK, cos, sin),
            rotate(k_BHSK, cos, sin),
            v_BHSK,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        out_BSD: Tensor = self.output(mixed_BHSK.transpose(1, 2).reshape(B, S, -1))
        return out_BSD


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection around it."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.gradient_checkpointing = gradient_checkpointing
        self.attention_norm = nn.LayerNorm(hidden_size, bias=False)
        self.attention = Attention(hidden_size, num_heads, dropout)
        self.mlp_norm = nn.LayerNorm(hidden_size, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size, bias=False),
            nn.GELU(approximate="tanh"),
            ResidualLinear(4 * hidden_size, hidden_size, bias=False),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            x_BSD = checkpoint(self._compute, x_BSD, cos, sin, use_reentrant=False)
            return x_BSD
        return self._compute(x_BSD, cos, sin)

    def _compute(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), cos, sin))
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


class GPT(CausalLM):
    """A decoder-only transformer over tokens (by default bytes).

    `learning_rate` rises linearly over `warmup_steps`, then falls along a cosine to `min_learning_rate_ratio`
    of its peak at the last step of the run. Parameters with one dimension are not decayed.

    With `gradient_checkpointing` a layer keeps only its input, and is recomputed in the backward.

    With `defer_init` the layers are made by `configure_model`, which the trainer calls: under HolmesStrategy a process
    then allocates only its own layers, and initial weights depend on the seed and their names.

    With HolmesStrategy(tensor_parallel_size=...) the ranks of a tensor group shard attention by heads, the MLPs by their
    inner size, and embedding and head by the vocabulary (Megatron-LM, arXiv 1909.08053, section 3). Dropout within
    attention then differs from dropout in one process.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        hidden_size: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        sequence_length: int = 128,
        dropout: float = 0.0,
        learning_rate: float = 3e-3,
        min_learning_rate_ratio: float = 0.1,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        betas: tuple[float, float] = (0.9, 0.95),
        tie_embeddings: bool = False,
        gradient_checkpointing: bool = False,
        defer_init: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (
            ("vocab_size", vocab_size),
            ("hidden_size", hidden_size),
            ("num_layers", num_layers),
            ("num_heads", num_heads),
            ("sequence_length", sequence_length),
        ):
            if value < 1:
                raise ConfigurationError(f"{name}={value} is too small: give 1 or more.")
        multiple = 2 * num_heads
        if hidden_size % multiple:
            raise ConfigurationError(
                f"hidden_size={hidden_size} does not divide into num_heads={num_heads} heads of even size: "
                f"give a multiple of {multiple}, for example {math.ceil(hidden_size / multiple) * multiple}."
            )
        if not 0.0 <= dropout < 1.0:
            raise ConfigurationError(f"dropout={dropout} is no probability: give at least 0 and less than 1.")
        betas = (betas[0], betas[1])  # a plain tuple, so that a YAML list is saved and loaded alike
        self.save_hyperparameters()
        self.num_layers = num_layers
        self.sequence_length = sequence_length
        self.learning_rate = learning_rate
        self.min_learning_rate_ratio = min_learning_rate_ratio
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.betas = betas

        self._is_built = self._is_sharded = False
        if not defer_init:
            self._build()

    def configure_model(self) -> None:
        """Make the layers if they do not exist yet, and shard them over the tensor group if there is one."""
        if not self._is_built:
            self._build()
        mesh = self.device_mesh
        axis = "tensor_parallel"
        if mesh is not None and axis in (mesh.mesh_dim_names or ()) and mesh[axis].size() > 1 and not self._is_sharded:
            self._shard(mesh[axis])

    def _shard(self, mesh: DeviceMesh) -> None:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        shape: Any = self.hparams
        for name, value in (("num_heads", shape.num_heads), ("vocab_size", shape.vocab_size)):
            if value % mesh.size():
                raise ConfigurationError(
                    f"{name}={value} does not divide among tensor_parallel_size={mesh.size()} ranks: change one of them"
                )
        layer = {
            "attention.qkv": ColwiseParallel(),
            "attention.output": RowwiseParallel(),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(),
        }
        plan: dict[str, Any] = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        plan |= {f"layers.{i}.{name}": style for i in range(self.num_layers) for name, style in layer.items()}
        parallelize_module(self, mesh, plan)
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight
        self._is_sharded = True

    def _build(self) -> None:
        shape: Any = self.hparams
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.rotary = RotaryEmbedding(shape.hidden_size // shape.num_heads)
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(
            Block(shape.hidden_size, shape.num_heads, shape.dropout, shape.gradient_checkpointing)
            for _ in range(shape.num_layers)
        )
        self.norm = nn.LayerNorm(shape.hidden_size, bias=False)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.apply(self._init_weights)
        self._is_built = True

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as GPT-2: normal with standard deviation 0.02, for residual projections divided by sqrt(2 * num_layers)."""
        if isinstance(module, nn.Linear | nn.Embedding):
            scale = math.sqrt(2 * self.num_layers) if isinstance(module, ResidualLinear) else 1.0
            nn.init.normal_(module.weight, std=0.02 / scale)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (B, S, V) for the token after each of `input_ids` (B, S)."""
        length = input_ids.shape[1]
        if length > self.sequence_length:
            raise ConfigurationError(
                f"a batch has {length} positions, but the model was made with "
                f"sequence_length={self.sequence_length}: give both the same sequence_length."
            )
        cos, sin = self.rotary(length, input_ids.device)
        hidden_BSD = self.dropout(self.embedding(input_ids))
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD, cos, sin)
        logits_BSV: Tensor = self.head(self.norm(hidden_BSD))
        return logits_BSV

    def compute_logits(self, batch: dict[str, Tensor]) -> Tensor:
        logits_BSV: Tensor = self(batch["input_ids"])
        return logits_BSV

    def target_labels(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["labels"]

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Sample a continuation of `prompt_ids` (B, S >= 1); return prompt and continuation.

        Needs the whole module in one process. A temperature of 0 takes the most likely token. There is no cache: each token
        costs a forward over the last `sequence_length` tokens.
        """
        was_training = self.training
        self.eval()
        token_ids = prompt_ids
        for _ in range(max_new_tokens):
            logits_BV = self(token_ids[:, -self.sequence_length :])[:, -1].float()
            if temperature == 0.0:
                next_ids = logits_BV.argmax(dim=-1, keepdim=True)
            else:
                probabilities = (logits_BV / temperature).softmax(dim=-1)
                next_ids = torch.multinomial(probabilities, 1, generator=generator)
            token_ids = torch.cat((token_ids, next_ids), dim=1)
        self.train(was_training)
        return token_ids
