"""Draft models in whole workers: answers are the same with and without them, and what they propose is the same wherever
their state came from.

Answers that may have few tokens alone are often what is proposed, random as it is, and often aren't.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.colocated_worker import colocated
from tests.support.family_hybrid import with_mtp
from tests.support.model_families import FAMILIES
from tests.support.plain_drafts import PlainEagle3, PlainMtp, PlainQwenMtp, make_eagle3
from tests.support.rank_followers import rank_processes
from tests.support.stepped_cluster import company, generated
from tests.support.worker_pair import pair
from tests.workers.test_drafts import FEW, Asked, Said, answers, said
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import AsyncCpuDevice
from twinpool.contracts.ids import PAIR, Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.drafting import DraftModelDrafter, WantedDraft

HOST_BYTES = 1 << 23
Proposed = dict[tuple[int, ...], list[int]]
"""What was proposed behind the tokens so far."""
DRAFTS: dict[str, Any] = {"draft_tokens": 4, "draft_requests": 8}


class Drafted(NamedTuple):
    """A checkpoint, what drafts for it, the plain definition of that, and the answers without drafts."""

    folder: Path
    draft_model: str
    oracle: PlainMtp | PlainEagle3
    plain: Said

    def sections(self, **sections: Any) -> dict[str, Any]:
        """The sections of a configuration, with drafts."""
        engine, decode = {"draft_model": self.draft_model}, DRAFTS | sections.get("decode", {})
        return {"engine": engine, **sections, "decode": decode}

    @property
    def tokens(self) -> list[list[int]]:
        """Of the answers without drafts."""
        return [list(one[0]) for one in self.plain if isinstance(one[0], list)]

    def expect_its_oracles(self, proposed: Proposed) -> None:
        assert proposed
        for tokens, draft in proposed.items():
            assert draft == self.oracle.proposals(tokens, len(draft), FEW), len(tokens)


@pytest.fixture(scope="module")
def drafts_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Drafted]:
    """What drafts, by its kind; each is made once."""
    base = tmp_path_factory.mktemp("drafts")

    @cache
    def make(kind: str) -> Drafted:
        oracle: PlainMtp | PlainEagle3
        if kind == "eagle3":
            folder = make_checkpoint(base / "llama", layers=8)
            head = make_eagle3(base / "head", hidden=64, vocab=VOCAB, known=range(1, VOCAB, 2))
            draft_model, oracle = str(head), PlainEagle3(folder, head)
        elif kind == "qwen3_next":
            folder = with_mtp(FAMILIES[kind](base / kind))
            draft_model, oracle = "mtp", PlainQwenMtp(folder)
        else:
            folder = FAMILIES[kind](base / kind, published=True)
            draft_model, oracle = "mtp", PlainMtp(folder)
        found, counters = answers(folder, asks(), decode={"speculation": "off"})
        assert counters["tokens_drafted"] == 0
        return Drafted(folder, draft_model, oracle, said(found))

    return make


def asks() -> Asked:
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


SCENES: dict[str, dict[str, Any]] = {
    "together": {},
    "few tokens a step": {"decode": {"max_batch_tokens": 6}},
    "prompts in chunks": {"prefill": {"chunk_tokens": 16}, "cache": {"page_tokens": 4}},
    "copied": {"decode": {"cache": {"host_bytes": HOST_BYTES}, "retract": "copy"}, "faults": {"retract_every": 3}},
    "shm": {"transfer": {"plane": "shm"}, "prefill": {"chunk_tokens": 16}},
    "zmq": {"transfer": {"plane": "zmq"}, "prefill": {"chunk_tokens": 16}},
    "shared experts": {"transfer": {"plane": "shm"}, "decode": {"dp": 2}},
}


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("kind", "scene"),
    [
        *(("deepseek_v3", scene) for scene in SCENES),
        *((kind, scene) for kind in ("eagle3", "qwen3_next") for scene in ("copied", "zmq")),
    ],
)
def test_answers_with_a_draft_model_are_those_without_and_its_state_is_never_lost(
    drafts_of: Callable[[str], Drafted], proposed: Proposed, kind: str, scene: str
) -> None:
    drafted = drafts_of(kind)
    found, counters = answers(drafted.folder, asks(), **drafted.sections(**SCENES[scene]))
    assert said(found) == drafted.plain
    assert 0 < counters["drafts_accepted"] < counters["tokens_drafted"]
    drafted.expect_its_oracles(proposed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_answers_with_a_draft_model_are_those_without_on_devices_that_are_late(
    drafts_of: Callable[[str], Drafted], proposed: Proposed, seed: int
) -> None:
    drafted, devices = (
        drafts_of("deepseek_v3"),
        {role: AdversarialDevice(2 * seed + at) for at, role in enumerate(PAIR)},
    )
    found, counters = answers(drafted.folder, asks(), devices=devices, **drafted.sections())
    assert said(found) == drafted.plain
    assert 0 < counters["drafts_accepted"] < counters["tokens_drafted"]
    drafted.expect_its_oracles(proposed)
    for device in devices.values():
        device.settle()


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["zmq", "local"])
def test_what_a_draft_model_keeps_does_not_leave_before_it_is_computed(
    drafts_of: Callable[[str], Drafted], proposed: Proposed, plane: str
) -> None:
    drafted, devices = drafts_of("eagle3"), {role: AsyncCpuDevice() for role in PAIR}
    transfer = {"plane": plane, "layers": True, "layer_group_bytes": 1, "layer_group_s": 1e-9}
    prefill = {"chunk_tokens": 32}
    found, counters = answers(
        drafted.folder, asks(), devices=devices, **drafted.sections(transfer=transfer, prefill=prefill)
    )
    assert said(found) == drafted.plain
    assert counters["pages_damaged"] == 0
    drafted.expect_its_oracles(proposed)


@pytest.mark.slow
def test_an_answer_that_begins_anew_elsewhere_goes_on_with_its_draft_model(
    drafts_of: Callable[[str], Drafted], proposed: Proposed
) -> None:
    drafted = drafts_of("deepseek_v3")
    with pair(drafted.folder, tokens=2048, **drafted.sections()) as both:
        kept = drafted.tokens
        given = zip(asks(), kept, strict=True)
        found = both.run(*(both.submit(*ask, emitted=tokens[: len(tokens) // 2]) for ask, tokens in given))
    assert [answer.list for answer in found] == [tokens[len(tokens) // 2 :] for tokens in kept]
    drafted.expect_its_oracles(proposed)


@pytest.mark.slow
def test_a_request_that_migrates_takes_its_draft_models_state_along(
    drafts_of: Callable[[str], Drafted], proposed: Proposed
) -> None:
    drafted = drafts_of("deepseek_v3")
    with company(drafted.folder, **drafted.sections(decode={"migration_chunk_bytes": 4096})) as c:
        rids = [c.submit(*ask) for ask in asks()]
        c.until(lambda: all(generated(c, rid, 2)() for rid in rids), "all to run")
        c.drain("decode-0")
        c.until(lambda: c.decode("decode-0").drained, "decode-0 to be empty", 1_000_000)
        assert c.core.migrations.counts.migrated > 0
        proposed.clear()
        assert c.run(*rids) == drafted.tokens
        assert c.decode("decode-1").status().counters["prompt_tokens_computed"] == 0
    drafted.expect_its_oracles(proposed)


@pytest.mark.slow
def test_a_colocated_worker_drafts_with_its_model_too(drafts_of: Callable[[str], Drafted], proposed: Proposed) -> None:
    drafted = drafts_of("eagle3")
    with colocated(drafted.folder, tokens=2048, **drafted.sections(colocate={"prompt_tokens": 16})) as worker:
        found = worker.run(*(worker.submit(prompt, params) for prompt, params in asks()))
    assert said(found) == drafted.plain
    drafted.expect_its_oracles(proposed)


@pytest.mark.slow
def test_prefill_on_two_ranks_hands_over_the_state_of_a_draft_model_on_one(
    drafts_of: Callable[[str], Drafted], proposed: Proposed
) -> None:
    drafted = drafts_of("eagle3")
    with rank_processes() as warm:
        sections = drafted.sections(prefill={"tp": 2}, transfer={"plane": "shm"})
        found, counters = answers(drafted.folder, asks(), ranks=warm, **sections)
    assert [answer.list[0] for answer in found] == [tokens[0] for tokens in drafted.tokens]
    assert counters["tokens_drafted"] > 0
    drafted.expect_its_oracles(proposed)


@pytest.mark.slow
def test_a_prefix_from_the_tree_has_the_draft_models_state(
    drafts_of: Callable[[str], Drafted], proposed: Proposed
) -> None:
    """The next turn of a conversation, whose prefix neither worker computes, is drafted as if it were computed."""
    prompt, params = asks()[0]
    drafted = drafts_of("deepseek_v3")
    with pair(drafted.folder, tokens=2048, **drafted.sections(cache={"page_tokens": 4})) as both:
        both.run(both.submit(prompt, params))
        both.settle()
        proposed.clear()
        (answer,) = both.run(both.submit([*prompt, *FEW], params))
        assert answer.progress[Role.PREFILL].cached_tokens >= 4
        assert answer.progress[Role.DECODE].cached_tokens >= 4
    drafted.expect_its_oracles(proposed)
