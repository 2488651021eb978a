"""The modules that `make gpu` trains: a GPT whose step logs nothing, a Llama of transformers, and deep plain layers.

Shapes: B samples, S positions, D hidden size, V vocabulary.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Causal attention and an MLP, each with a norm before it and a residual connection around it."""

    def __init__(self, hidden_size: int, num_heads: int, checkpoints: bool) -> None:
        super().__init__()
        self.num_heads, self.checkpoints = num_heads, checkpoints
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)
        self.up = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down = nn.Linear(4 * hidden_size, hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.checkpoints and self.training:
            recomputed: Tensor = checkpoint(self.compute, x_BSD, use_reentrant=False)
            return recomputed
        return self.compute(x_BSD)

    def compute(self, x_BSD: Tensor) -> Tensor:
        B, S, D = x_BSD.shape
        q, k, v = self.qkv(self.attention_norm(x_BSD)).view(B, S, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.output(mixed.transpose(1, 2).reshape(B, S, D))
        return x_BSD + self.down(F.gelu(self.up(self.mlp_norm(x_BSD)), approximate="tanh"))


class GPT(LightningModule):
    """A decoder of ``num_layers`` blocks; ``compiles``: each block is compiled in place, ``fuses``: AdamW is one kernel."""

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        sequence_length: int,
        checkpoints: bool = False,
        compiles: bool = False,
        fuses: bool = False,
    ) -> None:
        super().__init__()
        self.fuses = fuses
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Parameter(torch.zeros(sequence_length, hidden_size))
        self.layers = nn.ModuleList(Block(hidden_size, num_heads, checkpoints) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        for layer in self.layers if compiles else ():
            layer.compile()

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embedding(tokens_BS) + self.positions[: tokens_BS.shape[1]]
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        logits: Tensor = self.head(self.norm(x_BSD))
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4, fused=self.fuses or None)


class Llama(LightningModule):
    """A small Llama of transformers with SDPA."""

    def __init__(self, *, vocab_size: int, hidden_size: int, num_layers: int, num_heads: int, **_: Any) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2,
            attn_implementation="sdpa",
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class Deep(LightningModule):
    """``num_layers`` square layers and little else: almost all memory of a step is parameters, gradients and states."""

    def __init__(self, *, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=False)


MODELS = {"gpt": GPT, "llama": Llama, "deep": Deep}
