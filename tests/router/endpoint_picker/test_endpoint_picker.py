"""The endpoint picker in front of real routers, as a gateway talks to it: messages made and read by protobuf itself."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, router_config, serving
from tests.support.certificates import TestAuthority
from tests.support.ext_proc_protos import filter_metadata, header_map, parsed, proto
from tests.support.free_ports import free_port
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.credentials.certificate_files import NODE_NAME
from twinpool.contracts.errors import ConfigError
from twinpool.router.endpoint_picker import endpoint_picker, ext_proc_messages
from twinpool.router.endpoint_picker.endpoint_picker import (
    ASKED_HEADERS,
    AWAY_S,
    HELD_BYTES_MOST,
    MOST_ASKED,
    EndpointPicker,
    Endpoints,
    MetricsPage,
    PickerService,
    listen,
)
from twinpool.router.endpoint_picker.ext_proc_messages import (
    DESTINATION,
    HEALTH,
    PROCESSOR,
    SERVED,
    SUBSET,
    GatewayExchange,
    read_request,
)
from twinpool.router.service.admission import BodyBuffer

FULL_DUPLEX, BUFFERED, STREAMED, NONE = 4, 2, 1, 0
PROMPT = list(range(5, 69))
PATH = "/v1/completions"


@pytest.fixture
def routers() -> Iterator[list[Server]]:
    """Two routers, each of a cluster of its own, with room for two answers."""
    with ExitStack() as stack:
        found = [stack.enter_context(serving(FakeCluster(1, 1), config=router_config(max_queue=2))) for _ in range(2)]
        yield found
        for router in found:
            router.resume()
            router.at_rest()


def address(router: Server) -> str:
    return f"127.0.0.1:{router.port}"


class Gateway:
    """A gateway of one picker. `talk` is one exchange."""

    def __init__(self, picker: EndpointPicker, held: BodyBuffer | None = None) -> None:
        self.picker, self._held = picker, held or BodyBuffer(HELD_BYTES_MOST)
        self.counted: dict[str, int] = {}
        """Where the exchange counted as under way at its end."""

    async def talk(self, *messages: Any) -> list[Any]:
        """What the picker replies to these; the exchange is over then."""
        exchange, replies = GatewayExchange(self.picker, self._held), []
        try:
            for message in messages:
                told = await exchange.take(read_request(message.SerializeToString()))
                replies += [parsed("ProcessingResponse", one.to_bytes()) for one in told]
                self.counted = dict(+self.picker.open)
                assert sum(self.counted.values()) <= 1
                if any(one.HasField("dynamic_metadata") for one in replies):
                    assert not self._held.held, "the body goes on, and isn't held for the whole answer"
        finally:
            exchange.close()
        assert not self._held.held
        assert not +self.picker.open
        return replies

    async def destination(self, body: dict[str, Any] | bytes, **headers: str) -> list[str]:
        """The endpoints for a request whose body is sent in pieces."""
        return chosen(await self.talk(*asked(body, **headers)))


def chosen(replies: Sequence[Any]) -> list[str]:
    """The endpoints of the one reply that names some, the same in both places and in place of the client's own."""
    named = [one for one in replies if one.HasField("dynamic_metadata")]
    assert len(named) == 1, replies
    reply = named[0]
    common = (reply.request_headers if reply.HasField("request_headers") else reply.request_body).response
    (header,) = common.header_mutation.set_headers
    assert (header.header.key, header.append_action, common.clear_route_cache) == (DESTINATION, 2, True)
    told: str = header.header.raw_value.decode()
    assert reply.dynamic_metadata["envoy.lb"][DESTINATION] == told
    return told.split(",")


def headers_message(
    mode: int = FULL_DUPLEX, subset: Any = None, method: str = "POST", path: str = PATH, end: bool = False, **more: str
) -> Any:
    headers = {":method": method, ":path": path, "content-type": "application/json", DESTINATION: "6.6.6.6:6"}
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    spaces = {} if subset is None else {"envoy__lb__subset_hint": {SUBSET: subset}}
    return proto(
        "ProcessingRequest",
        request_headers={"headers": header_map(headers), "end_of_stream": end},
        metadata_context=filter_metadata(**spaces),
        protocol_config={"request_body_mode": mode, "response_body_mode": mode},
    )


def body_message(body: bytes, end: bool) -> Any:
    return proto("ProcessingRequest", request_body={"body": body, "end_of_stream": end})


