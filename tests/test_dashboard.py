"""The dashboard for Grafana, and what compose.yaml starts: they name metrics, labels and files that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Counter, Gauge, Histogram

from kakeya.metrics import Metrics, ProposerMetrics

ROOT = Path(__file__).parents[1]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/kakeya.json").read_text())
# What Prometheus itself knows of a sample, and of a bucket.
_EVERYWHERE = {"instance", "le"}


def exposed() -> dict[str, set[str]]:
    """Every series that a server or a proposer exposes by name, with its labels."""
    metrics = [*vars(Metrics()).values(), *vars(ProposerMetrics()).values()]
    series: dict[str, set[str]] = {}
    for metric in metrics:
        if isinstance(metric, (Counter, Gauge, Histogram)):
            ending = {Counter: "_total", Gauge: "", Histogram: "_bucket"}[type(metric)]
            series[metric._name + ending] = set(metric._labelnames)
    return series


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def test_names_are_those_of_the_exposition() -> None:
    """The test's own idea of a name, held to what Prometheus would read."""
    told = set(re.findall(r"^# TYPE (\w+) ", Metrics().exposition().decode(), re.MULTILINE))
    bare = {name.removesuffix("_bucket") for name in exposed() if not name.startswith("kakeya_proposer_")}
    assert {name for name in told if not name.endswith("_created")} == bare


def test_every_name_on_the_dashboard_is_a_metric() -> None:
    series = exposed()
    for expression in expressions():
        names = set(re.findall(r"\bkakeya_\w+", expression))
        assert names <= set(series), expression
        asked = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        asked |= set(re.findall(r"[{,]\s*(\w+)\s*=", expression))
        assert asked <= _EVERYWHERE.union(*(series[name] for name in names)), expression


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {name for expression in expressions() for name in re.findall(r"\bkakeya_\w+", expression)}
    assert set(exposed()) - shown == set()


def test_panels_have_their_own_numbers_and_places() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


def test_compose_mounts_what_is_there(services: dict[str, Any]) -> None:
    mounts = [
        mount for service in services.values() for mount in service["volumes"] if mount.startswith("./")
    ]
    assert len(mounts) == 3
    for mount in mounts:
        assert (ROOT / mount.partition(":")[0]).exists(), mount


def test_compose_publishes_nothing_to_other_machines(services: dict[str, Any]) -> None:
    published = [port for service in services.values() for port in service["ports"]]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_nobody_is_an_administrator_of_grafana_by_a_password_that_everybody_knows(
    services: dict[str, Any],
) -> None:
    settings = services["grafana"]["environment"]
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    # The form, and `Authorization: Basic` at the API: each would take admin with the password admin.
    assert (settings["GF_AUTH_DISABLE_LOGIN_FORM"], settings["GF_AUTH_BASIC_ENABLED"]) == ("true", "false")


def test_prometheus_and_grafana_find_each_other(services: dict[str, Any]) -> None:
    scrapes = yaml.safe_load((ROOT / "deploy/prometheus.yaml").read_text())["scrape_configs"]
    (target,) = scrapes[0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert any(published.endswith(f":{port}") for published in services[host]["ports"])
    provisioning = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/kakeya.yaml").read_text())["providers"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]


def test_stages_that_compose_builds_are_in_the_dockerfile(services: dict[str, Any]) -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    over = yaml.safe_load((ROOT / "deploy/compose.cuda.yaml").read_text())["services"]
    assert {services["kakeya"]["build"]["target"], over["kakeya"]["build"]["target"]} <= stages
