"""lightning-holmes convert IN OUT: writes a checkpoint in another format, one tensor at a time.

A checkpoint folder becomes a single plain Lightning file, and a file becomes a folder. ``--format safetensors`` writes a folder that
Hugging Face's from_pretrained reads, for HFCausalLM.
"""

import argparse
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lightning_holmes.checkpoint.converting import open_source, write_file, write_folder
from lightning_holmes.checkpoint.hf_export import MAX_SHARD_BYTES, write_pretrained
from lightning_holmes.errors import ConfigurationError

FORMATS = ("file", "folder", "safetensors")


def main(args: list[str]) -> None:
    """Run the command.

    Raises:
        ConfigurationError: there is no such checkpoint, or OUT exists.
        CheckpointError: the checkpoint is damaged.
    """
    parser = argparse.ArgumentParser(prog="lightning-holmes convert", description=__doc__)
    parser.add_argument("source", metavar="IN", type=Path, help="a checkpoint: a folder, or a .ckpt file")
    parser.add_argument("target", metavar="OUT", type=Path, help="what to write; must not exist")
    parser.add_argument("--format", choices=FORMATS, help="default: file if IN is a folder, folder if IN is a file")
    parser.add_argument(
        "--max-shard-bytes",
        type=int,
        default=MAX_SHARD_BYTES,
        help=f"the most bytes of one safetensors file; default {MAX_SHARD_BYTES}",
    )
    given = parser.parse_args(args)
    if not given.source.exists():
        raise ConfigurationError(f"IN={str(given.source)!r}: there is no such checkpoint (looked in {Path.cwd()})")
    if given.target.exists():
        raise ConfigurationError(f"OUT={str(given.target)!r} exists already; give a new name, or remove it")
    if given.max_shard_bytes < 1:
        raise ConfigurationError(f"--max-shard-bytes={given.max_shard_bytes} holds no tensor; give 1 or more")
    source = open_source(given.source)
    kind = given.format or ("file" if given.source.is_dir() else "folder")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(f"{given.source.name} to {kind}", total=source.num_bytes)
        source.advance.append(lambda num_bytes: progress.advance(task, num_bytes))
        if kind == "file":
            write_file(source, given.target)
        elif kind == "folder":
            write_folder(source, given.target)
        else:
            write_pretrained(source, given.target, max_shard_bytes=given.max_shard_bytes)
            progress.update(task, completed=source.num_bytes)
    print(f"wrote {given.target}")
