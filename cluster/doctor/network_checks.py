"""Checks of the network.

- Ports that a cluster listens on at numbers that were chosen: whether they are free.
- The Ray that is to be joined: there, of this build's version, with nodes that take workers.
- The hosts of a Ray against each other: which of them can hand over to which, and what to do where they can't.
"""

from __future__ import annotations

import platform
from collections.abc import Hashable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from twinpool.cluster.doctor.doctor_case import DoctorCase, Finding, error, fine, from_refusal, warning
from twinpool.cluster.doctor.machine_checks import MAX_SKEW_S
from twinpool.cluster.processes.free_port import free_port
from twinpool.cluster.processes.run_folder import live_run_of, newest_live_run
from twinpool.cluster.ray_nodes.host_facts import HostFacts
from twinpool.cluster.ray_nodes.ray_cluster import check_reachable
from twinpool.cluster.ray_nodes.ray_facts import RESOURCES, RayFacts, has_places, resource_example
from twinpool.cluster.serve.terminal import url_of
from twinpool.contracts import cpu_levels
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ConfigError


def check_ports(case: DoctorCase) -> Iterator[Finding]:
    """The endpoint's port, the operators', the controller's, and those of KV events."""
    taken, free = 0, list[str]()
    if case.options.file and (run := live_run_of(Path(case.options.file))) is not None:
        yield fine(f"{run.url} was launched with this file: up brings it to what the file says now")
        return
    for setting, host, port in _ports(case):
        try:
            free_port(host, port)
        except ConfigError as refused:
            taken += 1
            yield error(f"{setting} {port}: {refused}", _advice(case, host, port, setting))
        else:
            free.append(f"{setting} {port}")
    if not taken:
        yield fine(f"free: {', '.join(free)}" if free else "every port is any free one")


def _advice(case: DoctorCase, host: str, port: int, setting: str) -> str:
    if port == case.options.port:
        url = url_of(host, port, https=case.config.security.https is not None)
        run = newest_live_run(url)
        if run is not None:
            return f"a cluster of yours serves there: twinpool down --url {run.url}, or another --port"
    return f"end what listens there, or set another {setting} (0: any)"


def _ports(case: DoctorCase) -> Iterator[tuple[str, str, int]]:
    """Setting, address and port of each listener whose port isn't any."""
    options, security, events = case.options, case.config.security, case.config.cache.events
    if options.port:
        yield "--port", options.host, options.port
    for number in range(options.routers if security.admin_port else 0):
        yield "security.admin_port", security.admin_host, security.admin_port + number
    if case.config.cluster.controller_port:
        yield "cluster.controller_port", "127.0.0.1", case.config.cluster.controller_port
    if options.ray_address is not None:
        return  # Workers may listen on any node.
    for setting, endpoint in (
        ("cache.events.endpoint", events.endpoint),
        ("cache.events.replay_endpoint", events.replay_endpoint),
    ):
        parts = urlsplit(endpoint)
        if parts.scheme != "tcp" or not parts.port:
            continue
        from twinpool.cluster.assembly.build_parts import event_rank  # These import torch, which takes seconds.
        from twinpool.cluster.serve.memory_fit import named

        for name, role in named(options.workers):
            yield setting, parts.hostname or "0.0.0.0", parts.port + event_rank(role, name)


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
        wanted = count * case.config.ranks_for(role)
        there = sum(node.places.get(RESOURCES[role], 0) for node in facts.nodes)
        if there < wanted:
            yield warning(
                f"its nodes have {there:g} of {wanted} {RESOURCES[role]}: workers wait until more join",
                "start the other nodes, or ask for fewer workers",
            )


Groups = Mapping[Hashable, Sequence[HostFacts]]


def check_hosts(case: DoctorCase) -> Iterator[Finding]:
    """Ask each host, where that is wanted, and compare what they say."""
    address = case.options.ray_address
    if address is None:
        yield fine("one machine: there is nothing to compare")
        return
    if not case.compare_hosts:
        yield fine("not compared: --hosts joins the Ray for it, and runs a task on each host")
        return
    try:
        told = case.host.ask_hosts(address, case.config.engine.device)
    except ConfigError as refused:
        yield from_refusal(refused)
        return
    hosts = [one for one in told if not one.silent]
    wrong = False
    for finding in (*_silent(told), *_builds(hosts), *_numerics(case, hosts), *_clocks(hosts)):
        wrong = True
        yield finding
    if not wrong:
        here = f"{len(hosts)} host{'s' if len(hosts) != 1 else ''}"
        yield fine(f"{here} that can hand over to each other: {_names(hosts)}")


def _silent(told: Sequence[HostFacts]) -> Iterator[Finding]:
    for one in told:
        if one.silent:
            yield error(
                f"{one.host} can't run this build: {one.silent}",
                "install the same Twinpool there, in the Python that its Ray was started by, or take it out of the Ray",
            )


