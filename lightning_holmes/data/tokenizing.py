"""Make token files: convert text to the flat file that TokenFile reads; a run that was killed continues where it stopped.

This module reads text, wraps the tokenizers and keeps the journal that makes a run restartable. The command line and the
progress bar are in commands/tokenize.py.

    job = TokenizeJob(files=(Path("a.txt"),), output=Path("tokens.bin"), tokenizer=ByteTokenizer())
    run_tokenize(job, advance=lambda num_bytes: None)

Text is cut into pieces at line ends, and each piece is tokenized by itself. The places of the cuts depend only on the files,
so a run that was killed and run again writes the same bytes as an uninterrupted run. During a run, tokens are in OUT.part, and
OUT.part.json records how much of it is safely on the disk; OUT appears in one step at the end.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from lightning_holmes.data.tokens import TokenDtype
from lightning_holmes.errors import ConfigurationError, needs_extra, read_by_transformers

PIECE_BYTES = 1 << 16  # bytes of text that one thread tokenizes at a time
COMMIT_BYTES = 1 << 23  # bytes of text between two entries of the journal
_LONGEST_LINE_BYTES = 1 << 22  # a longer line is cut into several pieces


class Tokenizer(Protocol):
    """``end``: the token after each document, None if the vocabulary has none; ``identity``: differs for different tokenizers."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end(self) -> int | None: ...

    @property
    def identity(self) -> str: ...

    def encode(self, texts: Sequence[bytes]) -> list[Any]:
        """Return the tokens of each text, without special tokens. Raises UnicodeDecodeError."""
        ...


class ByteTokenizer:
    """One token per byte; documents of one file are separated by a line end."""

    vocab_size = 256
    end = None
    identity = "bytes"

    def encode(self, texts: Sequence[bytes]) -> list[Any]:
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]


class FolderTokenizer:
    """A Hugging Face tokenizer from a local folder. Needs the extra: ``pip install lightning-holmes[hf]``.

    Raises:
        ConfigurationError: there is no tokenizer in the folder, or transformers is not installed.
    """

    def __init__(self, folder: str) -> None:
        if not Path(folder).is_dir():
            raise ConfigurationError(
                f"tokenizer={folder!r}: there is no such folder (looked in {Path.cwd()}). Give a local folder that "
                'save_pretrained wrote (nothing is downloaded), or "bytes".'
            )
        with needs_extra(f"tokenizer={folder!r}", "hf"):
            from transformers import AutoTokenizer
        with read_by_transformers(f"tokenizer={folder!r}: the folder holds no tokenizer"):
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self._tokenizer.model_max_length = 1 << 60  # no warnings: windows are cut later
        self.vocab_size = len(self._tokenizer)
        self.end = self._tokenizer.eos_token_id
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(Path(folder).glob("*")):
            if path.is_file() and ("token" in path.name or "vocab" in path.name or path.name == "merges.txt"):
                digest.update(path.name.encode() + path.read_bytes())
        self.identity = digest.hexdigest()

    def encode(self, texts: Sequence[bytes]) -> list[Any]:
        decoded = [text.decode() for text in texts]
        return list(self._tokenizer(decoded, add_special_tokens=False, verbose=False)["input_ids"])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeJob:
    """The input files, the output file and the tokenizer of a run.

    A file whose name ends in .jsonl has one document per line, its text under ``text_key``; any other file is one
    document of UTF-8 text (of any bytes, for ByteTokenizer).
    """

    files: tuple[Path, ...]
    output: Path
    tokenizer: Tokenizer
    text_key: str = "text"
    end_documents: bool = True

    @property
    def dtype(self) -> TokenDtype:
        """The smallest token dtype that holds the vocabulary."""
        return "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"

    @property
    def num_bytes(self) -> int:
        """The number of bytes of text in all files."""
        return sum(path.stat().st_size for path in self.files)

    def identity(self) -> str:
        """A digest of everything that the output depends on."""
        facts: list[Any] = [
            self.tokenizer.identity,
            self.text_key,
            self.end_documents,
            PIECE_BYTES,
            _LONGEST_LINE_BYTES,
        ]
        for path in self.files:
            status = path.stat()
            facts.append([str(path), status.st_size, status.st_mtime_ns])
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The progress of a run: the first ``tokens`` tokens are those of all files before number ``file`` and of ``offset`` bytes of it."""

    file: int = 0
    offset: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Text to tokenize, from byte ``start`` of a file. ``next``: the file number and byte at which the next piece begins; ``ends``:
    whether a document ends after this piece."""

    path: Path
    start: int
    text: bytes
    next: tuple[int, int]
    ends: bool


def run_tokenize(job: TokenizeJob, advance: Callable[[int], None] = lambda num_bytes: None) -> int:
    """Write the token file, continuing a run that was killed; return the number of tokens.

    Args:
        advance: called with the number of bytes of text whose tokens have reached the disk since its previous call.

    Raises:
        ConfigurationError: a file cannot be read in the format of its name, another run writes the same file, or the
            files of a killed run belong to other input files or settings.
    """
    part, journal = _names(job.output)
    part.parent.mkdir(parents=True, exist_ok=True)
    itemsize = np.dtype(job.dtype).itemsize
    with part.open("ab") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigurationError(
                f"OUT={str(job.output)!r} is being written by another run ({part}): wait for it, or give another OUT."
            ) from error
        place = _read_journal(job, journal, part)
        output.truncate(place.tokens * itemsize)
        advance(_bytes_until(job, place))
        waiting: list[_Piece] = []
        num_waiting = 0
        for piece in _pieces(job, place):
            waiting.append(piece)
            num_waiting += len(piece.text)
            if num_waiting >= COMMIT_BYTES:
                place = _commit(job, output, journal, waiting, place, advance)
                waiting, num_waiting = [], 0
        if waiting:
            place = _commit(job, output, journal, waiting, place, advance)
        if place.tokens == 0:
            raise ConfigurationError("FILES hold no text, so there are no tokens to write.")
        part.rename(job.output)  # while locked, so that a second run does not continue it as its own
    journal.unlink()
    return place.tokens


