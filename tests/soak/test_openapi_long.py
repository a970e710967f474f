"""`/openapi.json` against what the router does, at length: boundaries of every field, and random requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tests.router.api.described import described
from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, serving
from twinpool.router.api.openapi import openapi_document

pytest_plugins = ["schemathesis.pytest.plugin"]
pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]
document = schemathesis.openapi.from_dict(openapi_document())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(FakeCluster(2, 2)) as found:
        yield found
        found.at_rest()


@document.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_described(case: Any, server: Server) -> None:
    described(server, case)