def asked(body: dict[str, Any] | bytes, **more: Any) -> list[Any]:
    """An exchange's first messages, its body in three pieces, of which the last is empty."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    half = len(raw) // 2
    return [headers_message(**more), *(body_message(one, not one) for one in (raw[:half], raw[half:], b""))]


def completion(prompt: Sequence[int] = PROMPT, **more: Any) -> dict[str, Any]:
    return {"prompt": list(prompt), "max_tokens": 2, **more}


def picking(
    endpoints: Sequence[str], work: Callable[[Gateway], Awaitable[None]], clock: ManualClock | None = None, **how: Any
) -> None:
    """Do something with a picker of these endpoints."""

    async def run() -> None:
        found = Endpoints(endpoints)
        await found.resolve()
        async with found.client(60.0) as client:
            await work(Gateway(EndpointPicker(found, client, clock or ManualClock(), 60.0, **how)))

    asyncio.run(run())


def test_a_request_goes_where_its_prefix_is_and_its_body_passes_as_it_came(routers: list[Server]) -> None:
    there = random.Random(3).randrange(2)
    routers[there].complete(prompt=PROMPT, max_tokens=2)
    held = routers[there].post(PATH, completion(), **{"X-Twinpool-Preview": "1"}).json()
    bare = routers[1 - there].post(PATH, completion(), **{"X-Twinpool-Preview": "1"}).json()
    assert (held["prompt_tokens"], bare["prompt_tokens"]) == (len(PROMPT), len(PROMPT))
    assert held["cached_tokens"] > bare["cached_tokens"] == 0

    async def work(gateway: Gateway) -> None:
        messages = asked(completion())
        replies = await gateway.talk(
            *messages,
            proto(
                "ProcessingRequest",
                response_headers={"headers": header_map({":status": "200"})},
                metadata_context=filter_metadata(envoy__lb={SERVED: address(routers[1 - there])}),
            ),
            proto("ProcessingRequest", response_body={"body": b"data: 1\n\n", "end_of_stream": True}),
        )
        assert chosen(replies) == [address(routers[there]), address(routers[1 - there])]
        assert gateway.counted == {address(routers[1 - there]): 1}, "the gateway tried another one"
        assert replies[0].HasField("request_headers"), "headers come first"
        pieces = [one.request_body.response.body_mutation.streamed_response for one in replies[1:4]]
        assert [(one.body, one.end_of_stream) for one in pieces] == [
            (one.request_body.body, one.request_body.end_of_stream) for one in messages[1:]
        ]
        assert replies[4].HasField("response_headers")
        echoed = replies[5].response_body.response.body_mutation.streamed_response
        assert (echoed.body, echoed.end_of_stream) == (b"data: 1\n\n", True)

    picking([address(router) for router in routers], work)
    assert [router.service.core.counts.submitted for router in routers].count(1) == 1, "previews begin nothing"


def test_a_busy_router_is_left_alone_and_where_all_refuse_their_client_hears_why(routers: list[Server]) -> None:
    def begin(router: Server, prompt: int) -> None:
        router.call(lambda: None)
        sent = httpx.AsyncClient(base_url=router.url, trust_env=False)

        async def send() -> None:
            async with sent:
                await sent.post(PATH, json=completion([prompt] * 40), timeout=60)

        asyncio.run_coroutine_threadsafe(send(), router.loop)

    for router in routers:
        router.pause("prefill")
    begin(routers[0], 7)
    routers[0].wait_until(lambda: routers[0].service.core.requests.in_flight == 1)

    async def first(gateway: Gateway) -> None:
        assert await gateway.destination(completion()) == [address(routers[1]), address(routers[0])]

    picking([address(router) for router in routers], first)
    begin(routers[0], 8)
    begin(routers[1], 9)
    begin(routers[1], 10)
    for router in routers:
        router.wait_until(lambda router=router: router.service.core.requests.in_flight == 2)  # type: ignore[misc]

    async def full(gateway: Gateway) -> None:
        (reply,) = await gateway.talk(*asked(completion()))
        told = {one.header.key: one.header.raw_value for one in reply.immediate_response.headers.set_headers}
        assert reply.immediate_response.status.code == 429
        assert told == {"content-type": b"application/json", "retry-after": b"1"}
        assert json.loads(reply.immediate_response.body)["error"]["code"] == "queue_full"

    picking([address(router) for router in routers], full)
    for router in routers:
        router.call(lambda router=router: setattr(router.service, "draining", True))  # type: ignore[misc]

    async def draining(gateway: Gateway) -> None:
        (reply,) = await gateway.talk(*asked(completion()))
        assert reply.immediate_response.status.code == 503
        assert json.loads(reply.immediate_response.body)["error"]["code"] == "shutting_down"

    picking([address(router) for router in routers], draining)


def test_only_endpoints_of_the_gateways_subset_are_chosen(routers: list[Server]) -> None:
    routers[0].complete(prompt=PROMPT, max_tokens=2)
    both = [address(router) for router in routers]

    async def work(gateway: Gateway) -> None:
        assert await gateway.destination(completion(), subset=[both[1]]) == [both[1]]  # type: ignore[arg-type]
        assert await gateway.destination(completion(), subset=",".join(both)) == both
        for none in ([], ["10.0.0.1:8000"], 5):
            for mode in (FULL_DUPLEX, NONE):
                replies = await gateway.talk(*asked(completion(), subset=none, mode=mode)[: 4 if mode else 1])
                assert [one.immediate_response.status.code for one in replies] == [503], none

    picking(both, work)


def test_bodies_come_as_the_gateway_has_them(routers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones are looked at; those that come too late, or are larger than what may be held, pass unseen."""
    routers[1].complete(prompt=PROMPT, max_tokens=2)
    both, raw = [address(router) for router in routers], json.dumps(completion()).encode()

    async def work(gateway: Gateway) -> None:
        for _ in range(2):
            replies = await gateway.talk(headers_message(BUFFERED), body_message(raw, True))
            assert not replies[0].request_headers.response.HasField("header_mutation")
            assert chosen(replies) == both[::-1]
        firsts = set()
        for mode in (NONE, STREAMED):
            for _ in range(2):
                replies = await gateway.talk(headers_message(mode), body_message(raw, True))
                assert replies[0].HasField("dynamic_metadata")
                assert replies[1].HasField("request_body")
                firsts.add(chosen(replies)[0])
        assert firsts == set(both), "in turns, where nothing tells them apart"
        trailers = proto("ProcessingRequest", request_trailers={"trailers": header_map({"x": "y"})})
        replies = await gateway.talk(headers_message(), body_message(raw, False), trailers)
        assert chosen(replies) == both[::-1]
        assert replies[-1].HasField("request_trailers")
        assert not any(one.request_body.response.body_mutation.streamed_response.end_of_stream for one in replies)
        assert await gateway.talk(headers_message(), body_message(raw[:9], False)) == [], "its client leaves then"
        for path, method in (("/v1/models", "GET"), ("/tokenize", "POST"), ("/v1/files", "POST")):
            got = await gateway.talk(headers_message(method=method, path=path, end=True))
            assert sorted(chosen(got)) == sorted(both)
        small = Gateway(gateway.picker, BodyBuffer(len(raw) // 4))
        for narrow, most in ((small, len(raw)), (gateway, len(raw) - 1)):
            monkeypatch.setattr(ext_proc_messages, "BODY_BYTES_MOST", most)
            whole = [await narrow.talk(headers_message(BUFFERED), body_message(raw, True)) for _ in range(2)]
            assert {chosen(replies)[0] for replies in whole} == set(both), "unseen, so in turns"
        replies = await small.talk(*asked(completion()))
        assert b"".join(r.request_body.response.body_mutation.streamed_response.body for r in replies[1:]) == raw
        assert sorted(chosen(replies)) == sorted(both)

    picking(both, work)
    assert [router.service.core.counts.submitted for router in routers] == [0, 1]


def test_a_client_that_comes_back_with_its_key_and_a_wrong_request_reach_a_router(routers: list[Server]) -> None:
    both = [address(router) for router in routers]

    async def work(gateway: Gateway) -> None:
        firsts = {(await gateway.destination(completion(), idempotency_key="k"))[0] for _ in range(4)}
        assert len(firsts) == 1
        keys = {(await gateway.destination(completion(), idempotency_key=f"k{n}"))[0] for n in range(16)}
        assert keys == set(both)
        for wrong in (b"{", b'{"prompt": [5], "n": 0}', b'{"prompt": [5], "model": "other"}'):
            (there,) = await gateway.destination(wrong)
            assert there in both, "which says what is wrong"

    picking(both, work)


def test_a_router_that_does_not_answer_is_left_out_and_asked_again_later(routers: list[Server]) -> None:
    gone, clock = f"127.0.0.1:{free_port()}", ManualClock()
    there = address(routers[0])

    async def work(gateway: Gateway) -> None:
        asks = list[str]()
        preview = gateway.picker._preview

        async def counted(request: Any, endpoint: str) -> Any:
            asks.append(endpoint)
            return await preview(request, endpoint)

        gateway.picker._preview = counted  # type: ignore[method-assign]
        for _ in range(3):
            assert await gateway.destination(completion()) == [there]
        assert asks.count(gone) == 1
        assert await gateway.destination(b"", path="/v1/models") == [there]
        clock.advance(AWAY_S)
        await gateway.destination(completion())
        assert asks.count(gone) == 2

    picking([gone, there], work, clock)


TWO = ["10.0.0.1:8000", "10.0.0.2:8000"]
PREVIEW = {"prompt_tokens": 64, "cached_tokens": 0, "queued_tokens": 0, "first_token_s": None, "waiting": 0}


def stand_ins(
    answer: Callable[[httpx.Request], httpx.Response],
    work: Callable[[Gateway], Awaitable[None]],
    names: Sequence[str] = TWO,
) -> None:
    """Do something with a picker that fails close and whose routers answer as `answer` does."""

    async def run() -> None:
        endpoints = Endpoints(names)
        await endpoints.resolve()
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await work(Gateway(EndpointPicker(endpoints, client, ManualClock(), 60.0, fail_open=False)))

    asyncio.run(run())


def test_one_that_was_left_out_is_asked_where_no_other_answers() -> None:
    gone, asks = {TWO[0]}, list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        asks.append(request.url.netloc.decode())
        if asks[-1] in gone:
            raise httpx.ConnectError("nobody listens")
        return httpx.Response(200, json=PREVIEW)

    async def work(gateway: Gateway) -> None:
        assert await gateway.destination(completion()) == [TWO[1]]
        gone.symmetric_difference_update(TWO)
        assert await gateway.destination(completion()) == [TWO[0]]
        asks.clear()
        assert await gateway.destination(completion()) == [TWO[0]]
        assert asks == [TWO[0]], "it has answered, and is asked as any other"

    stand_ins(answer, work)


def test_previews_have_their_clients_headers_byte_for_byte_and_no_others() -> None:
    told = list[dict[bytes, bytes]]()

    def answer(request: httpx.Request) -> httpx.Response:
        told.append(dict(request.headers.raw))
        return httpx.Response(200, json=PREVIEW)

    async def work(gateway: Gateway) -> None:
        given = {name.replace("-", "_"): f"café {name}" for name in (*ASKED_HEADERS, "cookie")}
        assert len(await gateway.destination(completion(), **given)) == 2
        for headers in told:
            assert {name: headers.get(name.encode()) for name in ASKED_HEADERS} == {
                name: f"café {name}".encode() for name in ASKED_HEADERS
            }
            assert b"cookie" not in headers
        assert {b"authorization", b"x-api-key", b"content-type"} <= told[1].keys()

    stand_ins(answer, work)


def test_a_wrong_request_goes_to_a_router_that_says_what_is_wrong() -> None:
    full = iter((429, 502, 503, 504))

    async def work(gateway: Gateway) -> None:
        for _ in range(4):
            assert await gateway.destination(completion()) == [TWO[1]]

    stand_ins(lambda request: httpx.Response(next(full) if request.url.netloc.decode() == TWO[0] else 400), work)


def test_where_all_refuse_for_now_a_full_one_says_so_before_one_that_is_away() -> None:
    refusals = {TWO[0]: httpx.Response(503, text="away"), TWO[1]: httpx.Response(429, text="full")}

    async def work(gateway: Gateway) -> None:
        for _ in TWO:
            (reply,) = await gateway.talk(*asked(completion()))
            assert (reply.immediate_response.status.code, reply.immediate_response.body) == (429, b"full")

    stand_ins(lambda request: refusals[request.url.netloc.decode()], work)


@pytest.mark.parametrize(
    ("told", "order"),
    [
        ([{"queued_tokens": 1}, {}], [1, 0]),
        ([{"cached_tokens": 1}, {}], [0, 1]),
        ([{"waiting": 1}, {"queued_tokens": 999}], [1, 0]),
        ([{"first_token_s": 1.0}, {"first_token_s": 0.5, "queued_tokens": 999}], [1, 0]),
        ([{"first_token_s": 0.6}, {"first_token_s": 0.5, "queued_tokens": 999}], [0, 1]),
        ([{"first_token_s": 1.0}, {"first_token_s": 0.5, "queued_tokens": 9}, {"queued_tokens": 1}], [0, 2, 1]),
    ],
    ids=["queued", "cached", "waiting", "much later", "about as soon", "one can't tell"],
)
def test_of_those_that_answer_about_as_soon_the_one_with_least_to_compute_is_chosen(
    told: list[dict[str, Any]], order: list[int]
) -> None:
    names = [f"10.0.0.{number}:8000" for number in range(len(told))]
    said = {name: httpx.Response(200, json=PREVIEW | one) for name, one in zip(names, told, strict=True)}

    async def work(gateway: Gateway) -> None:
        for _ in names:
            assert await gateway.destination(completion()) == [names[number] for number in order]

    stand_ins(lambda request: said[request.url.netloc.decode()], work, names)


def test_over_tls_a_router_is_asked_at_its_address_and_checked_by_its_name(tmp_path: Path) -> None:
    asks = list[tuple[str, object]]()

    def answer(request: httpx.Request) -> httpx.Response:
        asks.append((str(request.url), request.extensions["sni_hostname"]))
        return httpx.Response(200, json=PREVIEW)

    async def run() -> None:
        endpoints = Endpoints(["router.example:8443"], ca=str(TestAuthority(tmp_path).ca))
        endpoints.hosts = {"10.0.0.1:8443": "router.example"}
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            gateway = Gateway(EndpointPicker(endpoints, client, ManualClock(), 60.0))
            assert await gateway.destination(completion()) == ["10.0.0.1:8443"]

    asyncio.run(run())
    assert asks == [(f"https://10.0.0.1:8443{PATH}", "router.example")]


def test_a_name_that_can_not_be_looked_up_keeps_its_addresses_and_no_others() -> None:
    places = {"a": ["10.0.0.1"], "b": ["10.0.0.2", "10.0.0.3"]}

    async def look_up(host: str, port: int, **how: Any) -> list[Any]:
        if host not in places:
            raise OSError("no such name")
        return [(2, 1, 6, "", (place, port)) for place in places[host]]

    async def run() -> None:
        endpoints = Endpoints(["a:1", "b:2"])
        asyncio.get_running_loop().getaddrinfo = look_up  # type: ignore[method-assign,assignment]
        await endpoints.resolve()
        assert endpoints.hosts == {"10.0.0.1:1": "a", "10.0.0.2:2": "b", "10.0.0.3:2": "b"}
        del places["a"]
        places["b"] = ["10.0.0.4"]
        await endpoints.resolve()
        assert endpoints.hosts == {"10.0.0.1:1": "a", "10.0.0.4:2": "b"}

    asyncio.run(run())


@pytest.mark.parametrize("fail_open", [True, False])
def test_where_no_router_answers_a_request_is_sent_on_or_refused_as_is_set(fail_open: bool) -> None:
    gone = [f"127.0.0.1:{free_port()}" for _ in range(2)]

    async def work(gateway: Gateway) -> None:
        replies = await gateway.talk(*asked(completion()))
        if fail_open:
            assert sorted(chosen(replies)) == sorted(gone)
        else:
            assert [one.immediate_response.status.code for one in replies] == [503]

    picking(gone, work, fail_open=fail_open)


def test_of_many_routers_those_are_asked_that_requests_of_the_same_beginning_ask() -> None:
    many = [f"127.0.0.1:{20000 + n}" for n in range(4 * MOST_ASKED)]

    async def work(gateway: Gateway) -> None:
        asks = list[str]()

        async def none(request: Any, endpoint: str) -> None:
            asks.append(endpoint)

        gateway.picker._preview = none  # type: ignore[method-assign]
        asked_of = []
        for prompt in ([1] * 400, [1] * 400 + [2], [3] * 400):
            asks.clear()
            await gateway.destination(completion(prompt))
            asked_of.append(set(asks))
        assert [len(one) for one in asked_of] == [MOST_ASKED] * 3
        assert asked_of[0] == asked_of[1] != asked_of[2]

    picking(many, work)


def test_bytes_that_are_no_message_are_refused_and_never_more() -> None:
    draw = random.Random(11)
    good = [one.SerializeToString() for one in asked(completion(), subset=["1.2.3.4:5"])]
    for _ in range(3000):
        data = bytearray(draw.choice(good))
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            read_request(bytes(data[: draw.randrange(len(data) + 1)]))
        except ValueError:
            continue
    for whole in good:
        with pytest.raises(ValueError, match=r"beyond its message|without an end"):
            read_request(whole[:-1])
    deep: dict[str, Any] = {}
    for _ in range(20):
        deep = {"x": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        read_request(headers_message(subset=deep).SerializeToString())
    for wrong in ("host", "host:", "host:0", ":80", "host:99999"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            Endpoints([wrong])


def test_it_is_served_over_grpc_with_health_checks(routers: list[Server]) -> None:
    async def work() -> None:
        endpoints = Endpoints([address(routers[0])])
        async with endpoints.client(60.0) as client:
            server = grpc.aio.server()
            picker = EndpointPicker(endpoints, client, ManualClock(), 60.0)
            PickerService(endpoints, picker).add_to(server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                check = channel.unary_unary(f"/{HEALTH}/Check", None, None)

                async def status(service: str) -> int:
                    answer = await check(proto("HealthCheckRequest", service=service).SerializeToString(), timeout=60)
                    return int(parsed("HealthCheckResponse", answer).status)

                names = ("", "liveness", "readiness", PROCESSOR)
                assert [await status(name) for name in names] == [1, 1, 2, 2], "it knows no endpoint yet"
                await endpoints.resolve()
                assert [await status(name) for name in names] == [1, 1, 1, 1]
                with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
                    await status("other")
                process = channel.stream_stream(f"/{PROCESSOR}/Process", None, None)
                sent = [one.SerializeToString() for one in asked(completion())]
                replies = [parsed("ProcessingResponse", one) async for one in process(iter(sent), timeout=60)]
                assert chosen(replies) == [address(routers[0])]
                with pytest.raises(grpc.aio.AioRpcError, match="can't be read"):
                    async for _ in process(iter([b"\xff"]), timeout=60):
                        pass
            await server.stop(None)
            assert not +picker.open, "exchanges that are over are counted nowhere"

    asyncio.run(work())


def test_over_tls_a_gateway_checks_the_pickers_certificate(tmp_path: Path) -> None:
    ours, other = TestAuthority(tmp_path / "ours"), TestAuthority(tmp_path / "other")
    node = ours.node()

    async def work() -> None:
        endpoints = Endpoints(TWO)
        answers = httpx.MockTransport(lambda _: httpx.Response(200, json=PREVIEW))
        async with httpx.AsyncClient(transport=answers) as client:
            server = grpc.aio.server()
            with pytest.raises(ConfigError, match="can't listen at"):
                listen(server, "127.0.0.1:0", str(tmp_path / "none"), str(node.key))
            PickerService(endpoints, EndpointPicker(endpoints, client, ManualClock(), 60.0)).add_to(server)
            port = listen(server, "127.0.0.1:0", str(node.cert), str(node.key))
            await endpoints.resolve()
            await server.start()
            for authority, fine in ((ours, True), (other, False)):
                credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
                named = [("grpc.ssl_target_name_override", NODE_NAME)]
                async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=named) as channel:
                    process = channel.stream_stream(f"/{PROCESSOR}/Process", None, None)
                    sent = [one.SerializeToString() for one in asked(completion())]
                    if fine:
                        replies = [parsed("ProcessingResponse", one) async for one in process(iter(sent), timeout=60)]
                        assert sorted(chosen(replies)) == TWO
                    else:
                        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                            await anext(aiter(process(iter(sent), timeout=60)))
            await server.stop(None)

    asyncio.run(work())


class Aborted(Exception):
    """Raised where a call is ended with an error."""


class Call:
    """What a service sees of a call."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(code, details)


@pytest.mark.parametrize("decided", [False, True])
def test_a_gateway_that_says_no_more_is_not_waited_for_for_ever(decided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the choice its request is held, and the call fails; behind it nothing is, and the exchange goes on."""
    monkeypatch.setattr(endpoint_picker, "HOLD_S", 60.0 if decided else 0.01)
    monkeypatch.setattr(endpoint_picker, "EXCHANGE_S", 0.01 if decided else 60.0)
    messages = [one.SerializeToString() for one in asked(completion())]

    async def silent() -> AsyncIterator[bytes]:
        for message in messages if decided else messages[:1]:
            yield message
        await asyncio.Event().wait()

    async def work(gateway: Gateway) -> None:
        service = PickerService(Endpoints(TWO), gateway.picker)
        replies = list[bytes]()
        ended = ""
        try:
            async for reply in service.process(silent(), Call()):  # type: ignore[arg-type]
                replies.append(reply)
        except Aborted as error:
            ended = str(error)
        assert bool(replies) is decided
        assert ("DEADLINE_EXCEEDED" in ended) is not decided
        assert not +gateway.picker.open

    stand_ins(lambda _: httpx.Response(200, json=PREVIEW), work)


def test_a_name_whose_look_up_hangs_keeps_its_addresses_and_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asks, hangs = list[str](), set[str]()

    async def run() -> None:
        goes_on = asyncio.Event()

        async def look_up(host: str, port: int, **how: Any) -> list[Any]:
            asks.append(host)
            if host in hangs:
                await goes_on.wait()
            return [(2, 1, 6, "", (f"10.0.0.{len(asks)}", port))]

        asyncio.get_running_loop().getaddrinfo = look_up  # type: ignore[method-assign,assignment]
        endpoints = Endpoints(["a:1", "b:2"])
        await endpoints.resolve()
        assert endpoints.hosts == {"10.0.0.1:1": "a", "10.0.0.2:2": "b"}
        monkeypatch.setattr(endpoint_picker, "RESOLVE_S", 0.01)
        hangs.add("a")
        for _ in range(2):
            await endpoints.resolve()
        assert (asks.count("a"), asks.count("b")) == (2, 3)
        assert endpoints.hosts == {"10.0.0.1:1": "a", "10.0.0.5:2": "b"}
        goes_on.set()
        monkeypatch.setattr(endpoint_picker, "RESOLVE_S", 60.0)
        await endpoints.resolve()
        assert sorted(endpoints.hosts.values()) == ["a", "b"]
        assert "10.0.0.1:1" not in endpoints.hosts

    asyncio.run(run())


async def scrape(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(60.0):
        found = await reader.read(-1)
    writer.close()
    return found


def test_what_it_has_chosen_and_by_what_is_at_its_metrics() -> None:
    said: dict[str, httpx.Response | Exception] = dict.fromkeys(TWO, httpx.Response(200, json=PREVIEW))

    def answer(request: httpx.Request) -> httpx.Response:
        told = said[request.url.netloc.decode()]
        if isinstance(told, Exception):
            raise told
        return told

    async def work(gateway: Gateway) -> None:
        page = await MetricsPage(gateway.picker).listen("127.0.0.1", 0)
        port = page.sockets[0].getsockname()[1]
        for wrong in (port, 99999):
            with pytest.raises(ConfigError, match=f"can't listen at 127.0.0.1:{wrong} for --metrics-port"):
                await MetricsPage(gateway.picker).listen("127.0.0.1", wrong)
        await gateway.destination(completion())
        await gateway.destination(completion(), **{"idempotency-key": "k"})
        said[TWO[0]], said[TWO[1]] = httpx.Response(200, json=[]), httpx.Response(400)
        await gateway.destination(completion())
        said[TWO[0]] = said[TWO[1]] = httpx.ConnectError("gone")
        (refused,) = await gateway.talk(*asked(completion()))
        assert refused.immediate_response.status.code == 503
        whole = await scrape(port, b"GET /metrics HTTP/1.1\r\nAccept: text/plain\r\n\r\n")
        head, _, body = whole.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        samples = {
            (sample.name.removeprefix("twinpool_picker_"), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }
        picks = {key[1]: value for key, value in samples.items() if key[0] == "picks_total" and value}
        assert picks == {"preview": 1, "key": 1, "at_fault": 1, "no_preview": 1}
        asks = {key[1]: value for key, value in samples.items() if key[0] == "previews_total"}
        assert asks == {"taken": 2, "refused": 1, "unread": 1, "failed": 2}
        assert samples["pick_seconds_count",] == 4
        assert (samples["endpoints", "present"], samples["endpoints", "away"]) == (0, 2)
        assert samples["exchanges",] == 0
        assert (await scrape(port, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert await scrape(port, b"x" * (2 * endpoint_picker.SCRAPE_BYTES)) == b""
        page.close()

    stand_ins(answer, work)
