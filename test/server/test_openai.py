"""The openai package against a real server: chat, completions, responses, models."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion
from serving import DEMO, Server

MODEL = "default"


def ask(client: openai.OpenAI, text: str, **options: Any) -> ChatCompletion:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 100, **options}
    )


def text_of(answer: ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


def test_models_names_the_model_and_its_context(openai_client):
    (model,) = openai_client.models.list().data
    assert Path(model.id).name == DEMO.name
    assert model.max_model_len >= 4096
    assert openai_client.models.retrieve(model.id).id == model.id


def test_chat_answers_after_thinking(openai_client):
    answer = ask(openai_client, "What is the capital of France?")
    assert "Paris" in text_of(answer)
    assert "capital of France" in answer.choices[0].message.reasoning_content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_system_message_and_earlier_turns_are_part_of_the_prompt(openai_client):
    def prompt_tokens(*texts: str) -> int:
        roles = ("user", "assistant", "user")
        turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        messages = [{"role": "system", "content": "You are helpful."}, *turns]
        answer = openai_client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
        return answer.usage.prompt_tokens

    assert prompt_tokens("Hello!") < prompt_tokens("Hello!", "Hello! How can I help you?", "Thanks")


def test_streamed_chat_is_the_same_text_in_pieces(openai_client):
    whole = ask(openai_client, "Where is Orrin?")
    reasoning, content, usage, finish = "", "", None, None
    stream = ask(openai_client, "Where is Orrin?", stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert content == text_of(whole) != ""
    assert reasoning == whole.choices[0].message.reasoning_content != ""
    assert finish == "stop"
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > usage.completion_tokens / 2, "a stream in one burst is no stream"


def test_thinking_can_be_switched_off(openai_client):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = ask(openai_client, "What is the capital of France?", extra_body=off)
    assert "Paris" in text_of(answer)
    assert not answer.choices[0].message.reasoning_content


def test_max_tokens_and_stop(openai_client):
    short = ask(openai_client, "Where is Orrin?", max_tokens=5)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 5)
    completion = openai_client.completions.create(
        model=MODEL, prompt="one two three four", max_tokens=40, temperature=0, stop=["e"]
    )
    assert "e" not in completion.choices[0].text


def test_greedy_output_is_the_same_each_time(openai_client):
    answers = {text_of(ask(openai_client, "Who are you?")) for _ in range(3)}
    assert len(answers) == 1


def test_a_seed_repeats_a_sample(openai_client):
    def sample(seed: int) -> str:
        answer = openai_client.completions.create(
            model=MODEL,
            prompt="The",
            max_tokens=24,
            temperature=1,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_several_samples_of_one_request(openai_client):
    answer = openai_client.completions.create(
        model=MODEL, prompt="The", n=3, temperature=1.5, max_tokens=24, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1
    stream = ask(openai_client, "Tell me about Orrin.", n=3, stream=True, max_tokens=8)
    assert {choice.index for chunk in stream for choice in chunk.choices} == {0, 1, 2}


def test_logprobs_are_of_the_tokens_and_sorted(openai_client):
    answer = ask(openai_client, "Hello!", logprobs=True, top_logprobs=4, max_tokens=8)
    positions = answer.choices[0].logprobs.content
    assert len(positions) == 8
    for position in positions:
        top = [entry.logprob for entry in position.top_logprobs]
        assert len(top) == 4
        assert top == sorted(top, reverse=True)
        assert math.isclose(position.logprob, top[0], abs_tol=1e-5), "greedy takes the most likely token"
        assert sum(map(math.exp, top)) <= 1.0001


def test_completions_with_logprobs_echo_and_a_list_of_prompts(openai_client):
    prompts = ["The capital of France is", "Ada lives in"]
    answer = openai_client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=6, temperature=0, logprobs=2, echo=True
    )
    assert len(answer.choices) == 2
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        assert choice.text.startswith(prompt)
        assert len(choice.text) > len(prompt)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
    stream = openai_client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "job": {"enum": ["baker", "smith"]},
    },
    "required": ["name", "age", "job"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("thinking, temperature", [(True, 0), (False, 1.5)])
def test_json_schema_is_kept(openai_client, thinking, temperature):
    schema = {"name": "person", "schema": PERSON, "strict": True}
    answer = ask(
        openai_client,
        "Tell me about Ada.",
        temperature=temperature,
        max_tokens=400,
        response_format={"type": "json_schema", "json_schema": schema},
        extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
    )
    assert answer.choices[0].finish_reason == "stop"
    person = json.loads(text_of(answer))
    assert set(person) == {"name", "age", "job"}
    assert 0 <= person["age"] <= 99
    assert person["job"] in ("baker", "smith")


def test_regex_is_kept(openai_client):
    off = {"enable_thinking": False}
    extra = {"regex": "[0-9]{3}-[a-f]{2}", "chat_template_kwargs": off}
    answer = ask(openai_client, "A code, please.", temperature=1, extra_body=extra)
    part, _, letters = text_of(answer).strip().partition("-")
    assert (len(part), len(letters)) == (3, 2)
    assert part.isdigit() and set(letters) <= set("abcdef")


def test_responses_whole_and_streamed(openai_client):
    def create(**options: Any) -> Any:
        return openai_client.responses.create(
            model=MODEL,
            input="What is the capital of France?",
            temperature=0,
            max_output_tokens=100,
            **options,
        )

    whole = create()
    assert whole.status == "completed"
    assert "Paris" in whole.output_text
    assert whole.usage.input_tokens > 0 and whole.usage.output_tokens > 0
    events = list(create(stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    pieces = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert pieces.strip() == whole.output_text.strip()


def test_responses_remember_the_previous_one(openai_client):
    first = openai_client.responses.create(model=MODEL, input="Hello!", temperature=0, max_output_tokens=60)
    assert openai_client.responses.retrieve(first.id).id == first.id
    second = openai_client.responses.create(
        model=MODEL,
        input="What is the capital of Italy?",
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=100,
    )
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_longer_prompt_reuses_the_prefix_and_says_so(demo_server: Server, openai_client):
    def complete(prompt: str) -> openai.types.Completion:
        return openai_client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=24)

    text = "The valley of Orrin has twelve villages. Ada lives in one of them, and Bram in another. " * 4
    first = complete(text)
    longer = text + first.choices[0].text + " Celia lives"
    second = complete(longer)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens <= cached < second.usage.prompt_tokens
    assert httpx.post(demo_server.url + "/flush_cache", timeout=30).status_code == 200
    cold = complete(longer)
    assert cold.usage.prompt_tokens_details is None
    assert cold.choices[0].text == second.choices[0].text, "a hit must not change the answer"


def test_sixteen_clients_at_once_get_the_answers_of_one(openai_client):
    questions = ["Where is Orrin?", "What is the capital of Spain?", "Who are you?", "Hello!"]
    alone = {q: text_of(ask(openai_client, q)) for q in questions}
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda q: (q, text_of(ask(openai_client, q))), questions * 4))
    same = sum(answer == alone[question] for question, answer in together)
    assert same >= 14, f"{16 - same} of 16 differ: batches change rounding, not answers"


def test_worker_counters_move_with_requests(demo_server: Server, openai_client):
    before = demo_server.metrics()
    answer = ask(openai_client, "What is the capital of Poland?")
    layers, top_k = 8, 4
    jobs, least = "sglang_ft_worker_jobs_total", layers * (answer.usage.completion_tokens - 1)
    demo_server.wait_for_metric(jobs, above=before[jobs] + least - 1)  # they are published twice a second
    demo_server.jobs_when_idle()
    after = demo_server.metrics()

    def moved(name: str) -> float:
        return after[f"sglang_ft_worker_{name}"] - before[f"sglang_ft_worker_{name}"]

    assert moved("rows_total") >= moved("jobs_total")
    assert moved("expert_rows_total") == top_k * moved("rows_total")
    assert moved("expert_bytes_total") > 0
    assert moved("busy_seconds_total") > 0
    assert after["sglang_ft_worker_up"] == 1
    assert after["sglang_ft_worker_restarts_total"] == before["sglang_ft_worker_restarts_total"]


def test_metrics_are_plain_prometheus_text(demo_server: Server):
    answer = httpx.get(demo_server.url + "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "# HELP sglang_ft_worker_jobs_total" in answer.text
