"""What is exported about the links between workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from twinpool.router.metrics.worker_metrics import MAX_LINKS, link_metrics


def test_each_link_has_its_own_samples_and_other_counters_have_none() -> None:
    counters = {"link_bytes:decode-0": 7.0, "link_bytes:decode-1": 8.0, "link_under_way:decode-0": 2.0}
    counters |= {"link_in_flight_bytes:decode-1": 9.0, "link_waiting:decode-1": 4.0, "link_plane_shm:decode-0": 1.0}
    others = {"outgoing_to:decode-0": 1.0, "link_of_tomorrow:decode-0": 3.0, "linkage": 4.0, "link_bytes": 5.0}
    entry = SimpleNamespace(
        record=SimpleNamespace(name="prefill-0"), status=SimpleNamespace(counters={**counters, **others})
    )
    samples = [s for family in link_metrics(cast(Any, [entry])) for s in family.samples]
    assert [(s.labels["to"], s.labels["plane"]) for s in samples if "plane" in s.labels] == [("decode-0", "shm")]
    found = {(s.name, s.labels["worker"], s.labels["to"]): s.value for s in samples if "plane" not in s.labels}
    assert found == {
        ("twinpool_link_bytes_total", "prefill-0", "decode-0"): 7.0,
        ("twinpool_link_bytes_total", "prefill-0", "decode-1"): 8.0,
        ("twinpool_link_under_way", "prefill-0", "decode-0"): 2.0,
        ("twinpool_link_in_flight_bytes", "prefill-0", "decode-1"): 9.0,
        ("twinpool_link_waiting", "prefill-0", "decode-1"): 4.0,
    }


def test_so_many_links_that_their_series_would_be_too_many_are_summed_by_worker() -> None:
    def entry(name: str, links: int) -> Any:
        counters = {f"link_{what}:decode-{i}": 2.0 for i in range(links) for what in ("writes", "waiting", "plane_shm")}
        return SimpleNamespace(record=SimpleNamespace(name=name), status=SimpleNamespace(counters=counters))

    def samples(*links: int) -> list[Any]:
        entries = [entry(f"prefill-{number}", count) for number, count in enumerate(links)]
        return [s for family in link_metrics(cast(Any, entries)) for s in family.samples]

    assert len(samples(MAX_LINKS - 10, 10)) == 3 * MAX_LINKS
    summed = {(s.name, s.labels["worker"], s.labels["to"]): s.value for s in samples(MAX_LINKS - 10, 11, 0)}
    assert summed == {
        ("twinpool_link_writes_total", "prefill-0", ""): 2.0 * (MAX_LINKS - 10),
        ("twinpool_link_waiting", "prefill-0", ""): 2.0 * (MAX_LINKS - 10),
        ("twinpool_link_writes_total", "prefill-1", ""): 22.0,
        ("twinpool_link_waiting", "prefill-1", ""): 22.0,
    }, "each worker has its own sum"
