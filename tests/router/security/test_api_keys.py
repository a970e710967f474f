"""Keys: who is let in, who isn't, and what tenants can tell of each other."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, serving
from tests.router.security.leasing_routers import LedgerLessor
from tests.router.security.spent_tokens import spent_tokens
from twinpool.cli.command_line import parser as command_line
from twinpool.cli.commands import run
from twinpool.cli.credential_commands import new_key, revoke_key
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import RequestId
from twinpool.contracts.key_file import ApiKey, KeyFile, TenantLimits, digest_of, read_key_file, write_key_file
from twinpool.contracts.messages.kept_answers import Attached, KeptAnswer
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.router.api.app import WITHOUT_KEY, model_refusal_of
from twinpool.router.openai.parse_request import GenerateRequest, UnknownModel
from twinpool.router.security import tenant_accounts
from twinpool.router.security.tenant_accounts import ApiKeys

COMPLETIONS = "/v1/completions"
ASK = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 1}
GUARDED = {
    COMPLETIONS: ASK,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
LARGE = {"prompt": [5, 6, 7] * 600, "max_tokens": 4, "seed": 1}
"""A body that a reader process reads."""


def known_keys(server: Server) -> ApiKeys:
    keys = server.service.admission.keys
    assert keys is not None
    return keys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def secret(keys: Path) -> str:
    return new_key(keys, "acme")


@pytest.fixture(params=["alone", "of several"])
def server(keys: Path, secret: str, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A router that has tenants' limits to itself, and one that leases them."""
    config = Config(security=SecurityConfig(keys_file=str(keys)))
    lessor = LedgerLessor() if request.param == "of several" else None
    with serving(FakeCluster(), config=config, lessor=lessor) as found:
        yield found
        found.at_rest()


def limit(keys: Path, **limits: Any) -> None:
    write_key_file(keys, replace(read_key_file(keys), tenants={"acme": TenantLimits(**limits)}))


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"Authorization": "Bearer"}, "missing_api_key"),
        ({"Authorization": "Basic abc"}, "missing_api_key"),
        ({"Authorization": "Bearer tp-wrong"}, "invalid_api_key"),
        ({"x-api-key": "tp-\xe9"}, "invalid_api_key"),
    ],
)
def test_without_a_key_that_is_known_nothing_is_served(server: Server, headers: dict[str, str], code: str) -> None:
    raw = httpx.Headers([(name.encode(), value.encode("latin-1")) for name, value in headers.items()])
    for path, body in GUARDED.items():
        answer = server.client.post(path, json=body, headers=raw)
        assert answer.status_code == 401, path
        if path.startswith("/v1/messages"):
            assert answer.json()["error"]["type"] == "authentication_error", path
        else:
            assert answer.json()["error"]["code"] == code, path
    assert not any(worker.submits for worker in server.cluster.workers.values())
    assert server.client.get("/v1/models", headers=raw).status_code == 401


def test_with_a_key_all_is_as_without(server: Server, secret: str) -> None:
    for path, body in GUARDED.items():
        assert server.post(path, body, **bearer(secret)).status_code == 200, path
        assert server.post(path, body, **{"x-api-key": secret}).status_code == 200, path


def test_what_tells_nothing_needs_no_key_and_what_operators_ask_needs_theirs(server: Server) -> None:
    for path in WITHOUT_KEY:
        assert server.client.get(path).status_code == 200, path
    assert server.client.get("/cluster/status").status_code == 200, "asked from this machine"


def test_a_key_that_is_revoked_is_refused_and_a_new_one_taken_without_a_restart(
    server: Server, keys: Path, secret: str
) -> None:
    other = new_key(keys, "other")
    server.wait_until(lambda: known_keys(server).tenant_of(other) == "other")
    assert server.post(COMPLETIONS, ASK, **bearer(other)).status_code == 200
    revoke_key(keys, digest_of(secret)[:12])
    server.wait_until(lambda: known_keys(server).tenant_of(secret) is None)
    assert server.post(COMPLETIONS, ASK, **bearer(secret)).status_code == 401
    keys.write_text("{")
    os.utime(keys, (1, 1))
    server.call(lambda: server.service.admission.keys.refresh() if server.service.admission.keys else None)
    assert server.post(COMPLETIONS, ASK, **bearer(other)).status_code == 200, "a file that went bad changes nothing"


