"""The calls for slices of tenants' quotas: one at a time, shared, and none that anybody waits for in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.router.http_server import eventually
from twinpool.cluster.controller.quota_ledger import QuotaLedger
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.key_file import TenantLimits
from twinpool.contracts.messages.leases import QuotaClaim, QuotaSlice
from twinpool.router.security.tenant_accounts import TenantAccounts, TenantLimited
from twinpool.router.service.admission import AWAY_RETRY_S, QuotaLeases

LIMITS = TenantLimits(requests_per_minute=80, concurrent=40)


class SlowLessor:
    """A controller that answers when it is told to. Implements `router.links.controller_port.QuotaLessor`."""

    def __init__(self, clock: ManualClock) -> None:
        self.ledger = QuotaLedger(clock)
        self.heard: list[list[str]] = []
        self.may_answer = asyncio.Event()
        self.away = False

    async def lease_quota(self, router: str, claims: Sequence[QuotaClaim]) -> list[QuotaSlice]:
        self.heard.append([claim.tenant for claim in claims])
        await self.may_answer.wait()
        if self.away:
            raise ConnectionError("it is away")
        return [self.ledger.lease(router, claim) for claim in claims]


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.accounts, self.lessor = TenantAccounts(leased=True), SlowLessor(self.clock)
        self.leases = QuotaLeases(self.accounts, self.lessor, "router-1", self.clock)

    async def admit(self, tenant: str = "acme", tokens: int = 1) -> bool:
        await self.leases.ensure(tenant, LIMITS, 1, tokens)
        try:
            self.accounts.admit(tenant, LIMITS, 1, tokens, self.clock.now())
        except TenantLimited:
            return False
        return True


@pytest.mark.asyncio
async def test_one_call_is_under_way_at_a_time_and_serves_all_that_wait() -> None:
    scene = Scene()
    asked = [asyncio.create_task(scene.admit("acme" if n % 2 else "other")) for n in range(20)]
    await eventually(lambda: bool(scene.lessor.heard))
    await asyncio.sleep(0)
    assert len(scene.lessor.heard) == 1
    scene.lessor.may_answer.set()
    assert await asyncio.gather(*asked) == [True] * 20
    assert len(scene.lessor.heard) <= 3
    assert set(scene.lessor.heard[-1]) == {"acme", "other"}


@pytest.mark.asyncio
async def test_a_request_that_is_given_up_takes_the_call_from_nobody_and_wants_nothing_any_more() -> None:
    scene = Scene()
    first, second = asyncio.create_task(scene.admit()), asyncio.create_task(scene.admit())
    await eventually(lambda: bool(scene.lessor.heard))
    first.cancel()
    scene.lessor.may_answer.set()
    assert await second
    with pytest.raises(asyncio.CancelledError):
        await first
    held = scene.accounts._accounts["acme"].held
    assert held is not None
    assert not held.pending


@pytest.mark.asyncio
async def test_while_the_controller_is_away_nobody_waits_and_it_is_asked_again_now_and_then() -> None:
    scene = Scene()
    scene.lessor.away = True
    scene.lessor.may_answer.set()
    assert await scene.admit()
    assert scene.accounts.alone
    assert all([await scene.admit() for _ in range(4)])
    assert len(scene.lessor.heard) == 1
    for _ in range(100):
        scene.clock.advance(AWAY_RETRY_S / 20)
        scene.leases.tick()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert 3 <= len(scene.lessor.heard) <= 6
    scene.lessor.away = False
    scene.clock.advance(2 * AWAY_RETRY_S)
    scene.leases.tick()
    await eventually(lambda: not scene.accounts.alone)
    assert await scene.admit()


@pytest.mark.asyncio
async def test_closing_ends_a_call_that_is_under_way() -> None:
    scene = Scene()
    waits = asyncio.create_task(scene.admit())
    await eventually(lambda: bool(scene.lessor.heard))
    scene.leases.close()
    with pytest.raises(asyncio.CancelledError):
        await waits


@pytest.mark.asyncio
async def test_what_is_spent_while_a_call_is_under_way_is_off_the_slice_that_it_brings() -> None:
    scene, limits = Scene(), TenantLimits(tokens_per_minute=800)
    scene.lessor.may_answer.set()
    await scene.leases.ensure("acme", limits, 1, 10)
    scene.accounts.admit("acme", limits, 1, 10, scene.clock.now())
    scene.lessor.may_answer.clear()
    scene.clock.advance(1.0)
    scene.leases.tick()
    await eventually(lambda: len(scene.lessor.heard) == 2)
    scene.accounts.spend("acme", 95)
    scene.lessor.may_answer.set()
    await eventually(lambda: scene.leases._call is None)
    scene.accounts.admit("acme", limits, 1, 5, scene.clock.now())
    with pytest.raises(TenantLimited):
        scene.accounts.admit("acme", limits, 1, 1, scene.clock.now())
