"""HFCausalLM: configs, folders, the exact token mean, and that it trains in plain Lightning."""

import json
import pickle
import shutil
import subprocess
import sys

import lightning.pytorch as pl
import pytest
import torch
from quiet import quiet_trainer
from torch.utils.data import DataLoader

import lightning_holmes
from lightning_holmes.errors import ConfigurationError

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install lightning-holmes[hf]")

from lightning_holmes.models import HFCausalLM  # noqa: E402

LLAMA = {
    "model_type": "llama",
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}


def make_ragged_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, 23, (4, 9), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, length in enumerate((9, 4, 7, 1)):
        attention_mask[row, length:] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda config: config["model_type"])
def test_loss_is_that_of_the_model_itself(config):
    torch.manual_seed(0)
    model = HFCausalLM(config=config).eval()
    batch = make_ragged_batch()
    torch.testing.assert_close(model.compute_loss(batch), model.model(**batch).loss)
    without_labels = {name: value for name, value in batch.items() if name != "labels"}
    torch.testing.assert_close(model.compute_loss(without_labels), model.compute_loss(batch))


def test_microbatches_weighted_by_tokens_give_the_whole_batch():
    torch.manual_seed(0)
    model = HFCausalLM(config=LLAMA)
    batch = make_ragged_batch()
    model.compute_loss(batch).backward()
    whole = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    total = model.microbatch_weight(batch)
    assert int(total) == 8 + 3 + 6 + 0
    for i in range(4):
        part = {name: value[i : i + 1] for name, value in batch.items()}
        (model.compute_loss(part) * model.microbatch_weight(part) / total).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], msg=lambda text, name=name: f"{name}: {text}")


def test_config_as_object_folder_or_dict_is_one_model(tmp_path):
    settings = {name: value for name, value in LLAMA.items() if name != "model_type"}
    config = transformers.LlamaConfig(**settings)
    config.save_pretrained(tmp_path)
    models = []
    for given in (config, str(tmp_path), LLAMA):
        torch.manual_seed(0)
        models.append(HFCausalLM(config=given))
    for model in models[1:]:
        torch.testing.assert_close(model.state_dict(), models[0].state_dict())
    assert models[0].model.config.use_cache is False
    assert config.use_cache is True  # the caller's own object is unchanged


def test_pretrained_weights_are_loaded_for_training(tmp_path):
    torch.manual_seed(0)
    original = HFCausalLM(config=dict(GPT2, dtype="bfloat16"))
    original.model.save_pretrained(tmp_path)
    loaded = HFCausalLM(pretrained=str(tmp_path))
    torch.testing.assert_close(loaded.state_dict(), original.state_dict())
    assert loaded.model.dtype == torch.float32
    assert loaded.model.training and all(module.training for module in loaded.modules())


def test_trains_and_reloads_in_plain_lightning(tmp_path):
    torch.manual_seed(0)
    model = HFCausalLM(config=LLAMA, learning_rate=1e-2, warmup_steps=2, gradient_checkpointing=True)
    batch = make_ragged_batch()
    loader = DataLoader([{k: v[i] for k, v in batch.items()} for i in range(4)], batch_size=4)
    trainer = quiet_trainer(devices=1, max_epochs=30, default_root_dir=tmp_path)
    trainer.fit(model, loader, loader)
    assert trainer.callback_metrics["val_loss"] < 1.0
    trainer.save_checkpoint(tmp_path / "hf.ckpt")
    again = HFCausalLM.load_from_checkpoint(tmp_path / "hf.ckpt", weights_only=True)
    torch.testing.assert_close(again.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({}, "exactly one"),
        ({"config": LLAMA, "pretrained": "somewhere"}, "exactly one"),
        ({"config": "no/such/folder"}, "no/such/folder.*nothing is downloaded"),
        ({"pretrained": "no/such/folder"}, "no/such/folder.*nothing is downloaded"),
        ({"config": {"model_type": "lama"}}, "'lama'"),
        ({"config": 7}, "config=7 is a int"),
        ({"config": LLAMA, "dtype": "int8"}, "dtype='int8'"),
        ({"config": dict(LLAMA, model_type="t5")}, "no causal language model"),
    ],
)
def test_bad_input_is_named(kwargs, match):
    with pytest.raises(ConfigurationError, match=match):
        HFCausalLM(**kwargs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}, "asks for Python code of its own"),
        ({"auto_map": {"AutoConfig": None}}, "TypeError"),
        ({"hidden_size": "x"}, "hidden_size|TypeError"),  # the error of the installed transformers version
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        (None, "TypeError"),
    ],
)
def test_settings_that_transformers_stumbles_over_are_named(tmp_path, settings, words):
    (tmp_path / "config.json").write_text(json.dumps(3 if settings is None else LLAMA | settings))
    with pytest.raises(ConfigurationError, match=f"pretrained='{tmp_path}' holds no causal.*{words}"):
        HFCausalLM(pretrained=str(tmp_path)).configure_model()
    if settings is not None and "auto_map" not in settings:
        with pytest.raises(ConfigurationError, match=f"config=.*{words}|transformers made no causal.*{words}"):
            HFCausalLM(config=LLAMA | settings).configure_model()


