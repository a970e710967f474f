"""Admission: what requests may ask for, and what is booked for those that were let in.

A router has room for `router.max_queue` choices that have not ended, or that requests ask for; a tenant has the limits
of its key (`router.security.tenant_accounts`), slices of which a router leases from the controller (`QuotaLeases`); a
request has its time, its first token's, and the tokens of its answers. Bodies that are being received have a budget of
their own (`BodyBuffer`), and so have the pixels of answers in flight.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.json_logs import log
from twinpool.contracts.key_file import TenantLimits
from twinpool.contracts.messages.leases import QuotaClaim
from twinpool.contracts.messages.router_commands import BACKGROUND
from twinpool.contracts.messages.worker_status import WorkerStatus
from twinpool.router.links.controller_port import QuotaLessor
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.openai.api_errors import BufferFull, ImagesFull, QueueFull
from twinpool.router.openai.parse_request import GenerateRequest, UnknownModel
from twinpool.router.openai.request_headers import SLO_HEADER
from twinpool.router.security.tenant_accounts import ApiKeys, TenantAccounts
from twinpool.router.state.worker_table import WorkerTable
from twinpool.router.tokenizer_pool.prepare_request import too_long

if TYPE_CHECKING:
    from twinpool.router.service.router_service import RouterService

_MILLISECONDS = re.compile(r"0*[1-9][0-9]{0,8}", re.ASCII)
NO_LIMITS = TenantLimits()
IMAGE_BYTES = 1024**3
"""Bytes of pixels of all answers in flight: a router keeps them to the end, as it may have to begin one elsewhere."""
TRIES = 3
"""Claims that one request waits for; others of its tenant may take what each brings."""
SLOW_START_S, MAX_DOUBLINGS = 0.25, 10
"""Seconds after which an idle worker counts for twice as many background requests, and how often at most."""
AWAY_RETRY_S = 1.0
"""Seconds until a controller that was away is asked for slices again."""


FREE_BYTES = 64 * 1024
"""How much of every body doesn't count against the `BodyBuffer`: ordinary requests get in beside any number of large
ones, and the limit on connections bounds the sum."""


class BodyBuffer:
    """The count of bytes held by bodies between their first byte and their admission; `limit` in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, size: int) -> None:
        """Book `size` bytes. Raises `BufferFull`, with nothing booked, where they go beyond the limit."""
        if self.held + size > self.limit:
            raise self._full(size)
        self.held += size

    def give_back(self, size: int) -> None:
        self.held -= size

    @contextmanager
    def beside_clients(self, size: int) -> Iterator[None]:
        """Book a body of `size` bytes that no client waits for, meanwhile. Raises `BufferFull` where others would be
        left less than half of the limit, unless it is alone."""
        counted = max(0, size - FREE_BYTES)
        if counted and self.held and 2 * (self.held + counted) > self.limit:
            raise self._full(counted)
        self.take(counted)
        try:
            yield
        finally:
            self.give_back(counted)

    def _full(self, size: int) -> BufferFull:
        return BufferFull(
            f"bodies of {self.held} bytes are being received; try again later", size, self.held, self.limit
        )


