"""Streams that wait: they say that they live, they last as long as their request may, and they end in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.router.fake_worker import FakeCluster, expected
from tests.router.http_server import Server, router_config, serving
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.messages.worker_events import Done
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.api import app
from twinpool.router.openai.response_stream import KEEP_ALIVE, StreamHeartbeat

BODY: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 4, "seed": 1, "return_token_ids": True}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_may_take_as_long_as_its_timeout_says(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grace over the server's own default is nothing here: what is left is the request's own time."""
    monkeypatch.setattr(app, "CLIENT_GRACE_S", 0.0)
    with serving(FakeCluster(1, 1), config=router_config(request_timeout_s=0.2, max_timeout_s=60.0)) as server:
        server.pause("decode")

        def resume() -> None:
            for worker in server.cluster.workers.values():
                worker.resume()

        timer = server.loop.call_soon_threadsafe(server.loop.call_later, 0.6, resume)
        assert timer is not None
        response = server.post("/v1/completions", {**BODY, "timeout": 30, "stream": stream})
        assert response.status_code == 200, response.text
        if stream:
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            assert response.json()["choices"][0]["token_ids"] == expected((5, 6), SamplingParams(4, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_nobody_ends_in_time_ends_in_an_error(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router core that keeps no deadlines: the stream says so, and never just stops."""
    monkeypatch.setattr(app, "CLIENT_GRACE_S", 0.0)
    with serving(FakeCluster(1, 1), config=router_config(request_timeout_s=0.2)) as server:
        monkeypatch.setattr(server.service.core, "tick", lambda: None)
        server.pause("decode")
        response = server.post("/v1/completions", {**BODY, "stream": stream})
        if stream:
            *_, last = response.text.strip().split("\n\n")
            error = json.loads(last.removeprefix("data: "))["error"]
            assert "[DONE]" not in response.text
        else:
            assert response.status_code == 504
            error = response.json()["error"]
        assert error["code"] == "deadline"
        server.resume()
        server.at_rest()


@pytest.mark.slow
def test_a_stream_that_waits_says_that_it_lives_and_clients_skip_it() -> None:
    with serving(FakeCluster(1, 1), config=router_config(stream_keepalive_s=0.02)) as server:
        server.pause("prefill")
        with server.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            assert [next(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
            server.resume()
            rest = [line for line in lines if line]
        tokens = [
            t for line in rest if line.startswith("data: {") for t in json.loads(line[6:])["choices"][0]["token_ids"]
        ]
        assert tokens == expected((5, 6), SamplingParams(4, seed=1))
        assert rest[-1] == "data: [DONE]"
        server.pause("prefill")
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="demo", prompt=[5, 6], max_tokens=4, seed=1, stream=True)
            server.resume()
            assert "".join(c.choices[0].text for c in stream) == server.service.model_tokenizer.decode(tokens)


@pytest.mark.slow
def test_a_failure_after_a_keep_alive_is_an_event_without_done() -> None:
    with serving(FakeCluster(1, 1), config=router_config(stream_keepalive_s=0.02)) as server:
        server.pause("prefill")
        with server.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            worker = server.cluster["prefill-0"]

            def fail() -> None:
                (leg,) = worker.legs.values()
                worker.legs.clear()
                done = Done(leg.submit.request_id, 0, "error", error=ErrorKind.INVALID, message="planted")
                leg.session.on_events([done])

            server.call(fail)
            rest = [line for line in lines if line.startswith("data")]
        assert len(rest) == 1
        assert json.loads(rest[0][6:])["error"]["message"] == "planted"
        server.resume()


def test_a_stream_that_speaks_gets_no_comments(server: Server) -> None:
    with server.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        assert KEEP_ALIVE.decode().strip() not in response.read().decode()


def test_each_write_of_a_stream_puts_its_next_sign_of_life_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = 0

    def written(beat: StreamHeartbeat) -> None:
        nonlocal writes
        writes += 1

    monkeypatch.setattr(StreamHeartbeat, "written", written)
    server.stream("/v1/completions", BODY)
    assert writes