BIN = "(?:file is damaged, or holds more than tensors|Unable to load weights from pytorch checkpoint)"
"""Of transformers 5 and 4."""


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("config.json", "pickle", "not a valid JSON file"),
        ("config.json", "code", "asks for Python code of its own"),
        ("generation_config.json", "pickle", ""),
        ("model.safetensors", "pickle", "SafetensorError"),
        ("model.safetensors", "cut off", "SafetensorError"),
        ("model.safetensors", "another model's", "RuntimeError"),
        ("model.safetensors.index.json", "pickle", "codec can't decode"),
        ("pytorch_model.bin", "pickle", BIN),
        ("pytorch_model.bin", "torch", BIN),
    ],
)
def test_a_pretrained_folder_runs_no_code_and_what_is_wrong_is_named(tmp_path, name, kind, words):
    torch.manual_seed(0)
    folder, witness = tmp_path / "base", tmp_path / "witness"
    HFCausalLM(config=LLAMA).model.save_pretrained(folder)
    path = folder / name
    if name not in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / "model.safetensors").unlink()
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Payload(witness)))
    elif kind == "torch":
        torch.save({"model.norm.weight": Payload(witness)}, path)
    elif kind == "code":
        (folder / "own.py").write_text(f"open({str(witness)!r}, 'w')\n")
        settings = {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    elif kind == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        HFCausalLM(config=dict(LLAMA, hidden_size=32)).model.save_pretrained(tmp_path / "other")
        shutil.copy(tmp_path / "other" / name, path)
    if name == "generation_config.json":  # transformers does not need it
        HFCausalLM(pretrained=str(folder)).configure_model()
    else:
        with pytest.raises(ConfigurationError, match=f"pretrained='{folder}'.*{words}"):
            HFCausalLM(pretrained=str(folder)).configure_model()
    assert not witness.exists()


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return (type(self.witness).touch, (self.witness,))


def test_a_router_loss_is_refused():
    config = dict(LLAMA, model_type="mixtral", num_local_experts=2, num_experts_per_tok=1, output_router_logits=True)
    with pytest.raises(ConfigurationError, match="router loss"):
        HFCausalLM(config=config)


class Router(pl.LightningModule):
    """Router logits are captured by hooks that the first forward puts in, and that belong to a class by its name."""

    def __init__(self, *, warm: bool) -> None:
        super().__init__()
        config = dict(LLAMA, num_local_experts=2, output_router_logits=True)
        del config["model_type"]
        torch.manual_seed(0)
        self.model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config))
        if warm:
            self.model(input_ids=torch.zeros(1, 3, dtype=torch.long))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss


@pytest.mark.parametrize("warm", [False, True])
def test_router_losses_of_layers_are_refused_between_ranks_and_exact_on_one(warm):
    batch = make_ragged_batch()["input_ids"]
    refused = lightning_holmes.check(Router(warm=warm), batch, num_microbatches=1).refused
    assert refused is not None and "a value computed inside layer 0, read after the last layer" in refused
    assert "use pipeline_parallel_size=1" in refused
    assert lightning_holmes.check(Router(warm=warm), batch, num_microbatches=1, pipeline_parallel_size=1).ok


def test_hf_is_loaded_only_when_asked_for():
    code = "import sys, lightning_holmes.models; assert 'lightning_holmes.models.hf' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_missing_transformers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-holmes\[hf\]'"):
        HFCausalLM(config=LLAMA)
