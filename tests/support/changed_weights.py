"""Checkpoints whose weights a cluster changes between, their greedy answers, and clients that check each answer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import make_checkpoint
from tests.support.served_cluster import Serving

PROMPTS = tuple([7 + 3 * n, 40, 41, 42 + n, 43, 44, 45] * 6 for n in range(8))
TOKENS = 12
Answers = list[list[int]]
"""The tokens of each prompt's answer."""


def make_versions(root: Path, count: int = 4) -> dict[str, Path]:
    """A checkpoint, `step-0`, and folders with other weights of its shapes, by version."""
    return {f"step-{n}": make_checkpoint(root / f"step-{n}", layers=3, eos=None, seed=n) for n in range(count)}


def greedy_answers(folders: Mapping[str, Path]) -> dict[str, Answers]:
    """Each version's greedy answers, by transformers; no two versions have the same."""
    found = {}
    for version, folder in folders.items():
        model = transformer(folder)
        found[version] = [
            model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0][len(prompt) :].tolist()
            for prompt in PROMPTS
        ]
    for which in range(len(PROMPTS)):
        assert len({str(answers[which]) for answers in found.values()}) == len(found)
    return found


def transformer(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ask(client: openai.OpenAI, model: str, number: int, *, stream: bool = False) -> tuple[str, list[int]]:
    """One answer by the client; returns its version and tokens."""
    prompt = PROMPTS[number % len(PROMPTS)]
    extra = {"return_token_ids": True, "ignore_eos": True}
    made: Any = client.completions.create(
        model=model, prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body=extra, stream=stream
    )
    if not stream:
        return made.weights_version, made.choices[0].token_ids
    versions, tokens = set[str](), list[int]()
    for chunk in made:
        versions.add(chunk.weights_version)
        for choice in chunk.choices:
            tokens += choice.token_ids
    (version,) = versions
    return version, tokens


class Clients:
    """Clients that ask until they are told to stop; each answer is checked."""

    def __init__(
        self, serving: Serving, oracle: Mapping[str, Answers], count: int = 4, prompts: int = len(PROMPTS)
    ) -> None:
        """`prompts`: how many of `PROMPTS` they ask for."""
        self._oracle, self._model, self._prompts = oracle, serving.model, prompts
        self._client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=600)
        self.stop = threading.Event()
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        """Answers that are no version's, in words."""
        self.failed: list[str] = []
        """Requests that got no answer, in words."""
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self.stop.is_set():
            try:
                which = number % self._prompts
                version, tokens = ask(self._client, self._model, which, stream=number % 2 == 1)
            except (openai.OpenAIError, ValueError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                continue
            self.seen[version] += 1
            if version not in self._oracle or tokens != self._oracle[version][which]:
                self.wrong.append(f"{version}: {tokens}")
            number += len(self._threads)


def update(serving: Serving, folder: Path, version: str, **more: Any) -> httpx.Response:
    body = {"path": str(folder), "version": version, **more}
    return httpx.post(f"{serving.url}/v1/weights", json=body, timeout=300)


def shown(serving: Serving) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"{serving.url}/v1/weights").json()
    return told


def in_one_version(told: Mapping[str, Any]) -> bool:
    """Whether no change is under way, and all workers serve with the cluster's weights. `told`: as of `shown`."""
    serving = {(row["state"], row["weights_version"]) for row in told["workers"]}
    return told["pending"] is None and not told["behind"] and serving == {("ready", told["weights_version"])}
