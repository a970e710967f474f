"""Conversations of several turns, and what a trace of them says about the caches.

Each turn's prompt is all of the conversation so far and what the user adds. Some conversations begin with the same
system prompt. What the caches must hold follows from the prompts and answers alone: `Seen` is the plain model of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.support.checkpoints import VOCAB


@dataclass(frozen=True)
class Talk:
    """One conversation, as its user has it: the system prompt, and what is said turn by turn (token ids)."""

    system: tuple[int, ...]
    says: tuple[tuple[int, ...], ...]

    def goes_on_at_once(self, turn: int) -> bool:
        """Whether its user answers before others have their turn, rather than after all of them."""
        return (len(self.says[turn]) + turn) % 2 == 0

    def prompt(self, answers: Sequence[Sequence[int]]) -> list[int]:
        """Of the turn after `answers`."""
        tokens = list(self.system)
        for said, answer in zip(self.says, answers, strict=False):
            tokens += [*said, *answer]
        return tokens + list(self.says[len(answers)])


@dataclass(frozen=True)
class Turn:
    """What one turn came to. Counts are in tokens."""

    talk: int
    number: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    tiers: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    held: int = 0
    received_bytes: int = 0

    @property
    def cached(self) -> int:
        return sum(self.tiers.values())

    @property
    def again(self) -> int:
        """What prefill computed before it had to start over."""
        return self.computed - (len(self.prompt) - self.cached)


def make_talks(
    seed: int, count: int, *, turns: tuple[int, int] = (3, 6), said: tuple[int, int] = (20, 60)
) -> list[Talk]:
    """Every other one begins with one of two system prompts (60 and 37 tokens); no two go on alike."""
    rng = random.Random(seed)

    def words(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, VOCAB) for _ in range(n))

    systems = words(60), words(37)
    return [
        Talk(
            rng.choice(systems) if number % 2 else (),
            tuple(words(rng.randint(*said)) for _ in range(rng.randint(*turns))),
        )
        for number in range(count)
    ]


class Seen:
    """Prefixes in whole pages, as a set: what caches that lose nothing would hold."""

    def __init__(self, page_tokens: int) -> None:
        self._size = page_tokens
        self._pages: set[tuple[int, ...]] = set()

    def add(self, tokens: Sequence[int]) -> None:
        self._pages.update(self._prefixes(tokens))

    def longest(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest prefix seen before the last one, which is always computed."""
        length = 0
        for prefix in self._prefixes(tokens[:-1]):
            if prefix not in self._pages:
                break
            length = len(prefix)
        return length

    def _prefixes(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        whole = tuple(tokens)
        return (whole[:end] for end in range(self._size, len(whole) + 1, self._size))


def working_set(turns: Sequence[Turn], page_tokens: int) -> int:
    """Pages of all prompts and answers, shared ones once."""
    seen = Seen(page_tokens)
    for turn in turns:
        seen.add([*turn.prompt, *turn.answer])
    return len(seen._pages)


def expect_hits(talks: Sequence[Talk], turns: Sequence[Turn], page_tokens: int, *, answers: str = "never") -> None:
    """What was found is what the trace allows, where the tiers lose nothing.

    Prefill's own tiers hold every earlier prompt of the conversation. Of answers, decode's pages reach it through
    storage: `answers` says whether they are there in time "never", "perhaps" or "always". Of each system prompt
    somebody is the first.
    """
    firsts: dict[tuple[int, ...], list[int]] = {}
    for number, talk in enumerate(talks):
        mine = sorted((t for t in turns if t.talk == number), key=lambda t: t.number)
        assert len(mine) == len(talk.says)
        first = mine[0]
        firsts.setdefault(talk.system, []).append(first.cached)
        prompts, all_of_it = Seen(page_tokens), Seen(page_tokens)
        for before, turn in pairwise(mine):
            prompts.add(before.prompt)
            all_of_it.add([*before.prompt, *before.answer[:-1]])
            least = (all_of_it if answers == "always" else prompts).longest(turn.prompt)
            most = (prompts if answers == "never" else all_of_it).longest(turn.prompt)
            # Who was swapped out finds what it computed itself as well.
            assert least <= turn.cached <= most + turn.again, (least, most, turn)
    for system, cached in firsts.items():
        whole = len(system) // page_tokens * page_tokens
        assert sorted(cached) == [0] + [whole] * (len(cached) - 1) if whole else not any(cached), (system, cached)


def expect_all_known(turns: Sequence[Turn], page_tokens: int) -> None:
    """Every prompt was seen before: all but its last tokens are found."""
    for turn in turns:
        assert turn.cached == (len(turn.prompt) - 1) // page_tokens * page_tokens, turn
