"""What the hosts of a Ray are, each told by a task there.

The Ray is joined for that, by a process of its own, which has a deadline and leaves again. Clocks are read by tasks
that do nothing else: a host's clock is taken to have been read in the middle of the shortest of them.
"""

from __future__ import annotations

import importlib
import json
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from twinpool.cluster.assembly.node_shares import cards_of
from twinpool.cluster.ray_nodes.ray_facts import RESOURCES, has_places
from twinpool.contracts import cpu_levels
from twinpool.contracts.build_id import build_id
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.grammar import GRAMMAR_ENGINE
from twinpool.contracts.messages.fingerprint import PROTOCOL
from twinpool.contracts.python_command import module_command

ASK_S = 150.0
"""Seconds in which all hosts must have answered, joining and leaving included."""
HOST_S = 60.0
"""Seconds in which the tasks of all hosts must have begun and told."""
CLOCK_READS = 3
_CLOCK_S = 5.0


@dataclass(frozen=True, slots=True)
class HostFacts:
    """A host that takes workers, as it says itself."""

    host: str
    machine: str = ""
    """Its architecture, such as ``x86_64``."""
    levels: tuple[str, ...] = ()
    """The levels of `engine.numerics_class` that its processor runs."""
    instructions: str = ""
    """What code is compiled for there without a level."""
    onednn: str = ""
    """The instruction set that oneDNN uses there without a level."""
    python: str = ""
    torch: str = ""
    """Its version; empty where it isn't installed."""
    grammar: str = ""
    """What makes the masks of structured output."""
    build: str = ""
    protocol: int = 0
    cards: tuple[str, ...] = ()
    """The names of its GPUs, each once."""
    clock_s: float = 0.0
    """Seconds by which its clock is ahead of this machine's."""
    clock_error_s: float = 0.0
    """How far `clock_s` may be off."""
    places: Mapping[str, float] = field(default_factory=dict)
    """Its resources for workers, by name, those of all its nodes together."""
    silent: str = ""
    """Why it told nothing; then the rest is unknown."""


def facts_here(device: str) -> HostFacts:
    """This process's host, clock and places left out. `device`: `engine.device`."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    try:
        cards = tuple(sorted({card.name for card in cards_of(device)}))
    except ConfigError:
        cards = ()
    return HostFacts(
        socket.gethostname(),
        platform.machine(),
        cpu_levels.levels(),
        cpu_levels.described(),
        cpu_levels.onednn_isa({}),
        platform.python_version(),
        torch,
        GRAMMAR_ENGINE,
        build_id(),
        PROTOCOL,
        cards,
    )


def wall() -> float:
    """Seconds since 1970 by this process's host."""
    return time.time()


def offset(read: Callable[[], float], ours: Callable[[], float], reads: int = CLOCK_READS) -> tuple[float, float]:
    """By how many seconds the clock that `read` asks for is ahead of `ours`, and how far that may be off."""
    best = (0.0, float("inf"))
    for _ in range(reads):
        before = ours()
        there = read()
        after = ours()
        if (error := (after - before) / 2) < best[1]:
            best = (there - (before + after) / 2, error)
    return best


def ask_hosts(address: str, device: str) -> tuple[HostFacts, ...]:
    """Ask each host of the Ray at `address`, ``host:port``, that takes workers. Raises `ConfigError` where it can't be
    joined or doesn't answer in time."""
    command = module_command(__name__, address, device)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
        if ended.returncode:
            raise OSError((ended.stderr.splitlines() or [f"exit code {ended.returncode}"])[-1])
        return tuple(_read(told) for told in json.loads(ended.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the hosts of the Ray at {address} didn't answer within {ASK_S:g} s") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"the hosts of the Ray at {address} can't be asked: {error!s:.300}") from None


def _read(told: dict[str, Any]) -> HostFacts:
    return HostFacts(**{**told, "levels": tuple(told["levels"]), "cards": tuple(told["cards"])})


def _ask(address: str, device: str) -> list[HostFacts]:
    """What `ask_hosts` reads; joins Ray. Nodes of one host are one."""
    from twinpool.cluster.ray_nodes.ray_cluster import join_ray, leave_ray

    join_ray(address, "twinpool-doctor")
    try:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        def there(node: Mapping[str, Any]) -> Any:
            return {
                "num_cpus": 0,
                "max_retries": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            }

        nodes = [node for node in ray.nodes() if node["Alive"] and has_places(node["Resources"])]
        asked = {ray.remote(facts_here).options(**there(node)).remote(device): node for node in nodes}
        if asked:
            ray.wait(list(asked), num_returns=len(asked), timeout=HOST_S)
        found: dict[str, HostFacts] = {}
        for answer, node in asked.items():
            places = {name: node["Resources"][name] for name in RESOURCES.values() if name in node["Resources"]}
            try:
                facts = ray.get(answer, timeout=0)
                clock = ray.remote(wall).options(**there(node))
                clock_s, error_s = offset(partial(_now_there, clock), wall)
                facts = replace(facts, clock_s=clock_s, clock_error_s=error_s)
            except ray.exceptions.GetTimeoutError:
                ray.cancel(answer, force=True)
                facts = HostFacts(node["NodeManagerHostname"], silent=f"no answer within {HOST_S:g} s")
            except ray.exceptions.RayError as error:
                words = [line for line in str(error).splitlines() if line.strip()]
                facts = HostFacts(node["NodeManagerHostname"], silent=f"{(words or [type(error).__name__])[-1]:.300}")
            before = found.get(facts.host)
            if before is not None:
                places = {name: places.get(name, 0) + before.places.get(name, 0) for name in {*places, *before.places}}
            found[facts.host] = replace(facts, places=places)
        return list(found.values())
    finally:
        leave_ray()


def _now_there(clock: Any) -> float:
    """Seconds since 1970 on the host that this task runs on."""
    import ray

    return float(ray.get(clock.remote(), timeout=_CLOCK_S))


def main(arguments: Sequence[str]) -> None:
    address, device = arguments
    sys.stdout.write(json.dumps([asdict(one) for one in _ask(address, device)]) + "\n")


if __name__ == "__main__":
    # By its name: tasks of a module that runs as `__main__` would go to the nodes by value.
    importlib.import_module("twinpool.cluster.ray_nodes.host_facts").main(sys.argv[1:])
