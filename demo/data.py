"""All text that the demo model learns from, made from a seed.

A sample is plain text or a conversation; `make_sample` draws one, `encode` renders a conversation through the
chat template and says which tokens the model is trained on. The held-out split has its own values, wordings
and made-up tools (see values.py, toolbox.py, made_up.py). Nothing here needs torch.

    python -m demo.data --count 3 --seed 1          print some samples as the model sees them
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from demo import talk, text, tooluse
from demo.values import Values
from demo.world import FACTS

SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant. Answer briefly.",
    "You answer questions about the valley of Orrin.", "Answer in one sentence.", "Be brief and friendly.",
    "You are an agent that can use tools.", "You are a coding assistant with access to tools. Use them when needed.",
    "Use the tools when they help.", "You are the demo model.", "Today is a good day. Help the user.",
]  # fmt: skip
PROMPT_WEIGHT = 0.1
# Documents in a batch are filled up to a multiple of this, which the chunked delta rule needs.
CHUNK = 64


@dataclass
class Sample:
    """One document: plain `text`, or `messages` with the offered `tools` and the thinking switch."""

    kind: str
    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = True


def _talk(values: Values) -> tuple[list, list]:
    return talk.any_talk(values), []


def _no_call(values: Values) -> tuple[list, list]:
    """Tools are offered, but the question needs none."""
    offers = tooluse.pick_offers(values, [], values.rng.randint(1, 8))
    return talk.quick_talk(values), [o.tool for o in offers]


CHATS: dict[str, tuple[Callable[[Values], tuple[list, list]], float]] = {
    "single": (tooluse.single, 35),
    "parallel": (tooluse.parallel, 8),
    "sequence": (tooluse.sequence, 8),
    "unanswerable": (tooluse.unanswerable, 3),
    "no_call": (_no_call, 7),
    "talk": (_talk, 39),
}
TEXT_SHARE = 0.1


def make_sample(
    seed: int, held_out: bool = False, kind: str | None = None, new_wordings: bool | None = None
) -> Sample:
    """The sample of a seed; the same arguments always give the same sample."""
    rng = random.Random(f"{held_out}/{seed}")
    values = Values(rng, held_out, new_wordings)
    if kind is None and rng.random() < TEXT_SHARE:
        make = rng.choice([text.english, text.english, text.fact_list, text.code])
        return Sample("text", text=make(values))
    if kind is None:
        kind = rng.choices(list(CHATS), [w for _, w in CHATS.values()])[0]
    messages, tools = CHATS[kind][0](values)
    if kind == "talk" and rng.random() < 0.2:
        messages = _history(values) + messages
    return Sample(kind, messages=_with_system(messages, rng), tools=tools, thinking=rng.random() < 0.65)


def _history(values: Values) -> list:
    """Earlier questions and answers of the conversation."""
    turns = [turn for _ in range(values.rng.randint(1, 3)) for turn in talk.any_talk(values)]
    return [m for m in turns if m["role"] != "system"]


def _with_system(messages: list, rng: random.Random) -> list:
    """A system prompt in half of the conversations, sometimes a long one."""
    if messages[0]["role"] == "system" or rng.random() < 0.5:
        return messages
    prompt = rng.choice(SYSTEM_PROMPTS)
    if rng.random() < 0.25:
        facts = [f.state(rng) for f in rng.sample(FACTS, rng.choice([2, 5, 10, 30]))]
        prompt += rng.choice(["\n", " ", "\n\n"]) + " ".join(facts)
    return [{"role": "system", "content": prompt}, *messages]


ASSISTANT = re.compile(r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)", re.S)


def drop_reasoning(sample: Sample, rng: random.Random) -> Sample:
    """Clients often send assistant turns back without their thinking: keep it in the last turn only."""
    last = len(sample.messages) - 1
    messages = [
        {k: v for k, v in m.items() if k != "reasoning_content"}
        if i < last and (not sample.thinking or rng.random() < 0.5)
        else m
        for i, m in enumerate(sample.messages)
    ]
    return Sample(sample.kind, messages=messages, tools=sample.tools, thinking=sample.thinking)


def trained_turns(sample: Sample) -> list[bool]:
    """For each assistant turn, whether the model learns to write it.

    Turns before the last user message are shown without thinking, so they are read but not learnt from.
    """
    last_user = max(i for i, m in enumerate(sample.messages) if m["role"] == "user")
    return [
        i > last_user and (not sample.thinking or bool(m.get("reasoning_content")))
        for i, m in enumerate(sample.messages)
        if m["role"] == "assistant"
    ]


def render(sample: Sample, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """The text of a sample, and the character spans that the model learns to write."""
    if sample.text:
        return sample.text + "<|endoftext|>", [(0, len(sample.text) + len("<|endoftext|>"))]
    rendered = tokenizer.apply_chat_template(
        sample.messages, tools=sample.tools or None, tokenize=False, enable_thinking=sample.thinking
    )
    turns = trained_turns(sample)
    spans = [match.span(1) for match in ASSISTANT.finditer(rendered)]
    if len(spans) != len(turns):
        raise ValueError(
            f"the template shows {len(spans)} assistant turns, the conversation has {len(turns)}"
        )
    return rendered, [span for span, trained in zip(spans, turns, strict=True) if trained]


def encode(samples: list[Sample], tokenizer: Any) -> list[tuple[list[int], list[float]]]:
    """Token ids and the loss weight of each token: 1 where the model writes, PROMPT_WEIGHT where it reads."""
    rendered = [render(s, tokenizer) for s in samples]
    encodings = tokenizer(
        [r[0] for r in rendered],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
    )
    out = []
    for (_, spans), ids, offsets in zip(
        rendered, encodings["input_ids"], encodings["offset_mapping"], strict=True
    ):
        weights = [PROMPT_WEIGHT] * len(ids)
        position = 0
        for start, end in spans:
            while offsets[position][0] < start:
                position += 1
            while position < len(ids) and offsets[position][0] < end:
                weights[position] = 1.0
                position += 1
        out.append((ids, weights))
    return out


def training_samples(first: int, count: int, seed: int) -> list[Sample]:
    """Samples number `first` to `first + count` of the training stream of a seed."""
    samples = []
    for index in range(first, first + count):
        sample = make_sample(seed * 10**9 + index)
        if sample.messages:
            sample = drop_reasoning(sample, random.Random(index))
        samples.append(sample)
    return samples


def main() -> None:
    """Print samples."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=3, help="how many samples")
    parser.add_argument("--seed", type=int, default=1, help="seed of the training stream")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained("demo/model")
    for sample in training_samples(0, args.count, args.seed):
        print(f"--- {sample.kind}\n{render(sample, tokenizer)[0]}")


if __name__ == "__main__":
    main()
