"""The load of `twinpool demo`: clients that ask without pause, each answer compared with what it was undisturbed."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx

BEGINNINGS = (
    "It was a fine morning, and", "The captain looked at the sea", "She opened the letter and read", "In the old house",
    "Nobody in the village knew", "He had walked for three days", "When the rain began", "The king said to his son",
)  # fmt: skip
"""What prompts begin with; the demo model has read old stories."""
TOKENS = 200
"""Of an answer: so long that a strike finds some under way."""
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Question:
    """A request and the answer to it, known from before the trouble."""

    body: dict[str, Any]
    answer: str = ""


@dataclass
class Answers:
    """What became of the requests."""

    exact: int = 0
    replayed: int = 0
    """Exact ones that a worker had to begin anew, or to take over."""
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    tokens: int = 0

    @property
    def asked(self) -> int:
        return self.exact + len(self.wrong) + len(self.failed)


def questions(model: str, count: int, seed: int) -> list[Question]:
    """Greedy and drawn answers in turn, to prompts of unlike length that share their beginnings."""
    rng, out = random.Random(seed), []
    for number in range(count):
        prompt = " ".join(rng.choice(BEGINNINGS) for _ in range(rng.randint(1, 12)))
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
        body |= {"temperature": 0.8, "seed": rng.randrange(1 << 30)} if number % 2 else {"temperature": 0}
        out.append(Question(body))
    return out


class DemoLoad:
    """The clients."""

    def __init__(self, client: httpx.AsyncClient, asked: list[Question], clients: int, seed: int) -> None:
        """`client` has the endpoint's address; `asked` are questions without answers."""
        self._client, self._asked, self._clients, self._seed = client, asked, clients, seed
        self.answers = Answers()
        self._over = False

    async def learn(self) -> None:
        """Ask everything once, while nothing disturbs it. Raises `httpx.HTTPError` and `ValueError`."""
        found = []
        for question in self._asked:
            text, _ = await self._ask(question.body)
            found.append(Question(question.body, text))
        self._asked = found

    async def run(self) -> None:
        """Ask until `stop`, then finish what is under way."""
        self._over = False
        await asyncio.gather(*(self._ask_on(number) for number in range(self._clients)))

    def stop(self) -> None:
        self._over = True

    async def _ask_on(self, number: int) -> None:
        rng = random.Random(f"{self._seed}:{number}")
        while not self._over:
            question = rng.choice(self._asked)
            try:
                text, again = await self._ask(question.body)
            except (httpx.HTTPError, ValueError) as error:
                self.answers.failed.append(str(error) or type(error).__name__)
                await asyncio.sleep(0.5)
                continue
            if text == question.answer:
                self.answers.exact += 1
                self.answers.replayed += again
                self.answers.tokens += TOKENS
            else:
                self.answers.wrong.append(f"{question.body['prompt'][:40]}: {text[:60]!r} not {question.answer[:60]!r}")

    async def _ask(self, body: dict[str, Any]) -> tuple[str, bool]:
        """The whole text of a streamed answer, and whether workers had to change for it. Raises `ValueError` where the
        stream says an error or breaks off."""
        text, ended, again = "", False, False
        headers = {"X-Twinpool-Timeline": "1"}
        async with self._client.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers) as got:
            if got.status_code != 200:
                raise ValueError(f"status {got.status_code}: {(await got.aread())[:200]!r}")
            async for line in got.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(str(event["error"])[:200])
                text += "".join(choice["text"] for choice in event.get("choices", ()))
                told = event.get("twinpool") or {}
                again |= told.get("attempts", 1) > 1 or bool(told.get("migrations"))
        if not ended:
            raise ValueError("the answer broke off")
        return text, again
