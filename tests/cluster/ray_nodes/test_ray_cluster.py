"""Joining a Ray that somebody else started: its authentication is left as it is."""

from __future__ import annotations

import inspect
import os
import stat
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from twinpool.cluster.ray_nodes import ray_cluster
from twinpool.contracts.build_id import import_root
from twinpool.contracts.errors import ConfigError


class RayError(Exception):
    pass


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.SimpleNamespace:
    """In Ray's place; `modes` is what it found in its environment whenever it was started or joined."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv("HOME", str(tmp_path))
    fake = types.SimpleNamespace(
        modes=[], namespaces=[], refusal=None, exceptions=types.SimpleNamespace(RayError=RayError),
        job_config=types.SimpleNamespace(JobConfig=types.SimpleNamespace),
    )  # fmt: skip

    def init(*, namespace: str, **options: Any) -> types.SimpleNamespace:
        fake.namespaces.append(namespace)
        fake.modes.append(os.environ.get("RAY_AUTH_MODE"))
        if fake.refusal is not None:
            raise fake.refusal
        return types.SimpleNamespace(dashboard_url="")

    fake.init = init
    fake.util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.mark.parametrize("mode", [None, "disabled", "token"])
def test_the_authentication_of_a_cluster_that_is_joined_is_left_as_it_is(
    ray: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    if mode is not None:
        os.environ["RAY_AUTH_MODE"] = mode
    assert ray_cluster.join_ray("auto", "twinpool-x") == "10.0.0.1"
    assert ray.modes == [mode]
    assert ray.namespaces == ["twinpool-x"]
    assert os.environ.get("RAY_AUTH_MODE") == mode
    assert ray_cluster.authenticated() == (mode == "token")


def test_who_lacks_the_token_is_told_where_it_goes(ray: types.SimpleNamespace) -> None:
    ray.refusal = RayError("Token authentication is enabled but no token was found\nsee there")
    with pytest.raises(ConfigError, match=r"no token was found; give this process .*RAY_AUTH_TOKEN_PATH"):
        ray_cluster.join_ray("auto", "twinpool-x")
    ray.refusal = ConnectionError("")
    with pytest.raises(ConfigError, match=r"can't join Ray at auto: ConnectionError$"):
        ray_cluster.join_ray("auto", "twinpool-x")


def test_the_token_of_a_ray_of_our_own_is_for_its_owner_alone(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    tokens = []
    for folder in (one, two):
        folder.mkdir()
        path = ray_cluster._new_token(folder)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        tokens.append(path.read_text())
    assert len(set(tokens)) == 2
    assert ray_cluster._OWN["RAY_AUTH_MODE"] == "token"


def test_workers_import_nothing_from_the_folder_that_serve_was_started_in() -> None:
    """Ray adds the working directory and the script's folder; the source tree is where our packages are."""
    config = ray_cluster.driver_options()["job_config"]
    config._py_driver_sys_path.extend([str(import_root()), "/home/me/project", "/usr/bin"])
    assert list(config._get_proto_job_config().py_driver_sys_path) == [str(import_root())]


def test_rays_processes_are_in_sessions_of_their_own() -> None:
    """Else a signal to the group of `serve` ends the workers before the answers that they compute."""
    from ray._private import services

    plain = services.ConsolePopen
    with ray_cluster.apart_from_terminal():
        child = services.ConsolePopen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert services.ConsolePopen is plain
    try:
        assert os.getsid(child.pid) == child.pid
    finally:
        child.kill()
        child.communicate()


def test_rays_private_names_that_are_used_take_what_they_are_given() -> None:
    """Where another Ray has moved one, this says so instead of a cluster that doesn't start, or is never drained."""
    import ray._private.state
    import ray._raylet
    from ray._private import services, utils
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    assert set(inspect.signature(Node.start_api_server).parameters) == {"self", "include_dashboard", "raise_on_failure"}
    assert not inspect.signature(utils.get_dashboard_dependency_error).parameters
    assert "ray._private.utils.get_dashboard_dependency_error()" in inspect.getsource(services.start_raylet)
    assert "dashboard_agent_listen_port" in inspect.signature(RayParams).parameters
    assert not set(inspect.signature(ray._private.state.state.get_draining_nodes).parameters) - {"self"}
    assert not inspect.signature(ray._private.state.available_resources_per_node).parameters
    store = vars(ray._raylet)["GcsClient"]
    assert callable(store)  # It hands all names on to a client of Ray's own, which a whole cluster's tests ask.
