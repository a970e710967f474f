"""The bench of storage writes and reads every page, and says so when it can't."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cache import storage_speed as storage


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_ROUND_BYTES", 1 << 18)
    monkeypatch.setattr("os.sync", lambda: None)


def test_each_way_is_measured_and_leaves_nothing_behind(tmp_path: Path) -> None:
    rates = storage.measure_size(1 << 14, tmp_path, url="", rounds=2, batch=5)
    assert [rate.way for rate in rates] == ["plain", "file", "memory"]
    assert all(min(rate.read, rate.write, rate.read_two_threads, rate.exists_us) > 0 for rate in rates)
    assert not list(tmp_path.rglob("*.page"))
    assert not (tmp_path / f"plain-{1 << 14}").exists()


def test_pages_that_were_not_read_are_noticed() -> None:
    pages = storage.Pages(1 << 14)
    with pytest.raises(RuntimeError, match="not what was written"):
        pages.check()
