"""Stories of a harbour town, made by a grammar.

English that is the same on every machine: it comes from the rules below and
from `random.Random.random`, whose sequence Python promises to keep. Words have
the frequencies of Zipf's law, and each story has people, things and numbers of
its own. So it is about as hard to predict as prose: zlib makes it 3.7 times
smaller, and the help texts of Python 3.5 times.
"""

import random
import re
from bisect import bisect
from itertools import accumulate

SENTENCES = 8  # in a story
CAST = {"NAME": 4, "NOUN": 10, "ADJECTIVE": 8, "DID": 10, "WORKER": 2}
OWN = 0.5  # how often a story uses a word of its own cast

WORDS = {
    "NOUN": """
        boat house letter table door window net lamp rope bread stone river
        tree road chair cup basket bridge garden book clock coat wheel kettle
        ladder map bell sail barrel candle plate wall hat shoe key pear goat
        horse dog cat hen fence field hill island wagon anchor oar bucket
        needle thread blanket pillow mirror drawer stove pan spoon apple cheese
        crab gull shell pebble wave tide cloud storm lantern tower gate stair
        roof chimney cellar market stall coin purse ring ribbon button pocket
        glove scarf boot cradle drum flute violin song picture feather ink
        paper envelope stamp parcel hammer nail plank saw axe spade rake seed
        bean onion carrot cabbage pumpkin plum soup pie cake kitchen harbour
        station school mill forge well pond ditch meadow orchard forest path
        corner square fountain statue flag pole mast deck hull rudder telescope
        chart cabin hammock crate sack cart
        """,
    "ADJECTIVE": """
        old small new cold little red long green heavy empty blue dark warm
        white broken quiet wet narrow grey strange clean wooden round yellow
        soft bright black early deep sharp thin dusty crooked silver tall rusty
        shallow golden sour smooth hollow tired brown striped gentle noisy
        simple proud steep muddy loose painted frozen bitter plain hungry
        careful famous pale clever rough secret silent wide patient lonely
        brave foreign polished
        """,
    "DID": """
        carried found mended opened painted washed lost closed brought wanted
        sold dropped cleaned counted hid remembered bought pulled lifted pushed
        followed kept forgot noticed filled borrowed burned covered drew caught
        watched locked sent tied saved broke hung turned built weighed measured
        wrapped admired fetched emptied moved touched knew repaired polished
        praised stole shook sketched lent feared wore gathered guarded ordered
        traded folded scratched buried untied returned loaded
        """,
    "WENT": """
        went walked came ran waited slept stood sat hurried sang climbed rested
        stayed worked laughed fell sailed whistled danced hid stopped arrived
        lived knelt wept rowed wandered looked vanished listened
        """,
    "WHERE": """
        behind beside near under over above below outside inside beyond past
        against along around towards across
        """,
    "WORKER": """
        baker teacher fisherman doctor captain farmer sailor miller smith
        tailor postman gardener carpenter grocer painter watchmaker weaver
        librarian shepherd fiddler clerk judge nurse potter
        """,
    "HOW": """
        slowly|quietly|often|again|never|carefully|soon|suddenly|almost|
        gladly|always|once|twice|at last|quickly|kindly|secretly|rarely|
        simply|politely|at once|alone
        """,
    "WHEN": """
        in the morning|at noon|every evening|on Sunday|after the storm|
        in spring|before dawn|last winter|on market day|that night|
        all summer|by midnight|on the first of May|a week later|
        before the rain|in the autumn
        """,
    "FELT": """
        happy tired afraid angry curious sad surprised hungry sorry glad lonely
        ashamed cold late lucky sure restless
        """,
    "COUNT": """
        two three four five six seven eight nine ten eleven twelve twenty
        thirty forty ninety
        """,
    "DIGIT": "1 2 3 4 5 6 7 8 9",
    "START": "M T B L R S K N D H V El Or An Is",
    "MIDDLE": "a e o i u ari ene ola eri ume",
    "END": "n l ra s m ne tha k rin da x",
}

RULES = {
    "SENTENCE": (
        "PERSON DID THING",
        "PERSON WENT PLACE",
        "PERSON DID THING PLACE",
        "PERSON WENT PLACE WHEN",
        "PERSON DID THING and HOW WENT PLACE",
        "WHEN PERSON DID THING",
        "THING was ADJECTIVE and ADJECTIVE",
        "PERSON said that THING was ADJECTIVE",
        "there were COUNT NOUNs PLACE",
        "when PERSON DID THING, PERSON was FELT",
        "nobody knew why PERSON DID THING",
        '"where is THING?" asked PERSON',
        "PERSON HOW DID COUNT NOUNs",
        '"THING is WHERE the NOUN," PERSON said HOW',
        "because THING was ADJECTIVE, PERSON DID THING instead",
        "PERSON paid DIGITDIGIT coins for THING",
        "PERSON and PERSON WENT PLACE until THING was ADJECTIVE",
        "if THING had been ADJECTIVE, PERSON would have been FELT",
        "on page DIGITDIGITDIGIT it said: THING, COUNT NOUNs, THING",
        "in 1DIGITDIGITDIGIT PERSON DID THING, and that was that",
    ),
    "PERSON": (
        "NAME",
        "she",
        "NAME",
        "he",
        "the WORKER",
        "the ADJECTIVE WORKER",
    ),
    "THING": (
        "the NOUN",
        "one ADJECTIVE NOUN",
        "the ADJECTIVE NOUN",
        "it",
        "NAME's NOUN",
        "the NOUN of the WORKER",
        "the NOUN WHERE the NOUN",
    ),
    "PLACE": ("WHERE the NOUN", "far from the NOUN", "in the ADJECTIVE NOUN"),
    "NAME": ("STARTMIDDLEEND", "STARTMIDDLE"),
}
CHOICES: dict[str, tuple[str, ...]] = RULES | {
    symbol: tuple(
        " ".join(word.split())
        for word in (text.split("|") if "|" in text else text.split())
    )
    for symbol, text in WORDS.items()
}
SUMS = {  # of the weights 1/5, 1/6, 1/7, …
    symbol: list(accumulate(1 / (k + 5) for k in range(len(choices))))
    for symbol, choices in CHOICES.items()
}
SYMBOL = re.compile("|".join(sorted(CHOICES, key=len, reverse=True)))


class Stories:
    """Fills in the symbols of the grammar, at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random
        self.cast: dict[str, list[str]] = {}

    def story(self) -> str:
        """A few sentences about the same people and things."""
        self.cast = {}
        self.cast = {
            symbol: [self.draw(symbol) for _ in range(size)]
            for symbol, size in CAST.items()
        }
        lines = (self.draw("SENTENCE") for _ in range(SENTENCES))
        return " ".join(f"{line[0].upper()}{line[1:]}." for line in lines)

    def draw(self, symbol: str) -> str:
        """One choice, by Zipf's law, its own symbols filled in."""
        if symbol in self.cast and self.random() < OWN:
            return self.cast[symbol][int(self.random() * CAST[symbol])]
        sums = SUMS[symbol]
        choice = CHOICES[symbol][bisect(sums, self.random() * sums[-1])]
        return SYMBOL.sub(lambda found: self.draw(found[0]), choice)
