"""Certificates on a Ray that is joined: nodes have addresses that no certificate names, and find each other by it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.soak.test_ray_node import more_nodes, nodes, said
from tests.soak.test_security_fuzz import secured
from tests.support.served_cluster import serving
from tests.support.socket_fuzz import targets
from twinpool.contracts.messages.calls import WATCH, WORKER_STATUS, Empty
from twinpool.contracts.messages.cluster_view import WatchRequest
from twinpool.contracts.wire.grpc_calls import CallChannel, CallFailed

pytestmark = [pytest.mark.soak, pytest.mark.slow]

PROMPT = "It was a fine morning, and"


async def served(endpoint: str) -> bool:
    """Whether somebody without a certificate is told a worker's status, or the table, there."""
    async with CallChannel(endpoint) as channel:
        table = channel.subscribe(WATCH, WatchRequest(), timeout_s=1.0)
        for call in (channel.call(WORKER_STATUS, Empty(), 1.0), anext(table)):
            try:
                await call
            except CallFailed:
                continue
            return True
    return False


@pytest.mark.timeout(600)
@pytest.mark.parametrize("protected", [False, True])
def test_nodes_with_certificates_serve_as_nodes_without(tmp_path: Path, protected: bool) -> None:
    section, _ = secured(tmp_path)
    kept = ("cluster_ca", "cluster_cert", "cluster_key")
    sections = {
        "security": {key: section[key] for key in kept} if protected else {},
        "transfer": {"plane": "zmq"}, "cluster": {"start_timeout_s": 200},
    }  # fmt: skip
    with serving("demo", tmp_path / "plain", sections={"transfer": {"plane": "local"}}) as plain:
        expected = plain.complete(PROMPT, max_tokens=16).tokens
    with nodes(tmp_path) as ray:
        address = str(said(ray)["address"])
        more_nodes(ray)
        said(ray)
        flags = ("--decode", "2", "--ray-address", address)
        with serving("demo", tmp_path / "run", *flags, sections=sections, ready_within=300, orderly=False) as cluster:
            assert cluster.complete(PROMPT, max_tokens=16).tokens == expected
            (joined,) = [line for line in cluster.lines if "joined from" in line]
            loopback = "127." in joined.split("joined from")[1]
            said_open = any("prompts and answers in the clear" in line for line in cluster.lines)
            assert said_open is (not protected and not loopback)
            doors = {
                target for target in targets(cluster) if ":" not in target.host or target.host.startswith("::ffff:")
            }
            assert len({target.process for target in doors}) == 5, "serve, the router, three workers"
            if protected or not loopback:
                assert not [
                    door for door in doors if asyncio.run(served(f"{door.host.rpartition(':')[2]}:{door.port}"))
                ]
            cluster.settle()
