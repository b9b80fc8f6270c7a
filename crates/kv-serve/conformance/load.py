"""64 clients at once, some of which vanish or send nonsense: `python load.py http://HOST:PORT`.

Each answer must be whole, no status 500 or above, and all bytes of requests free in the end.
"""

import collections
import http.client
import json
import random
import sys
import threading
import time
import urllib.parse

CLIENTS = 64
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 15
ADDRESS = urllib.parse.urlsplit(sys.argv[1]).netloc
SEA = "The sea was calm that day, and the old boat lay upon the sand. "
CACHES = [
    {},
    {"policy": "full"},
    {"budget": 64},
    {"policy": "h2o", "budget": 0.3},
    {"policy": "longflow", "budget": 64},
]
counts = collections.Counter()
lock = threading.Lock()


def count(what):
    with lock:
        counts[what] += 1


def connection():
    return http.client.HTTPConnection(ADDRESS, timeout=300)


def ask(draw):
    streams, kind = draw.random() < 0.6, draw.random()
    body = json.dumps({
        "messages": [{"role": "user", "content": SEA * draw.randint(1, 30)}],
        "max_tokens": draw.randint(1, 64),
        "temperature": draw.choice([0, 1]),
        "kv": draw.choice(CACHES),
        "stream": streams,
    })
    if kind < 0.1:
        body = body[: draw.randint(0, len(body) - 1)]
    client = connection()
    headers = {"content-type": "application/json"}
    client.request("POST", "/v1/chat/completions", body, headers)
    if 0.1 <= kind < 0.3:
        time.sleep(draw.random() * 0.05)
        client.close()
        return count("vanished")
    answer = client.getresponse()
    text = answer.read().decode()
    client.close()
    if kind < 0.1:
        return count("nonsense refused" if answer.status == 400 else f"WRONG nonsense: {text}")
    if answer.status == 429:
        return count("told to come again")
    if answer.status != 200:
        return count(f"WRONG {answer.status}: {text}")
    if streams:
        whole = text.endswith("data: [DONE]\n\n") and '"error"' not in text
        return count("streams" if whole else f"WRONG stream: {text[-300:]}")
    return count("answers" if json.loads(text)["choices"] else f"WRONG {text}")


def work(seed, end):
    draw = random.Random(seed)
    while time.monotonic() < end:
        try:
            ask(draw)
        except OSError as error:
            count(f"WRONG {type(error).__name__}: {error}")


def idle_bytes(expected=None):
    """Bytes of caches once no request runs, which are those of contexts.

    Waits up to ten seconds for requests to end and for the expected bytes. `None` where requests
    do not end.
    """
    found = None
    for _ in range(100):
        client = connection()
        client.request("GET", "/v1/kv/requests")
        live = json.loads(client.getresponse().read())
        client.close()
        if live["waiting"] + live["prefilling"] + live["running"] == 0:
            found = live["kv_bytes"]
            if expected in (None, found):
                break
        time.sleep(0.1)
    return found


def main():
    held = idle_bytes()
    end = time.monotonic() + SECONDS
    threads = [threading.Thread(target=work, args=(seed, end)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = idle_bytes(held)
    if found is None or found != held:
        count(f"WRONG: {found} bytes of caches in the end, {held} before")
    for what, number in sorted(counts.items()):
        print(f"{number:6} {what}")
    return 1 if any(what.startswith("WRONG") for what in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
