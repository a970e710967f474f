"""The manifests for inference gateways, as kustomize renders them: what they name is there, and Twinpool takes it.

`SCHEMAS` has the fields of the custom resources that are used, of the versions that they name. No Kubernetes runs them
here."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.prometheus_server import DEPLOY
from tests.support.served_cluster import ROOT
from twinpool.cli.command_line import parser
from twinpool.cluster.serve.shutdown_signal import END_S
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.router.api.app import CLIENT_PREFIX_ROUTES, CLIENT_ROUTES, TEXT_KINDS
from twinpool.router.endpoint_picker.endpoint_picker import END_S as PICKER_END_S

FOLDER = DEPLOY / "kubernetes" / "gateway"
Object = dict[str, Any]


def fields(needed: str, **known: Any) -> Object:
    """A schema of an object with these fields and no others."""
    given = {"type": "object", "properties": known, "additionalProperties": False}
    return {**given, "required": needed.split()} if needed else given


TEXT, NUMBER, LABELS = {"type": "string"}, {"type": "integer"}, {"additionalProperties": {"type": "string"}}
PORT = fields("number", number={"type": "integer", "minimum": 1, "maximum": 65535})
MATCH = fields("path", path=fields("type value", type={"enum": ["Exact", "PathPrefix"]}, value={"pattern": "^/"}))
SCHEMAS = {
    "InferencePool": fields(
        "selector targetPorts endpointPickerRef",
        selector=fields("matchLabels", matchLabels=LABELS),
        targetPorts={"items": PORT, "minItems": 1, "maxItems": 8},
        endpointPickerRef=fields(
            "name", group=TEXT, kind=TEXT, name=TEXT, port=PORT, failureMode={"enum": ["FailOpen", "FailClose"]}
        ),
    ),
    "HTTPRoute": fields(
        "parentRefs rules",
        parentRefs={"items": fields("name", name=TEXT, namespace=TEXT, sectionName=TEXT)},
        hostnames={"items": TEXT},
        rules={
            "items": fields(
                "backendRefs",
                matches={"items": MATCH, "maxItems": 64},
                backendRefs={"items": fields("name", group=TEXT, kind=TEXT, name=TEXT, weight=NUMBER)},
                timeouts=fields("", request={"pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
            )
        },
    ),
    "ScaledObject": fields(
        "scaleTargetRef triggers",
        scaleTargetRef=fields("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=NUMBER,
        maxReplicaCount=NUMBER,
        cooldownPeriod=NUMBER,
        advanced=fields("", horizontalPodAutoscalerConfig={"type": "object"}),
        triggers={
            "items": fields(
                "type metadata",
                type={"const": "prometheus"},
                metadata=fields("serverAddress query threshold", serverAddress=TEXT, query=TEXT, threshold=TEXT),
            )
        },
    ),
}
VERSIONS = {
    "InferencePool": "inference.networking.k8s.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "ScaledObject": "keda.sh/v1alpha1",
}


@pytest.fixture(scope="module")
def objects() -> dict[tuple[str, str], Object]:
    """By kind and name."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    words = ["kubectl", "kustomize", str(FOLDER)]
    text = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}


def pod(objects: dict[tuple[str, str], Object], name: str) -> tuple[Object, Object]:
    """A deployment's pod, and its one container."""
    spec = objects["Deployment", name]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def test_custom_resources_have_only_fields_of_their_versions(objects: dict[tuple[str, str], Object]) -> None:
    custom = [one for one in objects.values() if one["kind"] in SCHEMAS]
    assert {one["kind"] for one in custom} == SCHEMAS.keys()
    for one in custom:
        assert one["apiVersion"] == VERSIONS[one["kind"]]
        jsonschema.validate(one["spec"], SCHEMAS[one["kind"]])


