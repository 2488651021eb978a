"""Tokenizing: the output, killed runs that go on, and files that are refused."""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_holmes.commands.tokenize import main
from lightning_holmes.data import TokenFile, tokenizing
from lightning_holmes.data.tokenizing import ByteTokenizer, FolderTokenizer, TokenizeJob, run_tokenize
from lightning_holmes.errors import ConfigurationError

WORDS = "the quick brown fox jumps over a lazy dog while ten grey wolves sleep \u00fcber der Br\u00fccke\n"

# Runs a job and is killed with SIGKILL when it reports the given commit for the n-th time.
KILLED = """
import os, pickle, signal, sys
from lightning_holmes.data import tokenizing
job, after, tokenizing.COMMIT_BYTES, tokenizing.PIECE_BYTES = pickle.load(open(sys.argv[1], "rb"))
calls = 0
def advance(num_bytes):
    global calls
    calls += 1
    if calls == after:
        os.kill(os.getpid(), signal.SIGKILL)
tokenizing.run_tokenize(job, advance)
"""


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    paths = []
    for number in range(3):
        path = tmp_path / f"text{number}.txt"
        path.write_text("".join(WORDS[(i * 7) % 50 :] for i in range(40 + number)))
        paths.append(path)
    lines = [json.dumps({"text": WORDS * n, "id": n}) for n in range(1, 20)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n\n")
    return [*paths, tmp_path / "lines.jsonl"]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install lightning-holmes[hf]")
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<unk>", "<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([WORDS] * 10, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)
    return folder


def test_bytes_are_the_bytes(texts, tmp_path, capsys):
    main([*map(str, texts), "--tokenizer", "bytes", "--output", str(tmp_path / "out.bin")])
    expected = b"".join(path.read_bytes() for path in texts[:3])
    for line in texts[3].read_text().split("\n"):
        if line:
            expected += json.loads(line)["text"].encode() + b"\n"
    assert np.fromfile(tmp_path / "out.bin", np.uint16).astype(np.uint8).tobytes() == expected
    assert "dtype: uint16, vocab_size: 256" in capsys.readouterr().out
    data = TokenFile(str(tmp_path / "out.bin"), vocab_size=256, sequence_length=16)
    data.setup()
    assert sorted(p.name for p in tmp_path.iterdir() if "out.bin" in p.name) == ["out.bin"]
    with pytest.raises(ConfigurationError, match="exists already"):
        main([str(texts[0]), "--tokenizer", "bytes", "--output", str(tmp_path / "out.bin")])


def test_a_folders_tokenizer_gives_back_the_text(texts, tmp_path, tokenizer_folder, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setattr(tokenizing, "PIECE_BYTES", 64)  # many cuts, also next to characters of two bytes
    monkeypatch.setattr(tokenizing, "_LONGEST_LINE_BYTES", 3)
    main([*map(str, texts), "--tokenizer", str(tokenizer_folder), "--output", str(tmp_path / "out.bin")])
    tokens = np.fromfile(tmp_path / "out.bin", np.uint16).tolist()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    documents = [path.read_text() for path in texts[:3]] + [WORDS * n for n in range(1, 20)]
    assert tokens.count(tokenizer.eos_token_id) == len(documents)
    assert tokenizer.decode(tokens) == "".join(text + "<end>" for text in documents)


def test_killed_and_run_again_it_writes_the_same_file(texts, tmp_path, tokenizer_folder, monkeypatch):
    monkeypatch.setattr(tokenizing, "COMMIT_BYTES", 1500)
    monkeypatch.setattr(tokenizing, "PIECE_BYTES", 400)
    tokenizer = FolderTokenizer(str(tokenizer_folder))

    def job(name: str) -> TokenizeJob:
        return TokenizeJob(files=tuple(texts), output=tmp_path / name, tokenizer=tokenizer)

    commits: list[int] = []
    count = run_tokenize(job("whole.bin"), commits.append)
    assert sum(commits) == job("whole.bin").num_bytes - 1 and len(commits) > 8  # except for the empty line at the end
    (tmp_path / "job").write_bytes(pickle.dumps((job("killed.bin"), 5, 1500, 400)))
    command = [sys.executable, "-c", KILLED, str(tmp_path / "job")]
    killed = subprocess.run(command, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    assert not (tmp_path / "killed.bin").exists()
    with (tmp_path / "killed.bin.part").open("ab") as part:
        part.write(os.urandom(999))  # a write that is not in the journal
    again: list[int] = []
    assert run_tokenize(job("killed.bin"), again.append) == count
    assert again[0] == sum(commits[:5]) > 0 and sum(again) == sum(commits)
    assert (tmp_path / "killed.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    assert not list(tmp_path.glob("killed.bin.part*"))


def test_what_a_killed_run_left_is_of_the_same_files(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "COMMIT_BYTES", 1500)
    monkeypatch.setattr(tokenizing, "PIECE_BYTES", 400)
    job = TokenizeJob(files=tuple(texts), output=tmp_path / "out.bin", tokenizer=ByteTokenizer())

    class Killed(BaseException):
        pass

    def die_at_the_third(num_bytes: int, calls: list[int] = []) -> None:  # noqa: B006
        calls.append(num_bytes)
        if len(calls) == 3:
            raise Killed

    with pytest.raises(Killed):
        run_tokenize(job, die_at_the_third)
    other = TokenizeJob(files=tuple(texts[:2]), output=tmp_path / "out.bin", tokenizer=ByteTokenizer())
    with pytest.raises(ConfigurationError, match="other files, another tokenizer"):
        run_tokenize(other)
    (tmp_path / "out.bin.part").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="shorter than"):
        run_tokenize(job)
    (tmp_path / "out.bin.part.json").write_text("{")
    with pytest.raises(ConfigurationError, match="damaged"):
        run_tokenize(job)


def test_two_runs_do_not_write_one_file(texts, tmp_path):
    job = TokenizeJob(files=tuple(texts), output=tmp_path / "out.bin", tokenizer=ByteTokenizer())

    refused: list[int] = []

    def second(num_bytes: int) -> None:
        with pytest.raises(ConfigurationError, match="another run"):
            run_tokenize(job)
        refused.append(num_bytes)

    run_tokenize(job, second)
    assert refused and (tmp_path / "out.bin").exists()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("latin.txt", b"ok\n\xe9t\xe9", "not UTF-8 text: byte 3"),
        ("bad.jsonl", b'{"text": "ok"}\n{"txt": 1}\n', "begins at byte 15.*text-key"),
        ("bad.jsonl", b'{"text": 3}\n', "it is a int"),
        ("empty.txt", b"", "no text"),
    ],
)
def test_files_that_are_no_text_are_named(tmp_path, tokenizer_folder, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=match):
        main([str(tmp_path / name), "--tokenizer", str(tokenizer_folder), "--output", str(tmp_path / "out.bin")])


def test_a_wrong_tokenizer_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigurationError, match=r"no such folder.*nothing is downloaded"):
        main([str(tmp_path / "a.txt"), "--tokenizer", "no/such"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="holds no tokenizer"):
        main([str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path / "empty")])
