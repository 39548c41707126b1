"""Tools that do not exist: a random verb, noun and parameters, so that the model must read the schema."""

from __future__ import annotations

from demo.toolbox import Param, ToolSpec
from demo.values import Values, digest

VERBS = """archive approve assign block boost check clone close compress count decode disable enable encode export
freeze hide import index inspect invite label launch lock merge mute notify open pause pin print publish rebuild
refund reject release renew reset restart resume review scan share sign sort split start stop submit sync tag
test unlock update upload validate verify""".split()
NOUNS = """invoice ticket account playlist sensor camera robot door report contract channel container branch device
folder group job key page parcel policy queue rule session task team token vehicle wallet pump valve oven drone
lamp server database printer backup cache window alarm ship garden machine""".split()
LEVELS = [
    "low|medium|high",
    "fast|slow",
    "small|large",
    "public|private",
    "daily|weekly|monthly",
    "red|green|blue",
    "left|right",
]
# Words of a request around a value, the schema names that may take it, and its kind.
PHRASES = [
    ("for {}", "person|name|owner|user", "name"),
    ("in {}", "city|location|place", "city"),
    ("on {}", "date|day", "date"),
    ("at {}", "time|start|when", "time"),
    ("and send it to {}", "email|recipient|to", "email"),
    ('with the note "{}"', "note|comment|text", "sentence"),
    ("{} times", "count|times|repeat", "int:2:40"),
    ("with the code {}", "code|pin|key", "code"),
    ("from the file {}", "path|file|source", "path"),
    ("with {} items", "items|count|size", "int:1:500"),
    ("under the name {}", "name|title|label", "word"),
]


def _pair(values: Values) -> tuple[str, str]:
    """A verb and a noun; one pair in six is held out."""
    while True:
        verb = values.rng.choice(VERBS) if values.rng.random() < 0.85 else values.invented(2, 2)
        noun = values.rng.choice(NOUNS) if values.rng.random() < 0.75 else values.invented(2, 3)
        if (digest(f"{verb} {noun}") % 6 == 0) == values.held_out:
            return verb, noun


def _tool_name(values: Values, verb: str, noun: str) -> str:
    return values.rng.choice(
        [
            f"{verb}_{noun}",
            f"{verb}_{noun}",
            f"{noun}_{verb}",
            f"{verb}{noun.capitalize()}",
            f"{verb.capitalize()}{noun.capitalize()}",
            f"{verb}-{noun}",
            f"{verb}_the_{noun}",
            verb,
        ]
    )


def _object(values: Values, noun: str) -> tuple[str, Param] | None:
    """How the request points at the noun, and the parameter that takes it."""
    kind = values.rng.choice(["code", "code", "int:1:9999", "word", "name", ""])
    if not kind:
        return None
    names = {
        "code": f"{noun}_id|id|{noun}|number",
        "word": f"{noun}_name|name|{noun}",
        "name": f"{noun}|name|owner",
    }
    about = (f"The {noun}", f"Which {noun}", f"Id of the {noun}")
    return " {object}", Param(
        "object", tuple(names.get(kind, f"{noun}_id|id|number").split("|")), kind, about
    )


def _extra(values: Values, index: int) -> tuple[str, Param]:
    """One more parameter with its words in the request."""
    slot, rng = f"extra{index}", values.rng
    style = rng.random()
    if style < 0.45:
        words, names, kind = rng.choice(PHRASES)
        return " " + words.format("{" + slot + "}"), Param(slot, tuple(names.split("|")), kind, ("",))
    word = rng.choice(
        ["priority", "mode", "size", "level", "color", "speed", "limit", "group", "version", "tag"]
    )
    if rng.random() < 0.5:
        word = values.invented(2, 2)
    lead = rng.choice(
        [
            " with {w} {v}",
            " with the {w} {v}",
            " and set {w} to {v}",
            ", {w}: {v}",
            ", {w} {v}",
            " with {w}={v}",
        ]
    )
    text = lead.format(w=word, v="{" + slot + "}")
    if style < 0.75:
        choices = tuple(rng.choice(LEVELS).split("|"))
        return text, Param(slot, (word,), "choice", ("", f"The {word}"), choices=choices)
    kind = rng.choice(["int:0:999", "word", "code", "name", "amount", "bool"])
    return text, Param(slot, (word,), kind, ("", f"The {word}"))


def made_up_tool(values: Values) -> ToolSpec:
    """A tool of a made-up verb, noun and up to four parameters."""
    rng = values.rng
    verb, noun = _pair(values)
    tail, params = "", []
    found = _object(values, noun)
    if found:
        tail, params = found[0], [found[1]]
    taken = {name for q in params for name in q.names}
    for index in range(rng.choice([0, 0, 1, 1, 2, 3])):
        words, param = _extra(values, index)
        if taken.isdisjoint(param.names):
            taken.update(param.names)
            tail += words
            params.append(param)
    what = f"{verb} the {noun}{tail}"
    asks = [
        f"{what[0].upper()}{what[1:]}.",
        f"Please {what}.",
        f"Can you {what}?",
        f"I want to {what}.",
        f"{verb.capitalize()} {noun}{tail}",
        f"I need you to {what}.",
        f"Can you {what} for me?",
        f"Could you {what}?",
        f"Would you {what}, please?",
        f"I would like you to {what}.",
    ]
    about = (
        f"{verb.capitalize()} a {noun}",
        f"{verb.capitalize()} the {noun}",
        f"{verb.capitalize()} one {noun}",
    )
    return ToolSpec((_tool_name(values, verb, noun),), about, tuple(params), tuple(asks))
