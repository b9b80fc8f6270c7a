#!/usr/bin/env python3
"""PyTorch's kernels on the cases of `kv-bench kernels`, as records that `--merge` takes.

    python3 kernels.py --json torch.json
    kv-bench kernels --device cuda --merge torch.json

Times are medians over replays of a CUDA graph, whose calls rotate among buffers of more memory than
the L2 cache holds.
"""

import argparse
import json
import pathlib
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

PROBLEMS = pathlib.Path(__file__).parent.parent / "problems.json"
CASES = json.loads(PROBLEMS.read_text())["suite"]
ROTATED_BYTES = 400 << 20
REPLAYS = 15
BACKENDS = {"pytorch-flash": SDPBackend.FLASH_ATTENTION, "pytorch-cudnn": SDPBackend.CUDNN_ATTENTION}


def microseconds(call, sets):
    """Median time of `call(i)` over graph replays, `i` rotating among `sets` inputs."""
    count = max(4, 2 * sets)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(count, 3)):
            call(i % sets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i % sets)
    times = []
    for i in range(REPLAYS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times[2:])


def sets_of(bytes_each):
    return min(128, max(2, -(-ROTATED_BYTES // bytes_each)))


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def attention(case, prefill):
    batch, heads, kv_heads = case["batch"], case["query_heads"], case["kv_heads"]
    tokens, dim = case["tokens"], case["head_dim"]
    rows = tokens if prefill else 1
    sets = sets_of(4 * batch * kv_heads * tokens * dim)
    queries = random(batch, heads, rows, dim)
    caches = [[random(batch, kv_heads, tokens, dim) for _ in range(2)] for _ in range(sets)]
    for name, backend in BACKENDS.items():
        def call(i):
            keys, values = caches[i]
            scaled_dot_product_attention(
                queries, keys, values, is_causal=prefill, enable_gqa=heads != kv_heads)
        try:
            with sdpa_kernel(backend):
                yield name, microseconds(call, sets)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}")


def product(case):
    rows, inputs, outputs = case["rows"], case["inputs"], case["outputs"]
    sets = sets_of(2 * inputs * outputs)
    hidden = random(rows, inputs)
    weights = [random(outputs, inputs) for _ in range(sets)]
    yield "cublas", microseconds(lambda i: linear(hidden, weights[i]), sets)


def compaction(case):
    pairs, tokens, kept, dim = (
        case["batch"] * case["kv_heads"], case["tokens"], case["kept"], case["head_dim"])
    pools = [[random(pairs, tokens, dim) for _ in range(2)] for _ in range(case["layers"])]
    index = torch.stack([torch.randperm(tokens, device="cuda")[:kept].sort()[0] for _ in range(pairs)])
    index = index[:, :, None].expand(-1, -1, dim)

    def call(_):
        for layer in pools:
            for pool in layer:
                pool.gather(1, index)
    yield "pytorch-gather", microseconds(call, 1)


def ranking(case):
    sets = sets_of(4 * case["rows"] * case["tokens"])
    scores = [torch.randn(case["rows"], case["tokens"], device="cuda") for _ in range(sets)]
    yield "pytorch-topk", microseconds(lambda i: scores[i].topk(case["kept"], sorted=False), sets)


def name_of(case):
    if "kv_heads" in case and "kept" in case:
        return (f"{case['layers']}x{case['batch']}x{case['kv_heads']}x{case['tokens']}"
                f" to {case['kept']}")
    if "kept" in case:
        return f"{case['kept']} of {case['rows']}x{case['tokens']}"
    if "rows" in case:
        return f"{case['rows']}x{case['inputs']}x{case['outputs']}"
    return f"{case['batch']}x{case['query_heads']}x{case['kv_heads']}x{case['tokens']}"


MEASURES = {
    "decode_attention": lambda case: attention(case, False),
    "prefill_attention": lambda case: attention(case, True),
    "linear": product,
    "compact_slots": compaction,
    "top_slots": ranking,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="where to write the records")
    args = parser.parse_args()
    torch.manual_seed(0)
    records = []
    for op, cases in CASES.items():
        # What PyTorch has nothing for.
        if op not in MEASURES:
            continue
        for case in cases:
            for peer, value in MEASURES[op](case):
                task = f"{op} {name_of(case)}"
                print(f"{task:44} {peer:14} {value:10.1f} us", flush=True)
                records.append({
                    "suite": "kernels", "case": {"task": task}, "model": "",
                    "device": torch.cuda.get_device_name(), "policy": peer, "budget": None,
                    "metric": "time_us", "value": value, "unit": "us"})
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
