"""The overlays as kustomize renders them: what they name is there, and Twinpool and Ray take their commands.
No Kubernetes runs them here."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.prometheus_server import DEPLOY
from tests.support.served_cluster import ROOT
from twinpool.cli.command_line import parser
from twinpool.cluster.ray_nodes.ray_facts import RESOURCES
from twinpool.cluster.serve.shutdown_signal import END_S
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.ids import Role
from twinpool.router.api.app import ADMIN_ROUTES, CLIENT_ROUTES

FOLDER = DEPLOY / "kubernetes"
OVERLAYS = ("cpu-demo", "gpu")
SECRETS = {"twinpool", "twinpool-keys"}
"""Those that the page has operators make."""
Object = dict[str, Any]


@cache
def rendered(overlay: str) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    words = ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


@dataclass
class Cluster:
    """The objects of an overlay."""

    objects: list[Object]

    def of(self, kind: str) -> dict[str, Object]:
        return {o["metadata"]["name"]: o for o in self.objects if o["kind"] == kind}

    @property
    def ray(self) -> Object:
        (found,) = self.of("RayCluster").values()
        return found

    @property
    def pods(self) -> dict[str, Object]:
        """The pods' specs: the head's, and those of the groups by name."""
        spec = self.ray["spec"]
        groups = {group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]}
        return {"head": spec["headGroupSpec"]["template"]["spec"], **groups}

    def group(self, name: str) -> Object:
        found: Object = next(g for g in self.ray["spec"]["workerGroupSpecs"] if g["groupName"] == name)
        return found


@pytest.fixture(params=OVERLAYS)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return Cluster(list(yaml.safe_load_all(rendered(request.param))))


def test_a_ray_cluster_has_only_fields_that_kuberay_knows(cluster: Cluster) -> None:
    jsonschema.validate(cluster.ray, json.loads((Path(__file__).parent / "ray_cluster_schema.json").read_text()))
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints" / "cpu.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster.ray["spec"]["rayVersion"] == pinned[1]


def test_its_configuration_is_one_and_its_pools_are_the_groups(cluster: Cluster, tmp_path: Path) -> None:
    (config_map,) = cluster.of("ConfigMap").values()
    file = tmp_path / "cluster.yaml"
    file.write_text(config_map["data"]["cluster.yaml"])
    config = load_config(file)
    assert config.launch.ray_address == "auto"
    pools = yaml.safe_load(file.read_text())["pools"]
    for role in (Role.PREFILL, Role.DECODE):
        group = cluster.group(role)
        assert pools[role] == group["replicas"] <= group["maxReplicas"]
        # KubeRay puts the value into a shell's line: the outer quotes are the shell's.
        (places,) = shlex.split(group["rayStartParams"]["resources"])
        assert json.loads(places) == {RESOURCES[role]: 1}
        budget = cluster.of("PodDisruptionBudget")[f"twinpool-{role}"]["spec"]
        assert budget["selector"]["matchLabels"]["ray.io/group"] == role
        assert budget["minAvailable"] < group["replicas"], "an eviction must be possible"
    mounted = {m["mountPath"] for c in cluster.pods["head"]["containers"] for m in c["volumeMounts"]}
    for name in (config.security.keys_file, config.security.admin_keys_file):
        assert str(Path(name).parent) in mounted
    ports = {p["name"]: p["containerPort"] for p in cluster.pods["head"]["containers"][1]["ports"]}
    admin = config.security.admin_port
    routers = {f"metrics-{i}": admin + i for i in range(config.launch.routers)}
    assert ports == {"http": config.launch.port, **routers}


def test_what_is_named_is_there(cluster: Cluster) -> None:
    for pod in cluster.pods.values():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
            assert {source["secretRef"]["name"] for source in container["envFrom"]} <= SECRETS
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in cluster.of("ConfigMap")
            if "secret" in volume:
                assert volume["secret"]["secretName"] in SECRETS
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in cluster.of("PersistentVolumeClaim")
    head = {port["name"] for container in cluster.pods["head"]["containers"] for port in container["ports"]}
    for service in cluster.of("Service").values():
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= head
        assert service["spec"]["selector"]["ray.io/cluster"] == cluster.ray["metadata"]["name"]
    assert {o["metadata"].get("namespace", "twinpool") for o in cluster.objects} == {"twinpool"}


def test_probes_ask_what_a_router_answers_without_a_key(cluster: Cluster) -> None:
    (serve,) = (c for c in cluster.pods["head"]["containers"] if c["name"] == "serve")
    asked = {probe: serve[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert asked == {"startupProbe": "/health", "readinessProbe": "/health", "livenessProbe": "/live"}
    for path in asked.values():
        assert "GET" in CLIENT_ROUTES[path]
    assert "GET" in ADMIN_ROUTES["/metrics"]


def test_the_head_waits_for_the_drain_of_serve_and_its_ray_with_it(cluster: Cluster, tmp_path: Path) -> None:
    (config_map,) = cluster.of("ConfigMap").values()
    file = tmp_path / "cluster.yaml"
    file.write_text(config_map["data"]["cluster.yaml"])
    head = cluster.pods["head"]
    ray, serve = head["containers"]
    assert head["terminationGracePeriodSeconds"] >= load_config(file).cluster.stop_timeout_s + END_S + 10
    assert "preStop" not in serve.get("lifecycle", {}), "SIGTERM is a drain, and every second before it is lost"
    assert head["shareProcessNamespace"], "the other container's processes are seen"
    waits = ray["lifecycle"]["preStop"]["exec"]["command"]
    program = tmp_path / serve["command"][0]  # a console script: its name is the process's
    program.write_text(f"#!{sys.executable} -S\nimport sys\nprint('runs', flush=True)\nsys.stdin.read()\n")
    program.chmod(0o755)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline() == b"runs\n"
        hook = subprocess.Popen([word.replace("/proc/[0-9]*/", f"/proc/{serving.pid}/") for word in waits])
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                hook.wait(0.3)
            serving.communicate()
            assert hook.wait(60) == 0
        finally:
            hook.kill()


def test_commands_are_ones_that_twinpool_takes_and_a_pod_waits_for_its_drain(cluster: Cluster) -> None:
    (serve,) = (c for c in cluster.pods["head"]["containers"] if c["name"] == "serve")
    assert parser().parse_args(serve["command"][1:]).config == Path("/etc/twinpool/cluster.yaml")
    operators = cluster.of("Service")["twinpool-operators"]["spec"]
    for role in (Role.PREFILL, Role.DECODE):
        pod = cluster.pods[role]
        (worker,) = pod["containers"]
        shell = worker["lifecycle"]["preStop"]["exec"]["command"]
        drain = parser().parse_args(shlex.split(shell[2].replace("$(hostname)", "twinpool-decode-x"))[2:])
        assert drain.worker == "twinpool-decode-x"
        assert drain.timeout < pod["terminationGracePeriodSeconds"]
        url = {variable["name"]: variable["value"] for variable in worker["env"]}["TWINPOOL_URL"]
        assert url == f"http://twinpool-operators:{operators['ports'][0]['port']}"


def test_pods_run_as_the_images_user_without_rights(cluster: Cluster) -> None:
    for pod in cluster.pods.values():
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_schemas_take_every_object(overlay: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate (22 MB)")
    cluster = Cluster(list(yaml.safe_load_all(rendered(overlay))))
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": n}, "spec": s} for n, s in cluster.pods.items()]
    for found in [*pods, *(o for o in cluster.objects if o["kind"] != "RayCluster")]:
        validate.validate(found, "1.32", strict=True)
