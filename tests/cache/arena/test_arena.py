"""Host memory that outlives its worker: whatever moment it died at, what is adopted is what was sealed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.cache_harness import World
from tests.support.cache_random_schedule import _ACTIONS, _WEIGHTS, Schedule
from tests.support.cache_requests import content
from tests.support.pool_sets import NAMES, pool_sets
from twinpool.cache.arena.arena import SALT_BYTES, Arena, SealedPage, arena_bytes, max_index_bytes
from twinpool.cache.arena.arena_keeper import MAX_TAKEN, SETTLED_S, ArenaKeeper, _date, _FoundPages
from twinpool.cache.memory.kv_cache_spec import LayoutOrder, PoolSetLayout
from twinpool.cache.prefix_cache.tree_node import Tier, TreeNode
from twinpool.contracts.block_hash import TOKEN_BYTES

PAGE_TOKENS = 2
COUNT = 40
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]
BOND = b"sixteen byte tie"


def layout_of(name: str, count: int = COUNT) -> PoolSetLayout:
    spec = pool_sets(PAGE_TOKENS)[name]
    return PoolSetLayout(spec, spec.even(count), LayoutOrder.PAGE_FIRST)


def segment_for(name: str, count: int = COUNT) -> memoryview:
    return memoryview(bytearray(arena_bytes(layout_of(name, count))))


def world_on(segment: memoryview, name: str, seed: int = 1, **settings: object) -> World:
    options = {"pages": COUNT, "host_pages": COUNT, "storage": False, **settings}
    return World(pool_sets(PAGE_TOKENS)[name], seed, segment=segment, **options)  # type: ignore[arg-type]


def visit(world: World, tokens: list[int], salt: str = "") -> int:
    """A request comes, computes what it doesn't find, shares it and leaves; returns how many pages it found."""
    visitor = world.arrive(tokens, salt)
    for _ in range(100):
        if visitor.allocation is None:
            world.admit(visitor)
        elif visitor.steps:
            world.commit(visitor, share=True, snapshot=True)
        elif visitor.done == len(visitor.prefix):
            found = visitor.allocation.depth
            world._share(visitor, visitor.allocation)
            world.leave(visitor)
            world.poll()
            return found
        else:
            world.compute(visitor, 2, snapshot=True)
        if world.adversarial is not None:
            world.adversarial.settle()
        world.poll()
        if visitor not in world.visitors:
            visitor = world.arrive(tokens, salt)
    raise AssertionError("a visit without an end")


def host_nodes(world: World) -> list[TreeNode]:
    return [node for node in world.manager.tree.accounts.nodes() if node.parts[Tier.HOST]]


def expect_right_bytes(world: World) -> int:
    """Every page and slot that the tree has on the host holds what its block hash says; returns how many."""
    host, tree = world.host, world.manager.tree
    assert host is not None
    seen = 0
    for node in tree.accounts.nodes():
        for part in node.parts[Tier.HOST].values():
            keys = node.keys[-1:] if tree.component(part.component).point else node.keys
            for key, index in zip(keys, part.lease.indices, strict=True):
                page = host.layout.page(host.region, part.component, index)
                assert page.equal(content(key, part.component, len(page))), (part.component, index)
                seen += 1
    return seen


def look_at_all(world: World) -> None:
    for _ in range(1000):
        world.clock.advance(0.01)
        world.poll()
    assert not any(world.manager.tiers.keeper._unproven.values())  # type: ignore[union-attr]


# ------------------------------------------------------------ adoption


@pytest.mark.parametrize("name", NAMES)
def test_what_is_planned_for_an_index_is_enough_and_not_much_more(name: str) -> None:
    for count in (3, 50, 5000):
        layout = layout_of(name, count)
        planned, taken = max_index_bytes(layout.spec, layout.nbytes), arena_bytes(layout) - layout.nbytes
        assert taken <= planned
        assert name != "full" or planned < taken + 2 * 4096


@pytest.mark.parametrize("name", NAMES)
def test_a_successor_finds_on_the_host_what_the_dead_had_there(name: str) -> None:
    segment = segment_for(name)
    first = world_on(segment, name)
    visit(first, TOKENS)
    visit(first, [*TOKENS[:4], 9, 9, 9, 9], "a tenant")
    visit(first, [*TOKENS[:4], 9, 9, 9, 9])
    pages = expect_right_bytes(first)
    assert pages
    second = world_on(segment, name, 2)
    assert expect_right_bytes(second) == pages
    assert second.check() == []
    for tokens, salt in ((TOKENS, ""), ([*TOKENS[:4], 9, 9, 9, 9], "a tenant")):
        visitor = second.arrive(tokens, salt)
        visitor.reusable = len(visitor.prefix)
        second.admit(visitor)
        assert visitor.allocation is not None
        assert visitor.allocation.cached.host == len(tokens), "all of it comes from the host"
        second.leave(visitor)
    look_at_all(second)
    second.settle()


