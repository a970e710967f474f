"""`/openapi.json` against what the router does: random requests that it describes, and random ones that it doesn't."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tests.router.api.described import described
from tests.router.http_server import Server
from twinpool.router.api.app import FRONT_ROUTES, PREFIX_ROUTES, ROUTES
from twinpool.router.api.openapi import openapi_document

pytest_plugins = ["schemathesis.pytest.plugin"]
SHORT = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": False}}})
document = schemathesis.openapi.from_dict(openapi_document(), config=SHORT)


@document.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_described(case: Any, server: Server) -> None:
    described(server, case)


def test_the_document_is_one_of_openapi_31() -> None:
    document = openapi_document()
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema), name
    assert document["openapi"] == "3.1.0"
    paths = {path.partition("/{")[0] for path in document["paths"]}
    assert paths == {*ROUTES, *FRONT_ROUTES} | {path.rstrip("/") for path in PREFIX_ROUTES}
    for path, methods in ROUTES.items():
        assert {method.lower() for method in methods} == document["paths"][path].keys()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"])
def test_a_body_that_is_declared_as_something_else_is_refused(server: Server, path: str) -> None:
    for kind, status in (("multipart/form-data; boundary=x", 415), ("application/xml", 415), ("application/json", 400)):
        answer = server.client.post(path, content=b"x", headers={"content-type": kind})
        assert answer.status_code == status
        assert "JSON" in answer.json()["error"]["message"]
    assert server.client.post(path, content=b"x").status_code == 400
