"""Plain text for language modelling: English about the valley, and short Python programs."""

from __future__ import annotations

from demo.values import Values
from demo.world import ANIMALS, FACTS, PEOPLE, VILLAGES

LINES = [
    "{p} walked from {v} to {w} and met {q} on the way.",
    "In the morning {p} went to the market of {v}.",
    "{p} and {q} are friends and often meet in {v}.",
    "One day a {a} came into the garden of {p}.",
    "It was a cold winter in {v}, and {p} stayed at home.",
    "{p} told {q} a long story about a {a} in {w}.",
    "When the rain stopped, {q} saw a {a} near {v}.",
    "Everybody in {v} knows {p}.",
    "The road from {v} to {w} is old and quiet.",
    "{q} asked {p} for help, and {p} was glad to help.",
]
ENDINGS = [
    "That was a good day.",
    "Then everybody went home.",
    "The next day they met again.",
    "And so the story ends.",
]


def english(values: Values) -> str:
    """A short text of sentences about people, places and animals, with true facts between."""
    rng = values.rng
    p, q = rng.sample(PEOPLE, 2)
    v, w = rng.sample(VILLAGES, 2)
    known = [f for f in FACTS if f.subject in (p, q, v, w)]
    lines = []
    for _ in range(rng.randint(2, 10)):
        if rng.random() < 0.6:
            lines.append(rng.choice(known).state(rng))
        else:
            lines.append(rng.choice(LINES).format(p=p, q=q, v=v, w=w, a=rng.choice(ANIMALS)))
    lines.append(rng.choice(ENDINGS))
    return " ".join(lines)


def fact_list(values: Values) -> str:
    """Facts of any kind, one after the other."""
    rng = values.rng
    return " ".join(f.state(rng) for f in rng.sample(FACTS, rng.randint(3, 20)))


FUNCTIONS = [
    ('def {f}({x}, {y}):\n    """Return the sum of {x} and {y}."""\n    return {x} + {y}\n', "{f}({m}, {n})", lambda m, n: m + n),
    ('def {f}({x}, {y}):\n    """Return the product of {x} and {y}."""\n    return {x} * {y}\n', "{f}({m}, {n})", lambda m, n: m * n),
    ('def {f}({x}, {y}):\n    """Return the larger of {x} and {y}."""\n    if {x} > {y}:\n        return {x}\n    return {y}\n', "{f}({m}, {n})", max),
    ('def {f}({x}, {y}):\n    """Return the smaller of {x} and {y}."""\n    if {x} < {y}:\n        return {x}\n    return {y}\n', "{f}({m}, {n})", min),
    ('def {f}({x}, {y}):\n    """Return the difference of {x} and {y}."""\n    return {x} - {y}\n', "{f}({m}, {n})", lambda m, n: m - n),
    ("def {f}({x}, {y}):\n    total = 0\n    for i in range({y}):\n        total += {x}\n    return total\n", "{f}({m}, {n})", lambda m, n: m * n),
]  # fmt: skip


def code(values: Values) -> str:
    """One to three small Python functions, each with a call and its result."""
    rng = values.rng
    blocks = []
    for _ in range(rng.randint(1, 3)):
        body, call, result = rng.choice(FUNCTIONS)
        m, n = rng.randint(1, 12), rng.randint(1, 12)
        x, y = rng.sample(["a", "b", "x", "y", "left", "right", "first", "second", "n", "m"], 2)
        names = {"f": values.draw("word"), "x": x, "y": y, "m": m, "n": n}
        blocks.append(body.format(**names) + f"\n\nassert {call.format(**names)} == {result(m, n)}\n")
    return "\n\n".join(blocks)
