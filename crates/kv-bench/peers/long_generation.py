#!/usr/bin/env python3
"""Long outputs in Hugging Face transformers, as records that `kv-bench paper longflow-fig4` merges.

    python3 long_generation.py --memory-cap 40 --batches 16 --json hf.json
    kv-bench paper longflow-fig4 --device cuda --memory-cap 40 --merge hf.json

Random weights in the shape of Qwen3 1.7B, bf16, eager, full cache: 16,000 tokens behind 512. The
cache is filled at some lengths, a few steps are timed at each, and the times integrated. The
largest batch is the one whose longest steps still fit.
"""

import argparse
import json
import pathlib
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from generation import SHAPES

INPUT, OUTPUT, POINTS = 512, 16_000, 8
WARM_UP, STEPS = 3, 12
GIB = 1 << 30


def step_seconds(model, batch, length):
    """Seconds of a decode step behind `length` tokens."""
    config = model.config
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        shape = (batch, config.num_key_value_heads, length, config.head_dim)
        rows = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        cache.update(*rows, layer)
    token = torch.zeros((batch, 1), dtype=torch.long, device="cuda")
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        token.tolist()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / STEPS


def rate(model, batch):
    """Tokens a second over the whole output, and seconds of its last steps."""
    points = [OUTPUT * point // (POINTS - 1) for point in range(POINTS)]
    last = INPUT + OUTPUT - WARM_UP - STEPS
    times = []
    # The longest first: what does not fit shows at once.
    for generated in reversed(points):
        torch.cuda.empty_cache()
        times.append(step_seconds(model, batch, min(INPUT + generated, last)))
    times.reverse()
    pairs = zip(zip(points, times), zip(points[1:], times[1:]))
    seconds = sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairs)
    return batch * OUTPUT / seconds, times[-1]


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(part) for part in text.split(",")]
    parser.add_argument("--memory-cap", type=float, default=40.0, help="GiB")
    parser.add_argument("--batches", type=numbers, default=[16])
    parser.add_argument("--json", type=pathlib.Path, help="where to write the records")
    args = parser.parse_args()
    torch.manual_seed(0)
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_cap / total))
    shape = dict(SHAPES["qwen3-1.7b"])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    records = []

    def record(task, batch, measured):
        values = {
            "decode_tokens_per_second": (measured[0], "tokens/s"),
            "step_time": (measured[1] * 1e3, "ms"),
            "peak_bytes": (torch.cuda.max_memory_reserved(), "bytes"),
        }
        for metric, (value, unit) in values.items():
            print(f"{task} x{batch} {metric} {value:.5g} {unit}", flush=True)
            records.append({
                "suite": "paper", "case": {"task": task, "length": OUTPUT, "batch": batch},
                "model": "random:qwen3-1.7b", "device": torch.cuda.get_device_name(),
                "policy": "hf-eager full", "budget": None, "metric": metric, "value": value,
                "unit": unit})

    for batch in args.batches:
        torch.cuda.reset_peak_memory_stats()
        try:
            record("longflow-fig4", batch, rate(model, batch))
        except torch.OutOfMemoryError:
            print(f"batch {batch} does not fit into {args.memory_cap} GiB", flush=True)
    token = 2 * config.num_key_value_heads * config.head_dim * 2 * config.num_hidden_layers
    weights = torch.cuda.memory_allocated()
    batch = int((args.memory_cap * GIB - weights) / (token * (INPUT + OUTPUT)))
    while batch:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            task = f"longflow-fig4, largest batch in {args.memory_cap:g} GiB"
            record(task, batch, rate(model, batch))
            break
        except torch.OutOfMemoryError:
            batch -= max(1, batch // 32)
    if not batch:
        print(f"no sequence fits into {args.memory_cap} GiB", flush=True)
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
