"""Write text as a token file, which recipes.text.TokenFile reads. Needs `pip install 'lightning-holmes[recipes]'`.

    python recipes/make_tokens.py corpus/ --tokenizer models/llama --output data/train.bin
    python recipes/make_tokens.py more.jsonl --tokenizer models/llama --output data/more.bin

A .jsonl file has one document per line, under "text"; any other file is one document. The end-of-text token follows each document.
The tokenizer is a local folder; nothing is downloaded. `datasets` tokenizes in several processes, and keeps what it has done in its cache.
"""

import argparse
from pathlib import Path

import numpy as np
from datasets import concatenate_datasets, load_dataset
from transformers import AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="+", help="files, and folders of files")
    parser.add_argument("--tokenizer", required=True, help="a folder that save_pretrained has written")
    parser.add_argument("--output", required=True)
    parser.add_argument("--processes", type=int, default=None)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, local_files_only=True)
    named = [Path(path) for path in options.paths]
    files = [file for path in named for file in (sorted(path.rglob("*.*")) if path.is_dir() else [path])]
    parts = []
    for lines in (True, False):
        found = [str(file) for file in files if (file.suffix == ".jsonl") == lines]
        if found:
            kind = ("json", {}) if lines else ("text", {"sample_by": "document"})
            parts.append(load_dataset(kind[0], data_files=found, split="train", **kind[1]).select_columns("text"))

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(rows["text"], add_special_tokens=False)["input_ids"]
        return {"ids": [[*ids, tokenizer.eos_token_id] for ids in encoded]}

    tokens = concatenate_datasets(parts).map(encode, batched=True, remove_columns="text", num_proc=options.processes)
    dtype = "uint16" if len(tokenizer) <= 1 << 16 else "uint32"
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file:
        for row in tokens:
            np.array(row["ids"], dtype).tofile(file)
    print(
        f"{output}: {output.stat().st_size // np.dtype(dtype).itemsize} tokens; dtype: {dtype}, vocab_size: {len(tokenizer)}"
    )


if __name__ == "__main__":
    main()
