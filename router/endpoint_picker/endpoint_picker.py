"""The endpoint picker: which router, of one cluster or of several with the same model, a request goes to; and the gRPC
server by which gateways ask.

Routers know what a choice needs: which prefixes their workers hold, by tenant, and what is ahead of a prompt. So they
are asked: each gets the request as a preview (`open_answers.preview`), reads and places it as if it were to
answer it, and says when its first token would come, and how many tokens have to be computed before it. Where all can
tell a time those that are much later than the first are out of the choice; of the others the one with the fewest tokens
gets the request. Nothing is guessed from metrics.

A router that doesn't answer within the time is left out, and for `AWAY_S` asked after all others alone. Requests of
which there is no preview go to the endpoint with the fewest exchanges under way, as far as this picker knows.

The server speaks Envoy's external processing, as the Gateway API's inference extension has it
(`docs/proposals/004-endpoint-picker-protocol` of kubernetes-sigs/gateway-api-inference-extension, 1.0). The gateway
opens a stream for each exchange, and is told the endpoints in the header `DESTINATION` and, with the same value, in
dynamic metadata; or it is given an answer for the client. Bodies come whole (`BUFFERED`) or in pieces that the picker
sends back once it has chosen (`FULL_DUPLEX_STREAMED`); sent otherwise, or too large, they aren't looked at.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import signal
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx

from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.json_logs import log
from twinpool.contracts.outside_data import read_json
from twinpool.router.api.app import TEXT_KINDS
from twinpool.router.endpoint_picker.ext_proc_messages import (
    DESTINATION,
    HEALTH,
    METADATA,
    PROCESSOR,
    BodyMode,
    ImmediateResponse,
    Part,
    ProcessingRequest,
    ProcessingResponse,
    health_answer,
    read_health_check,
    read_request,
)
from twinpool.router.openai.api_errors import ApiError, BufferFull
from twinpool.router.openai.request_headers import PREVIEW_HEADER
from twinpool.router.service.admission import BodyBuffer
from twinpool.router.tokenizer_pool.prepare_request import BODY_BYTES_MOST

RESOLVE_S = 5.0
"""Seconds between two looks at which addresses the names of endpoints have."""
AWAY_S = 5.0
"""Seconds for which a router that didn't answer is asked only where no other is left."""
MOST_ASKED = 16
"""Routers that one request is previewed by. Of more, those that requests of the same beginning are previewed by."""
MOST_NAMED = 3
"""Endpoints that a choice names: the first, and those that the gateway may try after it."""
NEAR, NEAR_S = 1.25, 0.01
"""Up to so many times the least, and seconds more, times to a first token count as equal: they are predictions."""
PREFIX_BYTES = 1024
"""Of a body: its beginning, by which requests ask the same routers."""
ASKED_HEADERS = ("authorization", "x-api-key", "content-type", "x-slo-ttft-ms", "x-session-id")
"""Headers of a request that its preview has too."""
TOLD_HEADERS = ("content-type", "retry-after")
"""Headers of a router's refusal that its client gets."""
ANSWER_BYTES = 64 * 1024
"""Of a refusal that its client gets."""