@pytest.mark.slow
@pytest.mark.parametrize("asked", [ASK, LARGE], ids=["inline", "by a reader"])
def test_tenants_share_no_prefix_whatever_their_salts(
    server: Server, keys: Path, secret: str, asked: dict[str, Any]
) -> None:
    other = new_key(keys, "other")
    server.wait_until(lambda: known_keys(server).tenant_of(other) == "other")
    names: list[str] = []
    prompts: list[tuple[int, ...]] = []
    for key, salt in ((secret, ""), (other, ""), (secret, "x"), (secret, "acme\n"), (other, "x")):
        for worker in server.cluster.workers.values():
            worker.submits.clear()
        assert server.post(COMPLETIONS, {**asked, "cache_salt": salt}, **bearer(key)).status_code == 200
        ((submit,), (at_decode,)) = (server.cluster[f"{role}-0"].submits for role in ("prefill", "decode"))
        assert submit.salt == at_decode.salt
        names.append(submit.salt)
        prompts.append(tuple(submit.tokens))
    assert len(set(names)) == len(names)
    assert len(set(prompts)) == 1


def test_limits_hold_and_say_when_to_come_back(server: Server, keys: Path, secret: str) -> None:
    limit(keys, requests_per_minute=2, priority=3)
    assert server.service.admission.keys is not None
    server.call(server.service.admission.keys.refresh)
    sent = [server.post(COMPLETIONS, {**ASK, "priority": 9}, **bearer(secret)) for _ in range(3)]
    assert [answer.status_code for answer in sent] == [200, 200, 429]
    error = sent[2].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "tenant_limit")
    assert 20 <= int(sent[2].headers["retry-after"]) <= 30
    assert {s.priority for s in server.cluster["decode-0"].submits} == {3}
    metrics = server.client.get("/metrics").text
    assert 'twinpool_tenant_requests_total{tenant="acme"} 2.0' in metrics
    assert 'twinpool_tenant_refused_total{tenant="acme"} 1.0' in metrics
    assert 'twinpool_tenant_tokens_total{tenant="acme"} 14.0' in metrics
    assert 'twinpool_tenant_in_flight{tenant="acme"} 0.0' in metrics


@contextmanager
def asking(server: Server, body: dict[str, Any], secret: str) -> Iterator[socket.socket]:
    """The connection of a client that asks, and leaves at the end."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        raw = json.dumps(body).encode()
        lines = (f"POST {COMPLETIONS} HTTP/1.1", "Host: x", f"Authorization: Bearer {secret}")
        client.sendall("\r\n".join((*lines, f"Content-Length: {len(raw)}", "", "")).encode() + raw)
        yield client


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_client_that_left_had_asked_for_counts_for_its_tenant(server: Server, secret: str, role: str) -> None:
    """Its prompt, and as much of its answer as it was sent; and in the router's counts what was done for it."""
    tally, tenants, metrics = server.service.metrics.tally, server.service.admission.tenants, server.service.metrics
    prompts, generated = tally.prompt_tokens, tally.generated_tokens
    spent, left = spent_tokens(tenants).get("acme", 0), metrics.disconnects
    server.pause(role)
    with asking(server, {**ASK, "max_tokens": 50, "stream": True}, secret) as client:
        server.wait_until(lambda: server.service.core.requests.in_flight == 1)
        if role == "decode":
            assert client.recv(65536), "the first token, which prefill drew"
    server.wait_until(lambda: metrics.disconnects == left + 1)
    server.resume()
    server.at_rest()
    first = int(role == "decode")
    size = 3
    assert tally.generated_tokens - generated == first
    assert tally.prompt_tokens - prompts == size * first, "nothing was done while prefill stood still"
    assert spent_tokens(tenants)["acme"] - spent == size + first


def test_a_tenant_that_is_beyond_its_limits_has_no_body_read(server: Server, keys: Path, secret: str) -> None:
    limit(keys, requests_per_minute=1)
    assert server.service.admission.keys is not None
    server.call(server.service.admission.keys.refresh)
    assert server.post(COMPLETIONS, ASK, **bearer(secret)).status_code == 200
    answer = server.client.post(COMPLETIONS, content=b"{", headers=bearer(secret))
    assert answer.status_code == 429, "a body that is no JSON would be a 400"
    assert answer.headers["connection"] == "close"


