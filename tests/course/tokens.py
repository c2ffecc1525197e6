#!/usr/bin/env python3
"""From a dataset and a tokenizer of Hugging Face to a token file that --data reads (llm.c's format).

    pip install datasets transformers
    tests/course/tokens.py roneneldan/TinyStories gpt2 stories.bin --split train[:1%]
    build/00_single_gpu/train --data stories.bin --vocab 50257 --documents 50256

The dataset may be a folder or a file here: *.txt, a document a line, or *.jsonl, *.csv, *.parquet. So may
the tokenizer: a folder with its tokenizer.json.
"""
import argparse
import array
import os
import sys


def write_tokens(path, documents, vocabulary):
    """Lists of token numbers, one a document; 16 bits a token where the vocabulary fits, else 32."""
    magic, version, kind = (20240520, 1, "H") if vocabulary <= 1 << 16 else (20240801, 7, "I")
    count = 0
    with open(path, "wb") as file:
        file.write(bytes(1024))
        for document in documents:
            tokens = array.array(kind, document)
            if sys.byteorder == "big":
                tokens.byteswap()
            file.write(tokens.tobytes())
            count += len(document)
        file.seek(0)
        for number in (magic, version, count):
            file.write(number.to_bytes(4, "little"))
    return count


def rows_of(dataset, split):
    from datasets import load_dataset

    readers = {".txt": "text", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    reader = readers.get(os.path.splitext(dataset)[1]) if os.path.isfile(dataset) else None
    if reader:
        return load_dataset(reader, data_files=dataset, split=split)
    return load_dataset(dataset, split=split)


def main():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("dataset", help="its name on the hub, or a folder or file here")
    parser.add_argument("tokenizer", help="likewise, or a folder here")
    parser.add_argument("file", help="the token file to write")
    parser.add_argument("--split", default="train")
    parser.add_argument("--column", default="text", help="which has the documents")
    chosen = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chosen.tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = rows_of(chosen.dataset, chosen.split)
    if chosen.column not in rows.column_names:
        columns = ", ".join(rows.column_names)
        sys.exit(f"tokens.py: --column {chosen.column}: {chosen.dataset} has {columns}")
    documents = (tokenizer.encode(row[chosen.column], add_special_tokens=False) + end for row in rows)
    count = write_tokens(chosen.file, documents, len(tokenizer))
    flags = f"--data {chosen.file} --vocab {len(tokenizer)}"
    flags += "".join(f" --documents {token}" for token in end)
    print(f"{count} tokens in {chosen.file}; train with {flags}")


if __name__ == "__main__":
    main()
