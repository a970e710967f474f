"""The doctor asks a real Ray, without joining it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.test_ray_node import more_nodes, nodes, said
from tests.support.served_cluster import ROOT
from twinpool.cluster.doctor.doctor_case import DoctorCase, DoctorHost, Severity
from twinpool.cluster.doctor.examine import CHECKS
from twinpool.cluster.ray_nodes.host_facts import ask_hosts, facts_here
from twinpool.cluster.ray_nodes.ray_facts import ask_ray
from twinpool.cluster.serve.preflight import ServeOptions
from twinpool.contracts.errors import ConfigError

START = """
import sys
from pathlib import Path
from twinpool.cluster.ray_nodes.ray_cluster import leave_ray, start_own_ray
start_own_ray(Path(sys.argv[1]), False)
import ray
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
leave_ray()
"""


@pytest.fixture
def head(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray as `serve` starts one, with its token in this process's environment."""
    folder = tmp_path_factory.mktemp("ray")
    with subprocess.Popen(
        [sys.executable, "-c", START, str(folder)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        address = process.stdout.readline().strip()
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(folder / "ray-token"))
        yield address
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.soak
def test_a_real_ray_says_its_version_and_its_places(head: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = ask_ray(head)
    (node,) = facts.nodes
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert set(node.places) == {"twinpool_prefill", "twinpool_decode", "twinpool_colocated"}
    case = DoctorCase(ServeOptions(port=0, ray_address=head))
    assert [finding.severity for finding in CHECKS["Ray"](case)] == [Severity.FINE]
    token = tmp_path / "token"
    token.write_text("0" * 64)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with pytest.raises(ConfigError, match=r"can't be asked|didn't answer"):
        ask_ray(head)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_hosts_of_a_real_ray_tell_of_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of this one machine, which has what this process sees of it, and whose clock is this one."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with nodes(tmp_path) as running:
        address = str(said(running)["address"])
        more_nodes(running)
        said(running)
        (there,) = told = ask_hosts(address, "cpu")
        assert there.silent == ""
        places = {"twinpool_prefill": 1.0, "twinpool_decode": 2.0}
        assert replace(there, clock_s=0.0, clock_error_s=0.0) == replace(facts_here("cpu"), places=places)
        assert abs(there.clock_s) <= there.clock_error_s < 5
        host = DoctorHost(ask_hosts=lambda *_: told)
        case = DoctorCase(ServeOptions(port=0, ray_address=address), host, compare_hosts=True)
        (found,) = CHECKS["hosts"](case)
        assert (found.severity, found.found) == (
            Severity.FINE,
            f"1 host that can hand over to each other: {there.host}",
        )
