"""OpenAI's own Python client against kv-serve: `python client.py http://HOST:PORT`."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

base = sys.argv[1].rstrip("/")
client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=120)
model = client.models.list().data[0].id
SEA = "The sea was calm that day, and the old boat lay upon the sand. "
STORY = (
    f"{SEA * 6}\nThe secret number of the clever fiddle is 21963.\n{SEA * 6}\n"
    "Question: What is the secret number of the clever fiddle?\nAnswer: "
)
NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Takes a note.",
        "parameters": {
            "type": "object",
            "properties": {"where": {"enum": ["sea", "sand"]}},
            "required": ["where"],
            "additionalProperties": False,
        },
    },
}


def ask(content=STORY, **more):
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(
        model=model, messages=messages, **{"max_tokens": 5, "temperature": 0, **more}
    )


def models():
    assert client.models.retrieve(model).id == model


def chat():
    answer = ask()
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.kv_bytes < answer.usage.kv_full_bytes, answer.usage
    if model == "needle-1m":
        assert answer.choices[0].message.content == "21963", answer


def policies():
    full = ask(extra_body={"kv": {"policy": "full"}})
    few = ask(extra_body={"kv": {"policy": "snapkv", "budget": 48}})
    assert few.usage.kv_bytes < full.usage.kv_bytes


def stream():
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ask().choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 5 and not chunks[-1].choices


def stream_helper():
    with client.chat.completions.stream(
        model=model, messages=[{"role": "user", "content": STORY}], max_tokens=5, temperature=0
    ) as events:
        final = [event for event in events if event.type == "content.done"]
    assert len(final) == 1


def choices_and_seeds():
    one = ask(SEA, n=3, seed=5, temperature=1.3, max_tokens=12)
    two = ask(SEA, n=3, seed=5, temperature=1.3, max_tokens=12)
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices] and len(set(texts)) > 1


def logprobs():
    content = ask(logprobs=True, top_logprobs=4).choices[0].logprobs.content
    assert len(content) == 5 and all(len(token.top_logprobs) == 4 for token in content)
    assert all(token.logprob <= 0 for token in content)


def stops():
    answer = ask(SEA, max_tokens=40, stop=["a", "e"])
    text = answer.choices[0].message.content
    assert "a" not in text and "e" not in text


def json_schema():
    schema = {
        "type": "object",
        "properties": {"where": {"enum": ["sea", "sand"]}, "calm": {"type": "boolean"}},
        "required": ["where", "calm"],
        "additionalProperties": False,
    }
    named = {"name": "place", "schema": schema, "strict": True}
    form = {"type": "json_schema", "json_schema": named}
    value = json.loads(ask(SEA, max_tokens=80, response_format=form).choices[0].message.content)
    assert value["where"] in ("sea", "sand") and isinstance(value["calm"], bool)


def tools():
    answer = ask(SEA, max_tokens=80, tools=[NOTE], tool_choice="required")
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", answer
    call = choice.message.tool_calls[0]
    assert json.loads(call.function.arguments)["where"] in ("sea", "sand")
    result = {"role": "tool", "tool_call_id": call.id, "content": "noted"}
    messages = [{"role": "user", "content": SEA}, choice.message, result]
    client.chat.completions.create(model=model, messages=messages, tools=[NOTE], max_tokens=4)
    chunks = ask(SEA, max_tokens=80, tools=[NOTE], tool_choice="required", stream=True)
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].index == 0 and calls[0].function.name == "note"


def completions():
    answer = client.completions.create(
        model=model, prompt=[STORY, SEA], max_tokens=5, temperature=0, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.tokens) == 5
    stream = client.completions.create(
        model=model, prompt=STORY, max_tokens=5, temperature=0, stream=True
    )
    assert "".join(c.choices[0].text for c in stream) == answer.choices[0].text


def contexts():
    text = STORY.split("Question")[0]
    body = {"name": "of-the-client", "text": text, "kv": {"policy": "keydiff", "decode": False}}
    client.post("/kv/contexts", body=body, cast_to=object)
    answer = ask(
        "Question" + STORY.split("Question")[1],
        extra_body={"kv": {"context": "of-the-client"}},
    )
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    client.delete("/kv/contexts/of-the-client", cast_to=object)


def raises(kind, **more):
    try:
        ask(**more)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}: {more}")


def errors():
    error = raises(openai.BadRequestError, max_tokens=1_000_000)
    assert error.param == "max_tokens" and error.type == "invalid_request_error"
    assert raises(openai.BadRequestError, temperature=7).param == "temperature"
    for body, param in [({"kv": {"policy": "snapvk"}}, "kv.policy"), ({"nothing": 1}, "nothing")]:
        assert raises(openai.BadRequestError, extra_body=body).param == param
    assert raises(openai.BadRequestError, content=SEA * 3000).code == "context_length_exceeded"
    try:
        client.models.retrieve("other")
        raise AssertionError("no NotFoundError")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"


def many_at_once():
    alone = ask().choices[0].message.content
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: ask().choices[0].message.content, range(48)))
    assert answers == [alone] * 48


def vanish():
    for _ in range(8):
        chunks = ask(SEA, stream=True, max_tokens=400)
        next(iter(chunks))
        chunks.close()
    chat()


def main():
    wrong = 0
    cases = [
        models, chat, policies, stream, stream_helper, choices_and_seeds, logprobs, stops,
        json_schema, tools, completions, contexts, errors, many_at_once, vanish,
    ]
    for case in cases:
        try:
            case()
            print(f"ok    {case.__name__}")
        except Exception as error:  # noqa: BLE001: each case is told
            wrong += 1
            print(f"WRONG {case.__name__}: {type(error).__name__}: {error}")
    print(f"openai {openai.__version__}: {len(cases) - wrong} of {len(cases)} cases are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
