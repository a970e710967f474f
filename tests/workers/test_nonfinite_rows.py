"""Logits that are no numbers: never sampled, computed once more elsewhere, then an error; and the worker that goes on
computing them is fenced. Real workers, and the real router core where several of them matter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import Oracle
from tests.support.stepped_cluster import Company, company
from tests.support.worker_pair import SESSION, pair, turns
from tests.support.worker_parts import manager_of
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.prefix_cache.tree_node import Tier
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import PAIR, RequestId, Role
from twinpool.contracts.messages.router_commands import Audit
from twinpool.contracts.messages.worker_events import Audited, AuditEnd
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.worker import DecodeWorker
from twinpool.prefill.worker import PrefillWorker

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
NAN, INF = float("nan"), float("inf")


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(count)]


class Bad:
    """Stands before a worker's head of logits and spoils what it is told to."""

    def __init__(self, worker: Any, value: float = NAN) -> None:
        assert isinstance(worker, PrefillWorker | DecodeWorker)
        self._decoder = worker.setup.engine.decoder
        self._logits = self._decoder.logits
        self._decoder.logits = self._spoilt  # type: ignore[method-assign]
        self.value = value
        self.calls = 0
        self.when: Callable[[int], bool] = lambda call: True
        self.rows: Callable[[int], list[int]] = lambda count: list(range(count))

    def _spoilt(self, x_nh: Tensor, numerics: Any) -> Tensor:
        logits_nv = self._logits(x_nh, numerics)
        self.calls += 1
        if self.when(self.calls - 1):
            logits_nv = logits_nv.clone()
            logits_nv[self.rows(len(logits_nv)), 7] = self.value
        return logits_nv

    def undo(self) -> None:
        self._decoder.logits = self._logits  # type: ignore[method-assign]


def test_prefill_tells_no_first_token_and_keeps_nothing_of_what_it_computed(model: Path) -> None:
    prompt = words(1, 50)
    with pair(model) as both:
        bad = Bad(both.prefill)
        (answer,) = both.run(both.submit(prompt, GREEDY))
        assert (answer.tokens, answer.done and answer.done.error) == ({}, ErrorKind.NONFINITE)
        assert both.prefill.status().counters["damage_logits"] == 1
        bad.undo()
        (again,) = both.run(both.submit(prompt, GREEDY))
        assert again.progress[Role.PREFILL].cached_tokens == 0, "its pages aren't in the tree"
        assert again.done is not None
        assert again.done.error is None


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=3)])
@pytest.mark.parametrize("value", [NAN, INF])
def test_decode_ends_the_damaged_row_and_no_other(model: Path, value: float, sampling: SamplingParams) -> None:
    prompts = [words(2, 40), words(3, 23)]
    with pair(model) as both:
        want = [a.list for a in both.run(*[both.submit(p, sampling) for p in prompts])]
    with pair(model) as both:
        bad = Bad(both.decode, value)
        bad.when, bad.rows = lambda call: call == 4, lambda count: [0]
        hit, spared = both.run(*[both.submit(p, sampling) for p in prompts])
        if hit.done is not None and hit.done.error is None:
            (hit, spared), want = (spared, hit), want[::-1]
        assert hit.done is not None
        assert hit.done.error is ErrorKind.NONFINITE
        assert hit.list == want[0][: len(hit.list)], "what was told before is right, and nothing was told after"
        assert len(hit.list) < 12
        assert spared.list == want[1]
        assert both.decode.status().counters["damage_logits"] == 1


def test_what_was_launched_behind_a_damaged_step_is_told_to_nobody(model: Path) -> None:
    """A device that is a step behind: the next step began with the damaged row's token."""
    prompt = words(4, 40)
    with pair(model) as both:
        (want,) = both.run(both.submit(prompt, GREEDY))
    device = AdversarialDevice(5)
    with pair(model, devices={Role.DECODE: device}) as both:
        Bad(both.decode).when = lambda call: call == 3
        (answer,) = both.run(both.submit(prompt, GREEDY))
        assert answer.done is not None
        assert answer.done.error is ErrorKind.NONFINITE
        assert answer.list == want.list[: len(answer.list)] == want.list[:4]


def test_scores_of_a_prompt_that_are_no_numbers_end_it(model: Path) -> None:
    with pair(model) as both:
        bad = Bad(both.prefill)
        bad.when, bad.rows = (
            lambda call: call == 1,
            lambda count: [count // 2],
        )  # The first call draws, the next scores.
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2, prompt_logprobs=2)
        (answer,) = both.run(both.submit(words(5, 30), sampling))
        assert (answer.tokens, answer.scores) == ({}, ())
        assert answer.done is not None
        assert answer.done.error is ErrorKind.NONFINITE