# ---------------------------------------------------------------- the choice


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a router says of a request: the less, the sooner (`RequestPreview`)."""

    waiting: int
    first_token_s: float | None
    tokens: int
    """To be computed before the first token: of this prompt and of those ahead of it."""


@dataclass(frozen=True, slots=True)
class RouterRefusal:
    """A router's error for a request, which it would answer with."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def for_now(self) -> bool:
        """Whether another router, or this one later, may take the request: it isn't the request's own fault."""
        return self.status in (429, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request as far as the gateway has shown it; `body`: None where it isn't known whole."""

    headers: Mapping[str, str]
    body: bytes | None

    @property
    def path(self) -> str:
        return self.headers.get(":path", "").partition("?")[0]

    @property
    def is_previewed(self) -> bool:
        """Whether routers can say what would become of it."""
        return self.body is not None and self.headers.get(":method") == "POST" and self.path in TEXT_KINDS


class Endpoints:
    """The routers that there are, as addresses ``ip:port``; names are looked up again and again, so that the name of a
    headless service stands for all of its pods."""

    def __init__(self, names: Sequence[str], ca: str = "") -> None:
        """`names`: ``host:port`` each. `ca`: the file of the authority of their certificates; empty: they speak plain
        HTTP. Raises `ConfigError`."""
        self._names = [_host_and_port(name) for name in names]
        self.tls = bool(ca)
        try:
            self._trust: ssl.SSLContext | bool = ssl.create_default_context(cafile=ca) if ca else False
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"can't read the certificate authority {ca}: {error}") from None
        self.hosts: dict[str, str] = {}
        """The host name that each address was found by, by which its certificate is checked."""

    def client(self, timeout_s: float) -> httpx.AsyncClient:
        """A client of all endpoints, for previews. The caller closes it."""
        limits = httpx.Limits(max_connections=1024, max_keepalive_connections=256, keepalive_expiry=50.0)
        return httpx.AsyncClient(timeout=timeout_s, limits=limits, verify=self._trust, trust_env=False)

    async def resolve(self) -> None:
        """Look up all names. What a name had is kept while it can't be looked up."""
        loop, found = asyncio.get_running_loop(), dict[str, str]()
        for host, port in self._names:
            try:
                infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError as error:
                log("endpoint not found", host=host, reason=str(error))
                found |= {address: name for address, name in self.hosts.items() if name == host}
                continue
            found |= {_address(info[4]): host for info in infos}
        if found.keys() != self.hosts.keys():
            log("endpoints", addresses=sorted(found))
        self.hosts = found


