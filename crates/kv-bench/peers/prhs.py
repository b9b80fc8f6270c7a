#!/usr/bin/env python3
"""PyTorch's decode attention on the cases of `kv-bench paper prhs-table4` and `prhs-long`, as records that `--merge` takes.

    python3 prhs.py --json torch.json
    kv-bench paper prhs-table4 --device cuda --merge torch.json
"""

import argparse
import json
import pathlib

import torch

from kernels import attention

HEADS = {"Llama-2-7B": (32, 32), "groups of 4": (32, 8), "groups of 8": (64, 8)}
PAPER = [(batch, tokens) for tokens in (1024, 2048, 4096) for batch in (8, 16)]
LONG = [(batch, tokens) for tokens in (8192, 32768, 131072) for batch in (1, 8, 16)]
# Tokens of all key-value heads and sequences beyond which a case is left out.
MOST = 16 << 20


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="where to write the records")
    parser.add_argument("--figure", choices=["prhs-table4", "prhs-long"], help="only the cases of this one")
    args = parser.parse_args()
    torch.manual_seed(0)
    records = []
    for name, (heads, kv_heads) in HEADS.items():
        for batch, tokens in (PAPER if heads == kv_heads else []) + LONG:
            figure = "prhs-long" if (batch, tokens) in LONG else "prhs-table4"
            if kv_heads * batch * tokens > MOST or args.figure not in (None, figure):
                continue
            case = {"batch": batch, "query_heads": heads, "kv_heads": kv_heads, "tokens": tokens,
                    "head_dim": 128}
            for peer, value in attention(case, False):
                print(f"{name:12} {batch:3} x {tokens:6} {peer:14} {value:10.1f} us", flush=True)
                records.append({
                    "suite": "paper",
                    "case": {"task": f"{figure}, {name}", "length": tokens, "batch": batch},
                    "model": "", "device": torch.cuda.get_device_name(), "policy": peer,
                    "budget": None, "metric": "time_us", "value": value, "unit": "us"})
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
