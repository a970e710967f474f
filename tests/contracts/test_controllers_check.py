"""The settings of controllers: what is refused, with what to do, and without any password."""

from __future__ import annotations

import pytest

from twinpool.contracts.config.ledger_place import controller_endpoints, without_password
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.errors import ConfigError

SERVER = ("cluster.ledger=redis://h:1/0", "cluster.name=prod")


@pytest.mark.parametrize(
    ("ledger", "word"),
    [
        ("http://:geheim@h:6379", "a path, or a server"),
        ("redis://:geheim@h:99999/0", "can't be read"),
        ("redis://:geheim@h:nine/0", "can't be read"),
        ("redis://:geheim@h:0/0", "port 0"),
        ("redis://:geheim@/0", "names no host"),
        ("redis://:geheim@h/zero", "number of its database"),
        ("unix://", "names no socket"),
    ],
)
def test_a_ledger_that_is_none_is_refused_without_its_password(ledger: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as refused:
        load_config(None, [f"cluster.ledger={ledger}"])
    assert "cluster.ledger" in str(refused.value)
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize(
    ("assignments", "word"),
    [
        (["cluster.name=a b"], "cluster.name takes letters"),
        (["cluster.controllers=h:1"], "needs cluster.ledger on a server and cluster.name"),
        (["cluster.controllers=h:1", "cluster.ledger=/a/file", "cluster.name=x"], "on a server"),
        ([*SERVER, "cluster.controllers=h"], "takes host:port"),
        ([*SERVER, "cluster.controllers=h:70000"], "takes host:port"),
        ([*SERVER, "cluster.controllers='h:1,h:1'"], "twice"),
        (["cluster.ledger_replicas=1"], "needs cluster.ledger on a server"),
        (["cluster.standby_controllers=9"], "at most 8"),
        (["cluster.standby_controllers=1", "cluster.lease_s=4"], "more than half of cluster.lease_s"),
    ],
)
def test_what_doesnt_go_together_is_refused_with_what_to_do(assignments: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_config(None, assignments)


@pytest.mark.parametrize(
    "ledger", ["", "/a/file", "file", "redis://h", "redis://u:p@h:1/2", "rediss://[::1]:7/0", "unix:///a/socket?db=1"]
)
def test_ledgers_that_are_some_are_taken(ledger: str) -> None:
    config = load_config(None, [f"cluster.ledger={ledger}", "cluster.lease_s=2"])
    assert config.cluster.ledger == ledger
    assert "p@" not in without_password(ledger)


def test_endpoints_keep_their_order() -> None:
    assert controller_endpoints("b:2, a:1,[::1]:3") == ("b:2", "a:1", "[::1]:3")
    assert controller_endpoints("") == ()
