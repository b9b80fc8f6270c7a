#!/usr/bin/env python3
"""Chats for any server with OpenAI's API, as streams: how many it answers, and how evenly.

    kv-serve HuggingFaceTB/SmolLM2-135M-Instruct --device cpu --rows 8 --policy full
    python3 serving.py --url http://127.0.0.1:8000/v1 --text BOOK.txt --clients 8 --seconds 60

    llama-server -m smollm2.gguf -c 16384 -np 8 -t 2 --port 8002
    python3 serving.py --url http://127.0.0.1:8002/v1 --text BOOK.txt --clients 8 --seconds 60

Each client sends a chat of 200 to 2,400 characters of the book, reads its stream of 16 to 63
tokens, and sends the next. Some leave after a few tokens (`--leave`), some send malformed JSON
(`--malformed`). `--fields` are sent with every chat: `kv-serve` chooses a policy by the field `kv`.
Prints a table, and with `--json` a line of JSON. Ends with an error where an answer is lost or
wrong.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time

import httpx

CHARACTERS, TOKENS, LEAVES_AFTER = (200, 2_400), (16, 64), 4


class Load:
    """What clients have seen."""

    def __init__(self, options):
        self.options = options
        self.text = open(options.text, encoding="utf-8", errors="ignore").read()
        self.counts = dict(answered=0, left=0, refused=0, wrong=0)
        self.first, self.gaps, self.tokens = [], [], 0

    def body(self, draw):
        at = draw.randrange(max(1, len(self.text) - CHARACTERS[1]))
        content = self.text[at : at + draw.randrange(*CHARACTERS)]
        return {
            "model": self.options.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": draw.randrange(*TOKENS),
            "stream": True,
            **self.options.fields,
        }

    async def malformed(self, http):
        headers = {"content-type": "application/json"}
        answer = await http.post("/chat/completions", content=b'{"messages": [', headers=headers)
        self.counts["refused" if answer.status_code == 400 else "wrong"] += 1

    async def chat(self, http, draw):
        leaves, body = draw.random() < self.options.leave, self.body(draw)
        start, last, tokens, ended = time.perf_counter(), None, 0, False
        async with http.stream("POST", "/chat/completions", json=body) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                ended = ended or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line[6:]).get("choices") or [{}]
                if not choices[0].get("delta", {}).get("content"):
                    continue
                now = time.perf_counter()
                (self.first if last is None else self.gaps).append(now - (last or start))
                last, tokens = now, tokens + 1
                if leaves and tokens > LEAVES_AFTER:
                    break
        self.tokens += tokens
        self.counts["answered" if ended else "left" if leaves else "wrong"] += 1

    async def client(self, http, number, end):
        draw = random.Random(number)
        while time.perf_counter() < end:
            try:
                if draw.random() < self.options.malformed:
                    await self.malformed(http)
                else:
                    await self.chat(http, draw)
            except (httpx.HTTPError, ValueError) as error:
                self.counts["wrong"] += 1
                print(repr(error), file=sys.stderr)

    async def run(self):
        """Seconds until the last client has ended."""
        clients = self.options.clients
        limits = httpx.Limits(max_connections=clients)
        start = time.perf_counter()
        async with httpx.AsyncClient(
            base_url=self.options.url, timeout=600, limits=limits
        ) as http:
            try:
                models = (await http.get("/models")).raise_for_status().json()
            except httpx.HTTPError as error:
                sys.exit(f"no server answers at {self.options.url}/models: {error}")
            self.options.model = self.options.model or models["data"][0]["id"]
            end = start + self.options.seconds
            await asyncio.gather(*[self.client(http, number, end) for number in range(clients)])
        return time.perf_counter() - start


def percentile(values, share):
    ordered = sorted(values)
    return ordered[int(len(ordered) * share)] if ordered else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="the field `model`; by default the server's first")
    parser.add_argument("--text", required=True, help="a file of text, from which chats are cut")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60, help="how long clients send chats")
    parser.add_argument("--leave", type=float, default=0, help="the share of chats that are left")
    parser.add_argument("--malformed", type=float, default=0, help="the share of bad requests")
    parser.add_argument("--fields", type=json.loads, default={}, help="more fields, as JSON")
    parser.add_argument("--json", action="store_true")
    load = Load(parser.parse_args())
    seconds = asyncio.run(load.run())
    ms = [1e3 * percentile(load.gaps, share) for share in (0.5, 0.99, 1 - 1e-9)]
    result = {
        **load.counts,
        "requests_s": load.counts["answered"] / seconds,
        "tokens_s": load.tokens / seconds,
        "first_token_s": statistics.median(load.first) if load.first else None,
        "between_tokens_ms": dict(zip(("median", "p99", "most"), ms)),
    }
    if load.options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:18} {value}")
    sys.exit(1 if load.counts["wrong"] else 0)


if __name__ == "__main__":
    main()
