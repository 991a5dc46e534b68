#!/usr/bin/env python3
"""Compares the speed of sbtrain's tokenizers with that of the libraries they come from, on one thread.

  tests/bench/tokenizer_speed.py build/release/sbtrain TEXT.jsonl TOKENIZER...

TOKENIZER is a tokenizer.json, for the package tokenizers, or a tiktoken file named after its encoding, for
tiktoken. sbtrain's time is that of the whole `sbtrain prepare --threads 1`: it also reads and parses the text,
and writes the tokens. The libraries only encode texts that are in memory. All times are of the processor, so
that other work on the machine matters little; each is the best of three.
"""

import argparse
import base64
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "unit/tokenizer"))
import tokenizer_reference as reference  # noqa: E402

ROUNDS = 3


def library(path):
    """The library's name and its function from a text to ids."""
    if path.suffix == ".json":
        tokenizer = reference.Tokenizer.from_file(str(path))
        tokenizer.encode_special_tokens = True
        return "tokenizers", lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    pattern, _ = reference.TIKTOKEN[path.name.split(".")[0]]
    encoding = reference.tiktoken.Encoding("bench", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return "tiktoken", encoding.encode_ordinary


def library_seconds(encode, texts):
    best, tokens = float("inf"), 0
    for _ in range(ROUNDS):
        start = time.process_time()
        tokens = sum(len(encode(text)) for text in texts)
        best = min(best, time.process_time() - start)
    return best, tokens


def sbtrain_seconds(program, text, tokenizer):
    best, tokens = float("inf"), 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            out = subprocess.run([program, "prepare", "--input", text, "--tokenizer", tokenizer, "--output",
                                  f"{folder}/out.h5", "--threads", "1", "--no-eos"],
                                 check=True, capture_output=True, text=True).stdout
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            tokens = int(out.split("documents, ")[1].split()[0])
            best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best, tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("tokenizers", type=pathlib.Path, nargs="+")
    args = parser.parse_args()
    texts = [json.loads(line)["text"] for line in args.text.open(encoding="utf-8")]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{megabytes:.1f} MB in {len(texts)} documents, one thread\n")
    print(f"{'tokenizer':32} {'library':12} {'its MB/s':>9} {'sbtrain':>9} {'ratio':>6}")
    for path in args.tokenizers:
        name, encode = library(path)
        theirs, tokens = library_seconds(encode, texts)
        ours, own_tokens = sbtrain_seconds(args.program, args.text, path)
        same = "" if tokens == own_tokens else f"  {own_tokens} tokens, not {tokens}"
        print(f"{'/'.join(path.parts[-2:]):32} {name:12} {megabytes / theirs:9.1f} {megabytes / ours:9.1f} "
              f"{theirs / ours:6.1f}{same}", flush=True)


if __name__ == "__main__":
    main()