def test_answers_in_flight_are_bounded_and_given_back_when_a_client_leaves(
    server: Server, keys: Path, secret: str
) -> None:
    limit(keys, concurrent=2)
    assert server.service.admission.keys is not None
    server.call(server.service.admission.keys.refresh)
    assert server.post(COMPLETIONS, {**ASK, "n": 3}, **bearer(secret)).status_code == 429
    server.pause("decode")
    with asking(server, {**ASK, "n": 2}, secret):
        server.wait_until(lambda: server.service.core.requests.in_flight == 2)
        assert server.post(COMPLETIONS, ASK, **bearer(secret)).status_code == 429
    server.wait_until(lambda: not server.service.core.requests.in_flight)
    server.resume()
    assert server.post(COMPLETIONS, {**ASK, "n": 2}, **bearer(secret)).status_code == 200


def test_a_model_that_a_tenant_may_not_use_is_refused(server: Server, keys: Path, secret: str) -> None:
    limit(keys, models=("another",))
    assert server.service.admission.keys is not None
    server.call(server.service.admission.keys.refresh)
    answer = server.post(COMPLETIONS, ASK, **bearer(secret))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")


def test_a_tenant_may_use_the_adapters_that_its_limits_name_and_no_others(
    server: Server, keys: Path, secret: str
) -> None:
    """An adapter is another model: who may use the model may not use what was trained for somebody else."""
    admission = server.service.admission
    assert admission.keys is not None
    server.service.intake.adapters = {name: AdapterRef(name, name, "/a") for name in ("mine", "theirs")}
    for models, may in ((("demo",), {""}), (("mine",), {"mine"}), (("mine", "demo"), {"mine", ""}), ((), None)):
        limit(keys, models=models)
        server.call(admission.keys.refresh)
        assert model_refusal_of([server.service], "acme") is None, "it may use one of those that are here"
        for adapter in ("", "mine", "theirs"):
            request = cast(GenerateRequest, SimpleNamespace(model_name=adapter))
            if may is None or adapter in may:
                admission.check_model("acme", request)
            else:
                with pytest.raises(UnknownModel, match="acme may use"):
                    admission.check_model("acme", request)


# ---------------------------------------------------------------- the file and the command


def test_a_key_file_comes_back_as_it_was_written_and_only_its_owner_reads_it(keys: Path) -> None:
    content = KeyFile(
        (ApiKey("a", "acme", "0" * 64, "now"), ApiKey("b", "other", "f" * 64)),
        {"acme": TenantLimits(1, 2, 3, -4, ("m", "n"))},
    )
    write_key_file(keys, content)
    assert read_key_file(keys) == content
    assert keys.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in keys.parent.iterdir()] == [keys.name]


def test_a_secret_is_not_in_the_file_and_two_are_never_the_same(keys: Path) -> None:
    secrets = [new_key(keys, "acme") for _ in range(3)]
    assert len(set(secrets)) == 3
    assert all(len(secret) == len("tp-") + 43 for secret in secrets)
    text = keys.read_text()
    assert not any(secret in text for secret in secrets)
    known = ApiKeys(keys)
    assert [known.tenant_of(secret) for secret in secrets] == ["acme"] * 3
    assert known.tenant_of(secrets[0][:-1]) is None


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ([], "an object of keys and tenants"),
        ({"key": []}, "an object of keys and tenants"),
        ({"keys": {}}, "a list of keys"),
        ({"keys": [{"id": "a"}]}, "keys[0] needs an id and a sha256"),
        ({"keys": [{"id": "a", "tenant": "a b", "sha256": "0" * 64}]}, "a tenant's name"),
        ({"keys": [{"id": 5}]}, "keys[0] must be an object of texts"),
        ({"tenants": {"a": {"request": 5}}}, "tenants.a must be an object of requests_per_minute"),
        ({"tenants": {"a": {"concurrent": -1}}}, "tenants.a.concurrent must be a whole number"),
        ({"tenants": {"a": {"models": "m"}}}, "tenants.a.models must be an array"),
    ],
)
def test_a_bad_key_file_is_refused_with_its_place(keys: Path, tree: Any, says: str) -> None:
    keys.write_text(json.dumps(tree))
    with pytest.raises(ConfigError) as caught:
        read_key_file(keys)
    assert says in str(caught.value)
    assert str(keys) in str(caught.value)


