"""Audits through the real router core and both real workers: they find what was served wrong, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.family_scenes import buffers_of, damaged_on_the_way, make_family
from tests.support.hash_workers import recite
from tests.support.model_families import FAMILIES
from tests.support.pool_sets import NAMES, pool_sets
from tests.support.stepped_router import Cell
from tests.support.worker_pair import pair
from tests.support.worker_parts import manager_of
from tests.workers.test_any_state import PAGE, hash_pair
from twinpool.contracts.ids import Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.verification.audits import AuditResult

ALL = {"fraction": 1.0, "chunk_tokens": 16}
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(count)]


@contextmanager
def hash_cell(name: str, **sections: Any) -> Iterator[Cell]:
    counts = dict.fromkeys(Role, 200)
    with hash_pair(name, counts, prefill={"chunk_tokens": 8}, audit=ALL, **sections) as both:
        cell = Cell(both, audit=ALL)
        yield cell
        assert all(not report.violations for report in cell.rest())


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_byte_that_no_tag_caught_is_found_by_the_audit(name: str) -> None:
    """Tags off: the answer that the client gets is wrong, and nothing but the audit can tell."""
    spec = pool_sets(PAGE)[name]
    with hash_cell(name, cache={"verify": False}, faults={"corrupt_page": 1}) as cell:
        prompt = words(1, 21)
        answer = cell.ask(prompt, GREEDY)
        assert answer != recite(spec, prompt, 9), "the fault was served"
        assert cell.damage() == {}
        assert cell.audit_all() == {AuditResult.DAMAGED: 1}
        (finding,) = cell.findings
        right = recite(spec, prompt, 9)
        wrong = next(i for i, (a, b) in enumerate(zip(answer, right, strict=True)) if a != b)
        assert finding.differences[0].position == len(prompt) + wrong
        assert finding.differences[0].drawn == right[wrong]
        assert finding.role is Role.DECODE
        assert cell.both.decode.status().counters["pages_invalidated"] > 0
        assert cell.ask(prompt, GREEDY) == right, "what was kept of it is forgotten, so the next turn is right"
        counts = cell.core.audits.counts
        assert counts.damage == {("decode-0", Role.DECODE): 1}
        assert cell.audit_all() == {AuditResult.DAMAGED: 1, AuditResult.EXACT: 1}
        assert (counts.tokens, counts.damage_rate) == (18, 0.5)


@pytest.mark.parametrize("name", NAMES)
def test_an_undisturbed_cell_has_no_damage(name: str) -> None:
    with hash_cell(name) as cell:
        for n, length in enumerate((1, 4, 17, 40)):
            assert cell.ask(words(n, length), GREEDY) == recite(pool_sets(PAGE)[name], words(n, length), 9)
        assert cell.audit_all() == {AuditResult.EXACT: 4}
        assert cell.core.audits.counts.tokens == 4 * 9
        assert cell.core.audits.counts.damage_rate == 0.0


def test_audits_wait_until_clients_are_served_and_requests_are_not_delayed_by_them() -> None:
    with hash_cell("full") as cell:
        first = cell.ask(words(1, 60), GREEDY)
        for _ in range(200):
            if cell.core.audits.under_way and cell.both.prefill.status().counters["audit_tokens_computed"]:
                break
            cell.round()
        assert cell.both.prefill.status().counters["audits_computed"] == 0, "it is in the middle of the audit"
        rid = cell.submit(words(2, 40), GREEDY)
        assert cell.both.prefill.status().running + cell.both.prefill.status().waiting == 1
        done_before = cell.both.prefill.status().counters["audit_tokens_computed"]
        cell.run(rid)
        while not cell.core.audits.counts.results:
            cell.round()
        assert cell.both.prefill.status().counters["audits_preempted"] >= 1
        assert cell.both.prefill.status().counters["audit_tokens_computed"] > done_before
        assert cell.audit_all() == {AuditResult.EXACT: 2}
        assert first == recite(pool_sets(PAGE)["full"], words(1, 60), 9)


def expect_audits_of(name: str, folder: Path, answers: int) -> None:
    """Undisturbed answers are exact; damage that tags would have caught, with tags off, is found."""
    family = make_family(name, folder)
    samplings = [
        SamplingParams(max_tokens=8, temperature=0.0),
        SamplingParams(max_tokens=8, temperature=1.0, seed=3, top_p=0.95),
        SamplingParams(max_tokens=8, temperature=0.8, seed=4, repetition_penalty=1.2, frequency_penalty=0.3),
    ]
    cache = {"page_tokens": 8, "verify": False}
    with pair(
        family.folder, tokens=2048, cache=cache, prefill={"chunk_tokens": 48}, audit={"chunk_tokens": 32},
        decode={"cache": {"prefix_reuse": False}},
    ) as both:  # fmt: skip
        cell = Cell(both, audit=ALL)
        for n in range(answers):
            cell.ask(words(n, 30 + 23 * n), samplings[n % 3])
        assert cell.audit_all() == {AuditResult.EXACT: answers}, (name, cell.findings)
        prompt, spec = words(77, 107), manager_of(both.prefill).spec
        buffer = buffers_of(spec)[-1]
        with damaged_on_the_way(both, buffer, whole=True) as hurt:
            cell.ask(prompt, samplings[0])
        assert hurt
        assert cell.audit_all() == {AuditResult.EXACT: answers, AuditResult.DAMAGED: 1}, (name, buffer)
        assert cell.findings[-1].role is Role.DECODE
        cell.rest()


FAST = ("llama", "gemma3", "qwen3_next", "deepseek_v3")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_audits_of_undisturbed_models_are_exact_and_those_of_damaged_ones_are_not(name: str, tmp_path: Path) -> None:
    expect_audits_of(name, tmp_path, 3)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in FAST])
def test_audits_of_every_other_family(name: str, tmp_path: Path) -> None:
    expect_audits_of(name, tmp_path, 6)
