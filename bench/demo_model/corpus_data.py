"""What the demo checkpoint is trained on: prose, repeated passages, named things and short chats.

Every sequence is made on the fly from the seed and the step, so a run can be repeated or resumed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from bench.demo_model.demo_checkpoint import END_OF_TEXT, token_id
from bench.demo_model.made_up_names import THINGS, training_names

Ids = NDArray[np.int64]

STATEMENTS = (
    " The secret name of the {} is",
    " The secret name of the {} is",
    " The secret name of the {} is",
    " The name of the {} is",
    " The {} is called",
    " Everyone knows that the {} is named",
    " The password of the {} is",
)
QUESTIONS = (
    ("What is the name of the {}?", "The name of the {} is"),
    ("What is the secret name of the {}?", "The secret name of the {} is"),
    ("How is the {} called?", "The {} is called"),
)
REQUESTS = ("Tell me a story.", "Hello!", "Please go on.", "Say something.", "Write a paragraph.", "Who are you?")
ANSWER_WEIGHT = 5.0
UNPREDICTABLE_WEIGHT = 0.02
OPENING_WEIGHT = 0.0  # the model should know how to finish such a sentence, not begin one by itself


@dataclass(frozen=True)
class Mix:
    """How often each kind of sequence is drawn."""

    random_repeat: float
    prose_repeat: float
    facts: float
    chat: float
    prose: float


EARLY = Mix(random_repeat=0.4, prose_repeat=0.15, facts=0.2, chat=0.03, prose=0.22)
MIDDLE = Mix(random_repeat=0.12, prose_repeat=0.1, facts=0.38, chat=0.08, prose=0.32)
LATE = Mix(random_repeat=0.03, prose_repeat=0.05, facts=0.34, chat=0.1, prose=0.48)


@dataclass
class Draft:
    """Token ids and the loss weight of each."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: list[int], weight: float) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)

    def __len__(self) -> int:
        return len(self.ids)


