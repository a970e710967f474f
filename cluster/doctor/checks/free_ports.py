"""The ports that a cluster listens on at numbers that were chosen: whether they are free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, error, fine
from twinpool.cluster.processes.free_port import free_port
from twinpool.cluster.processes.run_file import live_run_of, newest_live_run
from twinpool.cluster.serve.terminal import url_of
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
