"""What deploy/ has for clusters: manifests that their schemas allow, and names in them that exist."""

import copy
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema  # comes with schemathesis
import pytest
import yaml

from kakeya.cli.serve_options import ServeOptions

ROOT = Path(__file__).parents[1]
MANIFEST = list(yaml.safe_load_all((ROOT / "deploy/kuberay.yaml").read_text()))
BY_KIND = {each["kind"]: each for each in MANIFEST}
CLUSTER = BY_KIND["RayCluster"]
GROUPS = {each["groupName"]: each for each in CLUSTER["spec"]["workerGroupSpecs"]}
LAUNCHER = yaml.safe_load((ROOT / "deploy/ray-cluster.yaml").read_text())
SCHEMA = jsonschema.Draft7Validator(json.loads((ROOT / "tests/support/kuberay-raycluster.json").read_text()))


def pods() -> Iterator[dict[str, Any]]:
    yield CLUSTER["spec"]["headGroupSpec"]["template"]["spec"]
    yield from (each["template"]["spec"] for each in GROUPS.values())


def mistakes() -> list[tuple[Callable[[Any], object], str]]:
    """What people write, and what the schema says of it."""
    return [
        (lambda spec: spec.update(rayVersions="2"), "rayVersions"),
        (lambda spec: spec.update(enableInTreeAutoscaling="yes"), "not of type 'boolean'"),
        (lambda spec: spec["workerGroupSpecs"][0].update(replica=1), "replica"),
        (lambda spec: spec["workerGroupSpecs"][0].pop("groupName"), "'groupName' is a required property"),
        (lambda spec: spec["workerGroupSpecs"][0].update(maxReplicas="many"), "not of type 'integer'"),
        (
            lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
            "not of type 'string'",
        ),
        (
            lambda spec: spec["headGroupSpec"]["template"]["spec"].pop("containers"),
            "'containers' is a required",
        ),
        (lambda spec: spec.pop("headGroupSpec"), "'headGroupSpec' is a required property"),
    ]


def test_kuberay_takes_the_manifest() -> None:
    """The schema has the fields that are used, out of KubeRay's own."""
    assert [error.message for error in SCHEMA.iter_errors(CLUSTER)] == []


@pytest.mark.parametrize(("make", "says"), mistakes())
def test_the_schema_refuses_mistakes(make: Callable[[Any], object], says: str) -> None:
    wrong = copy.deepcopy(json.loads(json.dumps(CLUSTER)))
    make(wrong["spec"])
    assert any(says in error.message for error in SCHEMA.iter_errors(wrong))


def test_volumes_claims_and_secrets_exist() -> None:
    for pod in pods():
        volumes = {each["name"]: each for each in pod["volumes"]}
        for container in pod["containers"]:
            assert {each["name"] for each in container["volumeMounts"]} == set(volumes)
        claims = [
            each["persistentVolumeClaim"]["claimName"] for each in volumes.values() if "secret" not in each
        ]
        assert claims == [BY_KIND["PersistentVolumeClaim"]["metadata"]["name"]]
    assert BY_KIND["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_service_reaches_the_front_ends() -> None:
    service, front = BY_KIND["Service"]["spec"], GROUPS["fronts"]
    name = CLUSTER["metadata"]["name"]
    assert service["selector"] == {"ray.io/cluster": name, "ray.io/group": front["groupName"]}
    (container,) = front["template"]["spec"]["containers"]
    listening = {each["containerPort"] for each in container["ports"]}
    assert {each["targetPort"] for each in service["ports"]} == listening
    bound = {each["name"]: each["value"] for each in container["env"]}
    assert {int(bound[each].rpartition(":")[2]) for each in ("KAKEYA_BIND", "KAKEYA_HTTP")} == listening
    assert front["rayStartParams"] == {"num-cpus": "0"}  # no home goes there
    assert front["minReplicas"] == front["replicas"]  # Ray thinks them idle


def test_settings_of_front_ends_are_those_of_the_server() -> None:
    (container,) = GROUPS["fronts"]["template"]["spec"]["containers"]
    names = [each["name"].removeprefix("KAKEYA_").lower() for each in container["env"]]
    known = set(ServeOptions.__dataclass_fields__)
    assert [name for name in names if name not in known] == []
    mounted = {each["mountPath"] for each in container["volumeMounts"]}
    files = [each["value"] for each in container["env"] if each["value"].startswith("/")]
    assert {str(Path(each).parent) for each in files} <= mounted


def test_kubernetes_waits_longer_than_a_drain() -> None:
    for group in GROUPS.values():
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= ServeOptions.shutdown_grace_s + 5


def test_one_version_of_ray_everywhere() -> None:
    version = CLUSTER["spec"]["rayVersion"]
    texts = [
        (ROOT / each).read_text() for each in ("Dockerfile", "deploy/kuberay.yaml", "deploy/ray-cluster.yaml")
    ]
    found = [re.findall(r"ray\[default\]==([\d.]+)", text) for text in texts]
    assert all(found)
    assert {each for some in found for each in some} == {version}


def test_the_launcher_has_machines_to_start() -> None:
    machines = [LAUNCHER["provider"]["head_ip"], *LAUNCHER["provider"]["worker_ips"]]
    assert len(set(machines)) == len(machines) > 2
    for commands in (LAUNCHER["head_start_ray_commands"], LAUNCHER["worker_start_ray_commands"]):
        assert sum("ray start" in each for each in commands) == 1


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: its schema is in it"
)
def test_rays_launcher_takes_the_cluster_file() -> None:
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.origin is not None
    schema = json.loads((Path(found.origin).parent / "autoscaler/ray-schema.json").read_text())
    checker = jsonschema.Draft7Validator(schema)
    assert [error.message for error in checker.iter_errors(LAUNCHER)] == []
    assert list(checker.iter_errors(LAUNCHER | {"workers": 3}))