class EndpointPicker:
    """Picks endpoints, and knows what it has sent to which. On one event loop."""

    def __init__(
        self, endpoints: Endpoints, client: httpx.AsyncClient, clock: Clock, timeout_s: float, *, fail_open: bool = True
    ) -> None:
        """`timeout_s`: for which previews are waited for. `fail_open`: whether a request of which no preview has come
        is sent to one of the endpoints all the same; else it is refused."""
        self._endpoints, self._client, self._clock = endpoints, client, clock
        self._timeout_s, self._fail_open = timeout_s, fail_open
        self.open: Counter[str] = Counter()
        """Exchanges under way, by the endpoint that they were sent to first."""
        self._away_until: dict[str, float] = {}
        self._turn = 0

    async def pick(self, request: HttpRequest, subset: Sequence[str] | None) -> list[str] | ImmediateResponse:
        """The endpoints for a request, the best first; or the answer that it gets instead. `subset`: those that the
        gateway allows; None: all."""
        able = [one for one in self._endpoints.hosts if subset is None or one in subset]
        if not able:
            return refusal(503, "no endpoint of this pool is there", "no_endpoint")
        self._turn += 1
        able = able[self._turn % len(able) :] + able[: self._turn % len(able)]
        if key := request.headers.get("idempotency-key"):
            return _by_affinity(able, key.encode())[:MOST_NAMED]  # To where an answer that was begun is kept.
        if not request.is_previewed:
            return self._by_load(self._present(able))[:MOST_NAMED]
        present = self._present(able)
        said = await self._ask(request, present)
        if not said and (left := [one for one in able if one not in present]):
            said = await self._ask(request, left)
        return self._chosen(said, able)

    def _chosen(
        self, said: Mapping[str, Estimate | RouterRefusal], able: Sequence[str]
    ) -> list[str] | ImmediateResponse:
        """The choice by what routers have said; those that said nothing aren't in it."""
        if takes := {one: told for one, told in said.items() if isinstance(told, Estimate)}:
            return self._by_cost(takes)[:MOST_NAMED]
        refused = {one: told for one, told in said.items() if isinstance(told, RouterRefusal)}
        if at_fault := [one for one, told in refused.items() if not told.for_now]:
            return self._by_load(at_fault)[:1]  # The router says in its own words what is wrong with the request.
        if refused:
            best = min(refused.values(), key=lambda told: told.status != 429)
            status = 429 if best.status == 429 else 503
            return ImmediateResponse(status, best.body, best.headers, "all_endpoints_refuse")
        if self._fail_open:
            return self._by_load(able)[:MOST_NAMED]
        return refusal(503, "no endpoint has said what it would do with the request", "no_preview")

    def _by_cost(self, takes: Mapping[str, Estimate]) -> list[str]:
        """Those that take the request, the best first."""
        times = {one: told.first_token_s for one, told in takes.items() if told.first_token_s is not None}
        soon = min(times.values()) * NEAR + NEAR_S if len(times) == len(takes) else math.inf

        def cost(one: str) -> tuple[bool, float, int, int]:
            told, seconds = takes[one], times.get(one, 0.0)
            return told.waiting > 0, seconds if seconds > soon else 0.0, told.tokens, self.open[one]

        return sorted(takes, key=cost)

    async def _ask(self, request: HttpRequest, able: Sequence[str]) -> dict[str, Estimate | RouterRefusal]:
        """What routers say of a request, each that has said something within the time."""
        if len(able) > MOST_ASKED:
            able = _by_affinity(able, (request.body or b"")[:PREFIX_BYTES])[:MOST_ASKED]
        told = await asyncio.gather(*[self._preview(request, one) for one in able])
        return {one: said for one, said in zip(able, told, strict=True) if said is not None}

    async def _preview(self, request: HttpRequest, endpoint: str) -> Estimate | RouterRefusal | None:
        scheme = "https" if self._endpoints.tls else "http"
        given = {name: request.headers[name] for name in ASKED_HEADERS if name in request.headers}
        host = self._endpoints.hosts.get(endpoint, "")
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.post(
                    f"{scheme}://{endpoint}{request.path}",
                    content=request.body,
                    headers=httpx.Headers({**given, PREVIEW_HEADER: "1"}, encoding="latin-1"),
                    extensions={"sni_hostname": host} if self._endpoints.tls else None,
                )
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            self._away_until[endpoint] = self._clock.now() + AWAY_S
            log("no preview", endpoint=endpoint, reason=f"{type(error).__name__}: {error}")
            return None
        self._away_until.pop(endpoint, None)
        if response.status_code != 200:
            told = {name: response.headers[name] for name in TOLD_HEADERS if name in response.headers}
            return RouterRefusal(response.status_code, response.content[:ANSWER_BYTES], told)
        return _estimate(response.content)

    def _present(self, able: Sequence[str]) -> list[str]:
        """Those that have answered when they were asked last; all where none has."""
        now = self._clock.now()
        return [one for one in able if now >= self._away_until.get(one, 0.0)] or list(able)

    def _by_load(self, able: Sequence[str]) -> list[str]:
        return sorted(able, key=lambda one: self.open[one])


def refusal(status: int, message: str, code: str) -> ImmediateResponse:
    """An answer to the client in the form of routers' errors."""
    body = ApiError(status, message, "server_error", code).to_json()
    return ImmediateResponse(status, body, {"content-type": "application/json", "retry-after": "1"}, code)


def _estimate(body: bytes) -> Estimate | None:
    """What a preview says; None where it is none that is known here, of a newer build perhaps."""
    try:
        told: dict[str, Any] = read_json(body)
        seconds = told["first_token_s"]
        tokens = int(told["prompt_tokens"]) - int(told["cached_tokens"]) + int(told["queued_tokens"])
        return Estimate(int(told["waiting"]), None if seconds is None else float(seconds), tokens)
    except (ValueError, KeyError, TypeError):
        return None


def _by_affinity(able: Sequence[str], key: bytes) -> list[str]:
    """In an order that is the key's own, whoever else is there (rendezvous hashing, Thaler and Ravishankar 1998)."""
    return sorted(able, key=lambda one: hashlib.blake2b(one.encode() + b"\0" + key, digest_size=8).digest())


def _host_and_port(name: str) -> tuple[str, int]:
    host, _, port = name.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"an endpoint is named as HOST:PORT; got {name!r}")
    return host.strip("[]"), int(port)


