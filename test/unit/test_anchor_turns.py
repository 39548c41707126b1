"""Token ids of past turns, and the lines of clients that must not change a prompt."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace

import pytest

from sglang_ft.anchors.turns import TurnMemory
from sglang_ft.api.client_headers import without_volatile_lines
from sglang_ft.engine.anchors.turns import ChatPrompt, Turns

START, END, THINK, ENDTHINK, CALL, ENDCALL = range(1000, 1006)
SPECIAL = {START: "<s>", END: "<e>", THINK: "<t>", ENDTHINK: "</t>", CALL: "<c>", ENDCALL: "</c>"}


def decode(ids):
    """Ids below 256 are characters; 300 + i is the pair "ab" and so on: one text has many tokenizations."""
    return "".join(SPECIAL.get(i) or (chr(i) if i < 256 else PAIRS[i - 300]) for i in ids)


PAIRS = [a + b for a in "abc {}" for b in "abc {}"]


def encode(text: str, rng: random.Random | None = None) -> list[int]:
    """Characters; with a generator, some pairs of them as one token."""
    ids, i = [], 0
    names = {v: k for k, v in SPECIAL.items()}
    while i < len(text):
        special = next((n for n in names if text.startswith(n, i)), None)
        if special:
            ids.append(names[special])
            i += len(special)
        elif rng and text[i : i + 2] in PAIRS and rng.random() < 0.5:
            ids.append(300 + PAIRS.index(text[i : i + 2]))
            i += 2
        else:
            ids.append(ord(text[i]))
            i += 1
    return ids


@pytest.fixture
def memory() -> TurnMemory:
    return TurnMemory(decode, SPECIAL)


def test_a_sampled_turn_keeps_its_ids(memory):
    prompt = encode("<s>user abc<e><s>assistant ")
    sampled = encode("<t>aabb<e>", random.Random(3))
    assert sampled != encode("<t>aabb<e>")
    memory.remember(prompt, sampled)
    again = encode("<s>user abc<e><s>assistant <t>aabb<e> <s>user more<e>")
    spliced = memory.splice(again)
    assert spliced[: len(prompt) + len(sampled)] == prompt + sampled
    assert decode(spliced) == decode(again)


def test_the_first_word_of_an_answer_belongs_to_the_piece_that_the_prompt_began(memory):
    prompt, sampled = encode("<s>assistant "), [300 + PAIRS.index("ab"), END]
    memory.remember(prompt, sampled)
    assert memory.splice(encode("<s>assistant ab<e><s>")) == [*prompt, *sampled, START]


def test_after_an_edit_the_prompts_own_ids_follow(memory):
    prompt = encode("<s>user abc<e><s>assistant ")
    memory.remember(prompt, encode("<t>aabb</t>cc<e>", random.Random(1)))
    edited = encode("<s>user abc<e><s>assistant <t>aaXb</t>cc<e>")
    assert memory.splice(edited) == edited


def test_blanks_and_the_form_of_json_are_the_templates_not_the_turns(memory):
    prompt = encode("<s>user a<e><s>assistant")
    sampled = encode('</t>\nabc<c>{"x":1,"y":[2]}</c><e>')
    memory.remember(prompt, sampled)
    written = encode('<s>user a<e><s>assistant</t>\n\nabc<c>\n{"y": [2], "x": 1}\n</c><e>')
    assert memory.splice(written) == prompt + sampled
    other = encode('<s>user a<e><s>assistant</t>\n\nabc<c>\n{"y": [2], "x": 3}\n</c><e>')
    assert decode(memory.splice(other)).endswith('<c>\n{"y": [2], "x": 3}\n</c><e>')


def test_what_the_client_wrote_must_be_the_same_to_the_blank(memory):
    memory.remember(encode("<s>user abc <e><s>assistant"), encode("b<e>"))
    for text in ("<s>user abc<e><s>assistant", "<s>user  abc <e><s>assistant"):
        assert memory.splice(encode(text)) == encode(text)


def test_many_turns_of_many_conversations_keep_their_ids_and_their_text(memory):
    rng = random.Random(0)
    texts = ["<s>sys ab<e>" + f"<s>user {i} ab ba<e><s>assistant " for i in range(4)]
    ids = [encode(t) for t in texts]
    for _ in range(6):
        for i, text in enumerate(texts):
            spliced = memory.splice(encode(text))
            assert spliced[: len(ids[i])] == ids[i]
            assert decode(spliced) == text
            answer = (
                "<t>" + "".join(rng.choices("abc ", k=12)) + "</t>" + "".join(rng.choices("abc", k=9)) + "<e>"
            )
            sampled = encode(answer, rng)
            memory.remember(spliced, sampled)
            ids[i] = spliced + sampled
            texts[i] = text + answer + "<s>user ab<e><s>assistant "


def test_only_so_many_conversations_are_kept():
    memory = TurnMemory(decode, SPECIAL, most=2)
    sampled = encode("<t>abab<e>", random.Random(5))
    for i in range(3):
        memory.remember(encode(f"<s>user {i}<e>"), sampled)
    assert memory.splice(encode("<s>user 0<e><t>abab<e>")) == encode("<s>user 0<e><t>abab<e>")
    assert memory.splice(encode("<s>user 2<e><t>abab<e>")) == encode("<s>user 2<e>") + sampled


LINE = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("n", range(2))
def test_a_billing_line_does_not_change_the_prompt(n):
    line = LINE.format(n, "abcde"[n:])
    rest = {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}
    assert without_volatile_lines({"system": line + "\nYou are"})["system"] == "You are"
    assert without_volatile_lines({"system": line})["system"] == ""
    assert without_volatile_lines({"system": [{"type": "text", "text": line}, rest]})["system"] == [rest]
    first = {"type": "text", "text": line + "\nmore"}
    assert without_volatile_lines({"system": [first, rest]})["system"] == [first | {"text": "more"}, rest]
    chat = {"messages": [{"role": "system", "content": line + "\nhi"}, {"role": "user", "content": line}]}
    assert without_volatile_lines(chat)["messages"] == [
        {"role": "system", "content": "hi"},
        {"role": "user", "content": line},
    ]


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {"system": None, "messages": []},
        {"system": "about the x-anthropic-billing-header: it is a line"},
        {"system": "One line.\n" + LINE},
        {"system": [{"type": "text"}, 3], "messages": [{"role": "user", "content": LINE}]},
        {"messages": [{"role": "user", "content": LINE}]},
        {"messages": "x", "prompt": LINE},
        {"messages": [{"role": "system", "content": [{"type": "image"}]}]},
    ],
    ids=str,
)
def test_everything_else_stays_as_it_is(body):
    before = json.dumps(body)
    assert without_volatile_lines(body) == body and json.dumps(body) == before


class Tokenizer:
    def decode(self, ids, **options):
        return decode(ids)

    def get_added_vocab(self):
        return {text: i for i, text in SPECIAL.items()}


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("leaves_early", [False, True])
def test_an_answer_is_remembered_however_it_is_read(incremental, leaves_early):
    """Who wants no stream takes the one output and never comes to the generator's end."""
    outputs = [([THINK, 97], None), ([THINK, 97, END], {"type": "stop"})]
    if incremental:
        outputs = [([THINK, 97], None), ([END], {"type": "stop"})]
    manager = SimpleNamespace(incremental_streaming_output=incremental, tokenizer=Tokenizer())
    request = SimpleNamespace(input_ids=ChatPrompt([START, 98]))

    async def original(manager, obj, request):
        for ids, reason in outputs:
            yield {"output_ids": ids, "meta_info": {"finish_reason": reason}}

    async def read(turns):
        answers = turns.generated(original, manager, request)
        for _ in outputs:
            await anext(answers)
        if leaves_early:
            await answers.aclose()
        else:
            assert [more async for more in answers] == []

    turns = Turns()
    asyncio.run(read(turns))
    assert turns.memory(manager.tokenizer).splice([START, 98, THINK, 97, 32, END]) == [
        START,
        98,
        THINK,
        97,
        END,
    ]


def test_what_is_no_chat_prompt_or_was_cut_off_is_not_remembered():
    turns = Turns()
    manager = SimpleNamespace(incremental_streaming_output=False, tokenizer=Tokenizer())
    done = {"output_ids": [THINK, 97], "meta_info": {"finish_reason": {"type": "stop"}}}
    turns._remember(manager, SimpleNamespace(input_ids=[START, 98]), done, [])
    turns._remember(manager, SimpleNamespace(input_ids=ChatPrompt([START, 98])), None, [])
    running = {**done, "meta_info": {"finish_reason": None}}
    turns._remember(manager, SimpleNamespace(input_ids=ChatPrompt([START, 98])), running, [])
    assert turns.memory(manager.tokenizer).splice([START, 98, THINK, 97, 32]) == [START, 98, THINK, 97, 32]