@pytest.mark.slow
def test_a5_whatever_moment_a_worker_dies_at_what_is_adopted_is_what_was_sealed() -> None:
    met: Counter[str] = Counter()
    for seed in range(40):
        schedule = DyingSchedule(seed)
        schedule.live()
        successor = schedule.successor()
        met["adopted"] += successor.seen["adopted"]
        met["pages"] += expect_right_bytes(successor)
        met["in the middle of a copy"] += bool(schedule.world.manager.tiers.backup.busy)
        assert successor.check() == [], seed
        for prompt in schedule.prompts:
            visit(successor, prompt)
        expect_right_bytes(successor)
        assert (
            successor.manager.stats()["arena_pages_damaged"] == successor.manager.stats()["pages_damaged_on_host"] == 0
        )
        successor.settle()
    assert met["adopted"] > 200, met
    assert met["in the middle of a copy"], met


class DyingSchedule(Schedule):
    """A schedule on an arena that stops in the middle, with everything under way that is."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        count = self.settings["host_pages"]
        assert isinstance(count, int)
        self.segment = segment_for(self.name, count)
        self.world = World(
            self.world.spec, seed, adversarial=True, segment=self.segment, **{**self.settings, "storage": True},
        )  # fmt: skip
        assert self.world.adversarial is not None
        self.adversarial = self.world.adversarial

    def live(self) -> None:
        for prompt in self.prompts:
            self.world.arrive(prompt)
            self.to_the_end()
        for _ in range(self.rng.randint(0, _ACTIONS)):
            self.rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0](self)
        keeper = self.world.manager.tiers.keeper
        assert keeper.check() == []

    def successor(self) -> World:
        settings = {**self.settings, "storage": False, "pages": 40}
        return World(self.world.spec, 1, adversarial=True, segment=self.segment, **settings)


# ------------------------------------------------------------ what is not believed


def test_a9_a_page_that_was_damaged_while_nobody_lived_is_found_before_it_is_asked_for() -> None:
    name = "full+window"
    segment = segment_for(name)
    visit(world_on(segment, name), TOKENS)
    flip(segment, name, "full", page=2)
    second = world_on(segment, name, 2)
    second.damaged = True
    look_at_all(second)
    assert second.manager.stats()["arena_pages_damaged"] == 1
    assert visit(second, TOKENS) <= 2, "what is below it is gone as well"
    second.settle()


@pytest.mark.parametrize("name", NAMES)
def test_a9_a_damaged_page_that_is_asked_for_at_once_is_found_by_its_load_though_nothing_else_is_verified(
    name: str,
) -> None:
    segment = segment_for(name)
    visit(world_on(segment, name), TOKENS)
    flip(segment, name, "full", page=1)
    second = world_on(segment, name, 2)
    second.damaged = True
    second.manager.tiers.load_back._verify = False  # type: ignore[union-attr]
    second.manager.tiers.keeper._look = lambda budget: None  # type: ignore[union-attr,method-assign]
    visit(second, [*TOKENS, 9, 9])
    assert second.seen["allocation invalid"]
    assert second.manager.stats()["pages_damaged_on_host"] >= 1
    second.settle()


@pytest.mark.parametrize("by_load", [False, True])
def test_a9_what_a_rank_had_not_finished_when_it_died_is_dropped_and_called_no_damage(by_load: bool) -> None:
    name = "full"
    segment = segment_for(name)
    visit(world_on(segment, name), TOKENS)
    flip(segment, name, "full", page=2)
    second = world_on(segment, name, 2)
    second.damaged = True
    keeper = second.manager.tiers.keeper
    assert isinstance(keeper, ArenaKeeper)
    keeper._unfinished = True
    if by_load:
        keeper._look = lambda budget: None  # type: ignore[method-assign]
        visit(second, [*TOKENS, 9, 9])
        assert second.seen["allocation invalid"]
    else:
        look_at_all(second)
    stats = second.manager.stats()
    assert stats["arena_pages_damaged"] == stats["pages_damaged_on_host"] == 0
    assert stats["arena_records_torn"] >= 1
    assert by_load or visit(second, TOKENS) <= 2, "what is below it is gone as well"
    second.settle()


def test_copies_are_counted_until_somebody_asks() -> None:
    arena = world_on(segment_for("full"), "full").manager.tiers.keeper._arena  # type: ignore[union-attr]
    arena.take_copies()
    bond = arena.bond
    for _ in range(3):
        arena.count_copy()
    assert arena.bond == bond, "the header is as valid as before"
    assert (arena.take_copies(), arena.take_copies()) == (3, 0)


def test_a_record_that_was_cut_off_anywhere_is_not_believed() -> None:
    name = "full"
    segment = segment_for(name)
    world = world_on(segment, name)
    visit(world, TOKENS)
    whole = bytes(segment)
    table = world.arena.tables["full"]  # type: ignore[union-attr]
    used = table.sums.nonzero()[0].tolist()
    words = table.words.shape[1]
    for word in range(1, words):
        # The record of the second page up to here is another page's, as when it was just being written over.
        cut = memoryview(bytearray(whole))
        mine = Arena(cut, layout_of(name), "world").tables["full"].words
        mine[used[1], word] ^= 0xFF
        second = world_on(cut, name, 2)
        assert second.manager.stats()["arena_records_torn"] == 1, word
        assert second.manager.stats()["arena_pages_adopted"] == 1, "the page before it stays"
        assert second.manager.stats()["arena_pages_dropped"] == len(used) - 2, "what hangs below it has lost its place"
        assert second.check() == []
    cleared = memoryview(bytearray(whole))
    Arena(cleared, layout_of(name), "world").tables["full"].sums[used[1]] = 0
    assert world_on(cleared, name, 2).manager.stats()["arena_records_torn"] == 0


def test_a_record_in_another_place_or_of_another_pool_is_none() -> None:
    name = "all"
    segment = segment_for(name)
    world = world_on(segment, name)
    visit(world, TOKENS)
    tables = world.arena.tables  # type: ignore[union-attr]
    words = tables["full"].words
    (first, *_) = tables["full"].sums.nonzero()[0].tolist()
    free = next(i for i in range(1, COUNT) if not words[i, 0])
    words[free] = words[first]
    records, torn = world.arena.read("full")  # type: ignore[union-attr]
    assert torn == 1
    assert free not in {record.index for record in records}
    moved = tables["window"].words
    tables["state"].words[free] = moved[tables["window"].sums.nonzero()[0][0]]
    assert world.arena.read("state")[1] == 1  # type: ignore[union-attr]


def test_an_arena_of_another_model_or_layout_has_no_bond() -> None:
    segment = segment_for("full")
    arena = Arena(segment, layout_of("full"), "a model")
    assert arena.bond == b""
    arena.begin(BOND)
    assert Arena(segment, layout_of("full"), "a model").bond == BOND
    assert Arena(segment, layout_of("full"), "another model").bond == b""
    assert Arena(segment, layout_of("full", COUNT - 1), "a model").bond == b""


def test_records_of_a_later_life_are_later_than_all_that_it_took_over() -> None:
    """Of two records of the same page the later one counts, and what was used last goes last."""
    segment, layout = segment_for("full"), layout_of("full")
    Arena(segment, layout, "a model").begin(BOND)
    tokens = bytes(TOKEN_BYTES * layout.spec.page_tokens)
    for life in (1, 2, 3):
        arena = Arena(segment, layout, "a model")
        before, _ = arena.read("full")
        assert arena.seal("full", (life,), SealedPage(0, bytes([life]) * 16, (7,), tokens=tokens))
        latest = {record.sequence for record in arena.read("full")[0] if record.index == life}
        assert min(latest) > max((record.sequence for record in before), default=0)


@pytest.mark.parametrize("word", range(8))
def test_a_header_that_was_cut_off_anywhere_is_none(word: int) -> None:
    segment = segment_for("full")
    arena = Arena(segment, layout_of("full"), "a model")
    arena.begin(BOND)
    arena._header[word] ^= 1
    assert Arena(segment, layout_of("full"), "a model").bond == b""


# ------------------------------------------------------------ what is not adopted


def test_what_was_invalidated_is_never_adopted_though_somebody_held_it_still() -> None:
    segment = segment_for("full")
    world = world_on(segment, "full")
    visit(world, TOKENS)
    visitor = world.arrive(TOKENS)
    assert world.admit(visitor)
    world.invalidate(visitor.prefix, 1)
    assert world.manager.tree.accounts.invalidated, "it is locked"
    second = world_on(segment, "full", 2)
    assert second.manager.stats()["arena_pages_adopted"] == 1


@pytest.mark.parametrize("name", [name for name in NAMES if "+" in name or name == "all"])
def test_pages_of_another_layout_leave_nothing_in_the_null_pages_of_who_begins_anew(name: str) -> None:
    segment = segment_for(name)
    first = world_on(segment, name)
    assert first.host is not None
    for index in range(1, COUNT):  # Each page is in use, as in a worker that has run for a while.
        for pool in first.host.spec.by_name:
            first.host.layout.page(first.host.region, pool, index).fill_(0x55)
    second = world_on(segment, name, 2, host_pages=COUNT - 1)
    assert second.host is not None
    assert second.host.check() == []
    visit(second, TOKENS)
    assert expect_right_bytes(second)
    assert second.check() == []


def test_pages_under_a_salt_that_no_record_can_hold_end_with_their_worker() -> None:
    segment = segment_for("full")
    world = world_on(segment, "full")
    visit(world, TOKENS, "s" * (SALT_BYTES + 1))
    visit(world, TOKENS, "s" * SALT_BYTES)
    assert world.check() == []
    second = world_on(segment, "full", 2)
    assert second.manager.stats()["arena_pages_adopted"] == len(TOKENS) // PAGE_TOKENS
    assert visit(second, TOKENS, "s" * SALT_BYTES) > 0
    assert visit(second, TOKENS, "s" * (SALT_BYTES + 1)) == 0
    world.settle()


def test_state_that_several_in_a_row_died_with_is_left() -> None:
    segment = segment_for("full")
    visit(world_on(segment, "full"), TOKENS)
    for _ in range(MAX_TAKEN):
        assert world_on(segment, "full", 2).manager.stats()["arena_pages_adopted"] > 0
    last = world_on(segment, "full", 2)
    assert last.manager.stats()["arena_pages_adopted"] == 0
    visit(last, TOKENS)
    for seed in range(2 * MAX_TAKEN):
        settled = world_on(segment, "full", seed)
        assert settled.manager.stats()["arena_pages_adopted"] > 0, "who lives long with it has not been harmed by it"
        settled.clock.advance(SETTLED_S)
        settled.poll()


def test_state_that_several_in_a_row_died_of_while_they_took_it_over_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = segment_for("full")
    visit(world_on(segment, "full"), TOKENS)
    tries = []

    def die(keeper: ArenaKeeper, roots: object) -> int:
        tries.append(keeper)
        raise MemoryError("it dies here")

    monkeypatch.setattr(ArenaKeeper, "_hang_all", die)
    for _ in range(MAX_TAKEN):
        with pytest.raises(MemoryError):
            world_on(segment, "full", 2)
    try:
        assert world_on(segment, "full", 2).manager.stats()["arena_pages_adopted"] == 0
    except MemoryError:
        pytest.fail("it was taken over once more")
    assert len(tries) == MAX_TAKEN


def test_who_has_looked_at_all_that_it_took_over_settles_as_well() -> None:
    """However little there was to look at: the next ones take it over without end."""
    segment = segment_for("full")
    visit(world_on(segment, "full"), TOKENS)
    for seed in range(2 * MAX_TAKEN):
        settled = world_on(segment, "full", seed)
        assert settled.manager.stats()["arena_pages_adopted"] > 0
        look_at_all(settled)
        settled.clock.advance(SETTLED_S)
        settled.poll()


def test_the_oldest_of_what_was_adopted_goes_first_and_before_all_that_is_new() -> None:
    segment = segment_for("full")
    first = world_on(segment, "full")
    older, newer, new = [5] * 8, [6] * 8, [7] * 8
    visit(first, older)
    visit(first, newer)
    second = world_on(segment, "full", 2)
    visit(second, new)

    def there() -> set[int]:
        return {node.raw[0] for node in second.manager.tree.accounts.nodes() if node.parts[Tier.HOST]}

    assert there() == {5, 6, 7}
    for left in ({6, 7}, {7}):
        second.evict(Tier.HOST, "full", 4)
        assert there() == left


def test_all_that_was_adopted_was_used_before_anything_that_is_to_come() -> None:
    segment = segment_for("full")
    first = world_on(segment, "full")
    visit(first, [5] * 8)
    visit(first, [6] * 8)
    second = world_on(segment, "full", 2)
    used = {node.raw[0]: node.used for node in host_nodes(second)}
    assert used[5] < used[6] == 0, "what the tree counts from now on is above nought"


def taken_over() -> tuple[World, ArenaKeeper]:
    """A world on what another one has left of `TOKENS`, and who keeps its arena."""
    segment = segment_for("full")
    visit(world_on(segment, "full"), TOKENS)
    second = world_on(segment, "full", 2)
    assert isinstance(second.manager.tiers.keeper, ArenaKeeper)
    return second, second.manager.tiers.keeper


def test_what_a_load_has_verified_is_not_looked_at_again() -> None:
    second, keeper = taken_over()
    keeper._look = lambda budget: None  # type: ignore[method-assign]
    there = [part for node in host_nodes(second) for part in node.parts[Tier.HOST].values()]
    assert all(map(keeper.unproven, there))
    visit(second, [*TOKENS, 9, 9])
    assert not any(map(keeper.unproven, there))


def test_check_names_a_page_that_is_to_be_looked_at_and_is_nobodys() -> None:
    _, keeper = taken_over()
    assert keeper.check() == []
    keeper._unproven["full"].add(COUNT - 1)
    assert keeper.check() == [f"arena: full pages [{COUNT - 1}] are to be looked at, and not in the tree"]


def flip(segment: memoryview, name: str, pool: str, page: int) -> None:
    """Damage what is page `page` of the prefix, behind everybody's back."""
    arena = Arena(segment, layout_of(name), "world")
    (record,) = [record for record in arena.read(pool)[0] if record.number == page]
    arena.layout.page(arena.region, pool, record.index)[3] ^= 1


