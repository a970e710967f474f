"""Decode workers that compute some prompts and receive others, one prefill worker, and the real router core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle, compare
from tests.support.stepped_cluster import Company, company, generated, hears
from tests.workers.test_migrations import prompts, seeded
from twinpool.colocate import ConditionalDecodeWorker
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.worker_events import LegReport
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.batch import BatchRow

pytestmark = pytest.mark.slow
PAGE = 16
STEP = 32
CONDITIONAL = {"mode": "conditional", "step_tokens": STEP}


def conditional(model: Path, decodes: int = 2, **sections: Any) -> Any:
    sections["cache"] = {"page_tokens": PAGE, **sections.get("cache", {})}
    return company(model, decodes=decodes, disaggregation=CONDITIONAL, **sections)


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[list[int]]:
    """What eight requests are answered where each is handed over, and nothing happens."""
    with company(model) as c:
        for number, prompt in enumerate(prompts(1, 8)):
            c.submit(prompt, seeded(number))
        return c.run()


@pytest.fixture
def running(model: Path) -> Iterator[tuple[Company, list[RequestId]]]:
    """The same eight in the middle of their answers, on two decode workers that have two of each kind."""
    with conditional(model) as c:
        yield c, both_kinds(c, [(prompt, seeded(number)) for number, prompt in enumerate(prompts(1, 8))])


def both_kinds(c: Company, asks: Sequence[tuple[list[int], SamplingParams]]) -> list[RequestId]:
    """Submit the requests, of which the first half is handed over, and step until all run."""
    half = len(asks) // 2
    # Until prefill was measured, prompts are handed over; without it, none is.
    rids = [c.submit(*ask) for ask in asks[:half]]
    c.drain("prefill-0")
    rids += [c.submit(*ask) for ask in asks[half:]]
    assert kinds(c, rids) == [""] * half + ["no_prefill"] * half
    # Now, as one that is retracted later may be computed again elsewhere.
    for name in ("decode-0", "decode-1")[: len(c.workers) - 1]:
        assert {bool(kind) for rid, kind in zip(rids, kinds(c, rids), strict=True) if c.worker_of(rid) == name} == {
            False,
            True,
        }
    c.until(lambda: all(generated(c, rid, 6)() for rid in rids), "all to run")
    c.drain("prefill-0", draining=False)
    return rids


def kinds(c: Company, rids: Sequence[RequestId]) -> list[str]:
    return [c.told[rid].request.local for rid in rids]


def test_both_kinds_beside_each_other_are_answered_as_transformers_does(model: Path, oracle: Oracle) -> None:
    asked = prompts(5, 10, 200)
    with conditional(model) as c:
        rids = both_kinds(c, [(prompt, SamplingParams(max_tokens=20, temperature=0.0)) for prompt in asked])
        for prompt, answer in zip(asked, c.run(*rids), strict=True):
            assert compare(oracle, prompt, answer).equal


def test_tokens_are_those_of_hand_overs_and_a_later_turn_needs_only_what_decode_lacks(
    running: tuple[Company, list[RequestId]], undisturbed: list[list[int]]
) -> None:
    c, rids = running
    assert c.run(*rids) == undisturbed
    reports = hears(c, LegReport)
    c.drain("prefill-0")
    turn = [*prompts(1, 8)[0], *undisturbed[0], 5, 6, 7]
    c.run(c.submit(turn, seeded(0, 4)))
    prefill = [report for report in reports if isinstance(report, LegReport) and report.role is Role.PREFILL]
    (told,) = prefill
    assert told.worker.startswith("decode")
    assert told.cached_tokens + told.computed_tokens == len(turn)
    if told.worker == c.told[rids[0]].request.workers[Role.DECODE]:
        assert told.computed_tokens <= 3 + PAGE


def test_each_hand_over_is_measured_once(model: Path) -> None:
    with conditional(model, decodes=1) as c:
        entry = c.core.workers.named("decode-0")
        assert entry is not None
        for number, prompt in enumerate(prompts(7, 4)):
            assert entry.transfers.seconds(50) is None, "four were to be seen"
            rid = c.submit(prompt, seeded(number, 6))
            assert kinds(c, [rid]) == [""]
            c.run(rid)
        assert entry.transfers.seconds(50) is not None


def test_running_requests_have_a_row_in_every_step_and_steps_are_bounded(model: Path) -> None:
    with conditional(model, decodes=1) as c:
        worker = c.decode("decode-0")
        assert isinstance(worker, ConditionalDecodeWorker)
        steps: list[list[int]] = []
        begin = worker.setup.engine.begin

        def spy(rows: Sequence[BatchRow], *rest: Any) -> Any:
            steps.append([len(row.tokens) for row in rows])
            return begin(rows, *rest)

        worker.setup.engine.begin = spy  # type: ignore[method-assign, assignment]
        # Nothing in it repeats, so no row has drafts.
        running = [
            c.submit(prompt, SamplingParams(60, temperature=1.0, seed=n)) for n, prompt in enumerate(prompts(1, 3))
        ]
        c.until(lambda: all(generated(c, rid, 2)() for rid in running), "them to run")
        c.drain("prefill-0")
        steps.clear()
        late = c.submit(prompts(3, 1, 90)[0] * 6, seeded(1, 4))
        c.until(generated(c, late, 1), "its first token")
        beside = [step for step in steps if max(step) > 8]
        assert len(beside) >= len(c.told[late].request.prompt) // STEP
        for step in beside:
            assert sum(step) <= STEP
            assert sum(tokens <= 8 for tokens in step) >= 3, "each running request has its row"
        c.run()
        c.settle()
        steps.clear()
        c.run(c.submit(list(range(200)), seeded(1, 2)))
        assert max(sum(step) for step in steps) > STEP, "nobody is beside it"


def test_c10_where_rows_take_the_whole_step_prompts_still_get_a_page_of_it(model: Path) -> None:
    sections: dict[str, Any] = {
        "disaggregation": {"mode": "conditional", "step_tokens": PAGE},
        "cache": {"page_tokens": PAGE},
    }
    with company(model, prefills=0, decodes=1, **sections) as c:
        running = [c.submit(prompt, seeded(0, 80)) for prompt in prompts(1, 24)]
        c.until(lambda: all(generated(c, rid, 1)() for rid in running), "them to run")
        late = c.submit([7] * 200, seeded(1, 2))
        c.until(lambda: c.told[late].done is not None, "the late one", 200)
        c.run()


def test_a_prefill_pool_that_is_gone_costs_no_answer_and_its_prompts_start_over_at_decode(
    model: Path, undisturbed: list[list[int]]
) -> None:
    # What the dead writer may still write to isn't used again here, as its process, this one, lives on.
    with conditional(model, settle=False) as c:
        rids = [c.submit(prompt, seeded(number)) for number, prompt in enumerate(prompts(1, 8))]
        c.until(generated(c, rids[0], 1), "the first token")
        c.gone("prefill-0")
        assert c.run(*rids) == undisturbed
        assert [worker.check().violations for worker in c.workers.values()] == [()] * 2
        again = kinds(c, rids)
        assert again.count("no_prefill") >= 4
        assert c.core.counts.local_prompts["no_prefill"] == again.count("no_prefill")


def test_d1_a_decode_worker_that_drains_hands_on_both_kinds_and_no_stream_is_altered(
    running: tuple[Company, list[RequestId]], undisturbed: list[list[int]]
) -> None:
    c, rids = running
    mine = [rid for rid in rids if c.worker_of(rid) == "decode-0"]
    c.drain("decode-0")
    c.until(lambda: c.decode("decode-0").drained, "decode-0 to be empty", 1_000_000)
    assert all(c.worker_of(rid) == "decode-1" for rid in rids if c.told[rid].done is None)
    assert c.run(*rids) == undisturbed
    assert c.core.migrations.counts.migrated == len(mine)
    assert [c.told[rid].replays for rid in rids] == [[]] * 8, "nothing was computed again"


def test_d5_a_decode_worker_that_is_gone_costs_both_kinds_a_replay(
    running: tuple[Company, list[RequestId]], undisturbed: list[list[int]]
) -> None:
    c, rids = running
    mine = [rid for rid in rids if c.worker_of(rid) == "decode-0"]
    c.gone("decode-0")
    assert c.run(*rids) == undisturbed
    assert [len(c.told[rid].replays) for rid in rids] == [int(rid in mine) for rid in rids]


def test_a_prefill_worker_that_is_gone_after_its_hand_over_costs_nothing(
    running: tuple[Company, list[RequestId]], undisturbed: list[list[int]]
) -> None:
    c, rids = running
    c.gone("prefill-0")
    assert c.run(*rids) == undisturbed
    assert [c.told[rid].replays for rid in rids] == [[]] * 8


@pytest.mark.parametrize("way", ["copy", "recompute"])
def test_retracted_requests_of_both_kinds_come_back(model: Path, undisturbed: list[list[int]], way: str) -> None:
    with conditional(model, faults={"retract_every": 5}, decode={"retract": way}) as c:
        rids = both_kinds(c, [(prompt, seeded(number)) for number, prompt in enumerate(prompts(1, 8))])
        assert c.run(*rids) == undisturbed
        counters = [worker.status().counters for name, worker in c.workers.items() if name.startswith("decode")]
        assert sum(counter["retractions"] for counter in counters) > 0


def test_both_kinds_are_cancelled_and_leave_nothing(running: tuple[Company, list[RequestId]]) -> None:
    c, rids = running
    before = len(c.sent)
    for rid in rids:
        c.cancel(rid)
    cancelled = sum(type(command).__name__ == "Cancel" for _, command in c.sent[before:])
    handed_over = kinds(c, rids).count("")
    assert len(rids) <= cancelled <= len(rids) + handed_over, "one that is local is cancelled once"


def test_a_prompt_that_decode_computes_is_cancelled_in_its_middle(model: Path) -> None:
    with conditional(model, decodes=1, prefill={"chunk_tokens": 32}) as c:
        c.drain("prefill-0")
        rid = c.submit([3] * 300, seeded(0, 4))
        c.step()
        c.step()
        assert c.told[rid].tokens == []
        c.cancel(rid)
        other = c.submit([4] * 40, seeded(0, 4))
        assert len(c.run(other)[0]) == 4


def test_a_prompt_whose_first_token_is_due_before_decode_begins_it_is_refused(model: Path) -> None:
    clock = ManualClock(100.0)
    with conditional(model, decodes=1, clock=clock, prefill={"max_running": 1}) as c:
        c.drain("prefill-0")
        first = c.submit([3] * 100, seeded(0, 4))
        late = c.submit([4] * 100, seeded(0, 4), first_token_by=clock.now() + 0.5)
        c.step("prefill-0")
        clock.advance(1.0)
        c.until(lambda: c.told[late].done is not None, "its end")
        done = c.told[late].done
        assert done is not None
        assert done.error == "late"
        c.run(first)


def test_a_step_that_has_no_room_for_a_page_is_refused(model: Path) -> None:
    sections: dict[str, Any] = {
        "disaggregation": {"mode": "conditional", "step_tokens": 8},
        "cache": {"page_tokens": 16},
    }
    with pytest.raises(ConfigError, match=r"disaggregation\.step_tokens=8 is below decode's cache\.page_tokens=16"):
        company(model, **sections).__enter__()
