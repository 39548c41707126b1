"""sglang-ft anchors: where a conversation's states would be kept, as text with the anchors marked."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ft import checkpoint
from sglang_ft.anchors import find
from sglang_ft.anchors.rules import Anchor
from sglang_ft.config import FtConfig
from sglang_ft.errors import CheckpointError, FtError

_COLOUR, _PLAIN = "\033[36m", "\033[0m"


def main(argv: Sequence[str]) -> int:
    config, rest = FtConfig.parse(argv, os.environ)
    args = _parser().parse_args(rest)
    tokenizer = _tokenizer(args.tokenizer_path or args.model_path)
    template = _read(args.chat_template) if args.chat_template else None
    rules = find.rules(tokenizer, template, wanted=config.anchors)
    print(f"markers: {find.describe(rules) or 'none'}\n", file=sys.stderr)
    messages, tools = _conversation(args.chat)
    text = find.render(tokenizer, messages, tools, template, add_generation_prompt=True)
    if text is None:
        raise FtError(f"{args.chat}: the chat template of {args.model_path} refuses this conversation")
    ids = tokenizer.encode(text, add_special_tokens=False)
    print(marked(tokenizer, ids, rules.find(ids), colour=sys.stdout.isatty()))
    return 0


def marked(tokenizer: Any, ids: Sequence[int], anchors: Sequence[Anchor], colour: bool) -> str:
    """The text of `ids`, with [kind position] at each anchor."""
    parts, last = [], 0
    for anchor in anchors:
        parts.append(_text(tokenizer, ids[last : anchor.position]))
        note = f"[{anchor.kind} {anchor.position}]"
        parts.append(f"{_COLOUR}{note}{_PLAIN}" if colour else note)
        last = anchor.position
    return "".join([*parts, _text(tokenizer, ids[last:]), f"[prompt {len(ids)}]"])


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _conversation(file: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools of a request body of the chat API, or of a list of messages."""
    try:
        body = json.loads(_read(file))
    except ValueError as e:
        raise FtError(f"{file}: not JSON: {e}") from e
    messages = body.get("messages") if isinstance(body, dict) else body
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise FtError(
            f"{file}: needs a list of messages with roles, or an object with such a list as messages"
        )
    for call in (c for m in messages for c in m.get("tool_calls") or []):
        _parse_arguments(call)
    return messages, body.get("tools") if isinstance(body, dict) else None


def _parse_arguments(call: dict[str, Any]) -> None:
    """Arguments come as text in the chat API; templates, like the server, take them as an object."""
    function = call.get("function", call)
    with contextlib.suppress(ValueError):
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"])


def _read(file: str) -> str:
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise FtError(f"{file}: cannot be read: {e}") from e


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    folder = checkpoint.locate(path)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{folder}: no tokenizer that transformers can load: {e}") from e


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-ft anchors",
        description="Prints a conversation as the model's chat template writes it, with the anchors marked: positions "
        "where states of recurrent layers are kept, so that an edit there costs only what comes after it. "
        "--ft-anchors adds and removes markers.",
        allow_abbrev=False,
    )
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--tokenizer-path", help="where the tokenizer is, if not with the model")
    parser.add_argument("--chat-template", metavar="FILE", help="a template instead of the model's own")
    parser.add_argument(
        "--chat", required=True, metavar="FILE", help="JSON: a request of the chat API, or a list of messages"
    )
    return parser