def test_the_command_makes_lists_and_revokes(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def keys_command(*arguments: str) -> tuple[int, str, str]:
        code = run(command_line().parse_args(["keys", *arguments, "--file", str(keys)]))
        told = capsys.readouterr()
        return code, told.out, told.err

    code, made, _ = keys_command("new", "acme")
    assert code == 0
    key_id = digest_of(made.strip())[:12]
    code, table, _ = keys_command("list")
    assert code == 0
    assert key_id in table
    assert "acme" in table
    assert keys_command("revoke", key_id) == (0, f"revoked {key_id}\n", "")
    code, _, error = keys_command("revoke", key_id)
    assert code == 2
    assert f"has no key {key_id}" in error
    assert keys_command("new")[0] == 2
    assert keys_command("new", "a b")[0] == 2


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "mine"}], ids=["plain", "with a key"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_workers_are_told_whose_a_request_is_and_its_weight(
    server: Server, keys: Path, secret: str, path: str, headers: dict[str, str]
) -> None:
    """And a priority that its tenant hasn't is none, though no other is set."""
    limit(keys, weight=7)
    assert server.service.admission.keys is not None
    server.call(server.service.admission.keys.refresh)
    body = ASK if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert server.post(path, {**body, "priority": 9}, **bearer(secret), **headers).status_code == 200
    for role in ("prefill", "decode"):
        (submit,) = server.cluster[f"{role}-0"].submits
        assert (submit.tenant, submit.weight, submit.priority) == ("acme", 7, 0)


def test_limits_are_those_of_two_routers_together_and_one_goes_on_while_the_controller_is_away(
    keys: Path, secret: str
) -> None:
    limit(keys, requests_per_minute=16)
    config, lessor = Config(security=SecurityConfig(keys_file=str(keys))), LedgerLessor()
    with (
        serving(FakeCluster(), config=config, lessor=lessor) as one,
        serving(FakeCluster(), config=config, lessor=lessor) as other,
    ):
        codes = [server.post(COMPLETIONS, ASK, **bearer(secret)).status_code for server in [one, other] * 10]
        assert 16 - 2 <= codes.count(200) <= 17, "a slice of one may be the other's that asks; a minute goes on"
        lessor.away = True
        one.wait_until(lambda: one.service.admission.tenants.alone)
        for server in (one, other):
            server.at_rest()


def test_requests_that_come_at_once_share_claims(keys: Path, secret: str) -> None:
    limit(keys, requests_per_minute=800)
    config, lessor = Config(security=SecurityConfig(keys_file=str(keys))), LedgerLessor()
    with serving(FakeCluster(), config=config, lessor=lessor) as server:
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: server.post(COMPLETIONS, ASK, **bearer(secret)), range(64)))
        assert {answer.status_code for answer in answers} == {200}
        assert lessor.calls < 32
        server.at_rest()


def test_a_body_is_not_read_where_another_router_has_let_through_all_that_there_is(keys: Path, secret: str) -> None:
    limit(keys, requests_per_minute=1)
    config, lessor = Config(security=SecurityConfig(keys_file=str(keys))), LedgerLessor()
    with (
        serving(FakeCluster(), config=config, lessor=lessor) as one,
        serving(FakeCluster(), config=config, lessor=lessor) as other,
    ):
        assert other.post(COMPLETIONS, ASK, **bearer(secret)).status_code == 200
        assert one.client.post(COMPLETIONS, content=b"{", headers=bearer(secret)).status_code == 429
        other.at_rest()