class QuotaLeases:
    """The leases of tenants' quotas: claims slices of the controller, before requests that need them and while they are
    used.

    One call is under way at a time, for all tenants that need one. A request that lacks a slice waits for it; where no
    answer comes the controller counts as away, and nobody waits until it has answered again.
    """

    def __init__(self, accounts: TenantAccounts, lessor: QuotaLessor, name: str, clock: Clock) -> None:
        """`name`: of this start of the router."""
        self._accounts, self._lessor, self._name, self._clock = accounts, lessor, name, clock
        self._call: asyncio.Task[None] | None = None
        self._waiting: dict[asyncio.Task[object], tuple[str, int, int]] = {}
        """Tenant, choices and tokens of each request that waits for a slice."""
        self._retry_at = 0.0

    async def ensure(self, tenant: str, limits: TenantLimits, choices: int, prompt_tokens: int) -> None:
        """Have slices here for a request, if the tenant may make it; the caller looks whether they are."""
        asked = tenant, limits, choices, prompt_tokens
        if not self._accounts.lacks(*asked, self._clock.now()):
            return
        task = asyncio.current_task()
        assert task is not None
        self._accounts.wait_for(tenant, choices, prompt_tokens)
        self._waiting[task] = (tenant, choices, prompt_tokens)
        try:
            for _ in range(TRIES):
                if self._call is not None:  # Its claims may have been made before this request came.
                    await asyncio.shield(self._call)
                if not self._accounts.lacks(*asked, self._clock.now()) or (call := self._begin()) is None:
                    return
                await asyncio.shield(call)
        finally:
            del self._waiting[task]
            self._accounts.wait_for(tenant, choices, prompt_tokens, -1)

    def tick(self) -> None:
        """Claim what is due; to be called every 100 ms or so."""
        if self._call is None and (not self._accounts.alone or self._clock.now() >= self._retry_at):
            self._begin()

    def check(self) -> list[str]:
        """Recount what waits for slices; returns a sentence for each disagreement."""
        wanted: dict[str, Counter[str]] = {}
        for tenant, choices, tokens in self._waiting.values():
            wanted.setdefault(tenant, Counter()).update(requests=1, tokens=tokens, concurrent=choices)
        counted = self._accounts.waiting
        found = [
            f"requests of {tenant} wait for {dict(+wanted.get(tenant, Counter()))}, {dict(counted.get(tenant, {}))} "
            "is claimed for them"
            for tenant in sorted(wanted.keys() | counted.keys())
            if +wanted.get(tenant, Counter()) != counted.get(tenant, Counter())
        ]
        ended = sum(task.done() for task in self._waiting)
        return [*found, f"{ended} requests have ended and still wait for a slice"] if ended else found

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _begin(self) -> asyncio.Task[None] | None:
        """Make the claims that are to be made, unless some are under way; returns the call, None where none is to be
        made."""
        if self._call is None and (claims := self._accounts.claims(self._clock.now())):
            self._call = asyncio.get_running_loop().create_task(self._claim(claims))
            self._call.add_done_callback(self._done)
        return self._call

    def _done(self, call: asyncio.Task[None]) -> None:
        self._call = None

    async def _claim(self, claims: Sequence[QuotaClaim]) -> None:
        was_alone = self._accounts.alone
        try:
            slices = await self._lessor.lease_quota(self._name, claims)
        except ConnectionError as error:
            now = self._clock.now()
            self._retry_at = now + AWAY_RETRY_S
            self._accounts.go_alone(now)
            if not was_alone:
                log("quotas alone", reason=str(error))
            return
        self._accounts.granted(claims, slices, self._clock.now())
        if was_alone:
            log("quotas leased again")


class IdleCapacity:
    """How many background requests of a model a router may have under way, as far as it sees.

    A decode worker is idle while it has no ordinary request: by what this router has sent it, and with several routers
    by what its latest status says. One that has been idle for `quiet_s` counts for one request, and for twice as many
    after each further `SLOW_START_S` (slow start): what is under way when an ordinary request comes is in its way, at
    prefill and where both are computed on the same cores.
    """

    def __init__(self, service: RouterService, quiet_s: float) -> None:
        self._service, self._quiet_s = service, quiet_s
        self._busy_at: dict[WorkerName, float] = {}
        """When a worker was last seen with an ordinary request, in seconds of the clock."""

    def requests(self, most: int) -> int:
        """Return how many, `most` at most."""
        service = self._service
        core, admission = service.core, service.admission
        served = core.workers.served
        if served.paused or served.asleep:  # What begins now may not end before its deadline.
            return 0
        if any(not core.serving(role) for role in core.workers.needed) or 2 * admission.booked >= admission.max_choices:
            return 0
        if service.background_rows:
            return most
        now, sent = service.clock.now(), self._sent()
        decoding = [e for role in core.workers.roles if role is not Role.PREFILL for e in core.serving(role)]
        seen = {entry.record.name: self._busy_at.get(entry.record.name, -math.inf) for entry in decoding}
        busy = {entry.record.name for entry in decoding if entry.record.name in sent or _has_others(entry.status)}
        self._busy_at = {**seen, **dict.fromkeys(busy, now)}
        idle = [now - at - self._quiet_s for name, at in self._busy_at.items() if name not in busy]
        return min(most, sum(1 << int(min(over / SLOW_START_S, MAX_DOUBLINGS)) for over in idle if over >= 0))

    def _sent(self) -> set[str]:
        """The workers of this router's ordinary requests."""
        return {
            name
            for _, choice in self._service.answers.owners.values()
            if choice.request.priority > BACKGROUND
            for name in choice.request.workers.values()
        }


