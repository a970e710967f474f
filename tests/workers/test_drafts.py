"""Drafts in whole workers: answers are the same with and without them, whatever happens on the way.

Answers that may have few tokens alone repeat themselves, so prompt lookup finds much in them, and half of it is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_families import FAMILIES
from tests.support.rank_followers import RankProcesses
from tests.support.worker_pair import Answer, pair
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.contracts.ids import PAIR, Role
from twinpool.contracts.sampling_params import SamplingParams

FEW = (17, 40, 203)
HOST_BYTES = 1 << 23
Asked = list[tuple[list[int], SamplingParams]]
Said = list[tuple[object, ...]]
"""Tokens, log-probabilities and ends."""
DRAFTS: dict[str, Any] = {"draft_tokens": 4, "draft_requests": 8}


SCENES: dict[str, dict[str, Any]] = {
    "together": {"decode": DRAFTS},
    "few tokens a step": {"decode": DRAFTS | {"max_batch_tokens": 6}},
    "retracted": {
        "decode": DRAFTS | {"cache": {"host_bytes": HOST_BYTES}, "retract": "copy"}, "faults": {"retract_every": 3},
    },
    "small pages": {"decode": DRAFTS, "cache": {"page_tokens": 4}},
}  # fmt: skip
_LIMITED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 1.3, "seed": 3},
    {"temperature": 0.0},
]
LIMITED = [SamplingParams(max_tokens=40, allowed_token_ids=(17, 40, 53), **kind) for kind in _LIMITED]


def asks() -> Asked:
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 1.3, "seed": 3, "logprobs": 2},
        {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
        {"temperature": 1.5, "seed": 5, "stop_token_ids": (FEW[1],), "min_tokens": 30},
        {"temperature": 0.0, "presence_penalty": 0.3},
    ]
    return [
        (
            [rng.choice(FEW) for _ in range(rng.randint(5, 60))],
            SamplingParams(max_tokens=40, allowed_token_ids=FEW, **kind),
        )
        for kind in kinds
    ]


def answers(model: Path, asked: Asked | None = None, **sections: Any) -> tuple[list[Answer], dict[str, float]]:
    """All answers to what is `asked`, or to `asks`, and decode's counters."""
    with pair(model, tokens=2048, **sections) as both:
        found = both.run(*(both.submit(prompt, params) for prompt, params in asked or asks()))
        counters = dict(both.decode.status().counters)
        both.settle()
    return found, counters


def said(found: Sequence[Answer]) -> Said:
    return [(answer.list, answer.logprobs, answer.done and answer.done.reason) for answer in found]


@pytest.fixture(scope="module")
def plain(model: Path) -> Said:
    found, counters = answers(model, decode={"speculation": "off"})
    assert counters["tokens_drafted"] == 0
    return said(found)


@pytest.mark.parametrize("sections", SCENES.values(), ids=SCENES)
def test_answers_with_drafts_are_those_without(model: Path, plain: Said, sections: dict[str, Any]) -> None:
    found, counters = answers(model, **sections)
    assert said(found) == plain
    assert 0 < counters["drafts_accepted"] < counters["tokens_drafted"]


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("scene", ["together", "retracted", "small pages"])
@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "lfm2"])
def test_answers_of_recurrent_models_with_drafts_are_those_without(kind: str, scene: str, tmp_path: Path) -> None:
    """Handed over, retracted and found in the tree again."""
    folder, sections = FAMILIES[kind](tmp_path / kind), SCENES[scene]
    rng = random.Random(3)
    asked = [([rng.choice((17, 40, 53)) for _ in range(n)], few) for n, few in zip((5, 33, 60), LIMITED, strict=True)]
    plain, _ = answers(folder, asked, **{**sections, "decode": {**sections["decode"], "speculation": "off"}})
    found, counters = answers(folder, asked, **sections)
    assert said(found) == said(plain)
    assert 0 < counters["drafts_accepted"] < counters["tokens_drafted"]


def test_followers_compute_drafts_as_they_are_told(model: Path, warm: RankProcesses) -> None:
    sections: dict[str, Any] = {"ranks": warm, "transfer": {"plane": "shm"}}
    want, _ = answers(model, **sections, decode={"speculation": "off", "tp": 2})
    found, counters = answers(model, **sections, decode=DRAFTS | {"tp": 2})
    assert said(found) == said(want)
    assert 0 < counters["drafts_accepted"] < counters["tokens_drafted"]


@pytest.mark.parametrize("seed", range(3))
def test_answers_with_drafts_are_those_without_on_devices_that_are_late(model: Path, plain: Said, seed: int) -> None:
    devices = {role: AdversarialDevice(2 * seed + at) for at, role in enumerate(PAIR)}
    found, counters = answers(model, devices=devices, decode=DRAFTS)
    assert said(found) == plain
    assert 0 < counters["drafts_accepted"] < counters["tokens_drafted"]
    for device in devices.values():
        device.settle()


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "falcon_h1"])
def test_pages_of_answers_with_drafts_are_what_the_next_turn_goes_on_from(kind: str, tmp_path: Path) -> None:
    """Nothing of a rejected draft is in the tree: the conversation goes on as one without drafts does."""
    turns, folder = [], FAMILIES[kind](tmp_path / kind)
    for decode in ({"speculation": "off"}, DRAFTS):
        with pair(folder, tokens=2048, decode=decode, cache={"page_tokens": 4}) as both:
            conversation = [17, 40, 53] * 4
            for _ in range(4):
                (answer,) = both.run(both.submit(conversation, LIMITED[0]))
                both.settle()
                conversation += [*answer.list, 5, 6]
            assert answer.progress[Role.DECODE].cached_tokens > 0
            turns.append(conversation)
    assert turns[0] == turns[1]
