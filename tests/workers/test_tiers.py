"""All tiers under both workers: conversations on device pools far smaller than what they touch.

Whatever the tiers do, tokens are those of a run that had room for everything; and where storage keeps everything and
requests wait for it, hits are exactly what the trace allows.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.conversations import Turn, expect_all_known, expect_hits, make_talks, working_set
from tests.support.storage_damage import damage_folder, still_damaged
from tests.support.tier_conversations import PAGE, by_turn, converse, counters, expect_hand_overs, in_folder, tiers
from tests.support.worker_pair import pair
from twinpool.contracts.ids import Role

TALKS = make_talks(11, 22, turns=(3, 5))
SMALL = {Role.PREFILL: 30 * PAGE, Role.DECODE: 60 * PAGE}
HOST_PAGES = 72
"""Room for what three requests wait for, the longest of 20 pages; less than a third of what all of it touches."""


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[Turn]:
    """The same conversations where everything stays on the device."""
    with pair(model, tokens=32768, cache={"page_tokens": PAGE}) as both:
        turns = converse(both, TALKS)
        assert counters(both)["pages_evicted"] == 0
        expect_hits(TALKS, turns, PAGE)
        expect_hand_overs(turns)
        return turns


@pytest.fixture(scope="module")
def stored(model: Path, undisturbed: list[Turn], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage folder in which the conversations have left all their pages, by a run that is checked here."""
    folder = tmp_path_factory.mktemp("stored")
    assert working_set(undisturbed, PAGE) > 3 * HOST_PAGES
    with pair(model, tokens=SMALL, cache=tiers(HOST_PAGES, **in_folder(folder))) as both:
        turns = converse(both, TALKS, quiet=True)
        assert by_turn(turns) == by_turn(undisturbed)
        expect_hits(TALKS, turns, PAGE, answers="always")
        expect_hand_overs(turns)
        found = sum((Counter(t.tiers) for t in turns), Counter())
        assert min(found[tier] for tier in ("device", "host", "storage")) > 0, found
        said = counters(both)
        assert said["pages_damaged_in_storage"] == said["pages_damaged_on_host"] == said["saves_left_out"] == 0
        assert said["prompt_tokens_cached"] == found.total()
    return folder


@pytest.mark.slow
def test_on_small_pools_hits_are_what_the_trace_allows_and_tokens_are_undisturbed(stored: Path) -> None:
    assert any(stored.rglob("*.page"))


@pytest.mark.slow
def test_after_a_restart_storage_still_has_every_page(model: Path, undisturbed: list[Turn], stored: Path) -> None:
    with pair(model, tokens=SMALL, cache=tiers(HOST_PAGES, **in_folder(stored))) as both:
        turns = converse(both, TALKS)
        assert by_turn(turns) == by_turn(undisturbed)
        expect_all_known(turns, PAGE)
        expect_hand_overs(turns)
        assert turns[0].tiers["storage"] == turns[0].cached > 0


@pytest.mark.slow
def test_a9_what_is_damaged_in_storage_is_counted_and_computed_again(
    model: Path, undisturbed: list[Turn], tmp_path: Path
) -> None:
    with pair(model, tokens=SMALL, cache=tiers(HOST_PAGES, **in_folder(tmp_path))) as both:
        converse(both, TALKS)
    damaged = damage_folder(tmp_path, seed=5)
    with pair(model, tokens=SMALL, cache=tiers(HOST_PAGES, **in_folder(tmp_path))) as both:
        turns = converse(both, TALKS, at_once=1)
        assert by_turn(turns) == by_turn(undisturbed)
        expect_hand_overs(turns)
        met = len(damaged) - len(still_damaged(damaged))
        assert met > len(damaged) / 2
        assert counters(both)["pages_damaged_in_storage"] == met
