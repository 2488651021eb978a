"""lightning-holmes tokenize FILES: writes text as a flat file of tokens, which lightning_holmes.data.TokenFile reads.

    lightning-holmes tokenize corpus/ --tokenizer models/llama --output data/train.bin

FILES are files, or folders, which are searched for files. A .jsonl file has one document per line, under the key "text"; any
other file is one document. The tokenizer's end-of-text token is written after each document. If the command is interrupted, run
it again with the same arguments: it continues where it stopped.
"""

import argparse
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from lightning_holmes.data.bytes import find_files
from lightning_holmes.data.tokenizing import ByteTokenizer, FolderTokenizer, TokenizeJob, Tokenizer, run_tokenize
from lightning_holmes.errors import ConfigurationError


def main(args: list[str]) -> None:
    """Run the command.

    Raises:
        ConfigurationError: a file or the tokenizer cannot be read, or OUT exists.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-holmes tokenize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", metavar="FILES", nargs="+", help="text files, .jsonl files, or folders of them")
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER|bytes", help="a Hugging Face folder, or bytes")
    parser.add_argument("--output", type=Path, default=Path("tokens.bin"), metavar="OUT", help="default tokens.bin")
    parser.add_argument(
        "--text-key", default="text", help="the key of the text in each line of a .jsonl file; default text"
    )
    parser.add_argument("--no-end", action="store_true", help="write no end-of-text token after documents")
    given = parser.parse_args(args)
    if given.output.exists():
        raise ConfigurationError(f"--output={str(given.output)!r} exists already; give a new name, or remove it")
    files = tuple(find_files(given.files))
    if not files:
        raise ConfigurationError(f"FILES={given.files}: there is no file in them")
    tokenizer: Tokenizer = ByteTokenizer() if given.tokenizer == "bytes" else FolderTokenizer(given.tokenizer)
    job = TokenizeJob(
        files=files,
        output=given.output,
        tokenizer=tokenizer,
        text_key=given.text_key,
        end_documents=not given.no_end,
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(f"{len(files)} files", total=job.num_bytes)
        tokens = run_tokenize(job, advance=lambda num_bytes: progress.advance(task, num_bytes))
    print(f"wrote {tokens:,} tokens to {given.output}; to train on them:")
    print("  data:")
    print("    class_path: lightning_holmes.data.TokenFile")
    print(f"    init_args: {{paths: {given.output}, dtype: {job.dtype}, vocab_size: {tokenizer.vocab_size}}}")
