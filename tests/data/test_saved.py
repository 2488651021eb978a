"""SavedDataset: data sets written by save_to_disk, as batches for Hugging Face models; refusals."""

import pytest
import torch
from test_tokenizing import tokenizer_folder  # noqa: F401 - a fixture

from lightning_holmes.data import FileBytes, SavedDataset
from lightning_holmes.errors import ConfigurationError


@pytest.fixture
def folder(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra: pip install lightning-holmes[data]")
    rows = [[n + 1] * (1 + n % 4) for n in range(20)]
    datasets.Dataset.from_dict({"input_ids": rows, "text": ["the quick fox"] * 20}).save_to_disk(tmp_path / "one")
    return tmp_path


def test_ragged_samples_are_padded(folder):
    data = SavedDataset(str(folder / "one"), batch_size=4, val_fraction=0.2, sequence_length=3)
    data.setup()
    (val,) = [torch.cat([b["input_ids"][:, 0] for b in data.val_dataloader()])]
    seen = []
    for batch in data.train_dataloader():
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            value, length = int(ids[0]), min(3, 1 + (int(ids[0]) - 1) % 4)
            seen.append(value)
            assert ids.tolist() == [value] * length + [0] * (len(ids) - length)
            assert mask.tolist() == [1] * length + [0] * (len(ids) - length)
            assert labels.tolist() == [value] * length + [-100] * (len(ids) - length)
    assert sorted(seen + val.tolist()) == list(range(1, 21)) and len(val) == 4


def test_it_goes_on_in_mid_epoch(folder):
    def fresh():
        data = SavedDataset(str(folder / "one"), batch_size=4, val_fraction=0.0)
        data.setup()
        assert data.val_dataloader() == []
        with pytest.raises(ConfigurationError, match="no samples to test"):
            data.predict_dataloader()
        return data

    data = fresh()
    batches = iter(data.train_dataloader())
    next(batches)
    state = data.state_dict()
    rest = [batch["input_ids"].tolist() for batch in batches]
    again = fresh()
    again.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch in again.train_dataloader()] == rest and len(rest) == 4


def test_texts_and_splits(folder, tokenizer_folder):  # noqa: F811
    import datasets

    one = datasets.load_from_disk(str(folder / "one"))
    splits = {"train": one, "validation": one.select(range(4)), "test": one.select(range(6))}
    datasets.DatasetDict(splits).save_to_disk(folder / "splits")
    data = SavedDataset(str(folder / "splits"), tokenizer=str(tokenizer_folder), batch_size=2)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tokenizer_folder).decode(batch["input_ids"][0]) == "the quick fox<end>"
    assert len(data.val_dataloader()) == 2
    assert len(data.test_dataloader()) == len(data.predict_dataloader()) == 3


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"column": "tokens"}, "has the columns input_ids, text, but not column='tokens'"),
        ({"batch_size": 99}, "batch_size=99 is more than the 20"),
        ({"path": "no/such"}, "no such folder"),
        ({"path": "."}, "holds no data set"),
    ],
)
def test_refused(folder, options, match):
    data = SavedDataset(**{"path": str(folder / "one"), "val_fraction": 0.0, **options})
    with pytest.raises(ConfigurationError, match=match):
        data.setup()


def test_texts_without_a_tokenizer_are_named(folder):
    data = SavedDataset(str(folder / "one"), column="text")
    data.setup()
    with pytest.raises(ConfigurationError, match="no list of tokens"):
        next(iter(data.train_dataloader()))


def test_the_missing_package_names_the_extra(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-holmes\[data\]'"):
        SavedDataset(str(folder / "one")).setup()


def test_windows_without_labels():
    data = FileBytes(max_bytes=5000, sequence_length=32, shift_labels=False)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert list(batch) == ["input_ids"] and batch["input_ids"].shape == (32, 32)
