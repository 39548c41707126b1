"""The anthropic package against a real server."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
from anthropic.types import Message
from serving import Server

MODEL = "default"


def ask(client: anthropic.Anthropic, text: str, **options: Any) -> Message:
    messages = options.pop("messages", [{"role": "user", "content": text}])
    return client.messages.create(
        model=MODEL, messages=messages, **{"max_tokens": 100, "extra_body": {"temperature": 0}, **options}
    )


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_with_thinking(anthropic_client):
    answer = ask(anthropic_client, "What is the capital of France?")
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert "capital of France" in answer.content[0].thinking
    assert "Paris" in text_of(answer)
    assert (answer.role, answer.stop_reason) == ("assistant", "end_turn")
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0


def test_thinking_can_be_disabled(anthropic_client):
    answer = ask(anthropic_client, "What is the capital of France?", thinking={"type": "disabled"})
    assert [block.type for block in answer.content] == ["text"]
    assert "Paris" in text_of(answer)


def test_max_tokens_and_stop_sequences_name_their_reason(anthropic_client):
    short = ask(anthropic_client, "Where is Orrin?", max_tokens=5)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 5)
    stopped = ask(
        anthropic_client, "Where is Orrin?", stop_sequences=["twelve"], thinking={"type": "disabled"}
    )
    assert "valley" in text_of(stopped)
    assert "twelve" not in text_of(stopped)


def test_events_of_a_stream_come_in_the_order_of_the_api(anthropic_client):
    whole = ask(anthropic_client, "Where is Orrin?")
    messages = [{"role": "user", "content": "Where is Orrin?"}]
    with anthropic_client.messages.stream(
        model=MODEL, messages=messages, max_tokens=100, extra_body={"temperature": 0}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert text_of(final) == text_of(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_message_start_names_the_input_tokens(demo_server: Server, anthropic_client):
    messages = [{"role": "user", "content": "How many tokens does this have? " * 3}]
    counted = anthropic_client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    stream = anthropic_client.messages.create(model=MODEL, messages=messages, max_tokens=4, stream=True)
    start = next(event for event in stream if event.type == "message_start")
    list(stream)
    usage = start.message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted


def test_count_tokens_is_exact_and_generates_nothing(demo_server: Server, anthropic_client, weather):
    tool = {"name": weather["name"], "description": "x", "input_schema": weather["parameters"]}
    request = {"system": "Be brief.", "messages": [{"role": "user", "content": "Hello!"}], "tools": [tool]}
    jobs = demo_server.jobs_when_idle()
    counted = anthropic_client.messages.count_tokens(model=MODEL, **request).input_tokens
    plain = anthropic_client.messages.count_tokens(model=MODEL, messages=request["messages"]).input_tokens
    assert plain < counted
    assert demo_server.jobs_when_idle() == jobs
    usage = anthropic_client.messages.create(model=MODEL, max_tokens=1, **request).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted


def test_count_tokens_of_the_beta_api(demo_server: Server, anthropic_client):
    messages = [{"role": "user", "content": "Hello!"}]
    beta = anthropic_client.beta.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    body = {"model": MODEL, "messages": messages}
    raw = httpx.post(demo_server.url + "/v1/messages/count_tokens?beta=true", json=body)
    assert raw.status_code == 200
    assert raw.json()["input_tokens"] == beta > 0


def test_a_system_prompt_of_blocks_and_content_blocks(anthropic_client):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    content = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
    answer = ask(anthropic_client, "", system=system, messages=[{"role": "user", "content": content}])
    assert answer.usage.input_tokens > 0
