"""Malformed and malicious files: nothing in them is executed, and the error names the problem."""

import dataclasses
import os
import pickle
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from folder_saves import save_folder
from torch import nn

from lightning_holmes.checkpoint import CheckpointManager, Membership, load_module_state
from lightning_holmes.checkpoint.converting import open_source, write_file, write_folder
from lightning_holmes.checkpoint.finding import whole_checkpoints
from lightning_holmes.checkpoint.folder import FolderStateDict
from lightning_holmes.checkpoint.manager import bytes_of
from lightning_holmes.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from lightning_holmes.errors import CheckpointError
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.plan.partition import Partition


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return (Path.touch, (self.witness,))


def saved(path: Path, module: nn.Module) -> Path:
    """Save a checkpoint folder of ``module`` with an optimizer."""
    state = module.state_dict()
    values: dict[Any, Any] = {("state_dict", name): value for name, value in state.items()}
    values |= {("optimizer_0", "state", n, "exp_avg"): torch.randn_like(v) for n, v in state.items()}
    values["optimizer_0", "state", "0.weight", "note"] = {"steps": 3}
    rest = bytes_of({"loops": {}, "optimizer_states": [{"param_groups": [{"params": list(state)}]}]})
    save_folder(path, values, rest=rest, plan="plan")
    return path


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 2))


def read_all(path: Path) -> Any:
    """Load a checkpoint as the strategy does, and read every value."""
    loaded = CheckpointManager(distributed=True, background=False).load(Membership(), path, weights_only=None)
    state = loaded["state_dict"]
    whole = state.read_many(state) if isinstance(state, FolderStateDict) else {k: v.clone() for k, v in state.items()}
    for optimizer in loaded["optimizer_states"]:
        list(optimizer["state"].values())
    return whole


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "some.ckpt", build())


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder.parent / "some-plain.ckpt"
    write_file(open_source(folder), path)
    return path


def replace_in_manifest(folder: Path, old: bytes, new: bytes) -> None:
    """Replace ``old``, which the manifest has once, and correct the checksum."""
    text = (folder / MANIFEST).read_bytes().split(b"\n")[0]
    assert text.count(old) == 1
    text = text.replace(old, new)
    (folder / MANIFEST).write_bytes(text + f"\n{zlib.crc32(text):08x}\n".encode())


