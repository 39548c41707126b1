"""What agent harnesses do to their history before they send it again, as functions of the whole history.

Each is written after the public behaviour of a kind of harness; contents are made up, and the same for every run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Message = dict[str, Any]

KEPT_RESULTS = 4
KEPT_OBSERVATIONS = 3
_WORDS = (
    "buffer index table driver socket packet kernel module thread signal handle memory cursor vector matrix record "
    "column branch commit parser lexer symbol linker loader object header status cache layer token stream reader"
).split()


class Sizes(NamedTuple):
    """Words of the parts of a session; a word is one to three tokens."""

    system: int = 300
    user: int = 40
    thinking: int = 80
    result: int = 350
    answer: int = 30


class Session:
    """An agent at work: each step the history grows by an assistant turn with a tool call, and its result."""

    def __init__(self, seed: int, sizes: Sizes, steps_of_a_task: int = 6) -> None:
        self._random = random.Random(seed)
        self._sizes = sizes
        self._steps_of_a_task = steps_of_a_task
        self._steps = 0
        self.history: list[Message] = [{"role": "system", "content": self._text(sizes.system)}]
        self._ask()

    def _text(self, words: int) -> str:
        lines = []
        while words > 0:
            line = [self._random.choice(_WORDS) for _ in range(min(words, self._random.randint(6, 14)))]
            lines.append(f"{self._random.randint(1, 999)}: " + " ".join(line))
            words -= len(line)
        return "\n".join(lines)

    def _ask(self) -> None:
        self.history.append({"role": "user", "content": self._text(self._sizes.user)})

    def step(self) -> None:
        """The model thinks and calls a tool, or at the end of a task answers and is asked something else."""
        self._steps += 1
        thinking = self._text(self._sizes.thinking)
        if self._steps % self._steps_of_a_task == 0:
            answer = {"content": self._text(self._sizes.answer), "reasoning_content": thinking}
            self.history.append({"role": "assistant", **answer})
            self._ask()
            return
        name = f"call{self._steps:05d}"
        arguments = {"path": f"src/{self._random.choice(_WORDS)}.py", "line": self._random.randint(1, 999)}
        call = {"id": name, "type": "function", "function": {"name": "read", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "reasoning_content": thinking, "tool_calls": [call]}
        self.history.append(turn)
        text = self._text(self._random.randint(self._sizes.result // 2, self._sizes.result * 3 // 2))
        self.history.append({"role": "tool", "content": text, "tool_call_id": name})


def drop_thinking(history: list[Message]) -> list[Message]:
    """Thinking of all assistant turns but the last is dropped."""
    turns = [i for i, m in enumerate(history) if m["role"] == "assistant"]
    old = set(turns[:-1])
    return [{**m, "reasoning_content": ""} if i in old else m for i, m in enumerate(history)]


def clear_old_results(history: list[Message]) -> list[Message]:
    """Tool outputs older than a window become a placeholder."""
    return _replace_results(history, KEPT_RESULTS, "[Old tool result content cleared]")


def elide_observations(history: list[Message]) -> list[Message]:
    """All but the last n observations are elided, each to the number of its lines; thinking is not sent."""
    results = [i for i, m in enumerate(history) if m["role"] == "tool"]
    old = set(results[:-KEPT_OBSERVATIONS])
    shown = []
    for i, message in enumerate(history):
        if i in old:
            lines = message["content"].count("\n") + 1
            message = {**message, "content": f"Old environment output: ({lines} lines omitted)"}
        shown.append({**message, "reasoning_content": ""} if message["role"] == "assistant" else message)
    return shown


def _replace_results(history: list[Message], kept: int, placeholder: str) -> list[Message]:
    results = [i for i, m in enumerate(history) if m["role"] == "tool"]
    old = set(results[:-kept])
    return [{**m, "content": placeholder} if i in old else m for i, m in enumerate(history)]


class Summarising:
    """When the history has grown by so many messages, all but the newest become one summary after the system prompt."""

    def __init__(self, every: int = 24, kept: int = 5) -> None:
        self._every, self._kept = every, kept
        self._summarised = 1

    def __call__(self, history: list[Message]) -> list[Message]:
        if len(history) - self._summarised >= self._every:
            self._summarised = len(history) - self._kept
            while history[self._summarised]["role"] == "tool":
                self._summarised -= 1
        if self._summarised == 1:
            return list(history)
        summary = f"Summary of {self._summarised} messages: the work is under way."
        return [history[0], {"role": "user", "content": summary}, *history[self._summarised :]]


def as_it_is(history: list[Message]) -> list[Message]:
    """Nothing is edited."""
    return list(history)


HARNESSES: dict[str, Callable[[], Callable[[list[Message]], list[Message]]]] = {
    "drop_thinking": lambda: drop_thinking,
    "clear_old_results": lambda: clear_old_results,
    "elide_observations": lambda: elide_observations,
    "summarise": Summarising,
    "second_agent": lambda: as_it_is,
}


def requests(name: str, seed: int, sizes: Sizes) -> Iterator[list[Message]]:
    """The conversations that a harness sends, one a turn, without end; a second agent works in between."""
    view = HARNESSES[name]()
    first, second = Session(seed, sizes), Session(seed + 1000, sizes)
    while True:
        yield view(first.history)
        first.step()
        if name == "second_agent":
            yield view(second.history)
            second.step()
