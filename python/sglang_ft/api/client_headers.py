"""Lines that a client writes at the top of the system prompt for its provider, and that change with every call.

They tell the model nothing, and each new value would make the whole prompt a different prefix. Only lines of a known
name at the very beginning are taken out; everything else stays as the client sent it.
"""

from __future__ import annotations

import re
from typing import Any

# Claude Code's: "x-anthropic-billing-header: cc_version=...; cc_entrypoint=...; cch=...;"
_VOLATILE = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")


def without_volatile_lines(body: Any) -> Any:
    """A request body of the messages or the chat API with the lines taken out; others as they are."""
    if not isinstance(body, dict):
        return body
    if "system" in body:
        return {**body, "system": _cleaned(body["system"])}
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        return body
    if messages[0].get("role") not in ("system", "developer"):
        return body
    return {
        **body,
        "messages": [{**messages[0], "content": _cleaned(messages[0].get("content"))}, *messages[1:]],
    }


def _cleaned(system: Any) -> Any:
    """A text, or a list of blocks of text of which one that held nothing else is left out."""
    if isinstance(system, str):
        return _VOLATILE.sub("", system)
    if not isinstance(system, list) or not system:
        return system
    block = system[0]
    if not isinstance(block, dict) or not isinstance(block.get("text"), str):
        return system
    text = _VOLATILE.sub("", block["text"])
    if text == block["text"]:
        return system
    return [{**block, "text": text}, *system[1:]] if text.strip() else system[1:]
