"""OpenAI's Python client against Dynamo's front end: `python client.py http://HOST:PORT REQUESTS TOKENS`.

Asks for that many streams at once, of that many tokens each. Writes `running` once all of them have begun, and in the
end what became of them, as JSON.
"""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai

BASE, REQUESTS, TOKENS = sys.argv[1].rstrip("/"), int(sys.argv[2]), int(sys.argv[3])
SEA = "The sea was calm that day, and the old boat lay upon the sand. "
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0, timeout=120)
model = client.models.list().data[0].id
begun = threading.Barrier(REQUESTS + 1)


def kv(**options):
    return {"annotations": ["kv:" + json.dumps(options)]}


def plain():
    """A chat, a completion and a policy by the request, before there is load."""
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": SEA}], max_tokens=8, temperature=0,
        extra_body={"nvext": {**kv(policy="full"), "extra_fields": ["engine_data"]}},
    )
    assert chat.choices[0].message.role == "assistant", chat
    assert chat.usage.completion_tokens <= 8 and chat.usage.prompt_tokens > 8, chat
    text = client.completions.create(model=model, prompt=SEA * 3, max_tokens=8, temperature=0)
    assert text.usage.completion_tokens <= 8, text
    for wrong in [{"nvext": kv(policy="h20")}, {"nvext": kv(context="book")}]:
        try:
            client.completions.create(model=model, prompt=SEA, max_tokens=4, extra_body=wrong)
        except openai.BadRequestError as error:
            print(f"refused: {error}", file=sys.stderr)
        else:
            raise AssertionError(f"{wrong} was not refused")
    return chat.model_dump().get("nvext")


def stream(number):
    """What became of a stream: how many tokens it had, why it ended, and the longest time between two of them."""
    tokens, finish, longest, last, waits, worker = 0, None, 0.0, time.monotonic(), True, None
    try:
        answer = client.completions.create(
            model=model, prompt=f"{number}. {SEA * (1 + number % 4)}", max_tokens=TOKENS, temperature=0, stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "nvext": {"extra_fields": ["worker_id"]}},
        )
        for chunk in answer:
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            if waits:
                waits = False
                begun.wait(60)
                last = time.monotonic()
            worker = worker or (chunk.model_dump().get("nvext") or {}).get("worker_id")
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
        return {"tokens": tokens, "finish": finish, "longest": longest, "worker": worker}
    except (openai.OpenAIError, threading.BrokenBarrierError) as error:
        if waits:
            begun.abort()
        return {"error": f"{type(error).__name__}: {error}", "longest": max(longest, time.monotonic() - last)}


data = plain()
with ThreadPoolExecutor(REQUESTS) as pool:
    answers = [pool.submit(stream, number) for number in range(REQUESTS)]
    begun.wait(60)
    print("running", flush=True)
    answers = [answer.result() for answer in answers]
print(json.dumps({"data": data, "answers": answers}), flush=True)
