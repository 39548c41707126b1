"""Values that requests mention: cities, names, dates, numbers, paths, made-up words.

Decides what each kind of value looks like and which half of the split it belongs to. Every string value
belongs to exactly one split, by its hash, so held-out requests carry values that no training sample has.
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable
from typing import Any

CITIES = """Paris London Berlin Madrid Rome Vienna Prague Warsaw Lisbon Dublin Oslo Stockholm Helsinki Athens
Budapest Tokyo Kyoto Osaka Seoul Beijing Shanghai Delhi Mumbai Bangkok Hanoi Jakarta Manila Sydney Melbourne
Auckland Cairo Nairobi Lagos Accra Tunis Rabat Toronto Montreal Vancouver Ottawa Boston Chicago Seattle Denver
Dallas Houston Miami Atlanta Phoenix Portland Lima Quito Bogota Santiago Montevideo Havana Reykjavik Zurich
Geneva Bern Munich Hamburg Cologne Dresden Lyon Nice Lille Milan Turin Naples Venice Seville Valencia Porto
Antwerp Brussels Utrecht Rotterdam Amsterdam Copenhagen Aarhus Bergen Tallinn Riga Vilnius Krakow Gdansk Sofia
Bucharest Belgrade Zagreb Sarajevo Ankara Izmir Tehran Baghdad Doha Muscat Kabul Lahore Karachi Dhaka Colombo
New_York San_Francisco Los_Angeles San_Diego Las_Vegas New_Delhi Hong_Kong Kuala_Lumpur Buenos_Aires
Sao_Paulo Mexico_City Cape_Town Tel_Aviv Salt_Lake_City Santa_Fe El_Paso""".replace("\n", " ").split()
NAMES = """Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karla Leo Maria Nora Oscar Paula Quentin Rosa
Simon Tina Udo Vera Walter Xenia Yara Zoe Alice Bob Carol Dan Eve Frank Grace Henry Irene Jack Kate Liam Mia
Noah Olivia Peter Quinn Rachel Sam Tom Uma Victor Wendy Yusuf Amir Bela Chen Dara Elif Farid Gita Hana Ivan Jin
Kofi Lena Mateo Nadia Omar Priya Ravi Sara Tariq Wei Zainab""".replace("\n", " ").split()
SURNAMES = """Smith Miller Brown Wilson Taylor Clark Hall Young King Wright Baker Hill Green Adams Nelson
Carter Meyer Weber Wagner Becker Hoffmann Rossi Costa Silva Lopez Garcia Tanaka Sato Kim Park Singh Khan Okafor
Mensah Novak Horvat Larsen Berg Lund""".replace("\n", " ").split()
WORDS = """apple river stone window garden yellow silver mountain paper candle bridge forest music letter
kitchen summer winter market orange ladder basket pencil mirror button carpet bottle hammer pillow blanket
rocket planet castle island harbor tunnel meadow engine signal ticket wallet camera guitar violin piano trumpet
dragon falcon rabbit turtle spider salmon lemon pepper ginger butter cheese honey bread noodle pasta soup salad
budget report meeting invoice project schedule review draft summary release update backup server database
network printer keyboard monitor battery charger""".replace("\n", " ").split()
LANGUAGES = "French German Spanish Italian Dutch Polish Swedish Japanese Korean Chinese Hindi Arabic Turkish Greek".split()
CURRENCIES = "USD EUR GBP JPY CHF CAD AUD SEK NOK INR CNY BRL MXN PLN".split()
ROOMS = [
    "kitchen",
    "bedroom",
    "living room",
    "bathroom",
    "office",
    "garage",
    "hallway",
    "garden",
    "attic",
    "cellar",
]
UNITS = ["meters", "feet", "miles", "kilometers", "grams", "pounds", "liters", "gallons", "inches", "ounces"]
TOPICS = """sports science politics health travel music film economy weather technology chess football space
history gardening cooking energy robots whales trains""".replace("\n", " ").split()
EXTENSIONS = "txt md py json csv log yaml html toml cpp".split()
FOLDERS = "src docs data tests lib home/user tmp etc var/log notes reports images app/models".split()
COMMANDS = "ls -la|git status|pwd|whoami|df -h|uname -a|make test|pytest -q|git log|npm install|cat {path}|wc -l {path}|head {path}|rm {path}|grep {word} {path}|python {path}|mkdir {word}|echo {word}"
SYLLABLES = [
    c + v
    for c in "b c d f g h j k l m n p r s t v w z br ch dr gr kr sh st th tr".split()
    for v in "a e i o u ai ee ou".split()
]
ENDINGS = " n r s l m nd rt ck th x ne".split(" ")


def digest(text: str) -> int:
    """A stable 32-bit hash of a string, the same in every process."""
    return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=4).digest(), "big")


def is_held_out(value: str) -> bool:
    """Whether a string value belongs to the held-out split (one in five does)."""
    return digest(value) % 5 == 0


class Values:
    """Draws values of one split from one random generator."""

    def __init__(self, rng: random.Random, held_out: bool = False, new_wordings: bool | None = None) -> None:
        """`new_wordings`: requests in words that no training sample has; by default those of the same split."""
        self.rng = rng
        self.held_out = held_out
        self.new_wordings = held_out if new_wordings is None else new_wordings

    def draw(self, kind: str) -> Any:
        """A value of a kind: a string of this split, or a number or truth value.

        `kind` is a name of KINDS, or `int:LOW:HIGH` for an integer in that range.
        """
        if kind.startswith("int:"):
            low, high = kind.split(":")[1:]
            return self.rng.randint(int(low), int(high))
        make = KINDS[kind]
        value = make(self)
        while kind not in CLOSED and isinstance(value, str) and is_held_out(value) != self.held_out:
            value = make(self)
        return value

    def invented(self, low: int = 2, high: int = 3) -> str:
        """A pronounceable word that is in no dictionary."""
        word = "".join(self.rng.choice(SYLLABLES) for _ in range(self.rng.randint(low, high)))
        return word + self.rng.choice(ENDINGS)

    def letters(self, low: int, high: int, alphabet: str = string.ascii_lowercase) -> str:
        """Random letters."""
        return "".join(self.rng.choice(alphabet) for _ in range(self.rng.randint(low, high)))


def _mixed(pool: list[str], share: float, capital: bool = True) -> Callable[[Values], str]:
    """Mostly a listed value, else an invented one, so that values must be read and not remembered."""

    def make(v: Values) -> str:
        if v.rng.random() < share:
            return v.rng.choice(pool).replace("_", " ")
        word = v.invented() if v.rng.random() < 0.7 else v.letters(3, 8)
        return word.capitalize() if capital else word

    return make


def _city(v: Values) -> str:
    name = _mixed(CITIES, 0.45)(v)
    if v.rng.random() < 0.08:
        name = v.rng.choice(["New ", "San ", "Port ", "Saint ", "North "]) + name
    return name


def _full_name(v: Values) -> str:
    return f"{_mixed(NAMES, 0.6)(v)} {_mixed(SURNAMES, 0.6)(v)}"


def _date(v: Values) -> str:
    return f"{v.rng.randint(2020, 2031)}-{v.rng.randint(1, 12):02d}-{v.rng.randint(1, 28):02d}"


def _time(v: Values) -> str:
    return f"{v.rng.randint(0, 23):02d}:{v.rng.choice([0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55]):02d}"


def _code(v: Values) -> str:
    letters, digits = string.ascii_uppercase, string.digits
    style = v.rng.randrange(5)
    if style == 0:
        return v.letters(2, 3, letters) + "-" + v.letters(3, 5, digits)
    if style == 1:
        return v.letters(4, 9, digits)
    if style == 2:
        return v.letters(5, 10, letters + digits)
    if style == 3:
        return v.letters(6, 12, "abcdef" + digits)
    return v.letters(1, 2, letters) + v.letters(2, 4, digits)


def _phrase(v: Values) -> str:
    words = [_mixed(WORDS, 0.75, capital=False)(v) for _ in range(v.rng.randint(2, 5))]
    if v.rng.random() < 0.3:
        words.insert(0, v.rng.choice(["buy", "call", "the", "my", "send", "check", "a"]))
    return " ".join(words)


def _sentence(v: Values) -> str:
    form = v.rng.choice(
        [
            "See you at {time}",
            "The {word} is ready",
            "I will be in {city} on {date}",
            "Please bring the {word}",
            "Dinner with {name} at {time}",
            "Thank you for the {word}",
            "The meeting is at {time}",
            "Call {name} about the {word}",
            "{phrase}",
            "Hello {name}, the {word} is in the {word}",
        ]
    )
    parts = {
        "time": _time,
        "city": _city,
        "date": _date,
        "name": KINDS["name"],
        "phrase": _phrase,
        "word": KINDS["word"],
    }
    while "{" in form:
        kind = form[form.index("{") + 1 : form.index("}")]
        form = form.replace("{" + kind + "}", parts[kind](v), 1)
    return form


def _path(v: Values) -> str:
    stem = _mixed(WORDS, 0.6, capital=False)(v)
    if v.rng.random() < 0.2:
        stem += v.rng.choice("_-") + _mixed(WORDS, 0.6, capital=False)(v)
    name = f"{stem}.{v.rng.choice(EXTENSIONS)}"
    if v.rng.random() < 0.5:
        folder = v.rng.choice(FOLDERS) if v.rng.random() < 0.7 else v.invented(2, 2)
        name = f"{folder}/{name}"
        if v.rng.random() < 0.4:
            name = "/" + name
    return name


def _folder(v: Values) -> str:
    folder = v.rng.choice(FOLDERS) if v.rng.random() < 0.5 else _mixed(WORDS, 0.5, capital=False)(v)
    return v.rng.choice(["", "/", "./"]) + folder + v.rng.choice(["", "", "/" + v.invented(1, 2)])


def _command(v: Values) -> str:
    form = v.rng.choice(COMMANDS.split("|"))
    if v.rng.random() < 0.2:
        form = "{word} --{word} {path}"
    while "{" in form:
        kind = form[form.index("{") + 1 : form.index("}")]
        form = form.replace("{" + kind + "}", KINDS[kind](v), 1)
    return form


def _email(v: Values) -> str:
    host = _mixed(WORDS, 0.5, capital=False)(v)
    return f"{_mixed(NAMES, 0.5)(v).lower()}@{host}.{v.rng.choice(['com', 'org', 'net', 'io'])}"


def _url(v: Values) -> str:
    host = _mixed(WORDS, 0.5, capital=False)(v)
    tail = v.rng.choice(["", "/" + _mixed(WORDS, 0.5, capital=False)(v)])
    return f"https://{host}.{v.rng.choice(['com', 'org', 'net', 'io'])}{tail}"


def _expression(v: Values) -> str:
    def number() -> str:
        n = v.rng.choice([9, 99, 999, 9999])
        return str(v.rng.randint(1, n)) if v.rng.random() < 0.85 else f"{v.rng.randint(1, n) / 10}"

    text = f"{number()} {v.rng.choice('+-*/')} {number()}"
    if v.rng.random() < 0.25:
        text += f" {v.rng.choice('+-*/')} {number()}"
    if v.rng.random() < 0.15:
        text = f"({text}) {v.rng.choice('+-*/')} {number()}"
    return text


KINDS: dict[str, Callable[[Values], Any]] = {
    "city": _city,
    "name": _mixed(NAMES, 0.55),
    "full_name": _full_name,
    "word": _mixed(WORDS, 0.5, capital=False),
    "title": lambda v: _phrase(v).title() if v.rng.random() < 0.5 else _mixed(WORDS, 0.5)(v),
    "phrase": _phrase,
    "sentence": _sentence,
    "date": _date,
    "time": _time,
    "code": _code,
    "symbol": lambda v: v.letters(2, 5, string.ascii_uppercase),
    "path": _path,
    "folder": _folder,
    "command": _command,
    "email": _email,
    "url": _url,
    "expression": _expression,
    "amount": lambda v: v.rng.randint(1, 2000) if v.rng.random() < 0.7 else round(v.rng.uniform(0.5, 900), 2),
    "language": lambda v: v.rng.choice(LANGUAGES),
    "currency": lambda v: v.rng.choice(CURRENCIES),
    "room": lambda v: v.rng.choice(ROOMS),
    "unit": lambda v: v.rng.choice(UNITS),
    "topic": _mixed(TOPICS, 0.6, capital=False),
    "bool": lambda v: v.rng.random() < 0.5,
}
# Kinds with a fixed list of values: both splits draw from all of it.
CLOSED = {"language", "currency", "room", "unit", "bool", "amount"}
