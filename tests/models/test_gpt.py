"""GPT: shapes, initialisation, loss, optimizer groups, sampling, and that it learns in plain Lightning."""

import math

import pytest
import torch
from lightning.pytorch import Trainer
from quiet import quiet_trainer
from torch.utils.data import DataLoader

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.models.causal_lm import learning_rate_factor
from recipes.gpt import GPT, RotaryEmbedding, rotate

SMALL = {"vocab_size": 17, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "sequence_length": 8}


def make_batch(batch_size: int = 4) -> dict[str, torch.Tensor]:
    tokens = torch.arange(batch_size * 9).reshape(batch_size, 9) % 17
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def make_trainer(tmp_path, **kwargs) -> Trainer:
    return quiet_trainer(devices=1, default_root_dir=tmp_path, **kwargs)


def test_starts_near_the_loss_of_a_uniform_guess():
    torch.manual_seed(0)
    model = GPT(**SMALL)
    assert model(make_batch()["input_ids"]).shape == (4, 8, 17)
    assert model.compute_loss(make_batch()).item() == pytest.approx(math.log(17), abs=0.05)


def test_a_position_does_not_see_what_follows():
    model = GPT(**SMALL).eval()
    input_ids = make_batch()["input_ids"]
    changed = input_ids.clone()
    changed[:, 5:] = 0
    torch.testing.assert_close(model(input_ids)[:, :5], model(changed)[:, :5])
    assert not torch.allclose(model(input_ids)[:, 5:], model(changed)[:, 5:])


def test_rotary_products_depend_on_the_distance_alone():
    torch.manual_seed(0)
    cos, sin = RotaryEmbedding(8)(6, torch.device("cpu"))
    query = rotate(torch.randn(8).expand(1, 1, 6, 8), cos, sin)
    key = rotate(torch.randn(8).expand(1, 1, 6, 8), cos, sin)
    scores = (query @ key.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores[3, 1], scores[5, 3])
    torch.testing.assert_close(scores[2, 2], scores[4, 4])


def test_residual_projections_start_smaller():
    torch.manual_seed(0)
    model = GPT(hidden_size=128, num_layers=8)
    assert model.layers[0].mlp[0].weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.layers[0].mlp[2].weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


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


def test_two_parameter_groups_by_shape(tmp_path):
    model = GPT(**SMALL, weight_decay=0.3)
    loader = DataLoader([{k: v[0] for k, v in make_batch().items()}] * 4, batch_size=2)
    make_trainer(tmp_path, max_steps=2).fit(model, loader)
    groups = model.optimizers().param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert {parameter.ndim for parameter in groups[0]["params"]} == {2}
    assert {parameter.ndim for parameter in groups[1]["params"]} == {1}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_tied_embeddings_are_one_parameter():
    model = GPT(**SMALL, tie_embeddings=True)
    assert model.head.weight is model.embedding.weight
    untied = GPT(**SMALL)
    assert len(list(untied.parameters())) == len(list(model.parameters())) + 1


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


def test_hyperparameters_survive_a_checkpoint(tmp_path):
    model = GPT(**SMALL, betas=(0.8, 0.9))
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(model, DataLoader([{k: v[0] for k, v in make_batch().items()}]))
    trainer.save_checkpoint(tmp_path / "gpt.ckpt")
    again = GPT.load_from_checkpoint(tmp_path / "gpt.ckpt", weights_only=True)
    assert again.hparams == model.hparams
    torch.testing.assert_close(again.state_dict(), model.state_dict())


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


def test_gradient_checkpointing_gives_the_same_gradients():
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    gradients = []
    for gradient_checkpointing in (False, True):
        torch.manual_seed(0)
        model = GPT(
            hidden_size=16,
            num_layers=2,
            num_heads=2,
            sequence_length=16,
            dropout=0.1,
            gradient_checkpointing=gradient_checkpointing,
        )
        model.compute_loss({"input_ids": ids, "labels": ids}).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_a_subclass_may_use_configure_model_for_itself() -> None:
    class Sharing(GPT):
        def configure_model(self) -> None:
            raise AssertionError("only the trainer calls this")

    assert len(Sharing(hidden_size=32, num_layers=2, num_heads=2).layers) == 2
    deferred = GPT(hidden_size=32, num_layers=2, num_heads=2, defer_init=True)
    assert not hasattr(deferred, "layers")
    deferred.configure_model()
    built = deferred.layers
    deferred.configure_model()
    assert deferred.layers is built
