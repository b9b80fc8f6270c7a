#!/usr/bin/env python3
"""Hugging Face transformers on the cases of `kv-bench throughput`, as records that `--merge` takes.

    python3 generation.py --model llama-3.1-8b --lengths 1024 --batches 1,8 --json hf.json
    kv-bench throughput --device cuda --model random:llama-3.1-8b --lengths 1024 --batches 1,8 \
        --policy full --merge hf.json

Weights are random, in bf16. `hf-eager` is `generate` as it is, `hf-compiled` has a static cache and
`torch.compile`. Decode times are differences between long and short runs of `generate`, so that
prefill does not count; all are medians.
"""

import argparse
import json
import pathlib
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPES = {
    "llama-2-7b": dict(
        model_type="llama", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, head_dim=128, vocab_size=32000,
        max_position_embeddings=4096, rope_theta=10000.0),
    "llama-3.1-8b": dict(
        model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=128256,
        max_position_embeddings=131072, rope_theta=500000.0),
    "qwen3-1.7b": dict(
        model_type="qwen3", hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        max_position_embeddings=40960, rope_theta=1000000.0, tie_word_embeddings=True),
}
PEERS = {"hf-eager": {}, "hf-compiled": {"cache_implementation": "static"}}
SHORT = 8


def seconds(call, runs=3):
    """Median time of a call that ends on the host."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def decode_step(model, prompt, steps, **options):
    """Seconds of a decode step."""
    def run(count):
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=count,
            max_new_tokens=count, pad_token_id=0, eos_token_id=None, **options)
    run(SHORT + steps)
    run(SHORT)
    return (seconds(lambda: run(SHORT + steps)) - seconds(lambda: run(SHORT))) / steps


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(part) for part in text.split(",")]
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--lengths", type=numbers, default=[1024], help="tokens of the prompts")
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--steps", type=int, default=64, help="decode steps that are timed")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--prefill-only", action="store_true", help="leave decode steps out")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the records")
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = dict(SHAPES[args.model])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    records = []

    def record(length, batch, peer, metric, value, unit):
        print(f"{length:7} x {batch:<3} {peer:12} {metric:28} {value:12.2f} {unit}", flush=True)
        records.append({
            "suite": "throughput", "case": {"length": length, "batch": batch},
            "model": f"random:{args.model}", "device": torch.cuda.get_device_name(),
            "policy": peer, "budget": None, "metric": metric, "value": value, "unit": unit})

    for length in args.lengths:
        for batch in args.batches:
            prompt = torch.randint(config.vocab_size, (batch, length), device="cuda")
            first = lambda: model(prompt, logits_to_keep=1).logits.argmax(-1).tolist()
            first()
            prefill = seconds(first)
            record(length, batch, "hf-eager", "time_to_first_token", prefill * 1e3, "ms")
            rate = batch * length / prefill
            record(length, batch, "hf-eager", "prefill_tokens_per_second", rate, "tokens/s")
            if args.prefill_only:
                continue
            for peer in args.peers:
                try:
                    step = decode_step(model, prompt, args.steps, **PEERS[peer])
                except Exception as error:  # Whatever compilers raise: the other peer still counts.
                    print(f"{peer}: {str(error).splitlines()[0]}")
                    continue
                record(length, batch, peer, "decode_tokens_per_second", batch / step, "tokens/s")
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