def test_one_key_of_two_tenants_is_two_answers(server: Server, keys: Path, secret: str) -> None:
    """And each has its own, also where the body is another."""
    other = new_key(keys, "globex")
    server.wait_until(lambda: known_keys(server).tenant_of(other) is not None)
    body = {"prompt": [5, 6, 7], "max_tokens": 8}
    told = [
        server.post("/v1/completions", {**body, **more}, **bearer(key), **{"Idempotency-Key": "same"})
        for key, more in ((secret, {}), (other, {}), (other, {"max_tokens": 3}), (secret, {}))
    ]
    assert [answer.status_code for answer in told] == [200] * 4, "nothing is kept by these workers"
    ids = [answer.json()["id"] for answer in told]
    assert ids[0] == ids[3]
    assert len(set(ids)) == 3
    asked = {ask.key for worker in server.cluster.workers.values() for ask in worker.asked}
    assert len(asked) == 2


def test_a_client_at_its_limit_may_take_its_own_answer_over(server: Server, keys: Path, secret: str) -> None:
    limit(keys, concurrent=1)
    server.wait_until(lambda: known_keys(server).limits("acme").concurrent == 1)
    server.pause("decode")
    body, headers = {"prompt": [5, 6, 7], "max_tokens": 8}, {**bearer(secret), "Idempotency-Key": "mine"}
    asked, workers = {**body, "stream": True}, server.cluster.workers.values()
    with ThreadPoolExecutor(1) as pool, server.client.stream("POST", COMPLETIONS, json=asked, headers=headers) as first:
        assert first.status_code == 200
        other = server.post(COMPLETIONS, body, **bearer(secret))
        assert other.status_code == 429
        again = pool.submit(httpx.post, f"{server.url}{COMPLETIONS}", json=asked, headers=headers, timeout=60)
        # While the first one still runs: else its place would be free anyhow.
        server.wait_until(lambda: again.done() or any(worker.detached for worker in workers))
        server.resume()
        assert again.result().status_code == 200
    assert "[DONE]" in again.result().text


def test_what_a_worker_has_kept_of_an_answer_is_not_asked_of_its_tenant_again(server: Server, secret: str) -> None:
    kept = KeptAnswer(RequestId("kept-0"), 0, 0, 7, 3, 4, 60.0, (1, 2, 3, 4), reason="length")
    server.cluster["decode-0"].attached = lambda ask: Attached(ask.request_id, 0, answers=(kept,))
    told = server.post(COMPLETIONS, {**ASK, "return_token_ids": True}, **bearer(secret), **{"Idempotency-Key": "kept"})
    assert told.json()["choices"][0]["token_ids"] == [1, 2, 3, 4]
    assert 'twinpool_tenant_tokens_total{tenant="acme"} 0.0' in server.client.get("/metrics").text


def test_a_key_file_that_goes_bad_is_said_once_and_read_again_when_it_is_good(
    keys: Path, secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is looked at ten times a second."""
    known, good = ApiKeys(keys), keys.read_text()
    keys.write_text("{")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            known.refresh()
    assert [record.getMessage() for record in caplog.records] == ["keys are as before: their file can't be read"]
    keys.write_text(good.replace(digest_of(secret), "0" * 64))
    known.refresh()
    assert known.tenant_of(secret) is None


def test_keys_that_are_written_while_the_file_is_read_are_read_next(
    keys: Path, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a key that was revoked at that moment would stay good for ever."""
    known = ApiKeys(keys)
    new_key(keys, "other")

    def read_and_revoke(path: Path) -> KeyFile:
        content = read_key_file(path)
        revoke_key(keys, read_key_file(keys).keys[0].id)
        return content

    monkeypatch.setattr(tenant_accounts, "read_key_file", read_and_revoke)
    known.refresh()
    monkeypatch.undo()
    assert known.tenant_of(secret) == "acme"
    known.refresh()
    assert known.tenant_of(secret) is None


def test_what_fails_in_a_turn_of_the_clock_keeps_no_deadline_from_being_kept(
    server: Server, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("planted")

    for part in (server.service.admission.keys, server.service.controller, server.service.records):
        monkeypatch.setattr(part, "refresh" if part is server.service.admission.keys else "tick", fail)
    server.call(server.cluster["decode-0"].pause)
    late = server.post(COMPLETIONS, {**ASK, "timeout": 0.05}, **bearer(secret))
    assert late.status_code == 504
    server.call(server.cluster["decode-0"].resume)
