"""Requests that a client should not send. Each must get a 4xx that says what is wrong, and leave no trace.

Used by test/server/test_bad_requests.py and, as noise, by benchmark/soak.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, COUNT, GENERATE = "/v1/responses", "/v1/messages/count_tokens", "/generate"
JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "Hello!"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
BANANA = {"type": "banana"}  # no JSON schema


@dataclass(frozen=True)
class BadRequest:
    """One request; `says` are words of which the answer must hold at least one, in any case."""

    path: str
    body: bytes
    says: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))
    method: str = "POST"
    statuses: tuple[int, ...] = (400,)
    name: str = ""

    def __str__(self) -> str:
        return f"{self.path.removeprefix('/v1/')}: {self.name}"


def _chat(name: str, *says: str, **changes: Any) -> BadRequest:
    body = {"model": "default", "messages": USER, "max_tokens": 4, **changes}
    return BadRequest(CHAT, json.dumps(body).encode(), says, name=name)


def _completion(name: str, *says: str, **changes: Any) -> BadRequest:
    body = {"model": "default", "prompt": "Hello", "max_tokens": 4, **changes}
    return BadRequest(COMPLETIONS, json.dumps(body).encode(), says, name=name)


def _messages(name: str, *says: str, path: str = MESSAGES, **changes: Any) -> BadRequest:
    body = {"model": "default", "messages": USER, "max_tokens": 4, **changes}
    return BadRequest(path, json.dumps(body).encode(), says, name=name)


def _responses(name: str, *says: str, **changes: Any) -> BadRequest:
    body = {"model": "default", "input": "Hello", "max_output_tokens": 4, **changes}
    return BadRequest(RESPONSES, json.dumps(body).encode(), says, name=name)


def _generate(name: str, *says: str, params: Any = None, **changes: Any) -> BadRequest:
    body = {"text": "Hello", "sampling_params": params or {"max_new_tokens": 4}, **changes}
    return BadRequest(GENERATE, json.dumps(body).encode(), says, name=name)


def _function(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


FUNCTION = _function(name="f", parameters={})
BROKEN_CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{city"}}],
}


def _schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _for_every_endpoint() -> list[BadRequest]:
    """Bodies that no endpoint can read."""
    broken = {
        "an empty body": b"",
        "cut JSON": b'{"model": "default", "messages": [',
        "not UTF-8": b'{"model": "default", "prompt": "\xff", "input": "\xff", "messages": "\xff"}',
        "a list": b"[1, 2, 3]",
        "a string": b'"hello"',
        "null": b"null",
        "an empty object": b"{}",
        "10,000 open brackets": b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        "binary": bytes(range(256)),
    }
    found = []
    for path in (CHAT, COMPLETIONS, MESSAGES, RESPONSES, COUNT):
        found += [BadRequest(path, body, name=name) for name, body in broken.items()]
        plain = {"content-type": "text/plain"}
        body = json.dumps(
            {"model": "default", "messages": USER, "prompt": "a", "input": "a", "max_tokens": 1}
        )
        found.append(
            BadRequest(
                path, body.encode(), ("content-type", "json"), plain, statuses=(400, 415), name="text/plain"
            )
        )
    return found


CHATS = [
    _chat("empty messages", "empty", messages=[]),
    _chat("messages is a text", "messages", messages="Hello"),
    _chat("messages is null", "messages", messages=None),
    _chat("a message is a number", "messages", messages=[7]),
    _chat("a message without role", "role", messages=[{"content": "Hello"}]),
    _chat("an unknown role", "role", messages=[{"role": "wizard", "content": "Hello"}]),
    _chat("content is a number", "content", messages=[{"role": "user", "content": 7}]),
    _chat("an unknown content part", "type", messages=[{"role": "user", "content": [{"type": "smell"}]}]),
    _chat("an image for a text model", "image_url", "text", messages=[{"role": "user", "content": [IMAGE]}]),
    _chat("max_tokens -1", "max", max_tokens=-1),
    _chat("max_tokens a text", "max_tokens", max_tokens="many"),
    _chat("temperature -1", "temperature", temperature=-1),
    _chat("temperature a text", "temperature", temperature="hot"),
    _chat("temperature NaN", "JSON", temperature=float("nan")),
    _chat("temperature infinite", "JSON", temperature=float("inf")),
    _chat("top_p 2", "top_p", top_p=2),
    _chat("top_k 0", "top_k", top_k=0),
    _chat("n 0", "n ", "'n'", n=0),
    _chat("n -3", "n ", "'n'", n=-3),
    _chat("n 1,000,000", "n ", n=1_000_000),
    _chat("top_logprobs 100,000", "top_logprobs", logprobs=True, top_logprobs=100_000),
    _chat("top_logprobs -1", "top_logprobs", logprobs=True, top_logprobs=-1),
    _chat("frequency_penalty 9", "frequency_penalty", frequency_penalty=9),
    _chat("stop is a number", "stop", stop=7),
    _chat("an empty stop text", "stop", stop=[""]),
    _chat("a stop that is not a regular expression", "stop_regex", stop_regex=["("]),
    _chat("logit_bias of an unknown token", "logit_bias", logit_bias={"999999": 1.0}),
    _chat("logit_bias of a word", "logit_bias", logit_bias={"hello": 1.0}),
    _chat("logit_bias is a text", "logit_bias", logit_bias="x"),
    _chat("seed is a text", "seed", seed="lucky"),
    _chat("seed of 100 bits", "seed", seed=1 << 100),
    _chat("a tool without name", "name", **_function(description="x")),
    _chat("a tool without function", "function", tools=[{"type": "function"}]),
    _chat("tools is a text", "tools", tools="get_weather"),
    _chat("tool parameters that are no schema", "schema", **_function(name="f", parameters=BANANA)),
    _chat("tool parameters that are a text", "parameters", **_function(name="f", parameters="city")),
    _chat("tool_choice without tools", "tools", tool_choice="required"),
    _chat("tool_choice of an unknown tool", "not found",
          **FUNCTION, tool_choice={"type": "function", "function": {"name": "g"}}),
    _chat("tool_choice a wrong word", "tool_choice", **FUNCTION, tool_choice="perhaps"),
    _chat("response_format a wrong word", "response_format", response_format={"type": "yaml"}),
    _chat("response_format is a text", "shape", response_format="json"),
    _chat("a schema in a wrong place that is a text", "shape",
          response_format={"type": "json_schema", "schema": "x"}),
    _chat("reasoning_effort is a list", "reasoning_effort", reasoning_effort=[1]),
    _chat("an effort that is none", "effort", reasoning={"effort": "heroic"}),
    _chat("json_schema without schema", "schema", response_format={"type": "json_schema"}),
    _chat("json_schema of a wrong type", "schema", **_schema(BANANA)),
    _chat("json_schema that is a text", "schema", **_schema("object")),
    _chat("json_schema with a reference to nothing", "schema", "grammar", **_schema({"$ref": "#/none"})),
    _chat("json_schema with a broken pattern", "schema", "grammar",
          **_schema({"type": "string", "pattern": "("})),
    _chat("a regex that is none", "regex", "grammar", regex="(["),
    _chat("an EBNF that is none", "ebnf", "grammar", ebnf="root ::= ((("),
    _chat("regex and ebnf", "only one", regex="a", ebnf='root ::= "a"'),
    _chat("tool call arguments that are no JSON", "arguments", messages=[*USER, BROKEN_CALL, *USER]),
    _chat("a lora that was never loaded", "lora", lora_path="nobody"),
    _chat("stream is a text", "stream", stream="maybe"),
    _chat("stream_options is a text", "stream_options", stream=True, stream_options="all"),
    _chat("chat_template_kwargs is a text", "chat_template_kwargs", chat_template_kwargs="x"),
    _chat("ignore_eos is a list", "ignore_eos", ignore_eos=[1]),
    _chat("input_ids beyond the vocabulary", "token", "vocab", input_ids=[1, 2_000_000_000]),
    _chat("negative input_ids", "token", "vocab", input_ids=[-5]),
]  # fmt: skip
COMPLETION_CASES = [
    _completion("no prompt", "prompt", prompt=None),
    _completion("an empty prompt", "prompt", "empty", prompt=""),
    _completion("an empty list", "prompt", "empty", prompt=[]),
    _completion("prompt is a number", "prompt", prompt=7),
    _completion("prompt mixes kinds", "prompt", prompt=["a", 1]),
    _completion("unknown token ids", "token", "vocab", prompt=[1, 2_000_000_000]),
    _completion("negative token ids", "token", "vocab", prompt=[-1]),
    _completion("max_tokens -1", "max", max_tokens=-1),
    _completion("logprobs -1", "logprobs", logprobs=-1),
    _completion("logprobs 100,000", "logprobs", logprobs=100_000),
    _completion("n 0", "n ", "'n'", n=0),
    _completion("n 1,000,000", "n ", n=1_000_000),
    _completion("best_of is a text", "best_of", best_of="x"),
    _completion("a regex that is none", "regex", "grammar", regex="(["),
    _completion("json_schema that is no JSON", "schema", json_schema="{"),
    _completion("top_p 0", "top_p", top_p=0),
    _completion("logit_bias of an unknown token", "logit_bias", logit_bias={"999999": 1.0}),
    _completion("min_tokens above max_tokens", "min_", min_tokens=9),
]  # fmt: skip
MESSAGE_CASES = [
    _messages("empty messages", "empty", "message", messages=[]),
    _messages("no max_tokens", "max_tokens", max_tokens=None),
    _messages("max_tokens 0", "max_tokens", max_tokens=0),
    _messages("max_tokens -1", "max_tokens", max_tokens=-1),
    _messages("an unknown role", "role", messages=[{"role": "wizard", "content": "Hello"}]),
    _messages("an unknown block", "content", "type",
              messages=[{"role": "user", "content": [{"type": "smell"}]}]),
    _messages("system is a number", "system", system=7),
    _messages("a tool without schema", "input_schema", tools=[{"name": "f"}]),
    _messages("a schema that is none", "schema", tools=[{"name": "f", "input_schema": BANANA}]),
    _messages("tool_choice of an unknown tool", "tool", tool_choice={"type": "tool", "name": "g"}),
    _messages("temperature 9 of 1", "temperature", temperature="hot"),
    _messages("thinking is a text", "thinking", thinking="deep"),
    _messages("top_p -1", "top_p", top_p=-1),
    _messages("an unknown role", "role", path=COUNT, messages=[{"role": "wizard", "content": "Hello"}]),
    _messages("empty messages", "empty", "message", path=COUNT, messages=[]),
]  # fmt: skip
RESPONSE_CASES = [
    _responses("input is a number", "input", input=7),
    _responses("empty input", "input", "empty", input=[]),
    _responses("an unknown item", "input", "type", input=[{"type": "smell"}]),
    _responses("max_output_tokens -1", "max", max_output_tokens=-1),
    _responses("temperature a text", "temperature", temperature="hot"),
    _responses("an unknown tool", "tool", tools=[{"type": "banana"}]),
    _responses("an unknown role", "role", input=[{"role": "wizard", "content": "Hello"}]),
    BadRequest(
        RESPONSES,
        b'{"input": "Hello", "previous_response_id": "resp_none"}',
        ("not found",),
        statuses=(404,),
        name="a previous response that is not there",
    ),
]

GENERATE_CASES = [
    _generate("neither text nor ids", "text", text=None),
    _generate("text is a number", "text", text=7),
    _generate("ids that are texts", "input_ids", text=None, input_ids=["a", "b"]),
    _generate("an id beyond the vocabulary", "vocabulary", text=None, input_ids=[[1, 2], [3, 1 << 40]]),
    _generate("temperature a text", "temperature", params={"temperature": "hot"}),
    _generate("n 100,000", "n must", params={"n": 100_000}),
    _generate("n a text", "n must", params={"n": "two"}),
    _generate("an unknown parameter", "warmth", params={"warmth": 1}),
    _generate("sampling_params is a list of texts", "sampling_params", params=["a"]),
    _generate("top_logprobs_num 100,000", "top_logprobs", return_logprob=True, top_logprobs_num=100_000),
    _generate("logprob_start_len 1,000", "logprob_start_len", return_logprob=True, logprob_start_len=1000),
    _generate("logprob_start_len -9", "logprob_start_len", return_logprob=True, logprob_start_len=-9),
    _generate("stop_token_ids are texts", "stop_token_ids", params={"stop_token_ids": ["x"]}),
    _generate("token_ids_logprob beyond the vocabulary", "token_ids_logprob", return_logprob=True,
              token_ids_logprob=[1 << 40]),
    _generate("stop is a number", "stop", params={"stop": 7}),
    _generate("json_schema that is none", "schema", "grammar", params={"json_schema": "{"}),
    _generate("a session that is not there", "session", session_params={"id": "nobody"}),
]  # fmt: skip

ALL = [
    *_for_every_endpoint(),
    *CHATS,
    *COMPLETION_CASES,
    *MESSAGE_CASES,
    *RESPONSE_CASES,
    *GENERATE_CASES,
]
