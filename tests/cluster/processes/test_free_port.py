"""A port that is chosen some seconds before its server has it is given to nobody else meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from ray.scripts.scripts import start as ray_start

from twinpool.cluster.processes import free_port as module
from twinpool.cluster.processes.free_port import free_port
from twinpool.contracts.errors import ConfigError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_free_port_is_none_that_the_kernel_gives_to_connections(host: str) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 < free_port(host, 0) < first


def test_a_free_port_is_none_of_rays_workers() -> None:
    """`ray start` ends at once where its control store's port is one of its workers'."""
    options = {option.name: option.default for option in ray_start.params}
    workers = range(options["min_worker_port"], options["max_worker_port"] + 1)
    assert len(workers) > 1000
    assert [port for port in (free_port("127.0.0.1", 0) for _ in range(300)) if port in workers] == []


def test_where_all_that_are_tried_are_taken_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(module, "_below_the_kernels", lambda: [port])
        assert free_port("127.0.0.1", 0) not in (0, port)


def test_a_port_in_use_and_a_host_that_is_not_here_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .*choose another --port"):
            free_port("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host 192.0.2.1 \("):
        free_port("192.0.2.1", 0)
    with pytest.raises(ConfigError, match=r"--host nowhere\.invalid can't be resolved"):
        free_port("nowhere.invalid", 0)
