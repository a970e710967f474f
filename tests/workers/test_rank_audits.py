"""Audits on prefill workers of several ranks: all ranks compute them, and what they say is as exact as the draw was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.family_scenes import buffers_of, damaged_on_the_way, managers
from tests.support.rank_followers import RankProcesses
from tests.support.stepped_router import Cell
from tests.support.worker_pair import pair
from tests.workers.test_audits_end_to_end import ALL, words
from twinpool.contracts.ids import Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.verification.audits import AuditResult

PATIENT = {**ALL, "timeout_s": 1e6}
"""A cell's clock runs fast, and ranks that share a busy machine don't."""
SAMPLINGS = (
    SamplingParams(max_tokens=5, temperature=0.0),
    SamplingParams(max_tokens=5, temperature=0.9, seed=3, top_p=0.95),
    SamplingParams(max_tokens=5, temperature=0.8, seed=4, repetition_penalty=1.2),
)


def sections(prefill: int, decode: int, **more: Any) -> dict[str, Any]:
    return {
        "transfer": {"plane": "shm"}, "prefill": {"chunk_tokens": 48, "tp": prefill}, "decode": {"tp": decode},
        "audit": {"chunk_tokens": 32}, **more,
    }  # fmt: skip


@pytest.mark.slow
def test_two_ranks_draw_an_answer_again_exactly_and_give_way_to_requests(model: Path, warm: RankProcesses) -> None:
    with pair(model, tokens=1024, ranks=warm, **sections(2, 2)) as both:
        cell = Cell(both, audit=PATIENT)
        for n, sampling in enumerate(SAMPLINGS):
            cell.ask(words(n, 30 + 30 * n), sampling)
        assert cell.audit_all() == {AuditResult.EXACT: 3}, cell.findings
        assert cell.core.audits.counts.tokens == 3 * 5
        prompt = words(9, 100)

        def counters() -> dict[str, float]:
            return both.prefill.status().counters

        before, answer = counters()["audit_tokens_computed"], cell.ask(prompt, SAMPLINGS[0])
        while counters()["audit_tokens_computed"] == before:
            cell.round()
        assert cell.ask(prompt, SAMPLINGS[0]) == answer, "it came in the middle of an audit"
        assert counters()["audits_preempted"] > 0
        assert cell.audit_all() == {AuditResult.EXACT: 5}, cell.findings
        assert all(not report.violations for report in cell.rest())


@pytest.mark.slow
def test_stages_draw_an_answer_of_one_rank_again_to_the_bit(model: Path, warm: RankProcesses) -> None:
    layers = {"prefill": {"chunk_tokens": 48, "pp": 2}, "decode": {}}
    with pair(model, tokens=1024, ranks=warm, **{**sections(1, 1), **layers}) as both:
        cell = Cell(both, audit=PATIENT)
        for n, sampling in enumerate(SAMPLINGS):
            cell.ask(words(n, 30 + 30 * n), sampling)
        assert cell.audit_all() == {AuditResult.EXACT: 3}, cell.findings
        assert all(not report.violations for report in cell.rest())


@pytest.mark.soak
def test_what_went_wrong_on_the_way_between_ranks_is_found_where_nobody_looks_at_tags(
    model: Path, warm: RankProcesses
) -> None:
    """Of one rank's heads, as the leader writes them: the others' are right."""
    with pair(model, tokens=1024, ranks=warm, **sections(2, 2, cache={"verify": False})) as both:
        cell = Cell(both, audit=PATIENT)
        with damaged_on_the_way(both, buffers_of(managers(both)[0].pools.spec)[-1], whole=True) as hurt:
            cell.ask(words(1, 100), SAMPLINGS[0])
        assert hurt
        assert cell.audit_all() == {AuditResult.DAMAGED: 1}
        (finding,) = cell.findings
        assert finding.role is Role.DECODE
        assert cell.core.audits.counts.damage == {("decode-0", Role.DECODE): 1}
        assert all(not report.violations for report in cell.rest())


@pytest.mark.soak
def test_where_the_roles_have_unequal_ranks_rounding_accuses_nobody(model: Path, warm: RankProcesses) -> None:
    with pair(model, tokens=1024, ranks=warm, **sections(2, 1)) as both:
        cell = Cell(both, audit=PATIENT)
        for n, sampling in enumerate(SAMPLINGS):
            cell.ask(words(n, 30 + 30 * n), sampling)
        results = cell.audit_all()
        assert sum(results.values()) == 3
        assert set(results) <= {AuditResult.EXACT, AuditResult.UNCLEAR}, cell.findings
        assert all(not report.violations for report in cell.rest())
