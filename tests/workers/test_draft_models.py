"""A model's own draft layer in whole workers: answers are the same with and without it, and what it proposes is the
same wherever its state came from.

Answers that may have few tokens alone are often what the layer proposes, random as it is, and often aren't.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_families import FAMILIES
from tests.support.plain_drafts import PlainMtp
from tests.support.worker_pair import Answer, pair
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.contracts.ids import PAIR, Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.drafting import DraftModelDrafter, WantedDraft

FEW = (17, 40, 203)
HOST_BYTES = 1 << 23
Said = list[tuple[object, ...]]
"""Tokens, log-probabilities and ends."""
Proposed = dict[tuple[int, ...], list[int]]
"""What was proposed behind the tokens so far."""
MTP: dict[str, Any] = {"engine": {"draft_model": "mtp"}, "decode": {"draft_tokens": 4, "draft_requests": 8}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["deepseek_v3"](tmp_path_factory.mktemp("drafts"), published=True)


def asks() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.8, "seed": 3, "logprobs": 2},
        {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "choice": 1},
        {"temperature": 1.5, "seed": 5, "stop_token_ids": (FEW[1],), "min_tokens": 15},
        {"temperature": 0.0, "presence_penalty": 0.3},
    ]
    return [
        (
            [rng.choice(FEW) for _ in range(rng.randint(5, 60))],
            SamplingParams(max_tokens=24, allowed_token_ids=FEW, **kind),
        )
        for kind in kinds
    ]


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> Proposed:
    """What is proposed for greedy requests from now on, by all of their tokens."""
    found: Proposed = {}
    propose = DraftModelDrafter.propose

    def noted(self: DraftModelDrafter, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        drafts = propose(self, wanted)
        for (request, most), draft in zip(wanted, drafts, strict=True):
            assert len(draft) == most
            if request.submit.sampling.greedy:
                found[tuple(request.tokens)] = list(draft)
        return drafts

    monkeypatch.setattr(DraftModelDrafter, "propose", noted)
    return found


def answers(model: Path, **sections: Any) -> tuple[list[Answer], dict[str, float]]:
    """All answers, and decode's counters."""
    with pair(model, tokens=2048, **sections) as both:
        found = both.run(*(both.submit(prompt, params) for prompt, params in asks()))
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


@pytest.fixture(scope="module")
def oracle(model: Path) -> PlainMtp:
    return PlainMtp(model)


def with_mtp(**sections: Any) -> dict[str, Any]:
    return {"engine": MTP["engine"], **sections, "decode": MTP["decode"] | sections.get("decode", {})}


def expect_the_oracles(proposed: Proposed, oracle: PlainMtp) -> None:
    assert len(proposed) > 5
    for tokens, draft in proposed.items():
        assert draft == oracle.proposals(tokens, len(draft), FEW), len(tokens)


SCENES: dict[str, dict[str, Any]] = {
    "together": {},
    "few tokens a step": {"decode": {"max_batch_tokens": 6}},
    "prompts in chunks": {"prefill": {"chunk_tokens": 16}, "cache": {"page_tokens": 4}},
    "copied": {"decode": {"cache": {"host_bytes": HOST_BYTES}, "retract": "copy"}, "faults": {"retract_every": 3}},
    "shm": {"transfer": {"plane": "shm"}, "prefill": {"chunk_tokens": 16}},
    "zmq": {"transfer": {"plane": "zmq"}, "prefill": {"chunk_tokens": 16}},
}


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("scene", SCENES)
def test_answers_with_a_draft_layer_are_those_without_and_its_state_is_never_lost(
    model: Path, plain: Said, oracle: PlainMtp, proposed: Proposed, scene: str
) -> None:
    found, counters = answers(model, **with_mtp(**SCENES[scene]))
    assert said(found) == plain
    assert 0 < counters["drafts_accepted"] < counters["tokens_drafted"]
    expect_the_oracles(proposed, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_answers_with_a_draft_layer_are_those_without_on_devices_that_are_late(
    model: Path, plain: Said, oracle: PlainMtp, proposed: Proposed, seed: int
) -> None:
    devices = {role: AdversarialDevice(2 * seed + at) for at, role in enumerate(PAIR)}
    found, counters = answers(model, devices=devices, **with_mtp())
    assert said(found) == plain
    assert 0 < counters["drafts_accepted"] < counters["tokens_drafted"]
    expect_the_oracles(proposed, oracle)
    for device in devices.values():
        device.settle()


@pytest.mark.slow
def test_an_answer_that_begins_anew_elsewhere_goes_on_with_its_draft_layer(
    model: Path, plain: Said, oracle: PlainMtp, proposed: Proposed
) -> None:
    with pair(model, tokens=2048, **with_mtp()) as both:
        kept = [list(said[0]) for said in plain if isinstance(said[0], list)]
        given = zip(asks(), kept, strict=True)
        found = both.run(*(both.submit(*ask, emitted=tokens[: len(tokens) // 2]) for ask, tokens in given))
    assert [answer.list for answer in found] == [tokens[len(tokens) // 2 :] for tokens in kept]
    expect_the_oracles(proposed, oracle)


@pytest.mark.slow
def test_a_prefix_from_the_tree_has_the_draft_layers_state(model: Path, oracle: PlainMtp, proposed: Proposed) -> None:
    """The next turn of a conversation, whose prefix neither worker computes, is drafted as if it were computed."""
    prompt, params = asks()[0]
    with pair(model, tokens=2048, **with_mtp(cache={"page_tokens": 4})) as both:
        both.run(both.submit(prompt, params))
        both.settle()
        proposed.clear()
        (answer,) = both.run(both.submit([*prompt, *FEW], params))
        assert answer.progress[Role.PREFILL].cached_tokens >= 4
        assert answer.progress[Role.DECODE].cached_tokens >= 4
    expect_the_oracles(proposed, oracle)
