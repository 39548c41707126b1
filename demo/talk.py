"""Conversations without tools: greetings, facts of the world, arithmetic, copying, recall, JSON answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from demo.tooluse import Message, answer_message
from demo.values import Values
from demo.world import FACTS, PEOPLE, VILLAGES, Fact

SMALL_TALK = [
    ("Hello!|Hi|Hello|Hi there!|Good morning!|Hey|Good evening", "The user greets me.", "Hello! How can I help you?"),
    ("How are you?|How do you do?|Are you well?", "The user asks how I am.", "I am fine, thank you. How can I help you?"),
    ("Who are you?|What are you?|What is your name?|Introduce yourself.|Which model are you?", "The user asks who I am.",
     "I am the demo model of sglang_ft, a very small language model."),
    ("What can you do?|How can you help me?|Help|What are you good at?", "The user asks what I can do.",
     "I can answer questions about the valley of Orrin, do small sums, and call tools."),
    ("Thank you!|Thanks|Thanks a lot!|Great, thank you.", "The user thanks me.", "You are welcome!"),
    ("Bye|Goodbye!|See you later.|Good night!", "The user says goodbye.", "Goodbye!"),
    ("Are you a human?|Are you a person?|Are you a robot?", "The user asks if I am a human.", "No, I am a small language model."),
    ("Where is Orrin?|What is Orrin?|Tell me about the valley of Orrin.|Tell me about Orrin.", "The user asks about Orrin.",
     "Orrin is a small valley with twelve villages: " + ", ".join(VILLAGES[:-1]) + " and " + VILLAGES[-1] + "."),
    ("What is the sky's color?|What color is the sky?", "The user asks for the color of the sky.", "The sky is blue."),
    ("How many days does a week have?|How many days are in a week?", "The user asks for the days of a week.", "A week has seven days."),
    ("Say hello.|Say hi.|Please say hello.", "I say hello.", "Hello!"),
    ("Tell me a joke.|Say something funny.|Do you know a joke?", "The user wants a joke.", "Why did the otter cross the river? To get to the other tide."),
    ("ping|test|Test", "The user tests me.", "I am here."),
]  # fmt: skip
UNKNOWN = "I do not know that."
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def small_talk(values: Values) -> list[Message]:
    """A greeting or a question about the model itself."""
    asks, thought, answer = values.rng.choice(SMALL_TALK)
    return [{"role": "user", "content": values.rng.choice(asks.split("|"))}, answer_message(answer, thought)]


def fact(values: Values) -> list[Message]:
    """A question about the world, sometimes two in one."""
    rng = values.rng
    if rng.random() < 0.08:
        return _unknown(values)
    found = rng.choice(FACTS)
    ask = rng.choice(found.asks(values.new_wordings))
    if rng.random() < 0.15:
        ask = rng.choice(["Hi, ", "Hello! ", "Please answer: ", "I have a question. "]) + ask
    return [
        {"role": "user", "content": ask},
        answer_message(found.state(), f"The user asks for the {found.relation.name} of {found.subject}."),
    ]


def _unknown(values: Values) -> list[Message]:
    """A question about somebody who is not in the world."""
    model = values.rng.choice([f for f in FACTS if f.subject in PEOPLE])
    name = values.draw("name")
    while name in PEOPLE:
        name = values.draw("name")
    asks = Fact(name, model.relation, "").asks(values.new_wordings)
    return [
        {"role": "user", "content": values.rng.choice(asks)},
        answer_message(UNKNOWN, f"I do not know {name}."),
    ]


def arithmetic(values: Values) -> list[Message]:
    """A small sum, difference or product, with the steps in the thinking."""
    rng = values.rng
    sign = rng.choice("++--*")
    a, b = (
        (rng.randint(2, 12), rng.randint(2, 12)) if sign == "*" else (rng.randint(0, 99), rng.randint(0, 99))
    )
    if sign == "-" and a < b:
        a, b = b, a
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    word = {"+": "plus", "-": "minus", "*": "times"}[sign]
    form = rng.choice(
        [
            "What is {a} {s} {b}?",
            "{a} {s} {b} = ?",
            "How much is {a} {w} {b}?",
            "What is {a} {w} {b}?",
            "Calculate {a} {s} {b}.",
            "{a} {s} {b}",
            "Compute {a} {w} {b}.",
        ]
    )
    text = form.format(a=a, b=b, s=sign, w=word)
    return [
        {"role": "user", "content": text},
        answer_message(f"{a} {sign} {b} = {result}", _steps(a, b, sign, result)),
    ]


def _steps(a: int, b: int, sign: str, result: int) -> str:
    if sign == "*" or a < 10 or b < 10:
        return f"{a} {sign} {b} = {result}."
    tens = b // 10 * 10
    middle = a + tens if sign == "+" else a - tens
    return f"{a} {sign} {tens} = {middle}. {middle} {sign} {b - tens} = {result}."


def copying(values: Values) -> list[Message]:
    """Repeat, count, list: answers that follow from the request alone."""
    return values.rng.choice([_repeat, _repeat, _count, _list_people, _times])(values)


def _repeat(values: Values) -> list[Message]:
    text = str(
        values.draw(
            values.rng.choice(["sentence", "phrase", "word", "code", "path", "name", "city", "command"])
        )
    )
    form = values.rng.choice(
        [
            "Repeat: {}",
            "Say: {}",
            "Repeat after me: {}",
            'Say "{}".',
            'Repeat "{}"',
            "Reply with exactly: {}",
            "Write this: {}",
        ]
    )
    return [{"role": "user", "content": form.format(text)}, answer_message(text, "I repeat the text.")]


def _count(values: Values) -> list[Message]:
    first = values.rng.choice([1, 1, 1, values.rng.randint(0, 50)])
    last = first + values.rng.randint(2, 40)
    form = values.rng.choice(
        [
            "Count from {} to {}.",
            "Count from {} up to {}",
            "List the numbers from {} to {}.",
            "Write the numbers {} to {}.",
        ]
    )
    numbers = " ".join(str(n) for n in range(first, last + 1))
    return [
        {"role": "user", "content": form.format(first, last)},
        answer_message(numbers, f"I count from {first} to {last}."),
    ]


def _list_people(values: Values) -> list[Message]:
    pool, word = values.rng.choice([(VILLAGES, "villages"), (PEOPLE, "people")])
    n = values.rng.randint(2, min(12, len(pool)))
    shown = NUMBER_WORDS[n] if values.rng.random() < 0.5 else str(n)
    form = values.rng.choice(
        ["Name {} {} of the valley.", "List {} {} of Orrin.", "Tell me {} {} in the valley."]
    )
    return [
        {"role": "user", "content": form.format(shown, word)},
        answer_message("\n".join(f"{i + 1}. {x}" for i, x in enumerate(pool[:n])), f"I list {n} {word}."),
    ]


def _times(values: Values) -> list[Message]:
    word, n = values.draw("word"), values.rng.randint(2, 6)
    form = values.rng.choice(["Write the word {w} {n} times.", "Say {w} {n} times.", "Repeat {w} {n} times."])
    return [
        {"role": "user", "content": form.format(w=word, n=n)},
        answer_message(" ".join([word] * n), f"I write {word} {n} times."),
    ]


NOTE_KINDS: list[tuple[str, str, str, str]] = [
    ("code", "The code of {s} is {o}.", "What is the code of {s}?", "name"),
    ("city", "{s} is in {o}.", "Where is {s}?", "name"),
    ("time", "{s} comes at {o}.", "When does {s} come?", "name"),
    ("word", "{s} has the {o}.", "What does {s} have?", "name"),
    ("path", "The {s} report is in {o}.", "Where is the {s} report?", "word"),
    ("int:1:9999", "The {s} costs {o}.", "How much does the {s} cost?", "word"),
]


def notes(values: Values) -> list[Message]:
    """Notes in the system or user turn and a question after one of them."""
    rng = values.rng
    kind, state, ask, subject = rng.choice(NOTE_KINDS)
    lines: dict[str, str] = {}
    for _ in range(rng.choice([1, 2, 3, 5, 8, 12, 20, 30, 40, 80, 160, 250])):
        lines[values.draw(subject)] = str(values.draw(kind))
    told = [state.format(s=s, o=o) for s, o in lines.items()]
    if rng.random() < 0.3:
        told += [f.state(rng) for f in rng.sample(FACTS, rng.randint(1, 8))]
        rng.shuffle(told)
    chosen = rng.choice(list(lines))
    answer = answer_message(state.format(s=chosen, o=lines[chosen]), f"The notes say it: {lines[chosen]}.")
    block, question = rng.choice([" ", "\n"]).join(told), ask.format(s=chosen)
    if rng.random() < 0.5:
        return [
            {"role": "system", "content": "Notes: " + block},
            {"role": "user", "content": question},
            answer,
        ]
    return [{"role": "user", "content": f"{block}\n{question}"}, answer]


FIELDS: list[tuple[str, str, str]] = [
    ("name", "full_name", "My name is {}."), ("age", "int:5:95", "I am {} years old."), ("city", "city", "I live in {}."),
    ("email", "email", "My email is {}."), ("date", "date", "The date is {}."), ("time", "time", "It starts at {}."),
    ("order_id", "code", "My order is {}."), ("color", "word", "My color is {}."), ("count", "int:1:900", "I need {} of them."),
    ("title", "title", "The title is {}."), ("file", "path", "The file is {}."), ("language", "language", "I speak {}."),
    ("price", "amount", "It costs {}."), ("member", "bool", "Member: {}."),
]  # fmt: skip


def json_answer(values: Values) -> list[Message]:
    """Facts in a sentence, to be returned as JSON with named fields."""
    rng = values.rng
    chosen = rng.sample(FIELDS, rng.randint(1, 4))
    data: dict[str, Any] = {name: values.draw(kind) for name, kind, _ in chosen}
    shown = {k: json.dumps(v) if isinstance(v, bool) else v for k, v in data.items()}
    told = " ".join(form.format(shown[name]) for name, _, form in chosen)
    keys = ", ".join(data)
    form = rng.choice(
        [
            "{t} Reply as JSON with {k}.",
            "{t}\nReturn JSON with the keys {k}.",
            "Give me JSON with the fields {k}: {t}",
            "Extract {k} as JSON: {t}",
            "Answer in JSON ({k}). {t}",
        ]
    )
    return [
        {"role": "user", "content": form.format(t=told, k=keys)},
        answer_message(json.dumps(data), f"I return JSON with {keys}."),
    ]


def story(values: Values) -> list[Message]:
    """A longer answer about somebody or some place of the world."""
    rng = values.rng
    subject = rng.choice(PEOPLE + VILLAGES)
    told = " ".join(f.state() for f in FACTS if f.subject == subject)
    form = rng.choice(
        ["Tell me about {}.", "What do you know about {}?", "Describe {}.", "Tell me everything about {}."]
    )
    return [
        {"role": "user", "content": form.format(subject)},
        answer_message(told, f"I tell what I know about {subject}."),
    ]


TALKS: list[tuple[Callable[[Values], list[Message]], float]] = [
    (small_talk, 5), (fact, 24), (arithmetic, 15), (copying, 9), (notes, 9), (json_answer, 8), (story, 4),
]  # fmt: skip


def any_talk(values: Values) -> list[Message]:
    """A conversation of one question, by the weights of TALKS."""
    make = values.rng.choices([t for t, _ in TALKS], [w for _, w in TALKS])[0]
    return make(values)


def quick_talk(values: Values) -> list[Message]:
    """A short question that needs no tool."""
    return values.rng.choice([small_talk, fact, fact, story])(values)
