"""The Ray that is to be joined: there, of this build's version, with nodes that take workers."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, error, fine, from_refusal, warning
from twinpool.cluster.ray_nodes.ray_cluster import check_reachable
from twinpool.cluster.ray_nodes.ray_facts import RayFacts
from twinpool.cluster.ray_nodes.worker_resources import RESOURCES, has_places, resource_example
from twinpool.contracts.errors import ConfigError


def check_ray(case: DoctorCase) -> Iterator[Finding]:
    """Ask the head, without joining it."""
    address = case.options.ray_address
    if address is None:
        if case.options.dashboard and find_spec("aiohttp") is None:
            yield error("--dashboard, and aiohttp isn't installed", "pip install 'ray[default]', or leave the flag out")
        else:
            yield fine("a Ray of our own is started, on loopback")
        return
    if address == "auto":
        address = case.host.environment.get("RAY_ADDRESS", "") or _here(case)
    if not address:
        yield error(
            "--ray-address auto, and no Ray runs on this machine",
            "ray start --head here, or give the head's address as HOST:6379",
        )
        return
    try:
        check_reachable(address)
        facts = case.host.ask_ray(address)
    except ConfigError as refused:
        yield from_refusal(refused)
        return
    wrong = False
    for finding in (*_versions(case, facts), *_places(case, facts)):
        wrong = True
        yield finding
    if not wrong:
        yield fine(f"Ray {facts.ray} at {address}: {', '.join(node.name for node in facts.nodes)}")


def _here(case: DoctorCase) -> str:
    """The address that a Ray on this machine has left; empty where there is none."""
    return case.host.read(case.host.temporary / "ray" / "ray_current_cluster")


def _versions(case: DoctorCase, facts: RayFacts) -> Iterator[Finding]:
    try:
        ours = case.host.version("ray")
    except PackageNotFoundError:
        return  # Told of among the versions.
    python = platform.python_version()
    if facts.ray != ours:
        yield error(
            f"that Ray is {facts.ray}, and {ours} is installed here",
            f"pip install ray=={facts.ray} here, or have all nodes run {ours}",
        )
    if facts.python != python:
        yield error(
            f"that Ray runs Python {facts.python}, and this is {python}",
            "use the same Python on all nodes: Ray takes processes of its own alone",
        )


def _places(case: DoctorCase, facts: RayFacts) -> Iterator[Finding]:
    if not any(has_places(node.places) for node in facts.nodes):
        yield error(
            f"none of its {len(facts.nodes)} nodes has a place for workers",
            f"ray start --resources='{resource_example(case.options.workers)}' on the nodes that take workers",
        )
        return
    for role, count in case.options.workers.items():
        wanted = count * case.config.tp_for(role)
        there = sum(node.places.get(RESOURCES[role], 0) for node in facts.nodes)
        if there < wanted:
            yield warning(
                f"its nodes have {there:g} of {wanted} {RESOURCES[role]}: workers wait until more join",
                "start the other nodes, or ask for fewer workers",
            )
