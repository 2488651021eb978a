"""``convert``: a round trip changes nothing, and transformers reads the result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from folder_saves import save_folder
from test_large_models import trainer as make_trainer
from test_large_models import windows

from lightning_holmes.checkpoint.manager import bytes_of
from lightning_holmes.checkpoint.manifest import Manifest
from lightning_holmes.commands.convert import main as convert

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
}


def test_a_round_trip_changes_nothing(tmp_path: Path) -> None:
    """Tied weights stay one tensor, and values keep their order."""
    tied = torch.arange(6.0)
    values: dict[Any, Any] = {("state_dict", name): tied for name in ("first", "tied")}
    values["state_dict", "mean"] = torch.arange(3)
    values |= {("optimizer_0", "state", "first", key): value for key, value in (("exp_avg", tied + 1), ("step", 7))}
    groups = [{"param_groups": [{"lr": 0.1, "params": ["first"]}]}]
    rest = bytes_of({"optimizer_states": groups, "global_step": 5})
    order = ["first", "mean", "tied"]
    save_folder(tmp_path / "folder.ckpt", values, order=order, rest=rest, plan="stages: 1")
    for source, target in (("folder.ckpt", "file.ckpt"), ("file.ckpt", "again.ckpt"), ("again.ckpt", "last.ckpt")):
        convert([str(tmp_path / source), str(tmp_path / target)])
    for name in ("file.ckpt", "last.ckpt"):
        found = torch.load(tmp_path / name, weights_only=True)
        state, (optimizer,) = found["state_dict"], found["optimizer_states"]
        assert list(state) == order and found["global_step"] == 5 and found["lightning_holmes"]["plan"] == "stages: 1"
        assert torch.equal(state["first"], tied) and torch.equal(state["mean"], torch.arange(3))
        assert state["first"].data_ptr() == state["tied"].data_ptr()
        assert optimizer["param_groups"] == [{"lr": 0.1, "params": [0]}] and list(optimizer["state"]) == [0]
        assert torch.equal(optimizer["state"][0]["exp_avg"], tied + 1) and optimizer["state"][0]["step"] == 7
    assert len(Manifest.load(tmp_path / "again.ckpt").state_dict) == 3


@pytest.mark.parametrize("tied", [False, True], ids=["head of its own", "tied head"])
@pytest.mark.parametrize("origin", ["config", "pretrained"])
def test_transformers_reads_what_was_trained(origin: str, tied: bool, tmp_path: Path) -> None:
    """The model is trained with the strategy, exported in several files, and read with transformers only."""
    transformers = pytest.importorskip("transformers", reason="needs the extra: pip install lightning-holmes[hf]")
    from torch.utils.data import DataLoader

    from lightning_holmes.models import HFCausalLM

    torch.manual_seed(3)
    settings = {**LLAMA, "tie_word_embeddings": tied}
    module = HFCausalLM(config=settings, learning_rate=0.05, warmup_steps=1)
    if origin == "pretrained":
        module.model.save_pretrained(tmp_path / "base")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / "base" / name).write_text("{}")
        module = HFCausalLM(pretrained=str(tmp_path / "base"), learning_rate=0.05, warmup_steps=1)
    trainer = make_trainer({"save_distributed_checkpoint": True})
    trainer.fit(module, DataLoader(windows(16), 8))
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    convert([str(tmp_path / "trained.ckpt"), str(tmp_path / "hf"), "--format=safetensors", "--max-shard-bytes=9000"])
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True).eval()
    ours = module.eval().model
    for (name, theirs), (own_name, own) in zip(read.named_parameters(), ours.named_parameters(), strict=True):
        assert name == own_name and torch.equal(theirs, own.detach()), name
    words = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(read(words).logits, ours(words).logits)
    assert type(read).__name__ == "LlamaForCausalLM"
    if origin == "pretrained":
        assert (tmp_path / "hf" / "tokenizer.json").is_file() and (tmp_path / "hf" / "tokenizer_config.json").is_file()