def _has_others(status: WorkerStatus) -> bool:
    """Whether a worker of several routers has ordinary requests, by its own word."""
    return status.routers > 1 and status.running + status.waiting > status.background


class Admission:
    """The admission of one router's requests, on its event loop."""

    def __init__(
        self,
        spec: ModelSpec,
        config: RouterConfig,
        keys_file: str,
        workers: WorkerTable,
        tenants: TenantAccounts,
        metrics: PrometheusMetrics,
        clock: Clock,
        quotas: QuotaLeases | None = None,
    ) -> None:
        """`keys_file`: the file of clients' keys; empty: nobody needs one. `quotas`: leases slices of tenants' limits;
        None: they are this router's alone. Raises `ConfigError` where the file can't be read."""
        self._spec, self._config, self._workers, self._metrics, self._clock = spec, config, workers, metrics, clock
        self.keys = ApiKeys(Path(keys_file)) if keys_file else None
        """None: nobody needs a key."""
        self.tenants = tenants
        self._quotas = quotas
        self.max_choices = config.max_queue
        self.choices = 0
        """Places of choices that have begun."""
        self.pixels = 0
        """Bytes of their images."""
        self._opening: dict[asyncio.Task[object], int] = {}
        """Places that requests hold while they are read or looked for, by the task of each."""

    # ------------------------------------------------------------ room for answers

    @property
    def booked(self) -> int:
        """All places that are taken."""
        return self.choices + sum(self._opening.values())

    def check_room(self, choices: int = 1) -> None:
        """Raise `QueueFull` where there is no room for so many choices more. Books nothing."""
        if self.booked + choices > self.max_choices:
            self._metrics.refused_full += 1
            text = f"the queue is full: {self.booked} of {self.max_choices} answers are in flight; try again later"
            raise QueueFull(text, choices)

    @contextmanager
    def hold(self, places: int = 1) -> Iterator[None]:
        """Take places for the length of the block, in which the request is waited for; not to be nested.

        Whoever begins its choices does so before anything else is awaited: then the places are still free.
        """
        task = asyncio.current_task()
        assert task is not None
        assert task not in self._opening, "one request holds places once"
        self._opening[task] = places
        try:
            yield
        finally:
            del self._opening[task]

    def ended_holders(self) -> int:
        """Requests that hold places and have ended: 0, unless places are lost."""
        return sum(task.done() for task in self._opening)

    # ------------------------------------------------------------ tenants

    def allowed(self, tenant: str) -> TenantLimits:
        """Return the limits of a tenant."""
        return self.keys.limits(tenant) if self.keys is not None else NO_LIMITS

    async def lease(self, tenant: str, choices: int, prompt_tokens: int) -> None:
        """Have slices of a tenant's limits for so much, where they hold for several routers together."""
        if self._quotas is not None and self.keys is not None:
            await self._quotas.ensure(tenant, self.allowed(tenant), choices, prompt_tokens)

    def check_tenant(self, tenant: str, choices: int = 1, prompt_tokens: int = 1) -> None:
        """Raise `TenantLimited` where a tenant may not ask for so much now; by default the least. Books nothing."""
        if self.keys is not None:
            self.tenants.check(tenant, self.allowed(tenant), choices, prompt_tokens, self._clock.now())

    def check_model(self, tenant: str, request: GenerateRequest) -> None:
        """Raise `UnknownModel` where a tenant may not use the adapter that a request names, or the model itself. A key
        that names one of the model's names may use the model; an adapter must be named."""
        models, adapter = self.allowed(tenant).models, request.model_name
        if models and not set(models) & ({adapter} if adapter else set(self._spec.names)):
            raise UnknownModel(f"{tenant} may use {' and '.join(models)}", param="model")

    def book(self, tenant: str, choices: int, prompt_tokens: int, pixels: int) -> None:
        """Book the choices of an answer that begins, the bytes of their images, and what it takes of its tenant's
        limits. Raises `ImagesFull` and `TenantLimited`, having booked nothing. Without a tenant its limits aren't."""
        if pixels and self.pixels + pixels > IMAGE_BYTES:
            self._metrics.refused_full += 1
            raise ImagesFull(pixels, self.pixels, IMAGE_BYTES)
        if self.keys is not None and tenant:
            self.tenants.admit(tenant, self.allowed(tenant), choices, prompt_tokens, self._clock.now())
        self.choices += choices
        self.pixels += pixels

    def give_back(self, tenant: str, pixels: int) -> None:
        """Give back the place of a choice that has ended, and the bytes of its images."""
        self.choices -= 1
        self.pixels -= pixels
        if tenant:
            self.tenants.ended(tenant)

    # ------------------------------------------------------------ one request

    def as_background(self, request: GenerateRequest, seed: int) -> GenerateRequest:
        """Return a request of a batch as it is asked: background, with all the time that requests may have, and with
        `seed` where it names none."""
        seeded = request.sampling if request.seeded else structs.replace(request.sampling, seed=seed)
        time_s = self._config.max_timeout_s
        return replace(request, priority=BACKGROUND, timeout_s=time_s, sampling=seeded)

    def timeout_s(self, request: GenerateRequest) -> float:
        """Return the seconds from arrival to deadline. Raises `RequestError` above `router.max_timeout_s`."""
        if request.timeout_s is None:
            return self._config.request_timeout_s
        if request.timeout_s > self._config.max_timeout_s:
            raise RequestError(
                f"timeout {request.timeout_s:g} s is above the server's limit of {self._config.max_timeout_s:g} s",
                param="timeout",
            )
        return request.timeout_s

    def first_token_ms(self, header: str, tenant: str) -> int:
        """Return the milliseconds to the first token beyond which an answer is of no use; 0: none.

        `header`: what the client names, which may be less than its tenant's or the server's. Raises `RequestError`
        where it is no such number.
        """
        given = self.allowed(tenant).ttft_slo_ms or self._config.ttft_slo_ms
        if not header:
            return given
        if not _MILLISECONDS.fullmatch(header):
            raise RequestError(f"the header {SLO_HEADER} must be a whole number of milliseconds, 1 or more")
        return min(int(header), given) if given else int(header)

    def answer_limits(self, request: GenerateRequest, prompts: Sequence[int]) -> list[int]:
        """Return the `max_tokens` of the answers to each of the `prompts`, whose lengths in tokens are given. Raises
        `RequestError` as `answer_tokens` does, and for experts of more positions than `router.max_routed_positions`."""
        limits = [self.answer_tokens(request, have) for have in prompts]
        positions, most = request.n * (sum(prompts) + sum(limits)), self._config.max_routed_positions
        if request.sampling.routed_experts and positions > most:
            raise RequestError(
                f"return_routed_experts asks for those of {positions} positions, of each answer with its prompt; the "
                f"limit is {most}: lower max_tokens, or ask for fewer answers at once",
                param="return_routed_experts",
            )
        return limits

    def answer_tokens(self, request: GenerateRequest, have: int) -> int:
        """Return the `max_tokens` of the answers to a prompt of `have` tokens. Raises `RequestError`, with the numbers,
        where prompt and answer can't fit into the context or into the workers' pools."""
        context = self._spec.context
        param = request.prompt_field
        wanted = 1 if request.max_tokens is None else request.max_tokens
        if have > context or (wanted and have >= context):
            raise too_long(have, context, param)
        if have + wanted > context:
            raise RequestError(
                f"prompt ({have} tokens) and max_tokens ({wanted}) make {have + wanted}; the context is {context}",
                param="max_tokens",
            )
        left = context - have
        for role in self._workers.roles:
            most = self._workers.max_positions(role)
            if most is None or (role is Role.DECODE and wanted <= 1 and request.max_tokens is not None):
                continue
            if have + wanted > most:
                raise RequestError(
                    f"prompt ({have} tokens) and answer ({wanted}) make {have + wanted}; "
                    f"the {role} workers' pools hold {most} positions",
                    param=param if have > most else "max_tokens",
                )
            left = min(left, most - have)
        if request.max_tokens is not None:
            return request.max_tokens
        if request.sampling.min_tokens > left:
            raise RequestError(
                f"min_tokens {request.sampling.min_tokens} is more than the {left} left", param="min_tokens"
            )
        if request.chat or request.shape == "tokens":
            return left
        return min(left, max(self._config.default_max_tokens, request.sampling.min_tokens))
