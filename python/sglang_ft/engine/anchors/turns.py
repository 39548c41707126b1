"""Past turns keep their token ids: prompts of the chat API and those that are made into it, in the HTTP process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_ft.anchors.turns import TurnMemory
from sglang_ft.engine.hook import Hook


class ChatPrompt(list):
    """Token ids that a chat template gave, not a client."""


class Turns:
    """The memory of this process's server; made with the first prompt, once there is a tokenizer."""

    def __init__(self) -> None:
        self._memory: TurnMemory | None = None

    def memory(self, tokenizer: Any) -> TurnMemory:
        if self._memory is None:

            def decode(ids: Any) -> str:
                return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

            self._memory = TurnMemory(decode, tokenizer.get_added_vocab().values())
        return self._memory

    def rendered(self, result: Any, serving: Any, request: Any, tools: Any, is_multimodal: bool) -> Any:
        """After a chat template has been applied; images have ids of their own making."""
        if is_multimodal and (result.image_data or result.video_data or result.audio_data):
            return result
        if isinstance(result.prompt_ids, list):
            memory = self.memory(serving.tokenizer_manager.tokenizer)
            result.prompt_ids = ChatPrompt(memory.splice(result.prompt_ids))
        return result

    async def generated(
        self, original: Callable, manager: Any, obj: Any, request: Any = None
    ) -> AsyncIterator[Any]:
        """Around the generation of an answer. Whoever wants one output only leaves before the end."""
        last: Any = None
        parts: list[int] = []
        try:
            async with aclosing(original(manager, obj, request)) as outputs:
                async for output in outputs:
                    last = output
                    if manager.incremental_streaming_output and isinstance(output, dict):
                        parts += output.get("output_ids") or []
                    yield output
        finally:
            self._remember(manager, obj, last, parts)

    def _remember(self, manager: Any, obj: Any, last: Any, parts: list[int]) -> None:
        prompt = getattr(obj, "input_ids", None)
        if not isinstance(prompt, ChatPrompt) or not isinstance(last, dict):
            return
        output = parts or last.get("output_ids")
        if output and isinstance(output[0], int) and last["meta_info"].get("finish_reason"):
            self.memory(manager.tokenizer).remember(prompt, output)


def hooks() -> list[Hook]:
    """Hooks for the HTTP process."""
    turns = Turns()
    return [
        Hook(
            "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._apply_jinja_template",
            HookType.AFTER,
            turns.rendered,
            "(self, request, tools, is_multimodal)",
        ),
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
            HookType.AROUND,
            turns.generated,
            "(self, obj, request=None)",
        ),
    ]
