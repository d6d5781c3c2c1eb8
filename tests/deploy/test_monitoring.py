"""deploy/monitoring: the alerts by promtool and in a real Prometheus that scrapes real endpoints; the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from elastic_train.observe.metrics import Metrics
from elastic_train.tools.drills.nodes import free_port, wait_until
from tests.unit.test_metrics import state, world

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
ALERTS = re.findall(r"alert: (\w+)", (MONITORING / "alerts.yml").read_text())
FASTER = 60
"""how much shorter the waits of the alerts are in the test with a real Prometheus"""


def promtool(*arguments: str) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed: apt install prometheus")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, cwd=MONITORING)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("file", ["prometheus.yml", "prometheus-kubernetes.yml"])
def test_the_configuration_is_valid(file: str) -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "config", file)


def test_prometheus_is_let_in_where_it_asks() -> None:
    """One port, in the configuration, the policy and on the page; and the policy is for the pods that train."""
    yaml = pytest.importorskip("yaml")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    policy = yaml.safe_load((MONITORING / "network-kubernetes.yaml").read_text())
    kubernetes_validate.validate(policy, "1.33", strict=True)
    scrape = yaml.safe_load((MONITORING / "prometheus-kubernetes.yml").read_text())["scrape_configs"][0]
    (found,) = scrape["dns_sd_configs"]
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": found["port"]}]
    assert f"--metrics-port {found['port']} --metrics-host 0.0.0.0" in (MONITORING / "README.md").read_text()
    service = yaml.safe_load((MONITORING.parent / "kubernetes" / "base" / "service.yaml").read_text())
    assert policy["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"]
    assert found["names"] == [f"{service['metadata']['name']}.elastic-train.svc"]


def test_the_alerts_are_raised_when_they_should_be_and_not_before() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")
    tested = set(re.findall(r"alertname: (\w+)\n +exp_alerts", (MONITORING / "alerts_test.yml").read_text()))
    assert tested == set(ALERTS)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def endpoint(stack: ExitStack, run: str) -> tuple[Metrics, int]:
    port = free_port()
    return stack.enter_context(closing(Metrics("127.0.0.1", port, run=run, max_nodes=4, log=print, warn=print))), port


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\belastic_train_\w+", text))


def dashboard() -> dict[str, Any]:
    return dict(json.loads((MONITORING / "dashboard.json").read_text()))


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def test_alerts_and_dashboard_ask_for_what_is_told(stack: ExitStack) -> None:
    metrics, _ = endpoint(stack, "mine")
    metrics.enter(world(1), state())
    metrics.snapshot(step=1, num_bytes=1, stall_seconds=1.0, total_seconds=1.0)
    told = {family.name for family in metrics.collect()}
    shown = names_in("\n".join(expressions()))
    # Descriptions of alerts are prose, and name files and commands of the project too.
    alerts = names_in("\n".join(line for line in (MONITORING / "alerts.yml").read_text().splitlines() if "(" in line))
    assert alerts <= told
    assert told - shown == {
        "elastic_train_started_time_seconds",
        "elastic_train_snapshot_bytes",
        "elastic_train_snapshot_step",
    }
    assert shown <= told


def test_the_dashboard_is_one_that_can_be_shown(tmp_path: Path) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        own = {(column, row) for column in columns for row in rows}
        assert columns.stop <= 24
        assert not own & cells, f"{panel['title']} covers another panel"
        cells |= own
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$run", ".*")}
        for number, expression in enumerate(expressions())
    ]
    file = tmp_path / "expressions.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML too
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))


class Prometheus:
    """A real one, on a free port of the loopback interface."""

    def __init__(self, path: Path, targets: list[int], alerts: str) -> None:
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("prometheus is not installed: apt install prometheus")
        (path / "alerts.yml").write_text(alerts)
        config = (MONITORING / "prometheus.yml").read_text().replace("15s", "1s")
        listed = "".join(f"\n          - 127.0.0.1:{port}" for port in targets)
        (path / "prometheus.yml").write_text(config.replace("\n          - 127.0.0.1:9400", listed))
        self.port = free_port()
        with (path / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [program, f"--config.file={path / 'prometheus.yml'}", f"--storage.tsdb.path={path / 'data'}",
                 f"--web.listen-address=127.0.0.1:{self.port}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def ask(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=20) as reply:
                return json.load(reply)["data"]
        except OSError:  # not ready yet
            return None

    def firing(self) -> set[tuple[str, str]]:
        """(alert, run)."""
        alerts = (self.ask("alerts") or {"alerts": []})["alerts"]
        return {(a["labels"]["alertname"], a["labels"]["run"]) for a in alerts if a["state"] == "firing"}

    def runs_seen(self) -> set[str]:
        found = self.ask("query?" + urllib.parse.urlencode({"query": "elastic_train_step"})) or {"result": []}
        return {entry["metric"]["run"] for entry in found["result"]}

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)


def in_less_time(alerts: str) -> str:
    """The same alerts with every wait FASTER times shorter."""
    alerts = re.sub(r"> (\d{3,})", lambda found: f"> {int(found[1]) / FASTER}", alerts)
    alerts = re.sub(r"for: (\d+)m", lambda found: f"for: {60000 * int(found[1]) // FASTER}ms", alerts)
    return alerts.replace("[1h]", f"[{3600 // FASTER}s]")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_alert_fires_in_a_real_prometheus(stack: ExitStack, tmp_path: Path) -> None:
    names = ("good", "stuck", "gone", "small", "unsaved", "flaky", "wasteful")
    runs, ports = {}, []
    for name in names:
        runs[name], port = endpoint(stack, name)
        ports.append(port)
        form = 1000.0 if name == "wasteful" else 10.0
        runs[name].enter(world(3 if name == "small" else 4), state(train=1000.0, form=form))

    def go_on() -> None:
        """As training would, for those that do."""
        for name in runs:
            if name not in ("stuck", "unsaved"):
                runs[name].snapshot(step=7, num_bytes=1000, stall_seconds=0.01, total_seconds=0.1)
            if name != "stuck":
                form = 1000.0 if name == "wasteful" else 10.0
                runs[name].step(state(train=1000.0, form=form), 0.5, 64)

    alerts = in_less_time((MONITORING / "alerts.yml").read_text())
    prometheus = stack.enter_context(closing(Prometheus(tmp_path, ports, alerts)))

    def is_every_run_seen() -> bool:
        go_on()
        return prometheus.runs_seen() == set(names)

    wait_until(is_every_run_seen, "every run in Prometheus", 120)
    runs.pop("gone").close()
    runs["flaky"].enter(world(4, generation=8), state(train=1000.0))
    expected = {
        ("ElasticTrainNoStep", "stuck"),
        ("ElasticTrainNobodyAnswers", "gone"),
        ("ElasticTrainWorldBelowTarget", "small"),
        ("ElasticTrainSnapshotTooOld", "unsaved"),
        ("ElasticTrainReformsTooOften", "flaky"),
        ("ElasticTrainLowGoodput", "wasteful"),
    }
    assert {alert for alert, _ in expected} == set(ALERTS)

    fired: set[tuple[str, str]] = set()  # the hour in which a re-form counts ends before the snapshots are too old

    def have_all_fired() -> bool:
        go_on()
        fired.update(prometheus.firing())
        assert not {alert for alert, run in fired if run == "good"}
        return expected <= fired

    wait_until(have_all_fired, "every alert", 300)
