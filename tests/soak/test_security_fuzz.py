"""Strangers at every socket of a cluster that protects them all, for minutes: nobody is served, no process ends, and
clients get their tokens all the while.

`TWINPOOL_FUZZ_SECONDS` (600) is how long at each cluster, `TWINPOOL_FUZZ_SEED` with which bytes. Some of them have a
node's certificate, as one that went astray would, and nothing else.
"""

from __future__ import annotations

import os
import random
import ssl
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.served_cluster import Access, Serving, family, serving
from tests.support.socket_fuzz import abstract_sockets, mutated, targets, visit, visit_abstract
from twinpool.cli.credential_commands import new_certificates, new_key

pytestmark = [pytest.mark.soak, pytest.mark.slow]

SECONDS = float(os.environ.get("TWINPOOL_FUZZ_SECONDS", "600"))
SEED = int(os.environ.get("TWINPOOL_FUZZ_SEED", "20261125"))
PROMPT = "It was a fine morning, and"
SERVED = b'"choices"'
CHECK_S = 5.0
"""Seconds between two looks whether a client is served."""


def secured(folder: Path) -> tuple[dict[str, Path], Access]:
    """A whole `security` section with its files, and who gets in by it."""
    certs = folder / "certs"
    new_certificates(certs, [], 30)
    access = Access(certs / "ca.pem", new_key(folder / "keys.json", "acme"), new_key(folder / "operators.json", "me"))
    section = {
        "keys_file": folder / "keys.json", "tls_cert": certs / "node.pem", "tls_key": certs / "node.key",
        "tls_ca": certs / "ca.pem", "cluster_ca": certs / "ca.pem", "cluster_cert": certs / "node.pem",
        "cluster_key": certs / "node.key", "curve_key": certs / "curve.key_secret",
        "admin_keys_file": folder / "operators.json",
    }  # fmt: skip
    return section, access


def lasting(cluster: Serving) -> set[int]:
    """Processes that nothing but a fault ends: `serve`, the router, the arena agent. Workers are `incarnations`."""
    kept = ("twinpool.cli.commands", "twinpool.router.main", "arena_agent")
    return {one.pid for one in family(cluster.process) if any(word in " ".join(one.cmdline()) for word in kept)}


def incarnations(cluster: Serving) -> dict[str, tuple[int, int, str]]:
    return {name: (row["pid"], row["incarnation"], row["state"]) for name, row in cluster.status().items()}


@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize(("plane", "protected"), [("shm", True), ("zmq", True), ("shm", False)])
def test_strangers_at_every_socket_are_not_served_and_end_nothing(tmp_path: Path, plane: str, protected: bool) -> None:
    section, access = secured(tmp_path)
    sections: dict[str, dict[str, object]] = {
        "transfer": {"plane": plane},
        "cache": {"events.endpoint": "tcp://127.0.0.1:0", "events.replay_endpoint": "tcp://127.0.0.1:0"},
    }
    if protected:
        sections["security"] = dict(section)
    # Without protection whoever is on this machine is served; still nobody ends anything.
    access = access if protected else Access()
    with serving("demo", tmp_path / "run", "--decode", "2", sections=sections, access=access) as cluster:
        expected = cluster.complete(PROMPT, max_tokens=16).tokens
        before, alive = incarnations(cluster), lasting(cluster)
        doors, names = targets(cluster), list(abstract_sockets())
        assert len(doors) >= 10, doors
        assert names
        assert len(alive) == 3
        rng, visits = random.Random(f"{SEED} {plane} {protected}"), Counter[str]()
        trust = ssl.create_default_context(cafile=access.ca)
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        node = ssl.create_default_context(cafile=access.ca)
        node.check_hostname, node.verify_mode = False, ssl.CERT_NONE
        node.load_cert_chain(section["cluster_cert"], section["cluster_key"])
        end, checked = time.monotonic() + SECONDS, time.monotonic()
        while time.monotonic() < end:
            for door in rng.sample(doors, len(doors)):
                said = visit(door, rng, rng.choice([None, None, None, trust, node]))
                assert not protected or SERVED not in said, (door, said)
                visits[door.process.split()[0]] += 1
            for name in names:
                visit_abstract(name, rng)
            if time.monotonic() - checked > CHECK_S:
                assert cluster.complete(PROMPT, max_tokens=16).tokens == expected
                checked = time.monotonic()
        print(
            f"{sum(visits.values())} visits at {len(doors)} sockets of {len(visits)} processes, and {len(names)} more"
        )
        assert cluster.complete(PROMPT, max_tokens=16).tokens == expected
        assert incarnations(cluster) == before
        assert lasting(cluster) == alive
        cluster.settle()


def test_the_same_seed_says_the_same() -> None:
    assert [mutated(random.Random(7)) for _ in range(3)] == [mutated(random.Random(7)) for _ in range(3)]
