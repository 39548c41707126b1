"""The closed world of the demo model: the valley of Orrin, its villages, people and animals.

Every fact is fixed here (drawn once from WORLD_SEED), so that training text, questions and tests agree.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

WORLD_SEED = 20260
VILLAGES = "Amberfield Brook Cairn Dunmere Eastmill Fenwick Goldale Harrow Ironbridge Juniper Kestrel Lowmoor".split()
PEOPLE = """Ada Bram Celia Dorin Edda Falk Gerda Hollis Isra Jory Kaspar Linnea Marlo Nessa Osric Pia Quill Runa
Sorrel Tobin Ulla Vance Willa Ylva""".split()
ANIMALS = "badger crane deer fox goat heron lynx marten newt otter pony raven".split()
JOBS = "baker smith teacher miller doctor farmer fisher weaver potter carpenter gardener clockmaker".split()
COLORS = "red blue green yellow white black brown purple orange grey".split()
FOODS = [
    "apple pie",
    "rye bread",
    "pea soup",
    "goat cheese",
    "roast trout",
    "honey cake",
    "plum jam",
    "noodles",
]
PETS = "cat dog rabbit parrot hedgehog turtle duck goose".split()
INSTRUMENTS = "flute violin drum harp piano horn".split()
RIVERS = "Sill Tarn Wend Lark Oss Bourne".split()
LANDMARKS = [
    "a stone tower",
    "a wooden bridge",
    "an old mill",
    "a round church",
    "a red lighthouse",
    "a deep well",
]
GOODS = "wool honey pottery apples cheese rope candles paper".split()
DIETS = ["fish", "berries", "grass", "mice", "beetles", "leaves", "seeds", "worms"]
PLACES = ["in the forest", "by the river", "on the hills", "in the marsh", "near the lake", "in the meadows"]
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Japan": "Tokyo", "China": "Beijing", "India": "Delhi", "England": "London", "Ireland": "Dublin",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Greece": "Athens", "Austria": "Vienna",
    "Poland": "Warsaw", "Hungary": "Budapest", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima",
    "Canada": "Ottawa", "Cuba": "Havana", "Turkey": "Ankara", "Russia": "Moscow",
}  # fmt: skip


@dataclass(frozen=True)
class Relation:
    """One kind of fact: how it is stated, and how it is asked for.

    `{s}` is the subject and `{o}` the value. The last entry of `asks` is held out: only evaluation uses it.
    """

    name: str
    states: tuple[str, ...]
    asks: tuple[str, ...]


@dataclass(frozen=True)
class Fact:
    """A subject, a relation and the value that is true in the world."""

    subject: str
    relation: Relation
    value: str

    def state(self, rng: random.Random | None = None) -> str:
        """A sentence that says the fact; without a generator, its first wording."""
        form = rng.choice(self.relation.states) if rng else self.relation.states[0]
        text = form.format(s=self.subject, o=self.value)
        return text[0].upper() + text[1:]

    def asks(self, held_out: bool = False) -> list[str]:
        """The questions after this fact, of one split."""
        forms = self.relation.asks[-1:] if held_out else self.relation.asks[:-1]
        return [form.format(s=self.subject) for form in forms]


def _relation(name: str, states: str, asks: str) -> Relation:
    plain = (f"What about the {name} of {{s}}?", f"I want to know the {name} of {{s}}.", f"{name} of {{s}}?")
    return Relation(name, tuple(states.split("|")), (*plain, *asks.split("|")))


JOB = _relation(
    "job",
    "{s} is a {o}.|{s} works as a {o}.|The job of {s} is {o}.",
    "What is the job of {s}?|What does {s} do for a living?|What is {s}'s job?|What work does {s} do?|"
    "Tell me the job of {s}.|Which profession does {s} have?|What does {s} work as?",
)
HOME = _relation(
    "home",
    "{s} lives in {o}.|The home of {s} is {o}.|You can find {s} in {o}.",
    "Where does {s} live?|In which village does {s} live?|What is the home of {s}?|Which village is {s} from?|"
    "Where is the home of {s}?|Tell me where {s} lives.|Where can I find {s}?",
)
COLOR = _relation(
    "color",
    "{s} likes the color {o}.|The favorite color of {s} is {o}.|{s}'s favorite color is {o}.",
    "What is the favorite color of {s}?|Which color does {s} like?|What color does {s} like best?|"
    "What is {s}'s favorite color?|Tell me the favorite color of {s}.|Which color is the favorite of {s}?",
)
FOOD = _relation(
    "food",
    "{s} likes to eat {o}.|The favorite food of {s} is {o}.|{s}'s favorite food is {o}.",
    "What is the favorite food of {s}?|What does {s} like to eat?|Which food does {s} like best?|"
    "What is {s}'s favorite food?|Tell me the favorite food of {s}.|What food does {s} like?",
)
PET = _relation(
    "pet",
    "{s} has a {o}.|The pet of {s} is a {o}.|{s} keeps a {o} as a pet.",
    "What pet does {s} have?|Which pet does {s} have?|What is the pet of {s}?|Which animal does {s} keep?|"
    "Tell me the pet of {s}.|What kind of pet does {s} keep?",
)
INSTRUMENT = _relation(
    "instrument",
    "{s} plays the {o}.|The instrument of {s} is the {o}.",
    "Which instrument does {s} play?|What does {s} play?|What is the instrument of {s}?|"
    "Tell me which instrument {s} plays.|What instrument does {s} play?",
)
RIVER = _relation(
    "river",
    "{s} lies on the river {o}.|The river of {s} is the {o}.|The river {o} flows through {s}.",
    "Which river flows through {s}?|On which river is {s}?|What is the river of {s}?|Which river is {s} on?|"
    "Tell me the river of {s}.|What river does {s} lie on?",
)
FOUNDED = _relation(
    "founded",
    "{s} was founded in {o}.|The village of {s} was founded in {o}.",
    "When was {s} founded?|In which year was {s} founded?|What year was {s} founded?|How old is the village of {s}?|"
    "Tell me when {s} was founded.",
)
LANDMARK = _relation(
    "landmark",
    "{s} has {o}.|In {s} there is {o}.|The landmark of {s} is {o}.",
    "What is the landmark of {s}?|What can I see in {s}?|Which landmark does {s} have?|What is there to see in {s}?|"
    "Tell me the landmark of {s}.",
)
GOOD = _relation(
    "good",
    "{s} is known for {o}.|{s} is famous for its {o}.|People in {s} make {o}.",
    "What is {s} known for?|What is {s} famous for?|What do people in {s} make?|What is made in {s}?|"
    "Tell me what {s} is known for.",
)
DIET = _relation(
    "diet",
    "the {s} eats {o}.|in the valley the {s} eats {o}.",
    "What does the {s} eat?|What do {s}s eat?|What is the food of the {s}?|Tell me what the {s} eats.|"
    "What does a {s} eat?",
)
HABITAT = _relation(
    "habitat",
    "the {s} lives {o}.|in the valley the {s} lives {o}.",
    "Where does the {s} live?|Where do {s}s live?|Where can I see a {s}?|Tell me where the {s} lives.|"
    "Where does a {s} live?",
)
CAPITAL = _relation(
    "capital",
    "The capital of {s} is {o}.|{o} is the capital of {s}.",
    "What is the capital of {s}?|Which city is the capital of {s}?|Tell me the capital of {s}.|"
    "What's the capital of {s}?|Name the capital of {s}.",
)


def _facts() -> list[Fact]:
    rng = random.Random(WORLD_SEED)
    facts = []
    for person in PEOPLE:
        for relation, pool in (
            (JOB, JOBS), (HOME, VILLAGES), (COLOR, COLORS), (FOOD, FOODS), (PET, PETS), (INSTRUMENT, INSTRUMENTS),
        ):  # fmt: skip
            facts.append(Fact(person, relation, rng.choice(pool)))
    for village in VILLAGES:
        facts.append(Fact(village, RIVER, rng.choice(RIVERS)))
        facts.append(Fact(village, FOUNDED, str(rng.randint(1100, 1890))))
        facts.append(Fact(village, LANDMARK, rng.choice(LANDMARKS)))
        facts.append(Fact(village, GOOD, rng.choice(GOODS)))
    for animal in ANIMALS:
        facts.append(Fact(animal, DIET, rng.choice(DIETS)))
        facts.append(Fact(animal, HABITAT, rng.choice(PLACES)))
    facts.extend(Fact(country, CAPITAL, capital) for country, capital in CAPITALS.items())
    return facts


FACTS: list[Fact] = _facts()
