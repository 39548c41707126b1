"""Conversations with tools: which tools are offered, what the user asks, which calls are right, what follows.

Messages and tools are in the OpenAI form, with call arguments as dicts, just as SGLang hands them to the chat
template. `reasoning_content` holds the thinking.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

from demo.made_up import made_up_tool
from demo.toolbox import TOOLS, Param, ToolSpec
from demo.values import Values

Message = dict[str, Any]
# Tools near in meaning: none of a group is offered where another of it is asked for in vain.
GROUPS = [
    "calculate add multiply", "get_weather get_forecast", "search_web fetch_url get_news define_word find_recipe",
    "set_reminder create_event set_timer", "take_note write_file add_to_list", "send_email send_message",
    "get_user find_contact create_user", "get_order cancel_order track_package", "convert_units convert_currency",
    "read_file list_directory run_command search_files delete_file move_file write_file",
]  # fmt: skip
ERRORS = [
    "not found",
    "timeout",
    "permission denied",
    "service unavailable",
    "invalid value",
    "no connection",
    "too many requests",
]
REFUSALS = [
    "I am sorry, none of my tools can do that.",
    "I have no tool for that.",
    "I cannot do that, because I have no tool for it.",
]


@dataclass(frozen=True)
class Offer:
    """One tool as offered in a request: its spec, its name there, and the schema name of each slot."""

    spec: ToolSpec
    name: str
    tool: dict[str, Any]
    names: dict[str, str]


@dataclass(frozen=True)
class Task:
    """One thing that the user wants and the call that does it."""

    text: str
    offer: Offer
    arguments: dict[str, Any]
    slots: dict[str, Any]


def _property(param: Param, rng: random.Random) -> dict[str, Any]:
    if param.choices:
        schema: dict[str, Any] = {"type": "string", "enum": list(param.choices)}
    elif param.kind.startswith("int:"):
        schema = {"type": "number" if rng.random() < 0.15 else "integer"}
    else:
        schema = {"type": {"amount": "number", "bool": "boolean"}.get(param.kind, "string")}
    about = rng.choice(param.about)
    if about and rng.random() < 0.75:
        schema["description"] = about
    if rng.random() < 0.05:
        schema = {"title": param.slot.title(), **schema}
    return schema


def make_offer(spec: ToolSpec, rng: random.Random) -> Offer:
    """A schema for a tool, with names, descriptions and extras drawn from its variants."""
    name = spec.names[0] if rng.random() < 0.4 else rng.choice(spec.names)
    if rng.random() < 0.04:
        name = f"mcp__{rng.choice(['server', 'home', 'tools', 'office'])}__{name}"
    names: dict[str, str] = {}
    properties: dict[str, Any] = {}
    required = []
    for param in spec.params:
        if param.optional and rng.random() < 0.4:
            continue
        free = [n for n in param.names if n not in properties] or [param.slot]
        key = free[0] if rng.random() < 0.4 else rng.choice(free)
        names[param.slot] = key
        properties[key] = _property(param, rng)
        if not param.optional:
            required.append(key)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required or rng.random() < 0.5:
        parameters["required"] = required
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    if rng.random() < 0.05:
        parameters = {"$schema": "http://json-schema.org/draft-07/schema#", **parameters}
    function: dict[str, Any] = {"description": None, "name": name, "parameters": parameters, "strict": False}
    if rng.random() < 0.95:
        function["description"] = rng.choice(spec.about) + rng.choice(["", "", "."])
    return Offer(spec, name, {"type": "function", "function": function}, names)


def _fill(form: str, offer: Offer, chosen: dict[str, Any]) -> str:
    """A request wording with its values; bracketed parts go where their slot has no value."""

    def bracket(match: re.Match[str]) -> str:
        slots = re.findall(r"{(\w+)}", match.group(1))
        return match.group(1) if all(s in chosen for s in slots) else ""

    text = re.sub(r"\[([^\]]*)\]", bracket, form)
    return re.sub(r"{(\w+)}", lambda m: _as_text(chosen[m.group(1)]), text)


def _as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _polite(text: str, form: str, rng: random.Random) -> str:
    """The request with small talk around it."""
    if rng.random() < 0.25:
        lead = rng.choice(["Hi, ", "Hello, ", "Please ", "Hey, ", "Now ", "OK, "])
        lower = form[0] not in '{["`' and not form.startswith("I ")
        text = lead + (text[0].lower() + text[1:] if lower else text)
    if rng.random() < 0.08:
        text += rng.choice([" Thanks.", " Thank you!", " Please.", " It is urgent."])
    return text


def _direct(offer: Offer, chosen: dict[str, Any], rng: random.Random) -> str:
    """A request that names the tool and its parameters itself."""
    join = rng.choice([" {} = {}", " {} {}", " {}={}", " {}: {}"])
    parts = [
        join.format(offer.names[s], json.dumps(v) if rng.random() < 0.2 else _as_text(v)).strip()
        for s, v in chosen.items()
    ]
    lead = rng.choice(["Call {}", "Use {}", "Call the tool {}", "Use the tool {}", "Please call {}"]).format(
        offer.name
    )
    return lead + (" with " + ", ".join(parts) if parts else "") + "."


def make_task(offer: Offer, values: Values, fixed: dict[str, Any] | None = None) -> Task:
    """A request for one offered tool and the call that answers it; `fixed` sets slots instead of drawing them."""
    rng = values.rng
    chosen: dict[str, Any] = {}
    for param in offer.spec.params:
        if param.slot not in offer.names or (param.optional and rng.random() < 0.5):
            continue
        chosen[param.slot] = rng.choice(param.choices) if param.choices else values.draw(param.kind)
    chosen.update(fixed or {})
    form = rng.choice(offer.spec.wordings(values.new_wordings))
    if not values.new_wordings and rng.random() < 0.08:
        text = _direct(offer, chosen, rng)
    else:
        shown = {slot for slot in chosen if "{" + slot + "}" in form}
        chosen = {slot: value for slot, value in chosen.items() if slot in shown}
        text = _polite(_fill(form, offer, chosen), form, rng)
    arguments = {offer.names[s]: chosen[s] for s in offer.names if s in chosen}
    return Task(text, offer, arguments, chosen)


def pick_offers(
    values: Values, wanted: list[ToolSpec], count: int, avoid: set[str] | None = None
) -> list[Offer]:
    """Offers for the wanted tools, in order, followed by distractors up to `count`; all names differ."""
    rng = values.rng
    offers: list[Offer] = []
    taken: set[str] = set()
    while len(offers) < max(count, len(wanted)):
        needed = len(offers) < len(wanted)
        spec = wanted[len(offers)] if needed else _any_spec(values)
        if not needed and (
            spec.names[0] in (avoid or set()) or any(o.spec.names == spec.names for o in offers)
        ):
            continue
        offer = make_offer(spec, rng)
        if offer.name in taken:
            if not needed:
                continue
            offer = _renamed(offer, f"{offer.name}_{len(offers) + 1}")
        taken.add(offer.name)
        offers.append(offer)
    return offers


def _renamed(offer: Offer, name: str) -> Offer:
    tool = {"type": "function", "function": {**offer.tool["function"], "name": name}}
    return Offer(offer.spec, name, tool, offer.names)


def _any_spec(values: Values) -> ToolSpec:
    return made_up_tool(values) if values.rng.random() < 0.35 else values.rng.choice(TOOLS)


def call_message(tasks: list[Task], thought: str) -> Message:
    """The assistant's turn that calls the tools of some tasks."""
    calls = [
        {"type": "function", "function": {"name": t.offer.name, "arguments": t.arguments}} for t in tasks
    ]
    return {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": calls}


def _need(offer: Offer) -> str:
    about = offer.tool["function"]["description"]
    if not about:
        return f"The tool {offer.name} fits."
    about = about.rstrip(".")
    return f"I need: {about[0].lower()}{about[1:]}. The tool is {offer.name}."


def think_call(tasks: list[Task], step: str = "") -> str:
    """Thinking before calls: what is needed and which tool does it."""
    if len(tasks) > 1:
        return f"There are {len(tasks)} tasks. " + " ".join(_need(t.offer) for t in tasks)
    return step + _need(tasks[0].offer)


def _field_value(kind: str, values: Values) -> Any:
    return values.rng.choice(kind.split(",")) if "," in kind else values.draw(kind)


def make_result(task: Task, values: Values, fixed: dict[str, Any] | None = None) -> tuple[str, str]:
    """What the tool returns for a task, and the sentence that tells the user."""
    rng = values.rng
    if fixed is None and rng.random() < 0.1:
        return _error(values)
    spec = task.offer.spec
    if not spec.answers or (fixed is None and rng.random() < 0.2):
        return _generic_result(values)
    fields = {name: _field_value(kind, values) for name, kind in spec.result} | (fixed or {})
    answer = rng.choice(spec.answers)
    answer = re.sub(r"{(\w+)}", lambda m: _as_text({**task.slots, **fields}[m.group(1)]), answer)
    if rng.random() < 0.12:
        return answer, answer
    if rng.random() < 0.4:
        fields = {**task.arguments, **fields}
    if rng.random() < 0.15:
        return ", ".join(f"{k}: {_as_text(v)}" for k, v in fields.items()), answer
    return json.dumps(fields), answer


def _error(values: Values) -> tuple[str, str]:
    rng = values.rng
    text = rng.choice(ERRORS) if rng.random() < 0.6 else values.draw("phrase")
    form = rng.choice(['{"error": "%s"}', "Error: %s", '{"status": "error", "message": "%s"}', "error: %s"])
    return form % text, f"That did not work. The tool says: {text}."


def _generic_result(values: Values) -> tuple[str, str]:
    """A result with fields that no tool announced; the answer reads them out."""
    rng = values.rng
    known = [
        "status",
        "id",
        "result",
        "count",
        "name",
        "message",
        "value",
        "total",
        "state",
        "code",
        "date",
        "size",
    ]
    kinds = ["word", "int:0:9999", "code", "name", "date", "phrase", "city", "amount", "time"]
    fields = {}
    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        key = rng.choice(known) if rng.random() < 0.6 else values.invented(2, 2)
        fields[key] = values.draw(rng.choice(kinds))
    if rng.random() < 0.3:
        text = values.draw(rng.choice(["sentence", "phrase", "word", "code", "int:0:99999"]))
        return str(text), f"Done. The result is: {text}"
    told = " and ".join(f"the {k} is {_as_text(v)}" for k, v in fields.items())
    return json.dumps(fields), f"Done: {told}."


def tool_message(index: int, content: str) -> Message:
    """A tool's result in the conversation."""
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": content}


def answer_message(answer: str, thought: str) -> Message:
    """A plain turn of the assistant."""
    return {"role": "assistant", "content": answer, "reasoning_content": thought}


def single(values: Values) -> tuple[list[Message], list[dict]]:
    """One request and its call, most often followed by the result and the answer; sometimes after earlier ones."""
    rng = values.rng
    wanted = _any_spec(values)
    offers = pick_offers(values, [wanted], rng.randint(1, 8))
    messages: list[Message] = []
    for _ in range(rng.choice([0, 0, 0, 0, 0, 1, 2, 3])):
        messages += _request(make_task(rng.choice(offers), values), values, finished=True)
    messages += _request(make_task(offers[0], values), values, finished=rng.random() < 0.5)
    rng.shuffle(offers)
    return messages, [o.tool for o in offers]


def _request(task: Task, values: Values, finished: bool) -> list[Message]:
    messages = [{"role": "user", "content": task.text}, call_message([task], think_call([task]))]
    return messages + finish([task], values) if finished else messages


def finish(tasks: list[Task], values: Values) -> list[Message]:
    """Results of the calls just made, and the answer."""
    results = [make_result(t, values) for t in tasks]
    messages = [tool_message(i, r[0]) for i, r in enumerate(results)]
    answer = " ".join(r[1] for r in results)
    failed = any("That did not work" in r[1] for r in results)
    thought = "A tool failed. I say so." if failed else "I have the result and tell the user."
    return [*messages, answer_message(answer, thought)]


def _joined(tasks: list[Task], rng: random.Random) -> str:
    first = tasks[0].text.rstrip()
    if first[-1] not in ".?!":
        first += "."
    return first + rng.choice([" Also: ", " And: ", " Also, ", " And then this: ", "\n", " "]) + tasks[1].text


def parallel(values: Values) -> tuple[list[Message], list[dict]]:
    """Two or three things at once: calls in one turn."""
    rng = values.rng
    cities = [t for t in TOOLS if [q.slot for q in t.params if not q.optional] == ["city"]]
    same = rng.random() < 0.5
    wanted = [rng.choice(cities)] if same else [_any_spec(values), _any_spec(values)]
    if not same and wanted[0].names == wanted[1].names:
        return parallel(values)
    offers = pick_offers(values, wanted, rng.randint(len(wanted), 6))
    if same:
        tasks, text = _same_tool(offers[0], values)
    else:
        tasks = [make_task(o, values) for o in offers[:2]]
        text = _joined(tasks, rng)
    rng.shuffle(offers)
    messages = [{"role": "user", "content": text}, call_message(tasks, think_call(tasks))]
    if rng.random() < 0.5:
        messages += finish(tasks, values)
    return messages, [o.tool for o in offers]


def _same_tool(offer: Offer, values: Values) -> tuple[list[Task], str]:
    """One tool for several cities, asked in one sentence."""
    cities = [values.draw("city") for _ in range(values.rng.choice([2, 2, 3]))]
    mark = "<cities>"
    task = make_task(offer, values, {"city": mark})
    while mark not in task.text:
        task = make_task(offer, values, {"city": mark})
    listed = ", ".join(cities[:-1]) + " and " + cities[-1]
    key = offer.names["city"]
    tasks = [Task("", offer, {**task.arguments, key: c}, {**task.slots, "city": c}) for c in cities]
    return tasks, task.text.replace(mark, listed)


def sequence(values: Values) -> tuple[list[Message], list[dict]]:
    """First one call, then another that may need the first one's result."""
    rng = values.rng
    chained = rng.random() < 0.5
    name_a, name_b, slot, key, form = rng.choice(CHAINS)
    specs = [_named(name_a), _named(name_b)] if chained else [_any_spec(values), _any_spec(values)]
    if specs[0].names == specs[1].names:
        return sequence(values)
    offers = pick_offers(values, specs, rng.randint(2, 6))
    if chained:
        kind = dict(specs[0].result)[key]
        value = _field_value(kind, values)
        tasks = [make_task(offers[0], values), make_task(offers[1], values, {slot: str(value)})]
        while slot not in tasks[1].slots:
            tasks[1] = make_task(offers[1], values, {slot: str(value)})
        other = _as_text(next(iter(v for s, v in tasks[1].slots.items() if s != slot), ""))
        text = (
            tasks[0].text.rstrip(" .?!")
            + ". "
            + rng.choice(["Then ", "After that, ", "Next, "])
            + form.format(other)
            + "."
        )
        fixed = {key: value}
    else:
        tasks = [make_task(o, values) for o in offers[:2]]
        text = rng.choice(
            ["First this: {} Then this: {}", "First: {}\nThen: {}", "{} When that is done: {}"]
        ).format(tasks[0].text, tasks[1].text)
        fixed = {}
    rng.shuffle(offers)
    result = make_result(tasks[0], values, fixed)[0]
    messages = [
        {"role": "user", "content": text},
        call_message(tasks[:1], think_call(tasks[:1], "This takes two steps. ")),
        tool_message(0, result),
        call_message(tasks[1:], think_call(tasks[1:], "The first step is done. ")),
    ]
    if rng.random() < 0.6:
        messages += finish(tasks[1:], values)
    return messages, [o.tool for o in offers]


# first tool, second tool, slot of the second that takes the first one's result, result field, words of the second step
CHAINS = [
    ("read_file", "send_message", "text", "content", "send the content to {}"),
    ("read_file", "take_note", "text", "content", "save its content as a note"),
    ("search_web", "fetch_url", "url", "url", "open the page you found"),
    ("get_user", "send_message", "to", "name", 'send that user the message "{}"'),
    ("fetch_url", "write_file", "content", "text", "write the text to {}"),
]


def _named(name: str) -> ToolSpec:
    return next(t for t in TOOLS if t.names[0] == name)


def unanswerable(values: Values) -> tuple[list[Message], list[dict]]:
    """A request that none of the offered tools can serve."""
    rng = values.rng
    spec = rng.choice(TOOLS)
    avoid = {spec.names[0], "search_web", "run_command"}
    for group in GROUPS:
        if spec.names[0] in group.split():
            avoid |= set(group.split())
    offers = pick_offers(values, [], rng.randint(1, 6), avoid)
    task = make_task(make_offer(spec, rng), Values(rng, values.held_out, values.new_wordings))
    return [
        {"role": "user", "content": task.text},
        answer_message(rng.choice(REFUSALS), "None of the tools does this. I say so."),
    ], [o.tool for o in offers]
