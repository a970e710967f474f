"""Made-up names, the fifty of them that training never sees, and prompts that ask for one far behind its mention."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

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
FILLER = Path(__file__).parent / "heldout.txt"
_LEAD_IN_TOKENS = 24
_FILLER_STRIDE = 331


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


@dataclass(frozen=True)
class Prompt:
    """One question: the text, the name that should come next, and how far back it stands."""

    text: str
    name: str
    distance: int


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """The length of a text for the model."""
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def take_words(words: list[str], start: int, tokens: int, tokenizer: Tokenizer) -> str:
    """Words from ``start`` on (wrapping around), at least ``tokens`` tokens of them."""
    taken: list[str] = []
    total = 0
    position = start
    while total < tokens:
        word = " " + words[position % len(words)]
        total += count_tokens(tokenizer, word)
        taken.append(word)
        position += 1
    return "".join(taken)


def build_prompt(name: str, index: int, distance: int, words: list[str], tokenizer: Tokenizer) -> Prompt:
    """State ``name``, add filler, and ask for it again ``distance`` tokens later (or a few more)."""
    query = f" The secret name of the {THINGS[index * 7 % len(THINGS)]} is"
    start = index * _FILLER_STRIDE
    lead_in = take_words(words, start, _LEAD_IN_TOKENS, tokenizer).rstrip(" .,;:-").lstrip() + "."
    wanted = max(distance - count_tokens(tokenizer, "." + query) - 1, 0)
    filler = take_words(words, start + 100, wanted, tokenizer).rstrip(" .,;:-") + "."
    between = f".{filler}{query}"
    return Prompt(f"{lead_in}{query} {name}{between}", name, count_tokens(tokenizer, between))


def build_prompts(distance: int, words: list[str], tokenizer: Tokenizer, names: Iterable[str]) -> list[Prompt]:
    """One prompt for each name."""
    return [build_prompt(name, index, distance, words, tokenizer) for index, name in enumerate(names)]