@pytest.mark.parametrize("name", NAMES)
def test_what_a_retracted_request_has_on_the_host_is_a_prefix_for_whoever_comes_after_the_death(name: str) -> None:
    segment = segment_for(name)
    world = world_on(segment, name)
    visitor = world.arrive(TOKENS)
    assert world.admit(visitor)
    while visitor.done < len(visitor.prefix):
        assert world.compute(visitor, len(visitor.prefix))
        world.poll()
        assert world.commit(visitor, share=False)
    allocation, manager = visitor.allocation, world.manager
    assert allocation is not None
    swapped = manager.swapped.swap_out(allocation, visitor.prefix, len(TOKENS))
    world.leave(visitor)
    manager.swapped.settle(swapped)
    assert manager.check() == []
    second = world_on(memoryview(bytearray(segment)), name, 2)
    assert second.manager.stats()["arena_pages_adopted"] == len(visitor.prefix)
    assert expect_right_bytes(second)
    look_at_all(second)
    assert second.manager.stats()["arena_pages_damaged"] == 0
    again = second.arrive(TOKENS)
    again.reusable = len(again.prefix)
    second.admit(again)
    assert again.allocation is not None
    assert again.allocation.depth == len(again.prefix), "all of it can be computed from"
    second.settle()
    manager.swapped.drop(swapped)
    assert manager.check() == []
    third = world_on(segment, name, 3)
    assert third.manager.stats()["arena_pages_adopted"] == 0, "what was given back is nobody's prefix"


