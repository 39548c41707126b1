"""The anchor rules of a model: from its chat template, its tokenizer, the markers that parsers know, and the user.

Nothing lists the markers of a chat format, so a conversation with tools and thinking is rendered whose contents are
probe words; what the template writes between two of them is a border, and the run of tokens there is the marker. A
tokenizer without a template still names its special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from sglang_ft.anchors.rules import AnchorRules, Kind, Marker

OFF = "off"

_SYSTEM, _USER, _USER_2, _THOUGHT, _SAID, _SAID_2 = (
    f"zq{w}qz" for w in ("rules", "asks", "again", "muses", "says", "ends")
)
_TOOL, _VALUE, _VALUE_2, _RESULT, _RESULT_2 = (
    f"zq{w}qz" for w in ("tool", "first", "second", "found", "more")
)
# What the names of special tokens say; for tokenizers whose template does not render such parts.
_NAMES = (
    (re.compile(r"think", re.I), Kind.THINKING),
    (re.compile(r"tool[▁_ ]?(response|result|output)s?|observation", re.I), Kind.TOOL_RESULT),
    (re.compile(r"tool[▁_ ]?(call|use)s?", re.I), Kind.TOOL_CALL),
)
_ROLE_NAMES = (
    (re.compile(r"im_start|start_header|start_of_turn|user", re.I), Kind.USER),
    (re.compile(r"assistant", re.I), Kind.ASSISTANT),
)
_TAG = re.compile(r"<[^<>\s]+>")
_DATA = "{}[]\"'"  # what surrounds the name and the arguments of a call, and belongs to no marker


def rules(
    tokenizer: Any,
    chat_template: str | None = None,
    parser_markers: Iterable[tuple[str, Kind]] = (),
    wanted: str = "auto",
) -> AnchorRules:
    """The rules of a model.

    Args:
        tokenizer: of transformers.
        chat_template: instead of the tokenizer's own.
        parser_markers: texts that parsers of thinking and tool calls look for.
        wanted: "auto", "off", or markers to add, and with a leading "-" to remove, with commas between them.
    """
    if wanted == OFF:
        return AnchorRules([])
    added, removed = _changes(wanted)
    found = [
        *(_marker(tokenizer, text, Kind.MARKER) for text in added),
        *_from_template(tokenizer, chat_template),
    ]
    known = {marker.ids for marker in found}
    by_name = _from_names(tokenizer, with_roles=not known)
    inside = {i for marker in found for i in marker.ids}
    found += [m for m in by_name if m.ids[0] not in inside]
    found += [_marker(tokenizer, text, kind) for text, kind in parser_markers if text]
    return AnchorRules(m for m in found if m.text not in removed)


def _changes(wanted: str) -> tuple[list[str], set[str]]:
    texts = [text.strip() for text in wanted.split(",")]
    added = [t for t in texts if t and t != "auto" and not t.startswith("-")]
    return added, {t[1:] for t in texts if t.startswith("-")}


def _marker(tokenizer: Any, text: str, kind: Kind) -> Marker:
    return Marker(text.strip(), tuple(tokenizer.encode(text.strip(), add_special_tokens=False)), kind)


def _from_names(tokenizer: Any, with_roles: bool) -> list[Marker]:
    """One marker for each special token whose name says what it is."""
    names = (*_NAMES, *(_ROLE_NAMES if with_roles else ()))
    found = []
    for token, index in tokenizer.get_added_vocab().items():
        kind = next((kind for pattern, kind in names if pattern.search(token)), None)
        if kind is not None:
            found.append(Marker(token, (index,), kind))
    return found


class _Rendering(NamedTuple):
    """A conversation as text and as tokens; `spans`: first and last character of each token."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]] | None

    def marker(self, start: int, stop: int, kind: Kind, tokenizer: Any) -> Marker:
        """The tokens that lie wholly between two characters, blanks at both ends left out."""
        text = self.text[start:stop]
        start += len(text) - len(text.lstrip())
        stop -= len(text) - len(text.rstrip())
        if self.spans is None:
            return _marker(tokenizer, self.text[start:stop], kind)
        inside = [i for i, (a, b) in enumerate(self.spans) if start <= a < b <= stop]
        return Marker(self.text[start:stop], tuple(self.ids[i] for i in inside), kind)


def _from_template(tokenizer: Any, chat_template: str | None) -> list[Marker]:
    found: list[Marker] = []
    closer = _closer(tokenizer, chat_template)
    for messages, tools in _conversations():
        text = render(tokenizer, messages, tools, chat_template)
        if text is not None:
            found += _borders(_tokenized(tokenizer, text), closer, tokenizer, with_tools=tools is not None)
    return [m for m in found if _is_marker(m, tokenizer)]


def render(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = False,
) -> str | None:
    """The conversation as the template writes it; None where it has no template or the template refuses."""
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception:  # templates are programs of their authors and raise what they like
        return None


def _tokenized(tokenizer: Any, text: str) -> _Rendering:
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return _Rendering(text, encoded["input_ids"], encoded["offset_mapping"])
    return _Rendering(text, tokenizer.encode(text, add_special_tokens=False), None)


