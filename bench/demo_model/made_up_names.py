"""Made-up names, and the fifty of them that training never sees."""

from __future__ import annotations

import functools
import random

# fmt: off
_ONSETS = (
    "b", "br", "c", "ch", "cl", "cr", "d", "dr", "f", "fl", "fr", "g", "gl", "gr", "h", "j", "k", "kl", "kr", "l",
    "m", "n", "p", "pl", "pr", "qu", "r", "s", "sh", "sk", "sl", "sm", "sn", "sp", "st", "str", "t", "th", "tr",
    "v", "w", "y", "z",
)
_NUCLEI = (
    "a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "au", "ea", "ei", "ia", "io", "oa", "oo", "ou",
)
_CODAS = (
    "", "", "", "b", "ck", "d", "f", "g", "k", "l", "ll", "m", "n", "nd", "nk", "nt", "p", "r", "rd", "rk", "rn",
    "rt", "s", "ss", "st", "t", "th", "v", "x", "z",
)

THINGS = (
    "harbour", "castle", "garden", "bridge", "ship", "river", "mountain", "village", "captain", "dog", "horse",
    "cat", "king", "queen", "baker", "teacher", "doctor", "island", "forest", "library", "school", "tower",
    "market", "temple", "valley", "museum", "station", "hotel", "bank", "church", "theatre", "street", "road",
    "farm", "mill", "lake", "canal", "lighthouse", "server", "engine", "project", "team", "company", "city", "town",
    "county", "princess", "knight", "wizard", "dragon", "robot", "planet", "star", "moon", "painter", "singer",
    "writer", "farmer", "soldier", "sailor", "driver", "pilot", "nurse", "judge", "lawyer", "neighbour", "stranger",
    "visitor", "guest", "gardener", "cook", "housekeeper", "butler", "servant", "uncle", "aunt", "cousin", "nephew",
    "niece",
)


# fmt: on

HELD_OUT_SEED = 20_240_229
HELD_OUT_COUNT = 50


def make_name(rng: random.Random) -> str:
    """Two or three syllables with a capital letter, such as ``Drenolsk``."""
    syllables = rng.choice((2, 2, 3))
    parts = [rng.choice(_ONSETS) + rng.choice(_NUCLEI) for _ in range(syllables)]
    return ("".join(parts) + rng.choice(_CODAS)).capitalize()


@functools.cache
def held_out_names() -> tuple[str, ...]:
    """The names used for measuring; ``training_names`` never yields one of them."""
    rng = random.Random(HELD_OUT_SEED)
    names: dict[str, None] = {}
    while len(names) < HELD_OUT_COUNT:
        name = make_name(rng)
        if 5 <= len(name) <= 11:
            names[name] = None
    return tuple(names)


def training_names(count: int, seed: int) -> list[str]:
    """``count`` distinct names, none of them held out."""
    rng = random.Random(seed)
    held_out = set(held_out_names())
    names: dict[str, None] = {}
    while len(names) < count:
        name = make_name(rng)
        if name not in held_out:
            names[name] = None
    return list(names)
