"""Ray's custom resources by role: what nodes must offer, and what is missing of it."""

from __future__ import annotations

import sys
import types

import pytest

from twinpool.cluster.ray_nodes.ray_cluster import missing_places
from twinpool.cluster.ray_nodes.ray_facts import has_places, resource_example
from twinpool.contracts.ids import PAIR, Role


def test_a_node_is_one_of_ours_if_it_has_a_place_of_any_role() -> None:
    assert has_places({"twinpool_colocated": 1, "CPU": 4})
    assert not has_places({"twinpool_decode": 0, "CPU": 4})


def test_what_is_missing_is_told_by_role_with_the_flag_that_would_offer_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"twinpool_prefill": 2.0, "twinpool_decode": 1.0}
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(cluster_resources=lambda: there))
    assert missing_places({Role.PREFILL: 2, Role.DECODE: 3}) == "1 of 3 twinpool_decode"
    assert missing_places({Role.COLOCATED: 2}) == "0 of 2 twinpool_colocated"
    assert resource_example(PAIR) == '{"twinpool_prefill": N, "twinpool_decode": N}'
    assert resource_example([Role.COLOCATED]) == '{"twinpool_colocated": N}'
