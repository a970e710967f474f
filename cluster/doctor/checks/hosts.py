"""The hosts of a Ray against each other: which of them can hand over to which, and what to do where they can't."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from twinpool.cluster.doctor.checks.clocks import MAX_SKEW_S
from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, error, fine, from_refusal, warning
from twinpool.cluster.ray_nodes.host_facts import HostFacts
from twinpool.cluster.ray_nodes.worker_resources import RESOURCES
from twinpool.contracts import cpu_levels
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ConfigError

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
