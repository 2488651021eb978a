"""GPT: shapes, initialisation, loss, optimizer groups, sampling, and that it learns in plain Lightning."""

import pytest
import torch
from lightning.pytorch import Trainer
from quiet import quiet_trainer
from torch.utils.data import DataLoader

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.models.causal_lm import learning_rate_factor
from recipes.gpt import GPT

SMALL = {"vocab_size": 17, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "sequence_length": 8}


def make_batch(batch_size: int = 4) -> dict[str, torch.Tensor]:
    tokens = torch.arange(batch_size * 9).reshape(batch_size, 9) % 17
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def make_trainer(tmp_path, **kwargs) -> Trainer:
    return quiet_trainer(devices=1, default_root_dir=tmp_path, **kwargs)


def test_loss_is_the_mean_over_the_labels_that_count():
    torch.manual_seed(0)
    model = GPT(**SMALL)
    batch = make_batch()
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 2:] = -100
    batch["labels"][3] = -100
    parts = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(4)]
    weights = [model.microbatch_weight(part) for part in parts]
    assert [int(weight) for weight in weights] == [2, 8, 8, 0]
    losses = [model.compute_loss(part) for part in parts]
    assert losses[3].item() == 0.0  # without targets the loss is zero, not NaN
    mean = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    torch.testing.assert_close(mean, model.compute_loss(batch))


def test_learning_rate_rises_then_falls():
    factors = [learning_rate_factor(step, 100, 10, 0.1) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[10] == 1.0
    assert factors[100] == pytest.approx(0.1)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert learning_rate_factor(10_000, float("inf"), 10, 0.1) == 1.0


def test_learns_in_plain_lightning_and_samples(tmp_path):
    torch.manual_seed(0)
    model = GPT(**SMALL, learning_rate=1e-2, warmup_steps=5)
    samples = [{name: value[i] for name, value in make_batch(16).items()} for i in range(16)]
    loader = DataLoader(samples, batch_size=16)
    trainer = make_trainer(tmp_path, max_epochs=120)
    trainer.fit(model, loader, loader)
    assert trainer.callback_metrics["train_loss"] < 0.5
    assert trainer.callback_metrics["val_loss"] < 0.5
    prompt = torch.tensor([[3, 4, 5]])
    out = model.generate(prompt, 10, temperature=0.0)
    assert out.tolist() == [[(3 + i) % 17 for i in range(13)]]
    draws = [model.generate(prompt, 10, 1.0, torch.Generator().manual_seed(7)).tolist() for _ in range(2)]
    assert draws[0] == draws[1]
    assert trainer.predict(model, loader)[0].shape == (16, 8)
    assert trainer.test(model, loader, verbose=False)[0]["test_loss"] < 0.5


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"hidden_size": 18, "num_heads": 4}, r"hidden_size=18 .* for example 24"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
    ],
)
def test_impossible_sizes_are_named(kwargs, match):
    with pytest.raises(ConfigurationError, match=match):
        GPT(**kwargs)


def test_a_batch_longer_than_the_model_is_named():
    with pytest.raises(ConfigurationError, match=r"9 positions.*sequence_length=8"):
        GPT(**SMALL)(torch.zeros(1, 9, dtype=torch.long))