def _address(place: Sequence[object]) -> str:
    """``ip:port`` of what `getaddrinfo` has found."""
    host, port = str(place[0]), place[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ---------------------------------------------------------------- the gRPC server

HELD_BYTES_MOST = 256 * 2**20
"""Bytes of bodies that are held for a choice, of all exchanges together, each in pieces and as a whole; a body beyond
them isn't looked at."""
MOST_EXCHANGES = 8192
END_S = 25.0
"""Seconds for which exchanges go on after SIGTERM, less than Kubernetes gives by default."""
_ECHOED = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.GRPC)
"""How bodies are sent that go on only as they are sent back."""
_AT_ONCE = (BodyMode.NONE, BodyMode.STREAMED)
"""How bodies are sent of which nothing is known when the headers have to be answered."""
Reply = ProcessingResponse | ImmediateResponse


class GatewayExchange:
    """One exchange of a client through the gateway: what was seen of it, and where it was sent."""

    def __init__(self, picker: EndpointPicker, held: BodyBuffer) -> None:
        """`held`: the count of bytes of all exchanges' bodies that wait for a choice."""
        self._picker, self._held = picker, held
        self._headers: dict[str, str] = {}
        self._subset: list[str] | None = None
        self._modes = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED
        """The protocol asks for these, of a gateway that doesn't say."""
        self._body: list[bytes] = []
        """The pieces that wait for the choice."""
        self._booked = 0
        self._destination: str | None = None
        """The value of `DESTINATION`; None: nothing was chosen yet."""
        self._sent_to = ""

    async def take(self, message: ProcessingRequest) -> list[Reply]:
        """What is to be replied to a message; nothing where more of the body must come first."""
        self._modes = message.modes or self._modes
        match message.part:
            case Part.REQUEST_HEADERS:
                return await self._begin(message)
            case Part.REQUEST_BODY if self._modes[0] in _ECHOED:
                return await self._piece(message)
            case Part.REQUEST_BODY if self._destination is None:
                return [await self._choose(Part.REQUEST_BODY, known=self._hold(message.body))]
            case Part.REQUEST_TRAILERS if self._destination is None:
                replies = await self._whole(end=False)
                return replies if self._destination is None else [*replies, ProcessingResponse(message.part)]
            case Part.RESPONSE_BODY if self._modes[1] in _ECHOED:
                return [ProcessingResponse(Part.RESPONSE_BODY, chunk=(message.body, message.end_of_stream))]
            case Part.RESPONSE_HEADERS if message.served and self._sent_to:
                self._count_at(message.served)  # The gateway may have tried another one.
        return [ProcessingResponse(message.part)]

    def close(self) -> None:
        """End the exchange. Idempotent."""
        self._drop_body()
        self._count_at("")

    async def _begin(self, message: ProcessingRequest) -> list[Reply]:
        self._headers, self._subset = dict(message.headers), message.subset
        if message.end_of_stream or self._modes[0] in _AT_ONCE:
            return [await self._choose(Part.REQUEST_HEADERS, known=message.end_of_stream)]
        return [] if self._modes[0] in _ECHOED else [ProcessingResponse(Part.REQUEST_HEADERS)]

    async def _piece(self, message: ProcessingRequest) -> list[Reply]:
        """Take a piece of a body that is sent back in pieces: at once, where a choice was made."""
        if self._destination is not None:
            return [ProcessingResponse(Part.REQUEST_BODY, chunk=(message.body, message.end_of_stream))]
        known = self._hold(message.body)
        if known and not message.end_of_stream:
            return []
        return await self._whole(end=message.end_of_stream, known=known)

    def _hold(self, piece: bytes) -> bool:
        """Hold a piece of the body until the choice; returns whether the body may be looked at: it isn't too large, and
        there is room for it."""
        self._body.append(piece)
        try:
            self._held.take(len(piece))
        except BufferFull:
            return False
        self._booked += len(piece)
        return self._booked <= BODY_BYTES_MOST

    async def _whole(self, *, end: bool, known: bool = True) -> list[Reply]:
        """Choose by the body that has come, and let it pass. `end`: whether its last piece is the end of the request.
        `known`: whether it is all of the body."""
        pieces = self._body
        chosen = await self._choose(Part.REQUEST_HEADERS, known=known)
        if isinstance(chosen, ImmediateResponse):
            return [chosen]
        last = len(pieces) - 1
        chunks = [(piece, end and number == last) for number, piece in enumerate(pieces)]
        return [chosen, *(ProcessingResponse(Part.REQUEST_BODY, chunk=chunk) for chunk in chunks)]

    async def _choose(self, part: Part, *, known: bool) -> Reply:
        """Choose, and reply to `part` with the choice. `known`: whether what is held is the whole body."""
        request = HttpRequest(self._headers, b"".join(self._body) if known else None)
        picked = await self._picker.pick(request, self._subset)
        self._drop_body()
        if isinstance(picked, ImmediateResponse):
            log("refused", status=picked.status, details=picked.details, path=self._headers.get(":path", "")[:200])
            return picked
        self._count_at(picked[0])
        self._destination = ",".join(picked)
        told = {DESTINATION: self._destination}
        return ProcessingResponse(part, told, {METADATA: told})

    def _count_at(self, endpoint: str) -> None:
        """Count the exchange as under way at `endpoint`, and no more where it was; empty: nowhere."""
        if self._sent_to:
            self._picker.open[self._sent_to] -= 1
        if endpoint:
            self._picker.open[endpoint] += 1
        self._sent_to = endpoint

    def _drop_body(self) -> None:
        self._held.give_back(self._booked)
        self._body, self._booked = [], 0


