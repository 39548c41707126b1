"""Where anchors are: markers from templates of several families, names of tokens, parsers and the user."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang_ft.anchors import find
from sglang_ft.anchors.rules import Anchor, AnchorRules, Kind, Marker

DEMO = Path(__file__).parents[2] / "demo" / "model"

MESSAGES = "{%- for m in messages %}"
CALLS = "{%- for c in m.tool_calls or [] %}"
# The layouts of families, made up after them: one with a word that closes a message, one without, one of brackets, one
# whose roles and channels are plain words between special tokens.
FAMILIES = {
    "closed": (
        ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
        "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        + MESSAGES
        + "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{%- else %}<|im_start|>{{ m.role }}\n"
        "{%- if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
        + CALLS
        + '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
        "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}",
    ),
    "open": (
        [
            "[gMASK]",
            "<sop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
            "<think>",
            "</think>",
        ]
        + ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
        "[gMASK]<sop>{%- if tools %}<|system|>\n# Tools\n{{ tools | tojson }}{% endif %}"
        + MESSAGES
        + "{%- if m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{%- elif m.role == 'assistant' %}<|assistant|>\n<think>{{ m.reasoning_content or '' }}</think>\n"
        "{{ m.content }}"
        + CALLS
        + "\n<tool_call>{{ c.function.name }}\n{{ c.function.arguments | tojson }}\n</tool_call>{% endfor %}"
        "{%- else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}",
    ),
    "brackets": (
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        "<s>" + MESSAGES + "{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{%- elif m.role == 'assistant' %}{{ m.content }}"
        "{%- if m.tool_calls %}[TOOL_CALLS][{% endif %}"
        + CALLS
        + '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}'
        "{%- if m.tool_calls %}]{% endif %}</s>{% endif %}{% endfor %}",
    ),
    "channels": (
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"],
        MESSAGES + "{%- if m.role == 'assistant' %}"
        "{%- if m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>"
        "{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
        + CALLS
        + "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
        "{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
        "{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}",
    ),
}


def make_tokenizer(special: list[str], template: str | None) -> transformers.PreTrainedTokenizerFast:
    """One token a byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


def conversation(with_thinking: bool) -> list[dict]:
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    turn = {"role": "assistant", "content": "Let me look.", "tool_calls": [call]}
    thinking = {"reasoning_content": "Hm, what now?"} if with_thinking else {}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What colour is it?"},
        {**turn, **thinking},
        {"role": "tool", "content": "blue, 3 clouds", "tool_call_id": "call00001", "name": "look"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And now?"},
    ]


def cuts(tokenizer, text: str, words: list[str]) -> dict[str, int]:
    """Number of tokens before each word of a text."""
    return {w: len(tokenizer.encode(text[: text.index(w)], add_special_tokens=False)) for w in words}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_of_a_conversation_begins_at_most_two_tokens_after_an_anchor(family):
    tokenizer = make_tokenizer(*FAMILIES[family])
    rules = find.rules(tokenizer)
    text = find.render(tokenizer, conversation(with_thinking=family != "brackets"), [], None)
    assert text is not None
    positions = [a.position for a in rules.find(tokenizer.encode(text, add_special_tokens=False))]
    words = ["What colour", "Let me look", "blue, 3", "Blue.", "And now"]
    words += [] if family == "brackets" else ["Hm, what"]
    for word, cut in cuts(tokenizer, text, words).items():
        behind = [cut - p for p in positions if p <= cut]
        # One for the blank or newline that may stand between marker and content.
        assert behind and min(behind) <= 2, (word, cut, positions, text)


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_follow_the_roles(family):
    tokenizer = make_tokenizer(*FAMILIES[family])
    kinds = {marker.kind for marker in find.rules(tokenizer).markers}
    wanted = {Kind.USER, Kind.ASSISTANT, Kind.TOOL_CALL, Kind.TOOL_RESULT, Kind.THINKING}
    assert kinds >= (wanted - {Kind.THINKING} if family == "brackets" else wanted)


def test_the_first_turn_ends_the_system_prompt():
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    tool = {"type": "function", "function": {"name": "look", "description": "Looks", "parameters": {}}}
    text = find.render(tokenizer, conversation(True), [tool])
    ids = tokenizer.encode(text, add_special_tokens=False)
    anchors = find.rules(tokenizer).find(ids)
    first_turn = len(tokenizer.encode(text[: text.index("<|im_start|>user")], add_special_tokens=False))
    assert [a for a in anchors if a.kind == Kind.SYSTEM] == [Anchor(first_turn, Kind.SYSTEM)]


def test_the_demo_models_markers_are_all_found():
    texts = {m.text for m in find.rules(transformers.AutoTokenizer.from_pretrained(DEMO)).markers}
    assert texts == {
        "<|im_start|>user",
        "<|im_start|>assistant",
        "<|im_start|>user\n<tool_response>",
        "</tool_response>\n<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    }


def test_without_a_template_the_names_of_tokens_tell():
    tokenizer = make_tokenizer(["<|im_start|>", "<think>", "</think>", "<tool_call>", "<x>"], None)
    kinds = {m.text: m.kind for m in find.rules(tokenizer).markers}
    assert kinds == {
        "<|im_start|>": Kind.USER,
        "<think>": Kind.THINKING,
        "</think>": Kind.THINKING,
        "<tool_call>": Kind.TOOL_CALL,
    }


def test_a_template_that_raises_is_no_error():
    tokenizer = make_tokenizer(["<think>"], "{{ raise_exception('no') }}")
    assert [m.text for m in find.rules(tokenizer).markers] == ["<think>"]


def test_markers_are_added_and_removed():
    tokenizer = make_tokenizer(*FAMILIES["closed"])
    rules = find.rules(tokenizer, wanted="<note>, -<tool_call>")
    texts = {m.text: m.kind for m in rules.markers}
    assert texts["<note>"] == Kind.MARKER and "<tool_call>" not in texts and "</tool_call>" in texts
    ids = tokenizer.encode("ab<note>cd", add_special_tokens=False)
    assert rules.find(ids) == [Anchor(2, Kind.MARKER), Anchor(8, Kind.MARKER)], "six tokens, one a byte"
    assert not find.rules(tokenizer, wanted=find.OFF).markers


def test_what_parsers_look_for_are_markers_too():
    tokenizer = make_tokenizer(["<a>"], None)
    rules = find.rules(tokenizer, parser_markers=[("[THINK]", Kind.THINKING)])
    ids = tokenizer.encode("x[THINK]y", add_special_tokens=False)
    assert rules.find(ids) == [Anchor(1, Kind.THINKING), Anchor(8, Kind.THINKING)]


def test_random_sequences_against_a_search_token_by_token():
    random = np.random.default_rng(0)
    for _ in range(200):
        markers = [
            Marker(str(i), tuple(random.integers(0, 4, random.integers(1, 4)).tolist()), Kind.TOOL_CALL)
            for i in range(3)
        ]
        rules = AnchorRules(markers)
        ids = random.integers(0, 5, random.integers(1, 40)).tolist()
        expected = set()
        for i in range(len(ids)):
            here = [m for m in markers if tuple(ids[i : i + len(m.ids)]) == m.ids]
            if here:
                expected |= {i, i + max(len(m.ids) for m in here)}
        assert [a.position for a in rules.find(ids)] == sorted(expected)
