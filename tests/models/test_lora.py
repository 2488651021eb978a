"""LoRACausalLM: what is trained, what is saved, and that peft can load the adapters."""

import pytest
import torch
from lightning.pytorch import Trainer
from quiet import quiet_trainer
from torch.utils.data import DataLoader

from lightning_holmes.commands.convert import main as convert
from lightning_holmes.errors import CheckpointError, ConfigurationError

peft = pytest.importorskip("peft", reason="needs the extra: pip install lightning-holmes[lora]")

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig  # noqa: E402

from recipes.lora import LoRACausalLM  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_adapters_learn_and_peft_reads_them(folder, tmp_path):
    torch.manual_seed(1)
    module = LoRACausalLM(pretrained=str(folder), rank=2, learning_rate=0.05)
    base = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(0, 23, (4, 9), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(module.eval()(input_ids=ids), base(ids).logits)  # B begins at zero
    module.train()
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in n for n in trained) and len(trained) == 2 * 7 * 2  # 7 matrices of 2 layers
    trainer = quiet_trainer(enable_checkpointing=True, devices=1, max_steps=10, default_root_dir=tmp_path)
    trainer.fit(module, DataLoader([{"input_ids": row} for row in ids], batch_size=4))
    trainer.save_checkpoint(tmp_path / "lora.ckpt")
    again = LoRACausalLM.load_from_checkpoint(tmp_path / "lora.ckpt", weights_only=True)
    again.save_adapter(str(tmp_path / "adapter"))
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    logits = module.eval()(input_ids=ids)
    torch.testing.assert_close(again.eval()(input_ids=ids), logits)
    torch.testing.assert_close(read.eval()(ids).logits, logits)
    assert not torch.allclose(logits, base(ids).logits)


def test_adapters_are_merged_by_peft_and_refused_by_convert(tmp_path):
    """As recipes/finetune_lora/README.md says, also GPT-2's transposed matrices."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", vocab_size=23, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    module = LoRACausalLM(pretrained=str(tmp_path / "base"), rank=2, alpha=6.0).eval()
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3) if ".lora_" in name else None
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "lora.ckpt")
    with pytest.raises(CheckpointError, match="merge_and_unload"):
        convert([str(tmp_path / "lora.ckpt"), str(tmp_path / "tuned"), "--format=safetensors"])
    LoRACausalLM.load_from_checkpoint(tmp_path / "lora.ckpt", weights_only=True).save_adapter(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "tuned")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(read.eval()(ids).logits, module(input_ids=ids), rtol=1e-4, atol=1e-5)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
        assert not torch.allclose(read(ids).logits, base(ids).logits, atol=1e-2)


def test_refused(folder, monkeypatch):
    with pytest.raises(ConfigurationError, match="rank=0"):
        LoRACausalLM(pretrained=str(folder), rank=0)
    with pytest.raises(ConfigurationError, match="target_modules"):
        LoRACausalLM(pretrained=str(folder), target_modules=["no_such"]).configure_model()
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-holmes\[lora\]'"):
        LoRACausalLM(pretrained=str(folder)).configure_model()