class PickerService:
    """The services of the picker, as gRPC calls them."""

    def __init__(self, endpoints: Endpoints, picker: EndpointPicker) -> None:
        self._endpoints, self._picker, self._held = endpoints, picker, BodyBuffer(HELD_BYTES_MOST)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Have a server offer them. Messages are bytes here."""
        process = grpc.stream_stream_rpc_method_handler(self.process)
        check = grpc.unary_unary_rpc_method_handler(self.check)
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(PROCESSOR, {"Process": process}),
                grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
            )
        )

    async def process(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        """Process one exchange."""
        exchange = GatewayExchange(self._picker, self._held)
        try:
            async for data in messages:
                try:
                    message = read_request(data)
                except ValueError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a message can't be read: {error}")
                for reply in await exchange.take(message):
                    yield reply.to_bytes()
        finally:
            exchange.close()

    async def check(self, data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """Answer a health check: of the process, or of whether it knows endpoints to choose from."""
        match read_health_check(data):
            case "" | "liveness":
                return health_answer(serving=True)
            case "readiness" | "envoy.service.ext_proc.v3.ExternalProcessor":
                return health_answer(serving=bool(self._endpoints.hosts))
            case other:
                return await context.abort(grpc.StatusCode.NOT_FOUND, f"no such service: {other[:100]}")


async def serve_picker(
    address: str, endpoints: Endpoints, timeout_s: float, *, fail_open: bool, cert: str = "", key: str = ""
) -> None:
    """Serve at ``host:port`` until SIGTERM or SIGINT. `cert`, `key`: files; empty: without TLS. Raises `ConfigError`
    where the address or the files can't be used."""
    options = [("grpc.max_receive_message_length", BODY_BYTES_MOST + 2**20), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MOST_EXCHANGES)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with endpoints.client(timeout_s) as client:
        picker = EndpointPicker(endpoints, client, SystemClock(), timeout_s, fail_open=fail_open)
        PickerService(endpoints, picker).add_to(server)
        port = _listen(server, address, cert, key)
        await endpoints.resolve()
        await server.start()
        log("endpoint picker serves", port=port, endpoints=sorted(endpoints.hosts))
        while not ended.is_set():
            try:
                await asyncio.wait_for(ended.wait(), RESOLVE_S)
            except TimeoutError:
                await endpoints.resolve()
        await server.stop(END_S)


def _listen(server: grpc.aio.Server, address: str, cert: str, key: str) -> int:
    try:
        if not cert:
            return server.add_insecure_port(address)
        pair = Path(key).read_bytes(), Path(cert).read_bytes()
        return server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"can't listen at {address}: {error}") from None
