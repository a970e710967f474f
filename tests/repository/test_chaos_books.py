"""The books of the chaos runs tell growth from noise, and don't mix up runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.chaos_books import SAMPLES, Counters, Tally, flat, kept_mib


def test_what_grows_steadily_is_told_from_what_has_warmed_up() -> None:
    warm = [100.0 * min(1.0, n / 10) for n in range(SAMPLES)]
    assert flat(warm)
    assert not flat([100.0 + n for n in range(SAMPLES)])


def test_too_few_samples_prove_nothing() -> None:
    assert flat([float(2**n) for n in range(SAMPLES - 1)])


def test_a_run_goes_on_from_its_state_and_not_from_anothers(tmp_path: Path) -> None:
    path = tmp_path / "state"
    tally = Tally(seed=1, plane="zmq", seconds=60.0)
    tally.faults["cut"] += 2
    tally.save(path)
    assert Tally.load(path, 1, "zmq").faults["cut"] == 2
    with pytest.raises(SystemExit, match="seed 1"):
        Tally.load(path, 2, "zmq")
    with pytest.raises(SystemExit, match="zmq"):
        Tally.load(path, 1, "shm")


def test_a_run_that_failed_is_not_gone_on_with(tmp_path: Path) -> None:
    Tally(seed=1, plane="zmq", failures=["wrong"]).save(tmp_path / "state")
    with pytest.raises(SystemExit, match="wrong"):
        Tally.load(tmp_path / "state", 1, "zmq")


def test_counters_add_up_over_incarnations_that_each_count_from_zero() -> None:
    counters = Counters()
    rows = [(1, 3.0), (1, 5.0), (2, 1.0)]
    for incarnation, value in rows:
        row = {"name": "decode-0", "incarnation": incarnation, "counters": {"kept": value, "other": 9.0}}
        counters.take([row], ["kept"])
    assert counters.fresh("kept") == 6
    assert counters.fresh("kept") == 0


def test_memory_that_is_kept_without_being_mapped_is_seen() -> None:
    fd = os.memfd_create("kept")
    before = kept_mib(os.getpid())
    try:
        os.write(fd, bytes(3 << 20))
        assert kept_mib(os.getpid()) - before == pytest.approx(3.0)
    finally:
        os.close(fd)
    assert kept_mib(os.getpid()) == before