def test_what_is_named_is_there(objects: dict[tuple[str, str], Object]) -> None:
    labels = objects["Deployment", "twinpool-pod"]["spec"]["template"]["metadata"]["labels"]
    pool = objects["InferencePool", "twinpool"]["spec"]
    assert pool["selector"]["matchLabels"] == labels
    for name, deployment in (("twinpool-pods", "twinpool-pod"), ("twinpool-picker", "twinpool-picker")):
        service, (spec, container) = objects["Service", name]["spec"], pod(objects, deployment)
        found = objects["Deployment", deployment]["spec"]
        assert service["selector"] == found["selector"]["matchLabels"] == found["template"]["metadata"]["labels"]
        assert {port["targetPort"] for port in service["ports"]} == {port["name"] for port in container["ports"]}
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in spec.get("volumes", ())}
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert spec["securityContext"]["runAsNonRoot"]
    ports = {port["name"]: port["containerPort"] for port in pod(objects, "twinpool-pod")[1]["ports"]}
    assert pool["targetPorts"] == [{"number": ports["http"]}]
    picker = objects["Service", pool["endpointPickerRef"]["name"]]["spec"]["ports"]
    assert [port["port"] for port in picker] == [pool["endpointPickerRef"]["port"]["number"]]
    (rule,) = objects["HTTPRoute", "twinpool"]["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) in objects
    scaled = objects["ScaledObject", "twinpool-pod"]["spec"]
    assert ("Deployment", scaled["scaleTargetRef"]["name"]) in objects
    (metric,) = re.findall(r"twinpool_\w+", scaled["triggers"][0]["metadata"]["query"])
    assert f"`{metric}`" in (ROOT / "docs" / "metrics.md").read_text()
    assert f'service="{objects["Service", "twinpool-pods"]["metadata"]["name"]}"' in str(scaled["triggers"])


def test_twinpool_takes_its_commands_and_its_configuration(
    objects: dict[tuple[str, str], Object], tmp_path: Path
) -> None:
    (config_map,) = [one for one in objects.values() if one["kind"] == "ConfigMap"]
    (tmp_path / "cluster.yaml").write_text(config_map["data"]["cluster.yaml"])
    config = load_config(tmp_path / "cluster.yaml")
    spec, serve = pod(objects, "twinpool-pod")
    assert parser().parse_args(serve["command"][1:]).config == Path("/etc/twinpool/cluster.yaml")
    ports = {port["name"]: port["containerPort"] for port in serve["ports"]}
    assert (ports["http"], ports["metrics"]) == (config.launch.port, config.security.admin_port)
    assert spec["terminationGracePeriodSeconds"] >= config.cluster.stop_timeout_s + END_S + 10
    waiting, picker = pod(objects, "twinpool-picker")
    asked = parser().parse_args(picker["command"][1:])
    assert asked.endpoint == [f"twinpool-pods:{config.launch.port}"]
    assert [{"name": "grpc", "containerPort": asked.port}] == picker["ports"]
    assert {picker[probe]["grpc"]["service"] for probe in ("readinessProbe", "livenessProbe")} == {
        "readiness",
        "liveness",
    }
    assert waiting["terminationGracePeriodSeconds"] > PICKER_END_S + 10


def test_its_route_has_what_clients_need_and_waits_as_long_as_requests_may_take(
    objects: dict[tuple[str, str], Object],
) -> None:
    (rule,) = objects["HTTPRoute", "twinpool"]["spec"]["rules"]
    matches = [match["path"] for match in rule["matches"]]

    def passes(path: str) -> bool:
        return any(
            path == m["value"] or (m["type"] == "PathPrefix" and path.startswith(f"{m['value']}/")) for m in matches
        )

    for path in (*TEXT_KINDS, *CLIENT_PREFIX_ROUTES, "/v1/models", "/tokenize", "/detokenize"):
        assert passes(path) or path in ("/score", "/rerank", "/v2/rerank", "/"), path
    assert not any(passes(path) for path in CLIENT_ROUTES if path.startswith("/cluster/"))
    assert not passes("/metrics")
    assert float(rule["timeouts"]["request"].removesuffix("s")) > RouterConfig().max_timeout_s


def test_kubernetes_schemas_take_the_rest(objects: dict[tuple[str, str], Object]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate (22 MB)")
    for one in objects.values():
        if one["kind"] not in SCHEMAS:
            validate.validate(one, "1.32", strict=True)
