"""TokenFile: mapping, windows across files, pickling, and the checks on the files."""

import pickle

import numpy as np
import pytest
import torch

from lightning_holmes.data import TokenFile
from lightning_holmes.errors import ConfigurationError


def write_tokens(path, start: int, stop: int, dtype: str = "uint16") -> str:
    np.arange(start, stop, dtype=dtype).tofile(path)
    return str(path)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_run_on_across_files(tmp_path, dtype):
    offset = 70_000 if dtype == "uint32" else 0
    paths = [
        write_tokens(tmp_path / "a.bin", offset, offset + 5, dtype),
        write_tokens(tmp_path / "b.bin", offset + 5, offset + 50, dtype),
        write_tokens(tmp_path / "c.bin", offset + 50, offset + 61, dtype),
    ]
    data = TokenFile(paths, dtype=dtype, sequence_length=12, batch_size=1, val_fraction=0.0)
    data.setup()
    assert len(data.train_windows) == 5
    for i in range(5):
        item = data.train_windows[i]
        assert item["input_ids"].dtype == torch.int64
        assert item["input_ids"].tolist() == list(range(offset + 12 * i, offset + 12 * i + 12))
        assert item["labels"].tolist() == list(range(offset + 12 * i + 1, offset + 12 * i + 13))


def test_pickled_windows_hold_names_and_not_tokens(tmp_path):
    path = write_tokens(tmp_path / "a.bin", 0, 60_000)
    data = TokenFile(path, sequence_length=16, batch_size=2)
    data.setup()
    pickled = pickle.dumps(data.train_windows.source)
    assert len(pickled) < 2_000
    assert len(pickle.loads(pickled)) == 60_000
    assert torch.equal(pickle.loads(pickled).read(5, 9), torch.arange(5, 9))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loaders(tmp_path, num_workers):
    path = write_tokens(tmp_path / "a.bin", 0, 2_000)
    data = TokenFile(path, sequence_length=10, batch_size=8, val_fraction=0.1, num_workers=num_workers)
    data.setup()
    train = list(data.train_dataloader())
    val = list(data.val_dataloader())
    assert len(train) == 180 // 8 and all(batch["input_ids"].shape == (8, 10) for batch in train)
    assert sum(len(batch["input_ids"]) for batch in val) == 19
    assert not {int(b["input_ids"][0, 0]) for b in val} & {int(x) for b in train for x in b["input_ids"][:, 0]}


def test_vocabulary_is_checked_and_the_place_named(tmp_path):
    path = write_tokens(tmp_path / "a.bin", 0, 100)
    TokenFile(path, vocab_size=100, sequence_length=8).setup()
    data = TokenFile(path, vocab_size=90, sequence_length=8)
    with pytest.raises(ConfigurationError, match=r"a\.bin: token 90 is 90, but vocab_size=90"):
        data.setup()


@pytest.mark.parametrize("num_bytes", [0, 41])
def test_a_file_that_holds_no_whole_tokens_is_named(tmp_path, num_bytes):
    (tmp_path / "a.bin").write_bytes(bytes(num_bytes))
    with pytest.raises(ConfigurationError, match=rf"a\.bin: {num_bytes} bytes are no whole number of uint16"):
        TokenFile(str(tmp_path / "a.bin"), sequence_length=4).setup()


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"paths": "none.bin"}, "no token file 'none.bin'"),
        ({"paths": []}, "names no file"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"sequence_length": 100}, "holds 100 tokens: too few"),
    ],
)
def test_bad_input_is_named(tmp_path, kwargs, match):
    kwargs = {"paths": write_tokens(tmp_path / "a.bin", 0, 100), **kwargs}
    with pytest.raises(ConfigurationError, match=match):
        TokenFile(**kwargs).setup()
