"""What SGLang's parsers of thinking and tool calls look for, as texts of markers."""

from __future__ import annotations

import contextlib

from sglang_ft.anchors.rules import Kind

_THINKING = ("think_start_token", "think_end_token")
_TOOLS = ("bot_token", "eot_token")


def parser_markers(reasoning_parser: str | None, tool_call_parser: str | None) -> list[tuple[str, Kind]]:
    """Texts and kinds of the named parsers; nothing for one that is not known or needs more than its name."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    found: list[tuple[str, Kind]] = []
    for registry, name, attributes, kind in (
        (ReasoningParser.DetectorMap, reasoning_parser, _THINKING, Kind.THINKING),
        (FunctionCallParser.ToolCallParserEnum, tool_call_parser, _TOOLS, Kind.TOOL_CALL),
    ):
        detector = registry.get((name or "").lower())
        if detector is None:
            continue
        with contextlib.suppress(TypeError):  # a detector that takes arguments
            made = detector()
            texts = [getattr(made, attribute, None) for attribute in attributes]
            found += [(text.strip(), kind) for text in texts if isinstance(text, str) and text.strip()]
    return found
