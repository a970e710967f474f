"""`twinpool.LLM`: the demo in this process, its answers beside those of the endpoint's own rules, and its ends."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import Oracle, compare
from twinpool import LLM
from twinpool.cluster.serve import offline_llm
from twinpool.cluster.serve.offline_llm import AnswerFailed, Drawing
from twinpool.cluster.serve.serve_one_process import start_worker
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.errors import ConfigError, RequestError
from twinpool.contracts.interfaces.worker_interface import SessionId, Worker
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import WorkerRecord
from twinpool.router.openai.api_errors import ReaderFailed
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.service.open_answers import ClientRequest
from twinpool.router.service.router_service import RouterService

DEMO = Path(__file__).parents[3] / "cluster" / "demo"
PROMPTS = [[300 + n, 7, 11 + n, 400, 17] for n in range(5)]
GREEDY: Drawing = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO), settings={"router.max_queue": 4}) as made:
        yield made
        assert made.check() == []


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(DEMO)


def test_answers_are_the_oracles_in_order_though_more_than_the_queue_are_asked(llm: LLM, oracle: Oracle) -> None:
    found = llm.generate(PROMPTS, {**GREEDY, "logprobs": 0})
    assert [one.prompt_token_ids for one in found] == [tuple(prompt) for prompt in PROMPTS]
    for prompt, one in zip(PROMPTS, found, strict=True):
        (answer,) = one.answers
        verdict = compare(oracle, prompt, list(answer.token_ids))
        assert verdict.equal, verdict
        assert (len(answer.token_ids), answer.finish_reason, answer.stop_reason) == (6, "length", None)
        assert answer.logprobs is not None
        assert len(answer.logprobs["token_logprobs"]) == 6
        assert one.text == answer.text != ""


def test_one_prompt_has_as_many_answers_as_asked_and_its_log_probabilities(llm: LLM) -> None:
    asked: Drawing = {"max_tokens": 5, "seed": 3, "n": 2, "prompt_logprobs": 1}
    (found,) = llm.generate("The old house", asked)
    first, second = found.answers
    assert first.token_ids != second.token_ids
    assert found.prompt_logprobs is not None
    assert len(found.prompt_logprobs) == len(found.prompt_token_ids)
    (again,) = llm.generate(list(found.prompt_token_ids), asked)
    assert again == found, "of the same seed, by its token ids"


def test_chats_and_embeddings(llm: LLM, oracle: Oracle) -> None:
    chat = [{"role": "user", "content": "The old house stood"}]
    (one,) = llm.chat(chat, {"max_tokens": 4, "seed": 1})
    both = llm.chat([chat, chat], {"max_tokens": 4, "seed": 1})
    assert [answer.text for answer in both] == [one.text] * 2
    assert one.answers[0].message == {"role": "assistant", "content": one.text}
    (vector,) = llm.embed(PROMPTS[0])
    want = torch.nn.functional.normalize(oracle.hidden(PROMPTS[0])[-1], dim=0)
    torch.testing.assert_close(torch.tensor(vector), want, rtol=0, atol=5e-3)  # Of bfloat16.
    assert [len(each) for each in llm.embed(["a", "b"], dimensions=8)] == [8, 8]


@pytest.mark.parametrize(
    ("drawing", "says"),
    [({"temperature": -1}, "temperature must be"), ({"model": "other"}, "does not exist"), ({"best_of": 2}, "use n")],
)
def test_what_is_wrong_is_refused_as_the_endpoint_does_and_ends_the_call(llm: LLM, drawing: Drawing, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate(PROMPTS, drawing)
    assert llm.check() == []


def test_calls_of_several_threads_and_answers_of_several_choices_share_the_queue(llm: LLM) -> None:
    several: Drawing = {"max_tokens": 8, "ignore_eos": True, "n": 3}
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(llm.generate, PROMPTS, {**GREEDY, "n": 1 + at % 2}) for at in range(4)]
        assert [len(one.answers) for one in llm.generate(PROMPTS, several)] == [3] * 5
        assert [len(call.result()) for call in found] == [5] * 4
    assert llm.check() == []


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.03, 0.1, 0.25])
def test_the_deadline_of_a_call_is_its_own_at_any_length(llm: LLM, timeout_s: float) -> None:
    with pytest.raises(TimeoutError):
        llm.generate("a", {"max_tokens": 2000, "ignore_eos": True}, timeout_s=timeout_s)
    assert llm.check() == []


def test_calls_end_when_it_is_closed_though_some_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    long: Drawing = {"max_tokens": 1900, "ignore_eos": True}
    begun, opened = threading.Event(), RouterService.open

    async def told(service: RouterService, asked: ClientRequest) -> ResponseStream:
        begun.set()
        return await opened(service, asked)

    monkeypatch.setattr(RouterService, "open", told)
    made = LLM(str(DEMO), settings={"router.max_queue": 2})
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(made.generate, ["a"] * 5, long) for _ in range(3)]
        assert begun.wait(30)
        made.close()
        for call in calls:
            with pytest.raises((AnswerFailed, ReaderFailed)):
                call.result(30)


def test_a_worker_that_dies_ends_its_calls_and_later_ones_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[WorkerThread] = []

    def started(*args: Any) -> tuple[WorkerRecord, WorkerThread]:
        record, host = start_worker(*args)
        hosts.append(host)
        return record, host

    monkeypatch.setattr(offline_llm, "start_worker", started)
    with LLM(str(DEMO), prefill=1, decode=1) as made:
        decode, computes = hosts[1], threading.Event()

        def seen(worker: Worker) -> None:
            step = worker.step

            def watched() -> Sequence[tuple[SessionId, Event]]:
                events = step()
                if events:
                    computes.set()
                return events

            monkeypatch.setattr(worker, "step", watched)

        decode.call(seen).result(30)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(made.generate, ["a"] * 3, {"max_tokens": 1900, "ignore_eos": True}, timeout_s=60)
            assert computes.wait(30)
            decode.call(lambda worker: monkeypatch.setattr(worker, "step", lambda: 1 // 0)).result(30)
            with pytest.raises(AnswerFailed):
                call.result(30)
        with pytest.raises(AnswerFailed, match=r"died .*: make a new LLM"):
            made.generate("a", GREEDY, timeout_s=60)


def test_a_call_that_takes_too_long_is_ended_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(TimeoutError):
        llm.generate(["a"] * 9, {"max_tokens": 2000, "ignore_eos": True}, timeout_s=0.01)
    assert len(llm.generate(PROMPTS[0], GREEDY)) == 1
    assert llm.check() == []


def test_its_end_leaves_no_thread_and_no_process_and_later_calls_say_so() -> None:
    before, opened = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with LLM(str(DEMO), prefill=1, decode=1) as made:
        text = "It was a fine morning, and " * 200  # Read by a process of its own.
        (answer,) = made.generate(text, {"max_tokens": 3})
        assert len(answer.answers[0].token_ids) == 3
        assert set(threading.enumerate()) > before
    made.close()
    for thread in set(threading.enumerate()) - before:  # Of a pool that was told to end.
        thread.join(10)
    assert set(threading.enumerate()) <= before
    with pytest.raises(AnswerFailed, match="closed: make a new one"):
        made.generate("x")
    del made
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= opened + 2


def test_what_can_not_be_loaded_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError):
        LLM(str(DEMO), settings={"cache.page_tokens": -1})
    with pytest.raises(Exception, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))
    assert set(threading.enumerate()) == before


@pytest.mark.asyncio
async def test_answers_under_way_have_a_bound_and_who_gives_up_waiting_leaves_its_place_to_the_next() -> None:
    room, most = offline_llm.AnswerRoom(4), 0
    under_way, ended = dict[int, int](), list[int]()
    goes_on = asyncio.Event()

    async def body(number: int, choices: int) -> None:
        nonlocal most
        async with room.taken(choices):
            under_way[number] = choices
            most = max(most, sum(under_way.values()))
            await goes_on.wait()
            del under_way[number]
            ended.append(number)

    sizes = [2, 2, 1, 3, 4, 9, 1, 1]
    tasks = [asyncio.ensure_future(body(number, choices)) for number, choices in enumerate(sizes)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert under_way == {0: 2, 1: 2}, "as many as there is room for"
    tasks[0].cancel()
    tasks[3].cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert under_way.keys() - {0} == {1, 2}
    under_way.pop(0)
    goes_on.set()
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert [type(one) is asyncio.CancelledError for one in done] == [number in (0, 3) for number in range(8)]
    assert (most, sorted(ended)) == (9, [1, 2, 4, 5, 6, 7])
    last = asyncio.ensure_future(body(8, 4))
    for _ in range(20):
        await asyncio.sleep(0)
    assert last.done(), "nothing is left of those before"
