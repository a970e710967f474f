"""Into how many groups of layers a step's sends are divided."""

from __future__ import annotations

from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.prefill.handover import group_count
from twinpool.transfer.planes.data_plane import SentCounts

CONFIG = TransferConfig(layer_group_bytes=1000, layer_group_s=0.001)


def test_a_group_takes_the_link_about_the_configured_time() -> None:
    for rate in (2e6, 10e6, 50e6):
        groups = group_count(CONFIG, 1_000_000, 500, rate)
        assert abs(1_000_000 / groups / rate - 0.001) < 1e-4


def test_groups_keep_their_least_size_on_a_slow_link_and_on_one_that_carried_nothing() -> None:
    assert group_count(CONFIG, 20_000, 36, 1e3) == group_count(CONFIG, 20_000, 36, 0.0) == 20


def test_there_are_no_more_groups_than_layers() -> None:
    assert group_count(CONFIG, 1_000_000, 36, 0.0) == 36


def test_a_link_faster_than_any_step_still_gets_two_groups_where_there_are_bytes_for_two() -> None:
    assert group_count(CONFIG, 2_000, 36, 1e12) == 2
    assert group_count(CONFIG, 1_999, 36, 1e12) == 1


def test_what_a_link_carries_is_told_by_its_busy_time() -> None:
    assert SentCounts(writes=3, nbytes=600, busy_s=2.0, waited_s=9.0).bytes_per_s == 300.0
    assert SentCounts(nbytes=600).bytes_per_s == 0.0
