"""Agents: the model thinks, calls the tool that is offered, and uses what comes back. Both client packages."""

from __future__ import annotations

import json
from typing import Any

import pytest

MODEL = "default"
RESULT = {"temperature": 21, "condition": "sunny"}
# Inside a forced call any blank is allowed, and a very small model would go on with blanks.
STEADY: dict[str, Any] = {"temperature": 0, "frequency_penalty": 1.5, "max_tokens": 400}


def openai_tool(function: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {**function, "strict": strict}}


def anthropic_tool(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }


def test_a_tool_loop_with_openai(openai_client, weather):
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]

    def turn() -> Any:
        return openai_client.chat.completions.create(
            model=MODEL, messages=messages, tools=[openai_tool(weather)], temperature=0, max_tokens=120
        )

    first = turn()
    (call,) = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert "get_weather" in first.choices[0].message.reasoning_content
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(RESULT)})
    second = turn()
    answer = second.choices[0].message
    assert second.choices[0].finish_reason == "stop"
    assert "21" in answer.content and "sunny" in answer.content
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    messages.append({"role": "assistant", "content": answer.content})
    messages.append({"role": "user", "content": "What is the weather in Rome?"})
    (call,) = turn().choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_a_streamed_tool_call_arrives_in_pieces_without_markers(openai_client, weather):
    stream = openai_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Berlin?"}],
        tools=[openai_tool(weather)],
        temperature=0,
        max_tokens=120,
        stream=True,
    )
    content, names, arguments, finish = "", [], [], None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                names += [call.function.name] if call.function.name else []
                arguments += [call.function.arguments] if call.function.arguments else []
    assert names == ["get_weather"]
    assert json.loads("".join(arguments)) == {"city": "Berlin"}
    assert len(arguments) > 1
    assert finish == "tool_calls"
    assert "<" not in content and "tool_call" not in content


def test_a_tool_loop_with_anthropic(anthropic_client, weather):
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Madrid?"}]

    def turn() -> Any:
        return anthropic_client.messages.create(
            model=MODEL,
            messages=messages,
            tools=[anthropic_tool(weather)],
            extra_body={"temperature": 0},
            max_tokens=120,
        )

    first = turn()
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Madrid"})
    messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps(RESULT)}
    messages.append({"role": "user", "content": [result]})
    second = turn()
    text = second.content[-1].text
    assert second.stop_reason == "end_turn"
    assert "21" in text and "sunny" in text
    assert second.usage.cache_read_input_tokens > 0


def test_a_streamed_tool_call_with_anthropic(anthropic_client, weather):
    with anthropic_client.messages.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Lisbon?"}],
        tools=[anthropic_tool(weather)],
        extra_body={"temperature": 0},
        max_tokens=120,
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert final.content[-1].input == {"city": "Lisbon"}
    assert json.loads("".join(pieces)) == {"city": "Lisbon"}


def test_a_tool_loop_with_responses(openai_client, weather):
    tools = [{"type": "function", **weather}]
    history: list[Any] = [{"role": "user", "content": "What is the weather in Vienna?"}]
    first = openai_client.responses.create(
        model=MODEL, input=history, tools=tools, temperature=0, max_output_tokens=120
    )
    call = next(item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Vienna"})
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(RESULT)})
    second = openai_client.responses.create(
        model=MODEL, input=history, tools=tools, temperature=0, max_output_tokens=120
    )
    assert "21" in second.output_text and "sunny" in second.output_text


def test_a_named_tool_is_called_whatever_the_text(openai_client, weather):
    weather["parameters"]["properties"]["city"] = {"enum": ["Rome", "Paris"]}
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello!"}],
        tools=[openai_tool(weather, strict=True)],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        **STEADY,
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")


def test_tool_choice_none_calls_nothing(openai_client, weather):
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[openai_tool(weather)],
        tool_choice="none",
        temperature=0,
        max_tokens=60,
    )
    assert not answer.choices[0].message.tool_calls


@pytest.mark.parametrize(
    "schema, kind",
    [
        ({"type": "integer", "minimum": 0, "maximum": 9}, int),
        ({"type": "boolean"}, bool),
        ({"type": "null"}, type(None)),
        ({"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 2}, list),
    ],
)
def test_arguments_have_the_types_of_the_schema(openai_client, schema, kind):
    """With a strict tool the grammar keeps the schema, whatever the model would have liked to say."""
    parameters = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    function = {"name": "set_value", "description": "Set", "parameters": parameters}
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Set the value."}],
        tools=[openai_tool(function, strict=True)],
        tool_choice="required",
        **STEADY,
    )
    call = answer.choices[0].message.tool_calls[0]
    assert type(json.loads(call.function.arguments)["value"]) is kind
