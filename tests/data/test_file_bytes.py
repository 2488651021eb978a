"""FileBytes: reading, the windows and their split, loaders, and refusals."""

import pickle
import time

import pytest
import torch

from lightning_holmes.data import FileBytes
from lightning_holmes.data.bytes import find_files, find_stdlib_sources
from lightning_holmes.data.counting import CountingSampler
from lightning_holmes.errors import ConfigurationError


def make_folder(tmp_path) -> str:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").write_bytes(b"never read")
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (tmp_path / "b" / "c.txt").write_bytes(bytes(range(100, 200)))
    return str(tmp_path)


def test_windows_cover_the_bytes_and_labels_are_shifted(tmp_path):
    data = FileBytes(make_folder(tmp_path), sequence_length=16, batch_size=2, val_fraction=0.0)
    data.setup()
    assert len(data.train_windows) == 199 // 16
    for i in range(len(data.train_windows)):
        item = data.train_windows[i]
        assert item["input_ids"].dtype == torch.int64
        assert item["input_ids"].tolist() == list(range(16 * i, 16 * i + 16))
        assert item["labels"].tolist() == list(range(16 * i + 1, 16 * i + 17))
    assert data.val_dataloader() == []
    with pytest.raises(ConfigurationError, match="val_fraction=0"):
        data.test_dataloader()


def test_split_is_disjoint_complete_and_reproducible(tmp_path):
    def split(seed):
        data = FileBytes(
            make_folder(tmp_path / str(seed)), sequence_length=8, batch_size=2, val_fraction=0.25, seed=seed
        )
        data.setup("fit")
        data.setup("fit")  # Lightning may call it again
        return data.train_windows.indices.tolist(), data.val_windows.indices.tolist()

    (tmp_path / "3").mkdir()
    (tmp_path / "4").mkdir()
    train, val = split(3)
    assert len(val) == 6
    assert sorted(train + val) == list(range(24))
    data = FileBytes(str(tmp_path / "3"), sequence_length=8, batch_size=2, val_fraction=0.25, seed=3)
    data.setup()
    assert data.val_windows.indices.tolist() == val
    assert split(4)[1] != val


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches(tmp_path, num_workers):
    data = FileBytes(make_folder(tmp_path), sequence_length=8, batch_size=4, num_workers=num_workers)
    data.setup()
    batches = list(data.train_dataloader())
    assert {name: value.shape for name, value in batches[0].items()} == {
        "input_ids": (4, 8),
        "labels": (4, 8),
    }
    starts = torch.cat([batch["input_ids"][:, 0] for batch in batches])
    assert starts.unique().numel() == len(starts) and starts.tolist() != sorted(starts.tolist())
    again = torch.cat([batch["input_ids"][:, 0] for batch in data.train_dataloader()])
    assert torch.equal(starts, again)  # a new loader starts from the seed


def test_stdlib_is_fast_and_the_same_each_time():
    start_s = time.perf_counter()
    data = FileBytes("stdlib")
    data.setup()
    assert time.perf_counter() - start_s < 2.0
    assert len(data.train_windows) > 10_000
    text = bytes(data.train_windows[5]["input_ids"].tolist())
    files = find_stdlib_sources()
    assert text in b"".join(path.read_bytes() for path in files)
    assert files == sorted(files) == find_stdlib_sources()
    assert all(path.suffix == ".py" for path in files)
    assert not any({"site-packages", "test", "idlelib"} & set(path.parts) for path in files)


def test_max_bytes_takes_the_front(tmp_path):
    data = FileBytes(make_folder(tmp_path), max_bytes=33, sequence_length=8, batch_size=1, val_fraction=0.0)
    data.setup()
    assert len(data.train_windows) == 4


def test_files_and_folders_mix_in_the_order_given(tmp_path):
    folder = make_folder(tmp_path)
    names = [path.name for path in find_files([f"{folder}/b", f"{folder}/a.txt"])]
    assert names == ["c.txt", "a.txt"]


def test_windows_can_be_pickled(tmp_path):
    data = FileBytes(make_folder(tmp_path), sequence_length=8, batch_size=2)
    data.setup()
    again = pickle.loads(pickle.dumps(data.train_windows))
    torch.testing.assert_close(again[3], data.train_windows[3])


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"paths": "no/such/path"}, r"no file or folder 'no/such/path'.*stdlib"),
        ({"paths": []}, "names no file"),
        ({"sequence_length": 0}, "sequence_length=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_bytes": 1}, "max_bytes=1"),
        ({"val_fraction": 1.0}, "val_fraction=1.0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"sequence_length": 150}, "holds 200 tokens: too few.*301 tokens"),
        ({"sequence_length": 8, "batch_size": 50}, "batch_size=50 is more than the 23 training windows"),
    ],
)
def test_bad_input_is_named(tmp_path, kwargs, match):
    kwargs = {"paths": make_folder(tmp_path), **kwargs}
    with pytest.raises(ConfigurationError, match=match):
        data = FileBytes(**kwargs)
        data.setup()
        data.train_dataloader()


def test_labels_are_not_shifted_twice(tmp_path):
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    class ShiftsItself(BoringModel):
        shifts_labels = True

    folder = make_folder(tmp_path)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(
        ConfigurationError, match=r"ShiftsItself shifts them again: give the data module shift_labels=False"
    ):
        trainer.fit(ShiftsItself(), datamodule=FileBytes(folder, sequence_length=8, batch_size=2))
    data = FileBytes(folder, sequence_length=8, batch_size=2, shift_labels=False)
    data.setup()
    assert set(data.train_windows[0]) == {"input_ids"}


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
