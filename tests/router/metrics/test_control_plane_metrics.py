"""What is exported about the controllers."""

from __future__ import annotations

from twinpool.contracts.messages.cluster_view import ControlPlane
from twinpool.router.metrics.worker_metrics import control_plane_metrics


def test_a_controller_that_nobody_replaces_is_there_or_not() -> None:
    for reachable in (True, False):
        (family,) = control_plane_metrics(reachable, None)
        assert [(s.name, s.value) for s in family.samples] == [("twinpool_controller_up", float(reachable))]


def test_the_leader_its_term_and_who_waits_are_told() -> None:
    families = control_plane_metrics(False, ControlPlane("10.0.0.1:7", 3, ("10.0.0.2:7", "10.0.0.3:7"), away=True))
    assert {s.name: (s.labels, s.value) for family in families for s in family.samples} == {
        "twinpool_controller_up": ({}, 0),
        "twinpool_controller_info": ({"leader": "10.0.0.1:7"}, 1),
        "twinpool_controller_terms_total": ({}, 3),
        "twinpool_controller_standbys": ({}, 2),
    }
