"""Scrapes share their work, leave the loop to others, and cost no other scrape its answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from twinpool.router.metrics import prometheus_metrics
from twinpool.router.metrics.prometheus_metrics import Scrapes

pytestmark = pytest.mark.asyncio
OPENMETRICS = "application/openmetrics-text"


class Source:
    """Families whose values are how often they were collected."""

    def __init__(self, families: int = 1) -> None:
        self.collected, self._families = 0, families

    def collect(self) -> Iterator[Metric]:
        self.collected += 1
        for number in range(self._families):
            yield GaugeMetricFamily(f"family_{number}", "A family", value=self.collected)


async def test_scrapes_that_come_while_one_is_made_share_the_next() -> None:
    source = Source()
    made = Scrapes(source.collect)
    answers = await asyncio.gather(*(made.answer("") for _ in range(50)))
    assert source.collected == 1
    first = asyncio.ensure_future(made.answer(""))
    while source.collected == 1:
        await asyncio.sleep(0)
    others = [asyncio.ensure_future(made.answer("")) for _ in range(50)]
    await first
    answers = await asyncio.gather(*others)
    assert source.collected == 3
    assert all(b"family_0 3.0" in text for text, _ in answers), "none is older than its question"


async def test_each_form_is_made_for_those_who_asked_for_it() -> None:
    made = Scrapes(Source().collect)
    plain, opened = await asyncio.gather(made.answer(""), made.answer(OPENMETRICS))
    assert plain[1].startswith("text/plain")
    assert opened[1].startswith(OPENMETRICS)
    assert opened[0].endswith(b"# EOF\n")


async def test_other_work_has_its_turn_between_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_metrics, "PIECE_S", 0.0)
    source, turns = Source(families=100), 0
    task = asyncio.ensure_future(Scrapes(source.collect).answer(""))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 100


async def test_it_is_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    here, wrote, expose = threading.get_ident(), [], prometheus_metrics.expose

    def watched(families: prometheus_metrics.Collected, *, opened: bool) -> tuple[bytes, str]:
        wrote.append(threading.get_ident())
        return expose(families, opened=opened)

    monkeypatch.setattr(prometheus_metrics, "expose", watched)
    await Scrapes(Source().collect).answer("")
    assert wrote
    assert here not in wrote


async def test_what_was_seen_is_taken_on_the_loop_and_made_in_the_thread() -> None:
    here, made_in = threading.get_ident(), []
    value = 1.0

    def families(seen: float) -> Iterator[Metric]:
        made_in.append(threading.get_ident())
        yield GaugeMetricFamily("seen", "What was seen", value=seen)

    text, _ = await Scrapes(Source().collect, lambda: families(value)).answer("")
    assert b"seen 1.0" in text
    assert made_in
    assert here not in made_in


async def test_a_client_that_leaves_takes_the_answer_from_nobody() -> None:
    made = Scrapes(Source().collect)
    leaving, staying = (asyncio.ensure_future(made.answer("")) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    text, _ = await staying
    assert b"family_0 1.0" in text
    assert leaving.cancelled()


async def test_a_family_that_fails_fails_its_scrape_and_not_the_next() -> None:
    source, broken = Source(), True

    def collect() -> Iterator[Metric]:
        if broken:
            raise ValueError("a bug")
        yield from source.collect()

    made = Scrapes(collect)
    with pytest.raises(ValueError, match="a bug"):
        await made.answer("")
    broken = False
    assert b"family_0 1.0" in (await made.answer(""))[0]