def _names(output: Path) -> tuple[Path, Path]:
    return output.with_name(f"{output.name}.part"), output.with_name(f"{output.name}.part.json")


def _read_journal(job: TokenizeJob, journal: Path, part: Path) -> _Place:
    try:
        written = json.loads(journal.read_text())
    except FileNotFoundError:
        return _Place()
    except ValueError as error:
        raise ConfigurationError(f"{journal} is damaged: remove it and {part}, and start anew.") from error
    if written["identity"] != job.identity():
        raise ConfigurationError(
            f"{journal} is of a run with other files, another tokenizer or other options. Run with what it had, or remove "
            f"it and {part}, and start anew."
        )
    place = _Place(file=written["file"], offset=written["offset"], tokens=written["tokens"])
    if part.stat().st_size < place.tokens * np.dtype(job.dtype).itemsize:
        raise ConfigurationError(f"{part} is shorter than {journal} says: remove both, and start anew.")
    return place


def _commit(
    job: TokenizeJob,
    output: BinaryIO,
    journal: Path,
    pieces: Sequence[_Piece],
    place: _Place,
    advance: Callable[[int], None],
) -> _Place:
    """Tokenize the pieces, write the tokens, and update the journal once the tokens are on the disk; return the new progress."""
    tokenizer = job.tokenizer
    tokens = place.tokens
    for piece, encoded in zip(pieces, _encode(job, pieces), strict=True):
        values = np.asarray(encoded, dtype=np.int64)
        if piece.ends and job.end_documents and tokenizer.end is not None:
            values = np.append(values, tokenizer.end)
        output.write(values.astype(job.dtype).tobytes())
        tokens += len(values)
    output.flush()
    os.fsync(output.fileno())
    file, offset = pieces[-1].next
    after = _Place(file=file, offset=offset, tokens=tokens)
    beside = journal.with_name(f"{journal.name}.new")
    with beside.open("w") as entry:
        json.dump({"identity": job.identity(), "file": file, "offset": offset, "tokens": tokens}, entry)
        entry.flush()
        os.fsync(entry.fileno())
    beside.replace(journal)
    advance(_bytes_until(job, after) - _bytes_until(job, place))
    return after


def _bytes_until(job: TokenizeJob, place: _Place) -> int:
    return sum(path.stat().st_size for path in job.files[: place.file]) + place.offset


def _encode(job: TokenizeJob, pieces: Sequence[_Piece]) -> list[Any]:
    try:
        return job.tokenizer.encode([piece.text for piece in pieces])
    except UnicodeDecodeError:
        for piece in pieces:
            try:
                piece.text.decode()
            except UnicodeDecodeError as error:
                raise ConfigurationError(
                    f"{piece.path} is not UTF-8 text: byte {piece.start + error.start} ({error.reason}). Convert it, leave it "
                    "out, or give --tokenizer bytes."
                ) from None
        raise


def _pieces(job: TokenizeJob, place: _Place) -> Iterator[_Piece]:
    """Yield the pieces of text after ``place``."""
    for number in range(place.file, len(job.files)):
        path = job.files[number]
        start = place.offset if number == place.file else 0
        read = _read_lines if path.suffix == ".jsonl" else _read_text
        try:
            with path.open("rb") as file:
                file.seek(start)
                for text, ends in read(job, path, file, start):
                    yield _Piece(path=path, start=start, text=text, next=(number, file.tell()), ends=ends)
                    start = file.tell()
        except OSError as error:
            raise ConfigurationError(f"FILES: {path} cannot be read ({error.strerror}).") from error


def _read_text(job: TokenizeJob, path: Path, file: BinaryIO, start: int) -> Iterator[tuple[bytes, bool]]:
    size = path.stat().st_size
    while text := file.read(PIECE_BYTES):
        text += file.readline(_LONGEST_LINE_BYTES)
        while len(text) >= PIECE_BYTES and (more := _continuation(file)):  # so that no UTF-8 character is cut
            text += more
        yield text, file.tell() >= size


def _continuation(file: BinaryIO) -> bytes:
    """Read and return the next byte if it continues a UTF-8 character; otherwise read nothing and return b""."""
    byte = file.read(1)
    if byte and byte[0] & 0xC0 == 0x80:
        return byte
    file.seek(-len(byte), os.SEEK_CUR)
    return b""


def _read_lines(job: TokenizeJob, path: Path, file: BinaryIO, start: int) -> Iterator[tuple[bytes, bool]]:
    at = start
    for line in iter(file.readline, b""):
        if line.strip():
            try:
                text = json.loads(line)[job.text_key]
                if not isinstance(text, str):
                    raise TypeError(f"it is a {type(text).__name__}")
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigurationError(
                    f"{path}: the line that begins at byte {at} is no JSON object with a text under {job.text_key!r} "
                    f"({type(error).__name__}: {error}). Mend it, or give the right --text-key."
                ) from error
            yield text.encode() + (b"\n" if job.tokenizer.end is None else b""), True
        at = file.tell()
