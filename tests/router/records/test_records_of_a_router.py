"""Records as a router makes them of the requests that it serves, by whatever end, and as operators are answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, router_config, serving
from tests.router.records.test_record_reports import record
from twinpool.contracts.messages.request_record import FoundRecords, RequestRecord


def records(server: Server, asked: str) -> list[dict[str, Any]]:
    answer = server.client.get(f"/cluster/requests/{asked}")
    assert answer.status_code == 200, answer.text
    return list(answer.json()["records"])


def adds_up(one: dict[str, Any]) -> None:
    shown = [span for span in one["spans"] if not span["hidden"]]
    assert sum(span["end_s"] - span["start_s"] for span in shown) == pytest.approx(one["total_s"], rel=0.01, abs=2e-6)


def test_each_choice_has_a_record_that_says_which_workers_were_considered(server: Server) -> None:
    answer = server.complete(n=2, max_tokens=4)
    both = records(server, answer["id"])
    assert [one["request_id"].rpartition("-")[2] for one in both] == ["0", "1"]
    assert {one["answer_id"] for one in both} == {answer["id"].removeprefix("cmpl-")}
    for one in both:
        adds_up(one)
        assert (one["outcome"], one["generated"], one["prompt_tokens"]) == ("length", 4, 3)
        prefill, decode = one["choices"]
        assert {prefill["at_s"], decode["at_s"]} == {e["at_s"] for e in one["events"] if e["kind"] == "placed"}
        assert prefill["chosen"] in [worker["worker"] for worker in prefill["candidates"]]
        assert {worker["worker"] for worker in decode["candidates"]} == {"decode-0", "decode-1"}
        costs = [worker["cost"] for worker in decode["candidates"]]
        assert costs == sorted(costs)
        assert decode["chosen"] == decode["candidates"][0]["worker"] or costs[0] == costs[1]
    assert records(server, both[1]["request_id"]) == [both[1]]


def test_workers_that_could_not_be_chosen_are_named_with_the_reason(server: Server) -> None:
    server.call(lambda: setattr(server.cluster["decode-0"], "state", "draining"))
    server.call(server.cluster.changed)
    (one,) = records(server, server.complete(max_tokens=4)["id"])
    (refused,) = one["choices"][1]["refused"]
    assert refused == {"reason": "not ready, or not linked", "count": 1, "workers": ["decode-0"]}
    assert one["choices"][0]["refused"] == []


def test_a_request_that_still_runs_says_where_it_is_and_one_whose_client_left_that_it_was_abandoned(
    server: Server,
) -> None:
    server.pause("decode")
    asking = server.client.stream(
        "POST", "/v1/completions", json={"prompt": [5, 6, 7], "stream": True}, headers={"X-Request-Id": "left"}
    )
    with asking as response:
        lines = response.iter_lines()
        next(lines)
        (running,) = server.service.core.requests
        # The fakes make their times up: prefill's are over once so much time has passed.
        server.wait_until(lambda: running.reported and server.service.clock.now() > running.arrived + 0.01)
        (one,) = records(server, "left")
        assert (one["outcome"], one["generated"]) == ("running", 1)
        assert one["spans"][-1]["worker"].startswith("decode-")
        assert one["spans"][-1]["end_s"] == pytest.approx(one["total_s"])
        adds_up(one)
    server.wait_until(lambda: not server.service.core.requests.in_flight)
    (one,) = records(server, "left")
    assert (one["outcome"], one["events"][-1]["kind"]) == ("abandoned", "ended")
    adds_up(one)
    server.resume()


def test_a_request_that_waits_for_workers_says_so_and_its_error_is_in_its_record(server: Server) -> None:
    for name in ("decode-0", "decode-1"):
        server.call(server.cluster[name].die)
    body = {"prompt": [5, 6, 7], "timeout": 0.4}
    asking = threading.Thread(target=server.post, args=("/v1/completions", body), kwargs={"X-Request-Id": "late"})
    asking.start()
    server.wait_until(lambda: bool(server.service.core.requests.in_flight))
    (one,) = records(server, "late")
    assert (one["outcome"], one["message"], one["spans"][-1]["name"]) == ("running", "it waits for workers", "queue")
    asking.join()
    (one,) = records(server, "late")
    assert one["outcome"] == "deadline"
    assert "0.4 s" in one["message"]
    assert one["choices"] == []
    adds_up(one)


def test_a_replayed_request_names_the_loss_and_the_worker_that_is_left_out(server: Server) -> None:
    server.pause("decode")
    asking = threading.Thread(
        target=server.post, args=("/v1/completions", {"prompt": [5, 6, 7]}), kwargs={"X-Request-Id": "struck"}
    )
    asking.start()

    def placed() -> bool:
        return bool(server.service.records.kept.find("struck")) and bool(
            server.service.records.kept.find("struck")[0].choices
        )

    server.wait_until(placed)
    (one,) = records(server, "struck")
    victim = one["choices"][1]["chosen"]
    server.call(server.cluster[victim].die)
    server.resume()
    asking.join()
    (one,) = records(server, "struck")
    assert (one["outcome"], one["attempts"]) == ("length", 2)
    (replayed,) = [event for event in one["events"] if event["kind"] == "replayed"]
    assert replayed["text"] == f"lost {victim}: killed"
    again = one["choices"][3]
    assert again["refused"][0]["workers"] == [victim]
    adds_up(one)


def test_an_unknown_id_is_a_404_that_says_how_long_records_are_kept(server: Server) -> None:
    answer = server.client.get("/cluster/requests/nobody")
    assert answer.status_code == 404
    assert "router.kept_records" in answer.json()["error"]["message"]
    assert server.client.get(f"/cluster/requests/{'x' * 300}").status_code == 400
    assert server.client.post("/cluster/requests/nobody").status_code == 405


def test_without_kept_records_only_what_runs_is_known() -> None:
    with serving(FakeCluster(1, 1), config=router_config(kept_records=0)) as server:
        answer = server.client.get(f"/cluster/requests/{server.complete(max_tokens=2)['id']}")
        assert answer.status_code == 404
        assert "router.kept_records is 0" in answer.json()["error"]["message"]


class Controller:
    """Implements `router.links.controller_port.RecordListener`."""

    def __init__(self) -> None:
        self.found = FoundRecords((), 0.0, 0, 0)
        self.away = False
        self.heard: list[RequestRecord] = []

    async def report_records(
        self, router: str, records: Sequence[RequestRecord], answers: Sequence[tuple[int, Sequence[RequestRecord]]]
    ) -> None:
        self.heard += records

    async def find_records(self, request_id: str, recent: int = 0) -> FoundRecords:
        if self.away:
            raise ConnectionError("it is away")
        return self.found

    def on_record_ask(self, answer: Callable[[int, str], None]) -> None:
        pass


@pytest.fixture(scope="module")
def controlled() -> Iterator[tuple[Server, Controller]]:
    controller = Controller()
    with serving(FakeCluster(1, 1), recorder=controller) as server:
        yield server, controller


def test_what_another_router_has_is_found_by_the_controller(controlled: tuple[Server, Controller]) -> None:
    server, controller = controlled
    others = [record(f"there-{at}", answer_id="there", arrived=5.0 - at) for at in (1, 0)]
    controller.found = FoundRecords(tuple(others), 60.0, 2, 2)
    assert [one["request_id"] for one in records(server, "there")] == ["there-0", "there-1"]
    controller.found = FoundRecords((), 60.0, 3, 2)
    answer = server.client.get("/cluster/requests/there").json()["error"]["message"]
    assert "1 of 3 routers did not answer" in answer
    assert "go back 60 s" in answer
    controller.away = True
    assert "doesn't answer: it is away" in server.client.get("/cluster/requests/there").json()["error"]["message"]
    controller.away = False


def test_the_controller_is_told_within_a_second_or_two(controlled: tuple[Server, Controller]) -> None:
    server, controller = controlled
    answer = server.complete(max_tokens=2)
    server.wait_until(lambda: any(one.is_of(answer["id"]) for one in controller.heard))
    (one,) = [one for one in controller.heard if one.is_of(answer["id"])]
    assert one.router.startswith("router-"), "each start of a router has a name of its own"
    assert "twinpool_request_records_total" in server.client.get("/metrics").text