def _builds(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    protocols = _by(hosts, [one.protocol for one in hosts])
    if len(protocols) > 1:
        yield error(
            f"hosts speak different protocols: {_listed(protocols)}; they can't hand over to each other",
            "install one build of Twinpool on all of them",
        )
        return
    builds = _by(hosts, [one.build for one in hosts])
    if len(builds) > 1:
        yield warning(
            f"hosts have different builds: {_listed(builds)}",
            "install one build of Twinpool on all of them",
            "they speak one protocol, so they can hand over, but nobody has tested them together",
        )


def numerics_of(one: HostFacts, engine: EngineConfig, gpus: bool) -> tuple[str, ...]:
    """What the bits of a worker there follow from, as far as that can be told without computing. Hosts that differ in
    it are of different numerics classes (`engine.runner.numerics_class`)."""
    if gpus:
        return ("cuda", ", ".join(one.cards), f"torch {one.torch}", one.grammar)
    level = "" if engine.numerics_class == "auto" else engine.numerics_class
    isa = cpu_levels.VARIABLES[level]["ONEDNN_MAX_CPU_ISA"].lower() if level else one.onednn
    return (one.machine, level or one.instructions, f"oneDNN {isa}", f"torch {one.torch}", one.grammar)


def _numerics(case: DoctorCase, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    engine = case.config.engine
    gpus = case.wants_gpus or (engine.device == "auto" and any(one.cards for one in hosts))
    level = engine.numerics_class
    unable = [one for one in hosts if level not in ("auto", *one.levels)]
    if unable and not gpus:
        common = _common_level(hosts)
        yield error(
            f"engine.numerics_class={level}, which {_names(unable)} can't run: workers won't start there",
            f"set engine.numerics_class={common}, which all of them run" if common else "take these hosts out",
        )
        return
    classes = _by(hosts, [numerics_of(one, engine, gpus) for one in hosts])
    if engine.numerics == "fast" or len(classes) <= 1:
        return
    words = "; ".join(f"{_names(some)} ({', '.join(map(str, key))})" for key, some in _tuples(classes))
    found = f"under engine.numerics=invariant these hosts can't hand over to each other: {words}"
    alone = [some for some in classes.values() if _lacking(case, some)]
    why = "workers of different numerics classes refuse each other's state, which would go on with other bits"
    if alone:
        yield error(found, _remedy(hosts, engine, gpus), f"{_lacks(case, alone[0])}; {why}")
    else:
        yield warning(found, _remedy(hosts, engine, gpus), f"each group can serve by itself; {why}")


def _remedy(hosts: Sequence[HostFacts], engine: EngineConfig, gpus: bool) -> str:
    """What makes hosts of several classes one."""
    todo = []
    for name, seen in (("torch", [one.torch for one in hosts]), ("structured output", [one.grammar for one in hosts])):
        if len(set(seen)) > 1:
            todo.append(f"install the same {name} on all of them ({_listed(_by(hosts, seen))})")
    processors = {(one.machine, one.instructions, one.onednn) for one in hosts}
    if gpus and len({one.cards for one in hosts}) > 1:
        todo.append("give this cluster hosts with one model of GPU")
    elif not gpus and engine.numerics_class == "auto" and len(processors) > 1:
        common = _common_level(hosts)
        todo.append(
            f"set engine.numerics_class={common}, which all of them run"
            if common
            else "give this cluster hosts with one kind of processor"
        )
    return " and ".join(todo) + ", or set engine.numerics=fast"


def _common_level(hosts: Sequence[HostFacts]) -> str:
    """The highest level that all hosts run; empty where there is none."""
    if len({one.machine for one in hosts}) > 1:
        return ""
    return next((level for level in reversed(cpu_levels.LEVELS) if all(level in one.levels for one in hosts)), "")


def _lacking(case: DoctorCase, some: Sequence[HostFacts]) -> list[str]:
    """The places for workers that these hosts don't have at all, of those that are planned."""
    wanted = [RESOURCES[role] for role, count in case.options.workers.items() if count]
    return [name for name in wanted if not sum(one.places.get(name, 0) for one in some)]


def _lacks(case: DoctorCase, some: Sequence[HostFacts]) -> str:
    return f"{_names(some)} has no {' and no '.join(_lacking(case, some))}, so nothing there can serve alone"


def _clocks(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    first, last = (pick(hosts, key=lambda one: one.clock_s, default=None) for pick in (min, max))
    if first is None or last is None:
        return
    apart = last.clock_s - first.clock_s - first.clock_error_s - last.clock_error_s
    if apart > MAX_SKEW_S:
        yield warning(
            f"the clock of {last.host} is at least {apart:.1f} s ahead of that of {first.host}",
            "have both kept by NTP (chronyd, systemd-timesyncd)",
            "nothing here compares clocks of hosts, but certificates, keys that end, and logs go by them",
        )


def _by(hosts: Sequence[HostFacts], keys: Sequence[Hashable]) -> dict[Hashable, list[HostFacts]]:
    groups: dict[Hashable, list[HostFacts]] = {}
    for one, key in zip(hosts, keys, strict=True):
        groups.setdefault(key, []).append(one)
    return groups


def _tuples(groups: Groups) -> Iterator[tuple[tuple[object, ...], Sequence[HostFacts]]]:
    for key, some in groups.items():
        yield (key if isinstance(key, tuple) else (key,)), some


def _listed(groups: Groups) -> str:
    return ", ".join(f"{key} on {_names(some)}" for key, some in groups.items())


def _names(hosts: Sequence[HostFacts]) -> str:
    return " and ".join(one.host for one in hosts)
