"""``convert``: a round trip changes nothing, needs no memory for the whole model, and transformers reads the result."""

import gc
import io
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from large_model_cases import Windows, memory_mb
from large_model_cases import trainer as make_trainer
from launch import launch

from lightning_holmes.checkpoint import read_state_dict
from lightning_holmes.checkpoint.file_systems import FileSystems
from lightning_holmes.checkpoint.meeting import Meeting
from lightning_holmes.checkpoint.saving import FolderSave
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
TENSORS = 32
MODEL_MB = 200.0


def save(path: Path, megabytes: float) -> None:
    """Save a checkpoint folder of that size, half of it an optimizer's states, as if of HFCausalLM."""
    numel = int(megabytes * 1e6) // 4 // TENSORS
    names = [f"model.w{i:02}" for i in range(TENSORS // 2)]
    values: dict[Any, Any] = {("state_dict", name): torch.full((numel,), float(i)) for i, name in enumerate(names)}
    values |= {("optimizer_0", "state", name, "exp_avg"): torch.full((numel,), -1.0) for name in names}
    rest = io.BytesIO()
    groups = [{"param_groups": [{"lr": 0.1, "params": names}]}]
    torch.save({"optimizer_states": groups, "hyper_parameters": {"config": LLAMA}, "global_step": 5}, rest)
    FolderSave(
        target=path,
        token="size",
        file_systems=FileSystems(of_rank=(0,)),
        values=values,
        order=names,
        num_optimizers=1,
        rest=rest.getvalue(),
        plan="",
    ).run(Meeting(None, 0, 1, "size", timedelta(seconds=60)))


def convert_all(folder: str) -> dict[str, float]:
    """In a separate process: return the growth of its peak memory in MB during each conversion."""
    torch.set_num_threads(1)
    grown = {}
    for name, megabytes in (("small", 1.0), ("large", MODEL_MB)):  # the small one first, since it also imports modules
        root = Path(folder) / name
        root.mkdir()
        save(root / "folder.ckpt", megabytes)
        for args in (
            ["folder.ckpt", "file.ckpt"],
            ["file.ckpt", "again.ckpt"],
            ["folder.ckpt", "hf", "--format=safetensors"],
            ["file.ckpt", "hf_of_file", "--format=safetensors", "--max-shard-bytes=15000000"],
        ):
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")
            before = memory_mb("VmRSS")
            convert([str(root / args[0]), str(root / args[1]), *args[2:]])
            grown[" ".join(args)] = memory_mb("VmHWM") - before
    return grown


def test_memory_of_converting_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    (grown,) = launch(1, "test_converting:convert_all", str(tmp_path), timeout_s=200)
    for way, megabytes in grown.items():
        print(f"{way}: peak memory grew by {megabytes:.0f} MB for a checkpoint of {MODEL_MB:.0f} MB")
        assert megabytes < MODEL_MB / 3
    root = tmp_path / "large"
    again = read_state_dict(root / "again.ckpt")
    file = torch.load(root / "file.ckpt", weights_only=True, mmap=True)
    assert list(again) == list(file["state_dict"]) == [f"model.w{i:02}" for i in range(TENSORS // 2)]
    assert file["global_step"] == 5 and len(file["optimizer_states"][0]["state"]) == TENSORS // 2
    from safetensors import safe_open

    assert len(list((root / "hf_of_file").glob("*.safetensors"))) == TENSORS // 4
    with safe_open(root / "hf" / "model.safetensors", "pt") as one:
        for number, name in enumerate(one.keys()):
            assert name == f"w{number:02}" and one.get_tensor(name)[[0, -1]].tolist() == [number, number]
            assert bool((again[f"model.{name}"][:9] == number).all())


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
    trainer.fit(module, DataLoader(Windows(16), 8))
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