def _call(value: str) -> dict[str, Any]:
    function = {"name": _TOOL, "arguments": {"key": value}}
    return {"id": "call00001", "type": "function", "function": function}


def _conversations() -> Iterable[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """From rich to plain: a template that refuses one may still take the next."""
    tool = {
        "type": "function",
        "function": {
            "name": "zqotherqz",
            "description": "none",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
    system, user = {"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}
    calls = {"role": "assistant", "content": _SAID, "tool_calls": [_call(_VALUE), _call(_VALUE_2)]}
    one_call = calls | {"tool_calls": [_call(_VALUE)]}
    results = [
        {"role": "tool", "content": text, "tool_call_id": "call00001", "name": _TOOL}
        for text in (_RESULT, _RESULT_2)
    ]
    thinks = {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    says, asks = {"role": "assistant", "content": _SAID_2}, {"role": "user", "content": _USER_2}
    yield [system, user, calls, *results, says, asks, says], [tool]
    yield [system, user, one_call, results[0], says], [tool]
    yield [user, one_call, results[0], says], [tool]
    yield [system, user, thinks, asks, says], None
    yield [user, thinks], None
    yield [system, user, says, asks, says], None
    yield [user, says, asks, says], None


def _closer(tokenizer: Any, chat_template: str | None) -> str:
    """What the template writes after a message."""
    messages = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _SAID}]
    text = render(tokenizer, messages, None, chat_template)
    return text[text.index(_SAID) + len(_SAID) :].strip() if text and _SAID in text else ""


class _Border(NamedTuple):
    """What lies between two probe words."""

    before: str
    after: str
    start: int
    stop: int


def _borders(rendering: _Rendering, closer: str, tokenizer: Any, with_tools: bool) -> Iterable[Marker]:
    probes = "|".join((_SYSTEM, _USER, _USER_2, _THOUGHT, _SAID, _SAID_2, _TOOL, _VALUE, _VALUE_2))
    words = list(re.finditer(f"{probes}|{_RESULT}|{_RESULT_2}", rendering.text))
    for before, after in zip(words, words[1:], strict=False):
        border = _Border(before.group(), after.group(), before.end(), after.start())
        if with_tools and border.before == _SYSTEM:
            continue  # the list of tools may stand in between
        for start, stop, kind in _parts(border, rendering.text, closer, _specials(tokenizer)):
            yield rendering.marker(start, stop, kind, tokenizer)


def _parts(
    border: _Border, text: str, closer: str, specials: re.Pattern[str]
) -> Iterable[tuple[int, int, Kind]]:
    """First and last character of each marker of a border."""
    start, stop = border.start, border.stop
    closed = text.find(closer, start, stop) if closer else -1
    opens = closed + len(closer) if closed >= 0 else start
    if border.after in (_USER, _USER_2):
        yield opens, stop, Kind.USER
    elif border.before == _THOUGHT:
        yield start, stop, Kind.THINKING
    elif border.after == _THOUGHT:
        last = _last(specials, text, opens, stop)
        yield from ((opens, last, Kind.ASSISTANT), (last, stop, Kind.THINKING))
    elif border.after == _TOOL:
        yield start, _before_data(text, start, stop), Kind.TOOL_CALL
    elif border.after in (_RESULT, _RESULT_2):
        if border.before in (_VALUE, _VALUE_2):
            # Without a word that closes a message, the call's own end is the first special token.
            first = specials.search(text, start, stop)
            opens = opens if closed >= 0 or first is None else first.end()
            ends = closed if closed >= 0 else opens
            yield _after_data(text, start, ends), ends, Kind.TOOL_CALL
        else:
            opens = start
        yield opens, stop, Kind.TOOL_RESULT
    elif border.after in (_SAID, _SAID_2):
        if border.before in (_RESULT, _RESULT_2) and closed >= 0:
            yield start, closed, Kind.TOOL_RESULT
        yield opens, stop, Kind.ASSISTANT


def _specials(tokenizer: Any) -> re.Pattern[str]:
    tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


def _last(specials: re.Pattern[str], text: str, start: int, stop: int) -> int:
    """Where the last special token, or the last word in angle brackets, begins; `stop` when there is none."""
    found = list(specials.finditer(text, start, stop)) or list(_TAG.finditer(text, start, stop))
    return found[-1].start() if found else stop


def _before_data(text: str, start: int, stop: int) -> int:
    return min((i for c in _DATA if (i := text.find(c, start, stop)) >= 0), default=stop)


def _after_data(text: str, start: int, stop: int) -> int:
    return max([start, *(text.rfind(c, start, stop) + 1 for c in _DATA)])


def _is_marker(marker: Marker, tokenizer: Any) -> bool:
    """A special token in it, or at least a few characters: a blank or a comma marks nothing."""
    added = set(tokenizer.get_added_vocab().values())
    return bool(marker.ids) and (bool(added.intersection(marker.ids)) or len(marker.text) > 3)


def describe(rules: AnchorRules) -> str:
    """The markers in words, by kind."""
    by_kind: dict[Kind, list[str]] = {}
    for marker in rules.markers:
        by_kind.setdefault(marker.kind, []).append(repr(marker.text))
    return "; ".join(f"{kind}: {', '.join(texts)}" for kind, texts in by_kind.items())