def test_what_a_retracted_request_has_below_the_trees_own_pages_is_found_below_them() -> None:
    """Only its own pages were copied for it: they follow on those that the tree had on the host before."""
    segment = segment_for("full")
    world = world_on(segment, "full")
    visit(world, TOKENS[:4])
    visitor, manager = world.arrive(TOKENS), world.manager
    assert world.admit(visitor)
    while visitor.done < len(visitor.prefix):
        assert world.compute(visitor, len(visitor.prefix))
        world.poll()
        assert world.commit(visitor, share=False)
    assert visitor.allocation is not None
    swapped = manager.swapped.swap_out(visitor.allocation, visitor.prefix, len(TOKENS))
    assert swapped.kept == 2
    world.leave(visitor)
    manager.swapped.settle(swapped)
    second = world_on(segment, "full", 2)
    assert second.manager.stats()["arena_pages_adopted"] == 4
    assert second.manager.stats()["arena_pages_dropped"] == 0
    assert expect_right_bytes(second) == 4
    look_at_all(second)
    assert second.manager.tree.match(visitor.prefix).depth == 4
    second.settle()


def test_a_page_that_is_found_was_used_no_earlier_than_any_page_below_it() -> None:
    def page(used: int, *below: _FoundPages) -> _FoundPages:
        return _FoundPages(None, children=list(below), used=used)  # type: ignore[arg-type]

    deepest = page(9)
    middle = page(2, deepest, page(4))
    root, other = page(1, page(3), middle), page(7)
    _date([root, other])
    assert (root.used, middle.used, deepest.used, other.used) == (9, 9, 9, 7)