def test_the_folder_is_what_it_should_be(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["__0_0.distcp", MANIFEST, "meta.pt", "plan.yaml"]
    whole = read_all(folder)
    assert set(whole) == set(build().state_dict())


@pytest.mark.parametrize("name", ["__0_0.distcp", MANIFEST, "meta.pt", "plan.yaml"])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_payload_in_a_folder_never_runs(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    witness = tmp_path / "witness"
    path = folder / name
    size = path.stat().st_size
    if kind == "torch":
        torch.save(Payload(witness), path)
    else:
        path.write_bytes(pickle.dumps(Payload(witness)))
    if path.stat().st_size < size:  # pad to the right length, which is checked first
        path.write_bytes(path.read_bytes() + bytes(size - path.stat().st_size))
    elif name != MANIFEST:
        replace_in_manifest(folder, b'"num_bytes":%d' % size, b'"num_bytes":%d' % path.stat().st_size)
    if name == "plan.yaml":
        read_all(folder)  # it is not read then
    else:
        with pytest.raises(CheckpointError):
            read_all(folder)
    assert not witness.exists()


def test_a_payload_behind_right_checksums_never_runs(folder: Path, tmp_path: Path) -> None:
    """Someone who can write files can write checksums too."""
    witness = tmp_path / "witness"
    manifest = Manifest.load(folder)
    torch.save(Payload(witness), folder / "meta.pt")
    data = (folder / "meta.pt").read_bytes()
    part = (folder / "__0_0.distcp").read_bytes() + data
    (folder / "__0_0.distcp").write_bytes(part)
    entry = dataclasses.replace(
        manifest.state_dict["0.weight"], offset=len(part) - len(data), length=len(data), crc32=zlib.crc32(data)
    )
    files = manifest.files | {"__0_0.distcp": FileEntry(num_bytes=len(part), file_system=0)}
    forged = dataclasses.replace(manifest, files=files, state_dict=manifest.state_dict | {"0.weight": entry})
    (folder / MANIFEST).write_bytes(forged.to_bytes())
    assert forged.files["meta.pt"].num_bytes != len(data)
    with pytest.raises(CheckpointError):
        read_all(folder)
    files = files | {"meta.pt": FileEntry(num_bytes=len(data))}
    forged = dataclasses.replace(forged, files=files, rest_crc32=zlib.crc32(data))
    (folder / MANIFEST).write_bytes(forged.to_bytes())
    with pytest.raises(CheckpointError, match="could run code"):
        read_all(folder)
    torch.save({"optimizer_states": []}, folder / "meta.pt")
    data = (folder / "meta.pt").read_bytes()
    files = files | {"meta.pt": FileEntry(num_bytes=len(data))}
    (folder / MANIFEST).write_bytes(dataclasses.replace(forged, files=files, rest_crc32=zlib.crc32(data)).to_bytes())
    with pytest.raises(CheckpointError, match="could run code"):
        read_all(folder)
    outside = dataclasses.replace(manifest, files={**manifest.files, "../../secret": FileEntry(num_bytes=1)})
    (folder / MANIFEST).write_bytes(outside.to_bytes())
    with pytest.raises(CheckpointError, match="outside of the folder"):
        read_all(folder)
    assert not witness.exists()


def test_a_payload_in_a_file_never_runs(tmp_path: Path) -> None:
    witness, path = tmp_path / "witness", tmp_path / "some.ckpt"
    for write in (
        lambda: torch.save({"state_dict": Payload(witness)}, path),
        lambda: path.write_bytes(pickle.dumps(Payload(witness))),
    ):
        write()
        with pytest.raises(CheckpointError):
            read_all(path)
        with pytest.raises(CheckpointError):
            open_source(path)
    assert not witness.exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", MANIFEST, "meta.pt", "plan.yaml"])
def test_a_truncated_folder_is_torn_and_passed_over(folder: Path, tmp_path: Path, name: str) -> None:
    older = tmp_path / "step=1.ckpt"
    shutil.copytree(folder, older)
    torn = tmp_path / "last.ckpt"
    folder.rename(torn)
    path = torn / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.warns(UserWarning, match=r"last\.ckpt is torn") as warned:
        assert whole_checkpoints({str(torn)}, tmp_path) == {str(older)}
    assert name in str(warned[0].message)
    with pytest.raises(CheckpointError, match=name):
        open_source(torn)


def test_a_truncated_file_is_torn_and_passed_over(file: Path, tmp_path: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.warns(UserWarning, match="cut off"):
        assert whole_checkpoints({str(file)}, tmp_path) == {str(tmp_path / "some.ckpt")}
    with pytest.raises(CheckpointError, match="damaged"):
        read_all(file)


def test_every_flipped_bit_of_a_folder_is_noticed(folder: Path) -> None:
    for name in ("__0_0.distcp", MANIFEST, "meta.pt"):
        path = folder / name
        good = path.read_bytes()
        for place in range(0, len(good), max(1, len(good) // 40)):
            bad = bytearray(good)
            bad[place] ^= 1 << place % 8
            path.write_bytes(bad)
            with pytest.raises(CheckpointError):
                read_all(folder)
        path.write_bytes(good)
    read_all(folder)


def test_flipped_bits_of_a_files_tensors_are_noticed(file: Path) -> None:
    good = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        tensors = [info for info in archive.infolist() if info.filename.rpartition("/")[2].isdigit()]
    assert len(tensors) >= len(build().state_dict())
    for info in tensors:
        end = good.index(b"PK", info.header_offset + 4 + info.file_size)
        bad = bytearray(good)
        bad[end - info.file_size // 2] ^= 4
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match="checksum"):
            read_all(file)
        with pytest.raises(CheckpointError, match="checksum"):
            open_source(file)


@pytest.mark.parametrize("what", [b"[" * 100_000, b'{"a":' * 100_000, b"{}", b"7", b"\xff"], ids=lambda w: repr(w[:6]))
def test_a_manifest_that_says_something_else_is_damaged(folder: Path, what: bytes) -> None:
    """The manifest's checksum is right."""
    (folder / MANIFEST).write_bytes(what + f"\n{zlib.crc32(what):08x}\n".encode())
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        read_all(folder)


def test_a_manifest_is_cut_anywhere(folder: Path) -> None:
    whole = (folder / MANIFEST).read_bytes()
    for length in range(0, len(whole) - 1, 7):
        with pytest.raises(CheckpointError):
            Manifest.from_bytes(whole[:length], "cut")


@pytest.mark.parametrize("name", [MANIFEST, "meta.pt", "__0_0.distcp"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder: Path, name: str) -> None:
    if name != MANIFEST:  # forge the length to that of a pipe
        replace_in_manifest(folder, b'"num_bytes":%d' % (folder / name).stat().st_size, b'"num_bytes":0')
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError):
        read_all(folder)
    with pytest.warns(UserWarning, match="is torn"):
        assert whole_checkpoints({str(folder)}, folder.parent) == set()


def test_a_file_of_torchs_older_format_is_read_and_converted(file: Path, tmp_path: Path) -> None:
    old, again = tmp_path / "old.ckpt", tmp_path / "again.ckpt"
    torch.save(torch.load(file), old, _use_new_zipfile_serialization=False)
    write_folder(open_source(old), again)
    for found in (read_all(old), read_all(again)):
        assert all(torch.equal(value, found[name]) for name, value in read_all(file).items())
    old.write_bytes(old.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="damaged"):
        read_all(old)


def test_no_checkpoint_is_one_message_and_still_pythons_own_error(tmp_path: Path) -> None:
    for kind in (CheckpointError, FileNotFoundError):
        with pytest.raises(kind, match=r"ckpt_path='.*none\.ckpt'"):
            read_all(tmp_path / "none.ckpt")


def test_another_models_checkpoint_names_what_differs(folder: Path, file: Path) -> None:
    other = nn.Sequential(nn.Linear(20, 30), *(nn.Linear(3, 3) for _ in range(8)))
    pipeline = PipelineModule(other, None, Partition((1,)), (0,), torch.device("cpu"))
    for path in (folder, file):
        state = CheckpointManager(distributed=True, background=False).load(Membership(), path, weights_only=None)[
            "state_dict"
        ]
        with pytest.raises(CheckpointError) as raised:
            load_module_state(pipeline, {**dict(state), "extra": torch.ones(1)}, strict=True)
        text = str(raised.value)
        assert "it lacks 2.weight, 2.bias, 3.weight" in text and "and 4 more" in text and "extra" in text
        with pytest.raises(CheckpointError, match=r"another model than this Sequential: size mismatch for 1\.weight"):
            load_module_state(pipeline, state, strict=False)
