"""Routing policies: whom each chooses, and what none of them may do."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from tests.router.stage import Stage
from twinpool.contracts.config.cache_config import PrefetchConfig
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import ConfigError, ErrorKind
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.fingerprint import Fingerprint, handover_class, mismatch
from twinpool.router.core.routing_policies import LOAD_SHARE, PoolRates, PowerOfTwo, RoutingAsk, Session, make_policy
from twinpool.router.kv_indexer.prefix_indexes import PromptHits
from twinpool.router.state.prefix_hashes import prefix_hashes
from twinpool.router.state.worker_table import WorkerEntry, WorkerKey

PREFILL, DECODE = Role.PREFILL, Role.DECODE
POLICIES = ("cache_aware", "least_loaded", "power_of_two", "round_robin", "session")
PROMPT = tuple(range(640))


def entries(stage: Stage, role: Role = PREFILL) -> list[WorkerEntry]:
    return [e for e in stage.core.workers if e.record.role is role]


Held = dict[WorkerKey, int]


def ask(
    positions: int = 640,
    max_len: int = 700,
    *,
    session: str = "",
    now: float = 0.0,
    device: Held = {},  # noqa: B006 (read alone)
    held: Held = {},  # noqa: B006
    storage: int = 0,
) -> RoutingAsk:
    return RoutingAsk(positions, max_len, PromptHits(device, held, storage), session, now)


def rates(stage: Stage, **counters: tuple[float, float]) -> PoolRates:
    """Rates of prefill workers: tokens computed and loaded a second."""
    for name, (computed, loaded) in counters.items():
        stage.cluster[name.replace("_", "-")].counters = {
            "compute_tokens_per_s": computed, "load_tokens_per_s": loaded
        }  # fmt: skip
    stage.view()
    known = PoolRates()
    known.follow(stage.core.workers)
    return known


def cache_aware(stage: Stage, prefetch: PrefetchConfig = PrefetchConfig(), **counters: tuple[float, float]) -> Any:  # noqa: B008
    return make_policy("cache_aware", rates(stage, **counters), prefetch, random.Random(0))


# ---------------------------------------------------------------- cache_aware


def test_the_device_is_preferred_to_the_host_and_that_to_nothing() -> None:
    stage = Stage(3, 1)
    policy = cache_aware(stage, prefill_0=(1000, 4000), prefill_1=(1000, 4000), prefill_2=(1000, 4000))
    none, host, device = entries(stage)
    both = ask(device={device.key: 320}, held={device.key: 320, host.key: 320})
    assert policy.prefill([none, host, device], both) is device
    assert policy.prefill([none, host], both) is host
    # A quarter of 320 tokens is what loading them costs: 80 tokens in flight more on the other are as long.
    device.load = 79
    assert policy.prefill([none, host, device], both) is device
    device.load = 81
    assert policy.prefill([none, host, device], both) is host


def test_a_host_that_loads_no_quicker_than_it_computes_is_worth_nothing() -> None:
    stage = Stage(2, 1)
    policy = cache_aware(stage, prefill_0=(1000, 900), prefill_1=(1000, 0))
    slow, unknown = entries(stage)
    slow.load = 1
    assert policy.prefill([slow, unknown], ask(held={slow.key: 640})) is unknown
    assert policy.prefill([slow, unknown], ask(held={unknown.key: 640, slow.key: 640})) is unknown
    assert LOAD_SHARE < 1, "of a host that has loaded nothing yet, little is assumed"


def test_what_storage_holds_counts_for_all_and_most_for_who_has_least() -> None:
    stage = Stage(2, 1)
    policy = cache_aware(
        stage, PrefetchConfig(base_s=0.0, per_token_s=0.0001), prefill_0=(1000, 0), prefill_1=(1000, 0)
    )
    idle, holder = entries(stage)
    holder.load = 200
    held = {holder.key: 640}
    assert policy.prefill([idle, holder], ask(device=held, held=held)) is holder
    # Storage has 640 tokens, which are read in the time of 64: the idle worker is ahead by 200 - 64.
    assert policy.prefill([idle, holder], ask(device=held, held=held, storage=640)) is idle


def test_of_two_that_are_as_quick_the_one_is_asked_that_has_less_to_compute() -> None:
    """Whoever was chosen longest ago."""
    stage = Stage(2, 1)
    policy = cache_aware(stage)
    idle, holder = entries(stage)
    holder.load, holder.turn = 320, 9
    assert policy.prefill([idle, holder], ask(held={holder.key: 320})) is holder


def test_a_slow_worker_counts_for_more_and_noise_for_nothing() -> None:
    stage = Stage(3, 1)
    policy = cache_aware(stage, prefill_0=(1000, 0), prefill_1=(1380, 0), prefill_2=(480, 0))
    usual, lucky, slow = entries(stage)
    usual.load, lucky.load, slow.load = 10, 11, 0
    usual.turn, lucky.turn = 5, 1
    assert policy.prefill([usual, lucky, slow], ask()) is usual, "two equal ones may well differ so much"
    usual.load = lucky.load = 700
    assert policy.prefill([usual, lucky, slow], ask()) is slow
    lucky.load = usual.load = 600
    assert policy.prefill([usual, lucky, slow], ask()) is lucky, "who was chosen longest ago of two that are equal"


@pytest.mark.parametrize(("done_s", "wanted"), [(0.5, "prefill-1"), (1.0, "prefill-0"), (9.0, "prefill-0")])
def test_a_prompt_that_is_half_done_counts_for_half(done_s: float, wanted: str) -> None:
    stage = Stage(2, 1)
    policy = cache_aware(stage, prefill_0=(1000, 0), prefill_1=(1000, 0))
    long, short = entries(stage)
    long.load, short.load = 2000, 1200
    long.prompts.add(stage.request((7,) * 2000).id, 2000, 0, 100.0)
    short.prompts.add(stage.request((8,) * 1200).id, 1200, 0, 100.0 + done_s)
    assert policy.prefill([long, short], ask(now=100.0 + done_s)).record.name == wanted
    assert long.prompts.first_worked == (2000, 100.0)


def test_decode_goes_where_there_is_room_then_where_fewest_run_then_where_the_prefix_is() -> None:
    stage = Stage(1, 3)
    for name, free in (("decode-0", 10), ("decode-1", 100), ("decode-2", 100)):
        stage.cluster[name].pages_free = free
    stage.view()
    policy = cache_aware(stage)
    full, busy, holder = entries(stage, DECODE)
    full.load, busy.load, holder.load = 0, 1, 2
    assert policy.decode([full, busy, holder], ask(100, max_len=160)) is full
    assert policy.decode([full, busy, holder], ask(100, max_len=161)) is busy, "ten pages of 16 are 160 positions"
    assert policy.decode([full, busy, holder], ask(100, max_len=161, device={full.key: 16})) is full, (
        "it has a page of it"
    )
    assert policy.decode([full, busy, holder], ask(100, max_len=400, device={holder.key: 96})) is busy
    holder.load = 1
    assert policy.decode([full, busy, holder], ask(100, max_len=400, device={holder.key: 16})) is holder


def test_what_decode_was_promised_since_its_status_is_not_promised_twice() -> None:
    stage = Stage(1, 2)
    stage.cluster["decode-0"].pages_free, stage.cluster["decode-1"].pages_free = 30, 20
    stage.view()
    for _ in range(3):
        stage.submit((5,) * 10, max_tokens=190)
    by = Counter(w[0] for w, _ in stage.submits if w[0].startswith("decode"))
    assert by == {"decode-0": 2, "decode-1": 1}, "480 and 320 positions, of which each takes 200"
    first, second = entries(stage, DECODE)
    assert (first.headroom, second.headroom) == (80, 120)
    stage.view()
    assert (first.headroom, second.headroom) == (480, 320), "a new status tells what is left"


# ---------------------------------------------------------------- the others


def test_power_of_two_takes_the_less_loaded_of_the_two_that_it_draws() -> None:
    stage = Stage(8, 1)
    able = entries(stage)
    for number, entry in enumerate(able):
        entry.load = number
    chosen = Counter(PowerOfTwo(random.Random(seed)).prefill(able, ask()).load for seed in range(3000))
    assert chosen[7] == 0, "the most loaded never is"
    for load in range(8):  # of 28 pairs, as many have it as their lesser
        assert chosen[load] == pytest.approx(3000 * (7 - load) / 28, abs=100)
    again = [PowerOfTwo(random.Random(5)).prefill(able, ask()) for _ in range(2)]
    assert again[0] is again[1]
    assert PowerOfTwo(random.Random(5)).prefill(able[:1], ask()) is able[0]


def test_round_robin_goes_round_whatever_the_load_is() -> None:
    stage = Stage(3, 2, policy="round_robin")
    for _ in range(6):
        stage.submit((9,) * 300)
    assert [w[0] for w, _ in stage.submits if w[0].startswith("prefill")] == ["prefill-0", "prefill-1", "prefill-2"] * 2


def test_least_loaded_does_not_care_for_the_prefix() -> None:
    stage = Stage(2, 1, policy="least_loaded")
    first = stage.submit(PROMPT)
    home = stage.leg(first, PREFILL)
    stage.finish()
    assert stage.leg(stage.submit(PROMPT), PREFILL) != home, "it was chosen longest ago"


def test_a_session_stays_and_only_those_of_a_worker_that_goes_move() -> None:
    stage = Stage(5, 1)
    able, policy = entries(stage), Session()
    homes = {name: policy.prefill(able, ask(session=name)) for name in map(str, range(500))}
    assert min(Counter(e.record.name for e in homes.values()).values()) > 60
    for gone in able:
        left = [e for e in able if e is not gone]
        for name, home in homes.items():
            now = policy.prefill(left, ask(session=name))
            assert now is home or home is gone
    assert {name: policy.prefill(able[::-1], ask(session=name)) for name in homes} == homes


def test_a_session_is_what_its_client_says_or_how_its_prompt_begins() -> None:
    stage = Stage(6, 6, policy="session")
    rng = random.Random(1)

    def home(session: str, prompt: tuple[int, ...]) -> tuple[str, str]:
        request = stage.request(prompt)
        request.session = session
        rid = stage.take(request)
        return stage.leg(rid, PREFILL), stage.leg(rid, DECODE)

    prompts = [tuple(rng.randrange(1000) for _ in range(200)) for _ in range(12)]
    assert len({home("one", prompt) for prompt in prompts}) == 1
    assert len({home("", prompt) for prompt in prompts}) > 3
    assert len({home("", (*prompts[0][:64], *prompt)) for prompt in prompts}) == 1
    assert len({home("", (n, 7)) for n in range(12)}) > 3, "prompts without a whole block"
    assert home("one", prompts[0])[0].removeprefix("prefill") != ""
    assert home("", (3, 7)) == home("", (3, 7))


def test_an_unknown_policy_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"router\.policy.*" + ", ".join(POLICIES)):
        config_from_dict({"router": {"policy": "best"}})
    for name in POLICIES:
        assert config_from_dict({"router": {"policy": name}}).router == RouterConfig(policy=name)  # type: ignore[arg-type]


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("what", ["layout", "weights", "protocol"])
def test_who_can_not_hand_over_is_never_paired(policy: str, what: str) -> None:
    stage = Stage(2, 2, policy=policy)
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        stage.cluster[name].numerics = "invariant:x"
    for name in ("prefill-1", "decode-0"):
        setattr(stage.cluster[name], what, 99 if what == "protocol" else "another")
    stage.view()
    rids = [stage.submit((number,) * 200) for number in range(8)]
    pairs = {(stage.leg(rid, PREFILL), stage.leg(rid, DECODE)) for rid in rids}
    assert pairs <= {("prefill-0", "decode-1"), ("prefill-1", "decode-0")}
    stage.finish()
    for rid in rids:
        stage.assert_answered(rid)


def test_where_nobody_can_hand_over_the_refusal_says_why() -> None:
    stage = Stage(1, 1, worker_wait_s=1.0)
    for name in ("prefill-0", "decode-0"):
        stage.cluster[name].numerics = "invariant:x"
    stage.cluster["decode-0"].weights = "of another checkpoint"
    stage.view()
    rid = stage.submit()
    stage.tick(1.5)
    assert stage.ends[rid].error is ErrorKind.OVERLOADED
    for part in ("weights", "prefill-0", "decode-0", "give both the same checkpoint"):
        assert part in stage.ends[rid].message


def test_two_are_of_one_hand_over_class_where_nothing_mismatches() -> None:
    ways = [
        Fingerprint(protocol, layout, numerics, weights)
        for protocol in (4, 5)
        for layout in ("a", "b")
        for weights in ("v", "w")
        for numerics in ("fast:x", "fast:y", "invariant:x", "invariant:y")
    ]
    for one in ways:
        for other in ways:
            assert (handover_class(one) == handover_class(other)) is (mismatch(one, other, "o", "t") is None)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_chooses_who_drains_or_is_left_alone_or_has_failed_to_hand_over(policy: str) -> None:
    stage = Stage(2, 2, policy=policy, replay_limit=100)
    stage.drain("prefill-1")
    for number in range(6):
        stage.submit((number,) * 100)
    assert {w[0] for w, _ in stage.submits if w[0].startswith("prefill")} == {"prefill-0"}
    rid = stage.submit(PROMPT)
    stage.error(rid, PREFILL, ErrorKind.ROOM, blame=stage.cluster[stage.leg(rid, DECODE)].name)
    stage.finish()
    stage.assert_answered(rid)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_under_every_policy_every_answer_is_whole_whoever_dies(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(3, 3, policy=policy, replay_limit=1000)
    rids = [stage.submit((i, i + 1) * rng.randint(1, 90), max_tokens=9) for i in range(6)]
    for _ in range(120):
        act, name = rng.random(), rng.choice(list(stage.cluster.workers))
        if act < 0.8 and stage.legs:
            leg, rid = rng.choice(list(stage.legs))
            if stage.can_say(leg, rid):
                stage.say_next(leg, rid)
        elif act < 0.9 and stage.cluster[name].alive:
            stage.kill(name)
        elif not stage.cluster[name].alive:
            stage.restart(name)
    for name in list(stage.cluster.workers):
        if not stage.cluster[name].alive:
            stage.restart(name)
    stage.finish()
    for rid in rids:
        stage.assert_answered(rid)
    assert all(e.load == 0 and not e.requests for e in stage.core.workers)


def test_a_prompt_counts_as_hit_by_whole_blocks_of_it() -> None:
    stage = Stage(2, 1)
    now, key = stage.clock.now(), stage.key("prefill-0")
    stage.core.indexes.sent(key, prefix_hashes(PROMPT[:200]), now)
    assert stage.core.indexes.hits(prefix_hashes(PROMPT), now).held == {key: 192}


def told(entry: WorkerEntry, **numbers: Any) -> None:
    """A heartbeat of the worker, with these numbers."""
    entry.see(entry.record, replace(entry.status, **numbers))


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded"])
def test_what_other_routers_have_sent_is_counted_from_the_next_heartbeat_on(policy: str) -> None:
    stage = Stage(prefill=2, decode=2)
    chooses = make_policy(policy, PoolRates(), PrefetchConfig(), random.Random(0))
    busy, idle = entries(stage)
    told(busy, routers=2, prompt_tokens=5_000)
    for _ in range(3):
        assert chooses.prefill([busy, idle], ask()) is idle
    told(busy, routers=2, prompt_tokens=0, steps=1)
    told(idle, routers=2, prompt_tokens=900)
    assert chooses.prefill([busy, idle], ask()) is busy
    full, free = entries(stage, DECODE)
    told(full, routers=2, running=3, waiting=4)
    told(free, routers=2, running=5)
    assert chooses.decode([full, free], ask()) is free


def test_what_this_router_has_sent_itself_is_not_counted_twice_and_alone_it_goes_by_its_books() -> None:
    stage = Stage(prefill=1, decode=1)
    (prefill,), (decode,) = entries(stage), entries(stage, DECODE)
    prefill.load, decode.load = 700, 2
    told(prefill, routers=2, prompt_tokens=1_000)
    told(decode, routers=2, running=2, waiting=1)
    assert (prefill.others, prefill.whole_load, decode.others) == (300, 1_000, 1)
    told(prefill, routers=2, prompt_tokens=500)
    assert prefill.others == 0, "some of what was sent hasn't come"
    told(prefill, routers=1, prompt_tokens=9_000)
    assert prefill.others == 0