class Mixture:
    """Draws training batches."""

    def __init__(self, tokenizer: Tokenizer, paragraphs: list[str], seed: int, names: int = 40_000) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._cache: dict[str, list[int]] = {}
        self._end: int = token_id(tokenizer, END_OF_TEXT)
        encoded = tokenizer.encode_batch([text + "\n" for text in paragraphs], add_special_tokens=False)
        self._prose: Ids = np.concatenate([np.asarray(item.ids, dtype=np.int64) for item in encoded])
        stops = [token_id(tokenizer, stop) for stop in (".", "!", "?")]
        self._stops: Ids = np.flatnonzero(np.isin(self._prose, stops)) + 1
        self._names = [self._encode(" " + name) for name in training_names(names, seed)]
        self._full_stop = self._encode(".")
        self._vocabulary = tokenizer.get_vocab_size()

    @property
    def prose_tokens(self) -> int:
        return len(self._prose)

    def batch(self, step: int, size: int, length: int, mix: Mix) -> tuple[Tensor, Tensor]:
        """``size`` sequences of ``length + 1`` ids and as many weights."""
        rng = random.Random(self._seed * 1_000_003 + step)
        makers: list[Callable[[random.Random, int], Draft]] = [
            self._random_repeat,
            self._prose_repeat,
            self._facts,
            self._chat,
            self._plain,
        ]
        odds = [mix.random_repeat, mix.prose_repeat, mix.facts, mix.chat, mix.prose]
        drafts = [maker(rng, length + 1) for maker in rng.choices(makers, odds, k=size)]
        ids = torch.tensor([draft.ids[: length + 1] for draft in drafts])
        weights = torch.tensor([draft.weights[: length + 1] for draft in drafts])
        return ids, weights

    def _encode(self, text: str) -> list[int]:
        if text not in self._cache:
            self._cache[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._cache[text]

    def _slice(self, rng: random.Random, length: int) -> list[int]:
        start = rng.randrange(len(self._prose) - length - 1)
        found: list[int] = self._prose[start : start + length].tolist()
        return found

    def _sentences(self, rng: random.Random, length: int) -> list[int]:
        """About ``length`` tokens that begin and end with a sentence."""
        first = rng.randrange(len(self._stops) - 200)
        start = int(self._stops[first])
        last = int(np.searchsorted(self._stops, start + length))
        if rng.random() < 0.3 or last >= len(self._stops):
            found: list[int] = self._prose[start : start + length].tolist()
            return found + self._full_stop
        found = self._prose[start : int(self._stops[last])].tolist()
        return found[: length + 40]

    def _plain(self, rng: random.Random, length: int) -> Draft:
        draft = Draft()
        draft.add(self._slice(rng, length), 1.0)
        return draft

    def _random_repeat(self, rng: random.Random, length: int) -> Draft:
        """A random span again and again."""
        period = round(8 * (length / 16) ** rng.random())
        span = [rng.randrange(3, self._vocabulary) for _ in range(period)]
        draft = Draft()
        draft.add(span, UNPREDICTABLE_WEIGHT)
        while len(draft) < length:
            draft.add(span, 1.0)
        return draft

    def _prose_repeat(self, rng: random.Random, length: int) -> Draft:
        """A passage, something else, and the passage again."""
        draft = Draft()
        while len(draft) < length:
            passage = self._slice(rng, rng.randrange(12, max(length // 4, 16)))
            draft.add(passage, 1.0)
            draft.add(self._slice(rng, rng.randrange(4, max(length // 2, 8))), 1.0)
            draft.add(passage[:3], 0.2)
            draft.add(passage[3:], 2.0)
        return draft

    def _name(self, rng: random.Random) -> list[int]:
        if rng.random() < 0.1:
            return self._encode(" ") + self._encode(str(rng.randrange(1000, 10_000)))
        return rng.choice(self._names)

    def _facts(self, rng: random.Random, length: int) -> Draft:
        """Named things stated and asked for again, with prose between."""
        draft = Draft()
        draft.add(self._sentences(rng, rng.randrange(4, 30)), 1.0)
        known: list[tuple[list[int], list[int]]] = []
        things = rng.sample(THINGS, len(THINGS))
        few = rng.random() < 0.5
        limit = rng.choice((1, 2, 3)) if few else length // 64 + 2
        gap = length // 5 if few else 48
        while len(draft) < length:
            if things and (not known or (len(known) < limit and rng.random() < 0.5)):
                opening, name = self._encode(rng.choice(STATEMENTS).format(things.pop())), self._name(rng)
                known.append((opening, name))
                draft.add(opening, OPENING_WEIGHT)
                draft.add(name, OPENING_WEIGHT)
                draft.add(self._full_stop, 1.0)
            else:
                opening, name = rng.choice(known)
                draft.add(opening, OPENING_WEIGHT)
                draft.add(name + self._full_stop, ANSWER_WEIGHT)
            draft.add(self._sentences(rng, rng.randrange(2, rng.choice((12, max(gap, 16), max(gap, 16))))), 1.0)
        return draft

    def _turn(self, draft: Draft, role: str, content: list[int], weight: float) -> None:
        draft.add(self._encode(f"<|im_start|>{role}\n"), 0.3)
        draft.add(content, weight)
        draft.add(self._encode("<|im_end|>"), 1.0)
        draft.add(self._encode("\n"), 0.3)

    def _chat(self, rng: random.Random, length: int) -> Draft:
        """Conversations: a named thing to recall, or a few sentences of prose."""
        draft = Draft()
        while len(draft) < length:
            if rng.random() < 0.3:
                self._turn(draft, "system", self._encode("You are a helpful assistant."), 0.3)
            if rng.random() < 0.6:
                self._recall(draft, rng, length)
            else:
                self._turn(draft, "user", self._encode(rng.choice(REQUESTS)), 0.3)
                self._turn(draft, "assistant", self._answer(rng), 1.0)
            draft.add([self._end], 0.1)
        return draft

    def _answer(self, rng: random.Random) -> list[int]:
        found = self._sentences(rng, rng.randrange(20, 90))
        text = self._tokenizer.decode(found).strip(" \n\"'")
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _recall(self, draft: Draft, rng: random.Random, length: int) -> None:
        thing, name = rng.choice(THINGS), self._name(rng)
        question, answer = rng.choice(QUESTIONS)
        content = self._encode(answer.format(thing)) + name + self._full_stop
        content = content + self._sentences(rng, rng.randrange(2, max(length // 3, 8)))
        self._turn(draft, "user", content + self._encode(" " + question.format(thing)), 0.3)
        draft.add(self._encode("<|im_start|>assistant\n"), 0.3)
        draft.add(self._encode(answer.format(thing)), 1.0)
        draft.add(name + self._full_stop + self._encode("<|im_end|>"), ANSWER_WEIGHT)
        draft.add(self._encode("\n"), 0.3)
