#!/usr/bin/env python3
"""From a dataset and a tokenizer of Hugging Face to a token file that --data reads (llm.c's format).

    pip install datasets transformers
    tests/course/tokens.py roneneldan/TinyStories gpt2 stories.bin --split train[:1%] --column text
    build/00_single_gpu/train --data stories.bin --vocab 50257 --documents 50256 …
"""
import argparse
import array
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


def main():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("dataset")
    parser.add_argument("tokenizer")
    parser.add_argument("file")
    parser.add_argument("--split", default="train")
    parser.add_argument("--column", default="text")
    chosen = parser.parse_args()
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chosen.tokenizer)
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    rows = load_dataset(chosen.dataset, split=chosen.split)
    documents = (tokenizer.encode(row[chosen.column], add_special_tokens=False) + end for row in rows)
    count = write_tokens(chosen.file, documents, len(tokenizer))
    print(f"{count} tokens in {chosen.file}; train with --vocab {len(tokenizer)}")


if __name__ == "__main__":
    main()
