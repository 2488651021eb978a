"""The data modules of the recipes: windows and their split, loaders, pickling, refusals; make_tokens.py; CountingSampler."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from quiet import quiet_trainer

from lightning_holmes.data import CountingSampler
from lightning_holmes.errors import ConfigurationError
from recipes.text import FileBytes, TokenFile

ROOT = Path(__file__).parents[2]


def make_folder(tmp_path) -> str:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").write_bytes(b"never read")
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (tmp_path / "b" / "c.txt").write_bytes(bytes(range(100, 200)))
    return str(tmp_path)


def write_tokens(path, start: int, stop: int, dtype: str = "uint16") -> str:
    np.arange(start, stop, dtype=dtype).tofile(path)
    return str(path)


def make(kind: str, tmp_path, **options):
    """Return a data module over 199 or 200 tokens that count upwards from 0, set up."""
    if kind == "bytes":
        data = FileBytes(make_folder(tmp_path), **options)
    else:
        data = TokenFile(write_tokens(tmp_path / "a.bin", 0, 200, kind), dtype=kind, **options)
    data.setup("fit")
    data.setup("fit")  # Lightning may call it again
    return data


@pytest.mark.parametrize("kind", ["bytes", "uint16", "uint32"])
def test_windows_cover_the_tokens_and_labels_are_shifted(tmp_path, kind):
    data = make(kind, tmp_path, sequence_length=16, batch_size=2, val_fraction=0.0)
    assert len(data.train_windows) == 199 // 16 and data.val_dataloader() == []
    for i, item in enumerate(data.train_windows[i] for i in range(12)):
        assert item["input_ids"].dtype == torch.int64
        assert item["input_ids"].tolist() == list(range(16 * i, 16 * i + 16))
        assert item["labels"].tolist() == list(range(16 * i + 1, 16 * i + 17))
    again = pickle.loads(pickled := pickle.dumps(data.train_windows))
    torch.testing.assert_close(again[3], data.train_windows[3])
    assert kind == "bytes" or (b"a.bin" in pickled and len(pickled) < 2000), "the path, and not the tokens"


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (FileBytes, {"paths": "no/such/path"}, r"no file or folder 'no/such/path'.*stdlib"),
        (FileBytes, {"sequence_length": 0}, "sequence_length=0"),
        (FileBytes, {"batch_size": 0}, "batch_size=0"),
        (FileBytes, {"val_fraction": 1.0}, "val_fraction=1.0"),
        (FileBytes, {"num_workers": -1}, "num_workers=-1"),
        (FileBytes, {"sequence_length": 150}, "200 tokens are 1 windows .*too few"),
        (FileBytes, {"sequence_length": 8, "batch_size": 50}, "too few for batch_size=50"),
        (TokenFile, {"path": "none.bin"}, "path='none.bin': there is no such token file"),
        (TokenFile, {"vocab_size": 90}, r"a\.bin: it holds token 99, but vocab_size=90"),
        (TokenFile, {"dtype": "uint32", "path": "odd"}, r"41 bytes are no whole number of uint32 tokens"),
    ],
)
def test_bad_input_is_named(tmp_path, monkeypatch, kind, options, match):
    monkeypatch.chdir(tmp_path)
    given = {"paths": make_folder(tmp_path)} if kind is FileBytes else {"path": write_tokens("a.bin", 0, 100)}
    if kind is TokenFile:
        Path("odd").write_bytes(bytes(41))
    with pytest.raises(ConfigurationError, match=match):
        kind(**{**given, "sequence_length": 8, **options}).setup()


def test_labels_are_not_shifted_twice(tmp_path):
    from lightning.pytorch.demos.boring_classes import BoringModel

    class ShiftsItself(BoringModel):
        shifts_labels = True

    folder = make_folder(tmp_path)
    trainer = quiet_trainer(enable_model_summary=True)
    with pytest.raises(
        ConfigurationError, match=r"ShiftsItself shifts them again: give the data module shift_labels=False"
    ):
        trainer.fit(ShiftsItself(), datamodule=FileBytes(folder, sequence_length=8, batch_size=2))
    data = FileBytes(folder, sequence_length=8, batch_size=2, shift_labels=False)
    data.setup()
    assert set(data.train_windows[0]) == {"input_ids"}


def test_text_becomes_a_token_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("datasets")
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<unk>", "<end>", "one", "two", "three"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one two\nthree")
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in ("two", "one one"))
    )
    command = [sys.executable, "recipes/make_tokens.py", str(tmp_path / "texts"), str(tmp_path / "lines.jsonl")]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "new" / "tokens.bin")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "9 tokens; dtype: uint16, vocab_size: 5" in done.stdout, done.stderr
    assert np.fromfile(tmp_path / "new" / "tokens.bin", "uint16").tolist() == [3, 1, 2, 2, 1, 2, 3, 4, 1]


def test_replicas_get_contiguous_parts_of_each_batch_of_all(tmp_path):
    """So that microbatches hold the same samples with any number of replicas, also after a run has already seen some
    samples."""
    for seen in (0, 8):
        orders = {}
        for replicas in (1, 2, 4):
            samplers = [
                CountingSampler(31, batch_size=8 // replicas, num_replicas=replicas, rank=rank, seed=3)
                for rank in range(replicas)
            ]
            for sampler in samplers:
                sampler.seen_of_epoch = (0, seen)
            dealt = [torch.tensor(list(sampler)).view(-1, 8 // replicas) for sampler in samplers]
            orders[replicas] = torch.cat(dealt, dim=1).flatten().tolist()  # batch by batch, replica by replica
        assert orders[1] == orders[2] == orders[4] and len(orders[1]) == len(set(orders[1])) == 24 - seen
