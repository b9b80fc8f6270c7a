#!/usr/bin/env python3
"""A decode step of H2O in plain PyTorch at the size of `kv-bench paper longflow-fig1`, as records that `--merge` takes.

    python3 longflow.py --json torch.json
    kv-bench paper longflow-fig1 --device cuda --merge torch.json

A step attends, adds up the probabilities of every slot, and overwrites the one of the lowest sum; once as transformers'
eager attention does it, with keys and values repeated for every query head, and once in groups.
"""

import argparse
import json
import math
import pathlib

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels import BACKENDS, microseconds, random, sdpa_kernel

BATCH, HEADS, KV_HEADS, TOKENS, DIM = 128, 32, 8, 3200, 128
GROUP = HEADS // KV_HEADS
SETS = 2


def overwrite(cache, scores, new):
    """The slot of the lowest score is the new token's."""
    victim = scores.argmin(-1, keepdim=True)
    for pool, rows in zip(cache, new):
        pool.scatter_(2, victim[..., None].expand(-1, -1, 1, DIM), rows)
    scores.scatter_(2, victim, 0.0)


def h2o(cache, scores, query, new, repeated):
    keys, values = cache
    if repeated:
        keys, values = (pool.repeat_interleave(GROUP, dim=1) for pool in cache)
    heads = keys.shape[1]
    rows = query.reshape(BATCH, heads, HEADS // heads, DIM)
    logits = torch.matmul(rows, keys.transpose(2, 3)) / math.sqrt(DIM)
    probabilities = logits.softmax(-1, dtype=torch.float32)
    output = torch.matmul(probabilities.to(query.dtype), values)
    scores += probabilities.reshape(BATCH, KV_HEADS, GROUP, TOKENS).sum(2)
    overwrite(cache, scores, new)
    return output


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="where to write the records")
    args = parser.parse_args()
    torch.manual_seed(0)
    query = random(BATCH, HEADS, 1, DIM)
    new = [random(BATCH, KV_HEADS, 1, DIM) for _ in range(2)]
    caches = [[random(BATCH, KV_HEADS, TOKENS, DIM) for _ in range(2)] for _ in range(SETS)]
    scores = [torch.rand(BATCH, KV_HEADS, TOKENS, device="cuda") for _ in range(SETS)]

    def plain(i):
        scaled_dot_product_attention(query, *caches[i], enable_gqa=True)

    def step(repeated):
        return microseconds(lambda i: h2o(caches[i], scores[i], query, new, repeated), SETS)

    times = {}
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            times[name] = microseconds(plain, SETS)
    times["pytorch h2o, repeated heads"] = step(True)
    times["pytorch h2o, in groups"] = step(False)
    for name, value in times.items():
        print(f"{name:28} {value:10.1f} us", flush=True)
    if args.json:
        records = [{
            "suite": "paper", "case": {"task": "longflow-fig1", "batch": BATCH, "length": TOKENS},
            "model": "", "device": torch.cuda.get_device_name(), "policy": name, "budget": None,
            "metric": "time_us", "value": value, "unit": "us"} for name, value in times.items()]
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
