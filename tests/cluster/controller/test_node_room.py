"""What nodes have for workers, and what is left of it."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from twinpool.cluster.controller.node_room import NOWHERE, ClusterRoom, NodePlace, NodeRoom, Occupant, RoleRoom
from twinpool.contracts.ids import PAIR, Role, WorkerName
from twinpool.contracts.wire.message_codec import decode, encode

MIB = 1 << 20
A, B = NodePlace("a" * 12, "a"), NodePlace("b" * 12, "b")


def workers(role: Role, count: int, node: NodePlace = NOWHERE, first: int = 0, only: str = "") -> list[Occupant]:
    return [Occupant(WorkerName(f"{role}-{first + i}"), role, node, only) for i in range(count)]


def room(memory: int = 1000, processes: int = 100, node: NodePlace = A, **roles: RoleRoom) -> NodeRoom:
    sizes: dict[str, RoleRoom] = {Role(role): one for role, one in roles.items()} or {
        Role.PREFILL: RoleRoom(100 * MIB, planned=1),
        Role.DECODE: RoleRoom(200 * MIB, planned=1),
    }
    return NodeRoom(node, memory * MIB, processes, 2, sizes)


def test_who_does_not_fit_is_refused_with_the_numbers_and_how_many_would() -> None:
    there = [*workers(Role.PREFILL, 1, A), *workers(Role.DECODE, 1, A)]
    cluster = ClusterRoom((room(),))
    assert cluster.refusal(there, workers(Role.DECODE, 3, first=1)) == ""
    assert cluster.refusal(there, workers(Role.DECODE, 59, first=1)) == (
        "59 more decode workers would not fit, 3 would: each takes about 200 MiB at most and 1 process; "
        "a has 700 MiB of 1,000 MiB of memory, 98 of 100 processes (cluster.workers_per_core) left"
    )


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (room(processes=4), "2 would"),
        (room(decode=RoleRoom(1, ranks=2), processes=9, prefill=RoleRoom(1)), "3 would.*and 2 processes"),
        (room(decode=RoleRoom(1, places=3), prefill=RoleRoom(1)), "2 would.*2 of 3 places of Ray"),
        (room(prefill=RoleRoom(1)), "none would: a takes no decode workers"),
    ],
)
def test_cores_ranks_places_and_roles_bind_as_memory_does(node: NodeRoom, words: str) -> None:
    there = [*workers(Role.PREFILL, 1, A), *workers(Role.DECODE, 1, A)]
    more = workers(Role.DECODE, 50, first=1)
    refusal = ClusterRoom((node,)).refusal(there, more)
    assert re.search(words, refusal), refusal


def test_cards_bind_by_name() -> None:
    names = tuple(WorkerName(name) for name in ("prefill-0", "decode-0", "decode-1"))
    cluster = ClusterRoom((NodeRoom(A, 1 << 40, roles=dict.fromkeys(PAIR, RoleRoom(1)), cards=names),))
    there = [*workers(Role.PREFILL, 1, A), *workers(Role.DECODE, 1, A)]
    assert cluster.refusal(there, workers(Role.DECODE, 1, first=1)) == "", "its card waits for it"
    assert "all GPUs of a are dealt to the 3 workers" in cluster.refusal(there, workers(Role.DECODE, 1, first=2))


def test_memory_that_is_free_now_binds_those_that_were_not_planned_for() -> None:
    here = NodeRoom(NodePlace("", "h"), 1 << 40, 9, 2, {Role.DECODE: RoleRoom(100 * MIB, planned=2)}, free=150 * MIB)
    cluster, home = ClusterRoom((here,)), NodePlace("", "h")
    assert cluster.refusal(workers(Role.DECODE, 1, home), workers(Role.DECODE, 2, first=1)) == "", "one is planned"
    assert "2 would" in cluster.refusal(workers(Role.DECODE, 1, home), workers(Role.DECODE, 3, first=1))
    starting = [Occupant(WorkerName("decode-1"), Role.DECODE, home, starts=True)]
    refusal = cluster.refusal([*workers(Role.DECODE, 1, home), *starting], workers(Role.DECODE, 1, first=2))
    assert "none would" in refusal, "what starts has yet to take its memory"
    assert "50 MiB free now" in refusal


def test_those_that_were_planned_for_take_none_of_what_is_free_for_others() -> None:
    roles: dict[str, RoleRoom] = {Role.DECODE: RoleRoom(100 * MIB, planned=1), Role.PREFILL: RoleRoom(100 * MIB)}
    cluster = ClusterRoom((NodeRoom(A, 1 << 40, 9, 2, roles, free=150 * MIB),))
    assert cluster.refusal((), [*workers(Role.DECODE, 1), *workers(Role.PREFILL, 1)]) == ""
    assert "1 would" in cluster.refusal((), [*workers(Role.DECODE, 1), *workers(Role.PREFILL, 2)])


def test_a_pool_that_fits_after_another_is_refused_by_what_the_other_leaves() -> None:
    more = [*workers(Role.PREFILL, 4), *workers(Role.DECODE, 4)]
    assert "4 more decode workers would not fit, 3 would" in ClusterRoom((room(),)).refusal((), more)


def test_those_that_share_their_experts_need_a_node_with_room_for_all_of_them() -> None:
    decode = RoleRoom(100 * MIB, together=2)
    cluster = ClusterRoom(tuple(room(memory, node=node, decode=decode) for memory, node in ((300, A), (100, B))))
    assert cluster.refusal([], workers(Role.DECODE, 2)) == ""
    assert re.match("4 more decode workers would not fit, 2 would", cluster.refusal([], workers(Role.DECODE, 4)))
    there = workers(Role.DECODE, 3, A)
    assert cluster.refusal(there, workers(Role.DECODE, 1, first=3)) == "", "it comes back to the others"


def test_where_nodes_may_join_and_where_nothing_is_known_nobody_is_refused() -> None:
    more = workers(Role.DECODE, 500)
    assert ClusterRoom((room(),), grows=True).refusal((), more) == ""
    assert ClusterRoom().refusal((), more) == ""


def test_one_node_alone_is_asked_where_that_is_said() -> None:
    cluster = ClusterRoom((room(node=A), room(memory=250, node=B)))
    assert cluster.refusal((), workers(Role.DECODE, 6)) == ""
    refusal = cluster.refusal((), workers(Role.DECODE, 2, only="b"))
    assert "1 would" in refusal
    assert "a has" not in refusal


def test_two_nodes_of_a_ray_on_one_host_have_their_own_workers() -> None:
    beside = NodePlace("c" * 12, A.host)
    cluster = ClusterRoom((room(memory=200, node=A), room(memory=200, node=beside)))
    there = workers(Role.DECODE, 1, beside)
    assert cluster.refusal(there, workers(Role.DECODE, 1, first=1, only=A.node_id)) == ""
    assert "none would" in cluster.refusal(there, workers(Role.DECODE, 1, first=1, only=beside.node_id))


def test_it_crosses_the_wire_and_the_ledger_as_it_is() -> None:
    card = (WorkerName("decode-0"),)
    one = NodeRoom(A, 70, 8, 2, {Role.DECODE: RoleRoom(5, 2, 1, 4), Role.PREFILL: RoleRoom(6)}, card, 99)
    other = NodeRoom(NodePlace("", "h"), 1 << 40, 9, 3, {Role.COLOCATED: RoleRoom(1)})
    told = ClusterRoom((one, other), grows=True)
    assert decode(ClusterRoom, encode(told)) == (told, 0)
    kept = ClusterRoom.from_json(told.to_json())
    assert (kept.nodes[1], kept.grows) == (other, True)
    assert kept.nodes[0].free is None, "that is old by then"
    newer = replace(one, cards=None, roles={**one.roles, "a role of a later build": RoleRoom(1)})
    read, left_out = decode(ClusterRoom, encode(ClusterRoom((newer,))))
    assert left_out == 0
    assert read.refusal((), workers(Role.PREFILL, 1)) == "", "what it has for others is as it was"


sizes = st.integers(1, 40)


@given(
    memory=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    processes=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    needs=st.tuples(sizes, sizes),
    there=st.lists(st.tuples(st.sampled_from(PAIR), st.integers(0, 2)), max_size=6),
    role=st.sampled_from(PAIR),
    asked=st.integers(1, 12),
)
@settings(max_examples=200, deadline=None)
def test_as_many_are_taken_as_a_count_of_each_node_has_room_for(
    memory: list[int],
    processes: list[int],
    needs: tuple[int, int],
    there: list[tuple[Role, int]],
    role: Role,
    asked: int,
) -> None:
    """Against a count from nothing: on each node, workers one by one until one more would be too many."""
    places = [NodePlace(f"{number}" * 12, f"n{number}") for number in range(len(memory))]
    size = dict(zip(PAIR, needs, strict=True))
    nodes = [
        NodeRoom(place, most, processes[i], 2, {one: RoleRoom(size[one]) for one in PAIR})
        for i, (place, most) in enumerate(zip(places, memory, strict=True))
    ]
    held = Counter((one, number % len(memory)) for one, number in there)
    room_for = 0
    for i, most in enumerate(memory):
        used = sum(size[one] * held[one, i] for one in PAIR)
        running = sum(held[one, i] for one in PAIR)
        while used + size[role] <= most and running + 1 <= processes[i]:
            used, running, room_for = used + size[role], running + 1, room_for + 1
    occupants = [
        Occupant(WorkerName(f"{one}-{n}"), one, places[number % len(memory)]) for n, (one, number) in enumerate(there)
    ]
    more = workers(role, asked, first=100)
    refusal = ClusterRoom(tuple(nodes)).refusal(occupants, more)
    assert bool(refusal) == (asked > room_for)
    if refusal:
        assert (f", {room_for} would:" if room_for else "none would:") in refusal