def test_a_draw_that_is_no_number_beside_scores_that_are_ends_its_row(model: Path) -> None:
    with pair(model) as both:
        bad = Bad(both.prefill)
        bad.when, bad.rows = lambda call: call == 0, lambda count: [0]  # The first call draws, the next ones score.
        sampling = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=2)
        (answer,) = both.run(both.submit(words(5, 30), sampling))
        assert bad.calls > 1, "there were scores"
        assert answer.tokens == {}
        assert answer.done is not None
        assert answer.done.error is ErrorKind.NONFINITE
        assert both.prefill.status().counters["damage_logits"] == 1


def test_an_audit_that_meets_them_is_refused_and_counted(model: Path) -> None:
    prompt = words(6, 30)
    with pair(model) as both:
        (answer,) = both.run(both.submit(prompt, GREEDY))
        both.settle()
        Bad(both.prefill)
        both.prefill.handle(SESSION, Audit(RequestId("audit"), 0, (*prompt, *answer.list), len(prompt), GREEDY))
        (found,) = [e for _ in range(5) for _, e in both.prefill.step() if isinstance(e, Audited)]
        assert (found.end, found.differences) == (AuditEnd.REFUSED, ())
        assert both.prefill.status().counters["damage_logits"] == 1


def test_three_such_rows_within_a_minute_fence_a_worker_and_three_within_more_do_not(model: Path) -> None:
    for pause_s, fenced in ((29.0, True), (31.0, False)):
        clock = ManualClock(100.0)
        with pair(model, clock=clock) as both:
            Bad(both.prefill)
            for number in range(3):
                assert both.prefill.unfit == ""
                both.run(both.submit(words(7 + number, 20), GREEDY))
                clock.advance(pause_s if number < 2 else 0.0)
            assert both.prefill.status().counters["damage_logits"] == 3
            assert bool(both.prefill.unfit) is fenced
            assert ("cluster.nonfinite_rows" in both.prefill.unfit) is fenced


# ---------------------------------------------------------------- with a router


@contextmanager
def several(model: Path, **options: Any) -> Iterator[Company]:
    clock = ManualClock(100.0)
    with company(model, prefills=2, decodes=2, clock=clock, **options) as group:
        yield group


@pytest.mark.parametrize("role", PAIR)
def test_a_damaged_row_is_computed_once_more_elsewhere_and_the_client_sees_nothing(
    model: Path, oracle: Oracle, role: Role
) -> None:
    prompt = words(11, 70)
    want = oracle.generate(prompt, 12)
    with several(model) as group:
        Bad(group.workers[next(n for n in group.workers if n.startswith(role))]).when = lambda call: call == 0
        rid = group.submit(prompt, GREEDY)
        first = group.told[rid].request.workers[role]
        group.run(rid)
        told = group.told[rid]
        assert told.tokens == want
        assert len(told.replays) == 1
        assert "no finite numbers" in told.replays[0]
        assert told.request.workers[role] != first


def test_a_row_that_is_damaged_everywhere_ends_in_an_error_after_two_workers(model: Path) -> None:
    with several(model) as group:
        bads = [Bad(worker) for name, worker in group.workers.items() if name.startswith("prefill")]
        rid = group.submit(words(12, 40), GREEDY)
        group.until(lambda: group.told[rid].done is not None, "an end")
        told = group.told[rid]
        assert told.tokens == []
        assert told.done is not None
        assert told.done.error is ErrorKind.NONFINITE
        assert [bad.calls for bad in bads] == [1, 1], "each worker computed it once"


def test_the_second_time_it_is_computed_from_its_tokens_alone(model: Path, oracle: Oracle) -> None:
    """State that is kept under the same tokens may be what was wrong: here a NaN in both prefill workers' trees."""
    prompt = words(13, 64)
    want = oracle.generate(prompt, 6)
    with several(model) as group:
        for name, worker in group.workers.items():
            if isinstance(worker, PrefillWorker):
                other = next(n for n in group.workers if n.startswith("prefill") and n != name)
                group.drain(other)
                group.run(group.submit(prompt, SamplingParams(max_tokens=3, temperature=0.0)))
                group.drain(other, False)
                pages = [
                    i
                    for node in manager_of(worker).tree.accounts.nodes()
                    for i in node.parts[Tier.DEVICE]["full"].lease.indices
                ]
                assert pages
                for buffer in manager_of(worker).pools.gates["full"].layer(0).values():
                    buffer[pages] = torch.nan
        # Decode has sound pages of it: those are spared nothing, as the prompt's own are computed anew.
        rid = group.submit(prompt, SamplingParams(max_tokens=6, temperature=0.0))
        assert group.run(rid) == [want]
        assert len(group.told[rid].replays) == 1


def test_one_worker_alone_computes_it_once_more_itself(model: Path, oracle: Oracle) -> None:
    prompt = words(14, 30)
    clock = ManualClock(100.0)
    with company(model, prefills=1, decodes=1, clock=clock) as group:
        Bad(group.workers[next(n for n in group.workers if n.startswith("prefill"))]).when = lambda call: call == 0
        rid = group.submit(prompt, GREEDY)
        for _ in turns(2000):
            group.step()
            clock.advance(0.01)
            if group.told[rid].done is not None:
                break
        assert group.told[rid].tokens == oracle.generate(prompt, 12)
