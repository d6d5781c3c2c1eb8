"""The sources of notices, as their documentation has them; and a server that hangs or sends garbage."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from elastic_train.errors import UsageError
from elastic_train.notices import notice as answers
from elastic_train.notices.clouds import AwsSource, AzureSource, GcpSource, find_cloud
from elastic_train.notices.kubernetes import KubernetesSource
from elastic_train.notices.metadata import LINK_LOCAL, ask
from elastic_train.notices.notice import NoticeSource, NoticeUnreadable
from elastic_train.notices.own_sources import EndpointSource, FileSource, Relay, SlurmSource
from elastic_train.notices.watcher import NoticeWatcher, source_of
from elastic_train.preemption import (
    Fit,
    NoticesFlag,
    PreemptionNotice,
    fit_of,
    given_seconds,
    notices_flag,
    shown_notices,
)
from elastic_train.stopping import GRACE_SECONDS
from elastic_train.tools.drills.nodes import wait_until
from tests.metadata_server import learn, serving

NOON = 1_790_000_000.0
ENDED = "the VM is terminated for maintenance of its host"


def said(found: PreemptionNotice | None) -> tuple[str, float | None, bool] | None:
    return None if found is None else (found.reason, found.deadline, found.is_certain)


# --- what they answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("off", NoticesFlag("off")),
        ("aws", NoticesFlag("aws")),
        ("file:gone", NoticesFlag("file", "gone")),
        ("file:///run/gone", NoticesFlag("file", "/run/gone")),
        ("http://10.0.0.1:80/gone?node=3", NoticesFlag("http", "http://10.0.0.1:80/gone?node=3")),
        ("https://host/gone", NoticesFlag("http", "https://host/gone")),
    ],
)
def test_the_flag(text: str, flag: NoticesFlag) -> None:
    assert notices_flag(text) == flag


@pytest.mark.parametrize("text", ["http://user:secret@host/?token=secret", "file://", "AWS", ""])
def test_a_flag_that_means_nothing(text: str) -> None:
    with pytest.raises(UsageError, match="must be off, auto") as caught:
        notices_flag(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("behind", ["", "?token=secret", "?token=secret#part", "#secret"])
def test_what_is_shown_of_the_flag_has_no_query(behind: str) -> None:
    assert shown_notices(f"https://host:8/gone{behind}") == "https://host:8/gone"
    assert shown_notices("file:gone?") == "file:gone?"


def test_aws() -> None:
    """The examples of "Spot Instance interruption notices" and "EC2 instance rebalance recommendations"."""
    at = 1_505_722_920.0
    for action in ("stop", "terminate", "hibernate"):
        found = answers.from_instance_action(json.dumps({"action": action, "time": "2017-09-18T08:22:00Z"}))
        assert said(found) == (f"spot instance {action}", at, True)
    found = answers.from_rebalance('{"noticeTime": "2020-10-27T08:22:00Z"}')
    assert said(found) == ("rebalance recommendation", None, False)


def test_gcp() -> None:
    assert answers.from_preempted("FALSE") is None
    assert said(answers.from_preempted("TRUE\n")) == ("the VM is preempted", None, True)
    assert answers.from_maintenance_event("NONE") is None
    migrated = answers.from_maintenance_event("MIGRATE_ON_HOST_MAINTENANCE")
    assert migrated is not None
    assert not migrated.is_certain
    ended = answers.from_maintenance_event("TERMINATE_ON_HOST_MAINTENANCE")
    assert ended is not None
    assert ended.is_certain


def azure(*events: dict[str, Any]) -> str:
    common = {"ResourceType": "VirtualMachine", "Resources": ["vm-1"], "EventStatus": "Scheduled"}
    times = {"NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT", "DurationInSeconds": -1, "EventSource": "Platform"}
    return json.dumps({"DocumentIncarnation": 1, "Events": [common | times | event for event in events]})


def test_azure() -> None:
    at = 1_474_309_787.0
    for kind in ("Preempt", "Terminate", "Reboot", "Redeploy"):
        found = answers.from_scheduled_events(azure({"EventType": kind}), "vm-1")
        assert said(found) == (f"scheduled event {kind}", at, True)
    found = answers.from_scheduled_events(azure({"EventType": "Freeze"}), "vm-1")
    assert said(found) == ("scheduled event Freeze", at, False)
    assert answers.from_scheduled_events(azure({"EventType": "Preempt"}), "vm-2") is None, "another VM of the scale set"
    assert answers.from_scheduled_events(azure(), "vm-1") is None
    theirs: dict[str, Any] = {"EventType": "Preempt", "Resources": ["vm-2"]}
    for unread in (theirs | {"Resources": "vm-2"}, {"NotBefore": "soon", "EventType": "Reboot"}, {"EventType": 7}):
        found = answers.from_scheduled_events(azure(unread, {"EventType": "Terminate"}), "vm-1")
        assert said(found) == ("scheduled event Terminate", at, True), "what cannot be read hides nothing"
        with pytest.raises(NoticeUnreadable):
            answers.from_scheduled_events(azure(unread, theirs), "vm-1")
    several = azure({"EventType": "Freeze"}, {"EventType": "Preempt", "NotBefore": "", "EventStatus": "Started"})
    assert said(answers.from_scheduled_events(several, "vm-1")) == ("scheduled event Preempt", None, True)


def test_kubernetes_answers() -> None:
    """As in "Disruptions" and "Taints and Tolerations"."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    pod = {"metadata": {"deletionTimestamp": "2026-09-21T14:13:20Z"}, "status": {"conditions": [condition]}}
    assert said(answers.from_pod(pod)) == ("the pod is disrupted: PreemptionByScheduler", NOON, True)
    assert answers.from_pod({"status": {"conditions": [condition | {"status": "False"}]}}) is None
    assert answers.from_pod({}) is None
    taint = {"key": "cloud.google.com/impending-node-termination", "effect": "NoSchedule"}
    assert said(answers.from_node({"spec": {"taints": [taint]}})) == ("the node is about to be terminated", None, True)
    assert answers.from_node({"spec": {"taints": [{"key": "node.kubernetes.io/unschedulable"}]}}) is None


def test_an_answer_of_ones_own() -> None:
    assert said(answers.from_own("file", "")) == ("notice", None, True)
    assert answers.from_own("file", "null\n") is None
    without = answers.from_own("file", '{"source": null, "reason": null, "deadline": null}')
    assert without == PreemptionNotice("file", "notice")
    found = answers.from_own("file", '{"deadline": "2026-09-21T14:13:20+00:00", "certain": false, "reason": "tonight"}')
    assert said(found) == ("tonight", NOON, False)
    whole = PreemptionNotice("aws", "spot instance stop", NOON, True)
    assert answers.from_own("relay", answers.to_own(whole)) == whole
    assert answers.from_own("relay", answers.to_own(None)) is None


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "7", '{"deadline": "soon"}', '{"deadline": true}', '{"deadline": NaN}', '{"certain": "yes"}',
        "[" * 100_000, '{"deadline": 1' + "0" * 400 + "}", '{"deadline": -1}', '{"deadline": 1e300}',
    ],
)  # fmt: skip
def test_lies(text: str) -> None:
    with pytest.raises(NoticeUnreadable):
        answers.from_own("file", text)


@pytest.mark.parametrize(
    "read",
    [
        lambda: answers.from_instance_action('{"action": "stop"}'),
        lambda: answers.from_instance_action('{"action": 7, "time": "2017-09-18T08:22:00Z"}'),
        lambda: answers.from_rebalance("{}"),
        lambda: answers.from_instance_action('{"action": "stop", "time": "0001-01-02T00:00:00Z"}'),
        lambda: answers.from_preempted("<html>"),
        lambda: answers.from_maintenance_event(""),
        lambda: answers.from_scheduled_events("{}", "vm-1"),
        lambda: answers.from_scheduled_events('{"Events": [7]}', "vm-1"),
        lambda: answers.from_scheduled_events(azure({"EventType": "Preempt", "NotBefore": "soon"}), "vm-1"),
        lambda: answers.from_scheduled_events(azure({"EventType": "Preempt", "NotBefore": 7}), "vm-1"),
    ],
)
def test_lies_of_clouds(read: Any) -> None:
    with pytest.raises(NoticeUnreadable):
        read()


def test_when_it_is_acted_on() -> None:
    def is_due(seconds: float | None, *, is_certain: bool = True) -> bool:
        return PreemptionNotice("x", "y", None if seconds is None else NOON + seconds, is_certain).is_due(NOON)

    assert is_due(None)
    assert is_due(120)
    assert is_due(-5), "it may be late, or the clocks differ"
    assert not is_due(121)
    assert not is_due(10, is_certain=False)


@pytest.mark.parametrize(("save_seconds", "lead"), [(0.0, 120.0), (57.5, 120.0), (150.0, 305.0)])
def test_where_saving_takes_long_it_leaves_earlier(save_seconds: float, lead: float) -> None:
    """So much earlier that it fits; and a shorter one, of nodes that have come meanwhile, takes back nothing."""
    assert fit_of(save_seconds, lead) is Fit.FITS
    heard, takes = Heard(), [save_seconds]
    heard.watcher = NoticeWatcher(lambda: heard, heard, save_seconds=lambda: takes[0], now=lambda: heard.now)
    far = PreemptionNotice("s", "reboot", NOON + 900)
    assert heard.after(far, 0.0) == [("hear", "reboot")]
    assert heard.after(far, 899.0 - lead) == []
    assert heard.after(far, 1.0) == [("leave", "reboot")]
    takes[0] = 0.0
    assert heard.after(far, 0.0) == []


@pytest.mark.parametrize(
    ("save_seconds", "given", "fit"),
    [
        (12.5, 30.0, Fit.FITS),
        (13.0, 30.0, Fit.TIGHT),
        (30.0, 30.0, Fit.TIGHT),
        (30.1, 30.0, Fit.TOO_LONG),
        (48.0, 120.0, Fit.FITS),
        (0.1, 0.0, Fit.TOO_LONG),
    ],
)
def test_what_fits_a_notice(save_seconds: float, given: float, fit: Fit) -> None:
    assert fit_of(save_seconds, given) is fit


@pytest.mark.parametrize(
    ("source", "environ", "seconds"),
    [
        ("aws", {}, 120.0),
        ("gcp", {}, 30.0),
        ("azure", {}, 30.0),
        ("file", {}, None),
        ("http", {}, None),
        ("kubernetes", {}, None),
        ("auto", {}, None),
        ("gcp", {"SLURM_SIGNAL": "USR1@90"}, 30.0),
        ("slurm", {}, None),
        ("slurm", {"SLURM_SIGNAL": "USR1@90"}, 90.0),
        ("slurm", {"SBATCH_SIGNAL": "B:10@120"}, 120.0),
        ("slurm", {"SLURM_SIGNAL": "R:USR1"}, 60.0),
        ("slurm", {"SLURM_SIGNAL": "at noon"}, None),
    ],
)
def test_how_long_before_a_notice_comes(source: str, environ: dict[str, str], seconds: float | None) -> None:
    assert given_seconds(source, environ) == seconds


def test_what_is_shown_of_it_is_one_short_line() -> None:
    described = PreemptionNotice("http", "\x1b[2J\nrm -rf\r" + "x" * 1000).described
    assert described.isprintable()
    assert len(described) == 200


# --- how they are asked -----------------------------------------------------------------------------------------------


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return tmp_path / "known.json"


def test_asking_aws(known: Path) -> None:
    with serving("aws", known) as server:
        source = AwsSource(("127.0.0.1", server.server_port))
        assert source.look() is None
        learn(known, rebalance={"noticeTime": "2020-10-27T08:22:00Z"})
        assert said(source.look()) == ("rebalance recommendation", None, False)
        server.token = "another"  # the one before has run out
        learn(known, action={"action": "stop", "time": "2026-09-21T14:13:20Z"})
        assert said(source.look()) == ("spot instance stop", NOON, True)


def test_asking_gcp(known: Path) -> None:
    learn(known, instance="", preempted="FALSE", maintenance="NONE")
    with serving("gcp", known) as server:
        source = GcpSource(("127.0.0.1", server.server_port))
        assert source.look() is None
        learn(known, preempted="TRUE", maintenance="NONE")
        assert said(source.look()) == ("the VM is preempted", None, True)
        for unknown in ({}, {"maintenance": "a new word"}):
            learn(known, preempted="TRUE", **unknown)
            assert said(source.look()) == ("the VM is preempted", None, True), (
                "it is certain, whatever else is not known"
            )
        learn(known, preempted="FALSE")
        with pytest.raises(NoticeUnreadable):
            source.look()
        learn(known, preempted="TRUE", maintenance="NONE")
        server.cloud = "something that is not Google's"
        with pytest.raises(NoticeUnreadable):
            source.look()


def test_asking_azure(known: Path) -> None:
    learn(known, machine="vm-1", events=json.loads(azure()))
    with serving("azure", known) as server:
        source = AzureSource(("127.0.0.1", server.server_port))
        assert source.look() is None
        learn(known, machine="vm-1", events=json.loads(azure({"EventType": "Preempt"})))
        found = source.look()
        assert found is not None
        assert found.reason == "scheduled event Preempt"


@pytest.mark.parametrize(
    ("cloud", "documents", "kind"),
    [
        ("aws", {}, AwsSource),
        ("gcp", {"instance": ""}, GcpSource),
        ("azure", {"machine": "vm-1"}, AzureSource),
        ("nobody's", {}, None),
    ],
)
def test_which_cloud_it_is(cloud: str, documents: dict[str, Any], kind: type | None, known: Path) -> None:
    learn(known, **documents)
    with serving(cloud, known) as server:
        found = find_cloud(("127.0.0.1", server.server_port), seconds=5.0)
    assert (None if found is None else type(found)) is kind


def test_a_container_whose_answers_take_too_many_hops(known: Path) -> None:
    """Only the answer to the question for a token is lost there; who asks is told what to do, also by `auto`."""
    learn(known, **{"hop limit": 1})
    with serving("aws", known) as server:
        found = find_cloud(("127.0.0.1", server.server_port))
        assert isinstance(found, AwsSource)
        with pytest.raises(NoticeUnreadable, match="hop limit of IMDSv2 must be 2"):
            found.look()
        learn(known, **{"hop limit": 2})
        assert found.look() is None


def test_a_slow_server_of_another_cloud_is_not_taken_for_that(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the time for the last question says nothing."""
    learn(known, **{"hop limit": 1})
    with serving("nobody's", known) as server:
        address = "127.0.0.1", server.server_port

        def ask_late(*arguments: Any, **options: Any) -> Any:
            if options.get("method") != "PUT":
                time.sleep(0.12)
            return ask(*arguments, **options)

        monkeypatch.setattr("elastic_train.notices.clouds.ask", ask_late)
        assert find_cloud(address) is None


def test_nodes_that_are_taken_together_hear_of_it_before_one_leaves() -> None:
    for source in (AwsSource, GcpSource, AzureSource):
        assert source.poll_seconds < GRACE_SECONDS


def test_a_machine_with_a_gpu_has_an_hour_before_maintenance(known: Path) -> None:
    clock = [NOON]
    learn(known, instance="", preempted="FALSE", maintenance="TERMINATE_ON_HOST_MAINTENANCE")
    with serving("gcp", known) as server:
        address = "127.0.0.1", server.server_port
        late = GcpSource(address, has_gpu=True, now=lambda: clock[0])
        assert said(late.look()) == (ENDED, None, False), "when that was announced nobody knows"
        assert said(GcpSource(address, has_gpu=False).look()) == (ENDED, None, True), "60 s at most"
        learn(known, instance="", preempted="FALSE", maintenance="NONE")
        assert late.look() is None
        learn(known, instance="", preempted="FALSE", maintenance="TERMINATE_ON_HOST_MAINTENANCE")
        for _ in range(2):
            found = late.look()
            assert said(found) == (ENDED, NOON + 3600, True)
            clock[0] += 600
        assert found is not None
        assert not found.is_due(NOON + 3479)
        assert found.is_due(NOON + 3480)


@pytest.mark.parametrize("fault", ["hangs", "drips"])
def test_a_probe_takes_no_longer_than_it_may(fault: str, known: Path) -> None:
    learn(known, fault=fault)
    with serving("aws", known) as server:
        began = time.monotonic()
        assert find_cloud(("127.0.0.1", server.server_port)) is None
        assert 0.2 < time.monotonic() - began < 30.0, "the server would go on for a minute"


@pytest.mark.parametrize(
    ("cloud", "fault"),
    [*product(["aws", "gcp", "azure"], ["500", "redirects", "lies"]), *product(["aws"], ["hangs", "drips", "floods"])],
)
def test_a_server_that_hangs_or_lies(cloud: str, fault: str, known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "elastic_train.notices.metadata.ask.__kwdefaults__", {**(ask.__kwdefaults__ or {}), "seconds": 0.3}
    )
    learn(known, fault=fault)
    with serving(cloud, known) as server:
        address = "127.0.0.1", server.server_port
        source = {"aws": AwsSource, "gcp": GcpSource, "azure": AzureSource}[cloud](address)
        with pytest.raises(NoticeUnreadable):
            source.look()
        assert "/elsewhere" not in server.asked


def test_proxies_are_passed_by(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    learn(known, instance="", preempted="TRUE", maintenance="NONE")
    with serving("gcp", known) as server:
        assert find_cloud(("127.0.0.1", server.server_port), seconds=5.0) is not None


def test_no_name_is_looked_up(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers for names may be slow, or anybody."""
    assert ipaddress.ip_address(LINK_LOCAL[0]).is_link_local
    looked_up, ask_system = [], socket.getaddrinfo

    def note(host: Any, *arguments: Any, **options: Any) -> Any:
        looked_up.append(host)
        return ask_system(host, *arguments, **options)

    learn(known, instance="", preempted="FALSE", maintenance="NONE", machine="vm-1", events={"Events": []})
    for cloud, source in {"aws": AwsSource, "gcp": GcpSource, "azure": AzureSource, "nobody's": None}.items():
        with serving(cloud, known) as server, monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", note)
            found = find_cloud(("127.0.0.1", server.server_port), seconds=5.0)
            assert (None if found is None else type(found)) is source
            if found is not None:
                assert found.look() is None
    assert set(looked_up) == {"127.0.0.1"}


def test_an_endpoint_of_ones_own(known: Path) -> None:
    with serving("nobody's", known) as server:
        source = EndpointSource(f"http://127.0.0.1:{server.server_port}/gone?node=3")
        assert source.look() is None
        learn(known, **{"/gone": {"reason": "tonight", "certain": False}})
        assert said(source.look()) == ("tonight", None, False)
        assert server.asked[-1] == "/gone?node=3"
    with pytest.raises(NoticeUnreadable, match="refused"):
        source.look()


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("/goné?node=wörk", "/gon%C3%A9?node=w%C3%B6rk"),
        ("/gon%C3%A9?node=a%20b+c&d=~!$'()*,;:@", "/gon%C3%A9?node=a%20b+c&d=~!$'()*,;:@"),
        ("/gon\udce9", "/gon%E9"),
    ],
    ids=["letters of no ASCII", "a URL as it is", "an argument in another encoding"],
)
def test_an_endpoint_is_asked_as_a_browser_would(known: Path, typed: str, asked: str) -> None:
    learn(known, **{asked.split("?")[0]: {"reason": "tonight"}})
    with serving("nobody's", known) as server:
        assert said(EndpointSource(f"http://127.0.0.1:{server.server_port}{typed}").look()) == ("tonight", None, True)
        assert server.asked == [asked]


@pytest.mark.parametrize("token", ["secret", "secret with blanks", "sécret with blanks"])
def test_no_failure_shows_the_query(known: Path, token: str) -> None:
    with serving("nobody's", known) as server:
        learn(known, forbidden=f"/gone?token={token}")
        source = EndpointSource(f"http://127.0.0.1:{server.server_port}/gone?token={token}")
        with pytest.raises(NoticeUnreadable, match=r"/gone: ") as caught:
            source.look()
    assert "secret" not in str(caught.value)


def test_kubernetes_is_asked_what_the_pod_may_see(known: Path, tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("jobs")
    (tmp_path / "token").write_text("secret\n")
    told: list[str] = []
    with serving("nobody's", known) as server:
        environ = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_port),
            "HOSTNAME": "train-0",
        }  # fmt: skip
        source = KubernetesSource(told.append, environ, tmp_path, has_tls=False)
        with pytest.raises(NoticeUnreadable, match=r"pods/train-0: HTTP status 404: .* POD_NAME"):
            source.look()
        pod = {"spec": {"nodeName": "n1"}, "status": {}}
        node = {"spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler"}]}}
        learn(known, **{"/api/v1/namespaces/jobs/pods/train-0": pod, "/api/v1/nodes/n1": node})
        assert said(source.look()) == ("the cluster autoscaler deletes the node", None, True)
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        disrupted = pod | {"status": {"conditions": [condition]}}
        learn(known, **{"/api/v1/namespaces/jobs/pods/train-0": disrupted})
        assert said(source.look()) == ("the pod is disrupted: EvictionByEvictionAPI", None, True), "its node: a 404"
        for lie in ({"spec": [7]}, {"status": {"conditions": 7}}, {"spec": {"nodeName": ["n1"]}}):
            learn(known, **{"/api/v1/namespaces/jobs/pods/train-0": lie})
            with pytest.raises(NoticeUnreadable):
                source.look()
        assert told == []
        (tmp_path / "token").write_text("secret\ninjected: header")
        with pytest.raises(NoticeUnreadable, match="this is no HTTP") as unreadable:
            source.look()
        assert "secret" not in str(unreadable.value)


def test_a_pod_whose_host_has_another_name(known: Path, tmp_path: Path) -> None:
    """As those of an Indexed Job: the name of the pod ends in letters that its host's has not."""
    (tmp_path / "namespace").write_text("jobs")
    (tmp_path / "token").write_text("secret\n")
    pod_path = "/api/v1/namespaces/jobs/pods/train-0-x7k2p"
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    with serving("nobody's", known) as server:
        environ = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_port),
            "HOSTNAME": "train-0", "POD_NAME": "train-0-x7k2p",
        }  # fmt: skip
        source = KubernetesSource(lambda message: pytest.fail(message), environ, tmp_path, has_tls=False)
        learn(known, **{pod_path: {"status": {"conditions": [condition]}}})
        assert said(source.look()) == ("the pod is disrupted: EvictionByEvictionAPI", None, True)
        learn(known)
        with pytest.raises(NoticeUnreadable, match=r"x7k2p: HTTP status 404$"):  # POD_NAME is not what is missing
            source.look()
        assert server.asked == [pod_path] * 2


def test_what_kubernetes_forbids_is_told_once_and_asked_again(known: Path, tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("jobs")
    (tmp_path / "token").write_text("secret\n")
    told: list[str] = []
    pod_path, node_path = "/api/v1/namespaces/jobs/pods/train-0", "/api/v1/nodes/n1"
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    pod = {"spec": {"nodeName": "n1"}}
    disrupted = {"status": {"conditions": [condition]}}
    node = {"spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler"}]}}
    with serving("nobody's", known) as server:
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_port)}
        source = KubernetesSource(told.append, environ | {"HOSTNAME": "train-0"}, tmp_path, has_tls=False)
        learn(known, forbidden=pod_path)
        assert [source.look(), source.look()] == [None, None]
        assert server.asked == [pod_path] * 2
        learn(known, **{pod_path: pod, "forbidden": node_path})
        assert [source.look(), source.look()] == [None, None]
        assert server.asked[2:] == [pod_path, node_path] * 2
        learn(known, **{pod_path: pod, node_path: node})
        assert said(source.look()) == ("the cluster autoscaler deletes the node", None, True)
        learn(known, **{pod_path: disrupted})
        assert said(source.look()) == ("the pod is disrupted: EvictionByEvictionAPI", None, True)
        for forbidden, documents in ((pod_path, {}), (node_path, {pod_path: pod})):
            learn(known, **documents, forbidden=forbidden)
            with pytest.raises(NoticeUnreadable, match="status 403"):  # which withdraws no notice
                source.look()
    pods, nodes = told
    assert "may not get pods" in pods
    assert "may not get nodes" in nodes
    assert "secret" not in pods + nodes


def test_a_relative_file_is_that_of_the_start_wherever_the_code_that_is_trained_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    find = source_of(NoticesFlag("file", "gone"), pytest.fail, lambda signum, _tell: pytest.fail(f"{signum}"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    source = find()
    assert source is not None
    (tmp_path / "gone").touch()
    assert said(source.look()) == ("notice", None, True)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "gone"
    source = FileSource(path)
    assert source.look() is None
    path.touch()
    assert said(source.look()) == ("notice", None, True)
    path.write_text(" " * 70_000)
    with pytest.raises(NoticeUnreadable, match="more than"):
        source.look()
    path.unlink()
    path.mkdir()
    with pytest.raises(NoticeUnreadable, match="directory"):
        source.look()


def test_the_relay_keeps_what_it_said(tmp_path: Path) -> None:
    writer, reader = Relay(tmp_path / "notices" / "n"), Relay(tmp_path / "notices" / "n")
    assert reader.look() is None
    notice = PreemptionNotice("aws", "spot instance stop", NOON)
    writer.write(notice)
    assert reader.look() == replace(notice, is_followed=True)
    writer.clear()
    assert reader.look() == replace(notice, is_followed=True), "who wrote it has left"
    writer.write(None)
    assert reader.look() is None


@pytest.mark.parametrize(("seconds", "is_deadline"), [(60, True), (6000, False), (None, False)])
def test_slurms_signal(seconds: int | None, is_deadline: bool) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    ends = None if seconds is None else int(time.time()) + seconds
    try:
        source = SlurmSource({} if ends is None else {"SLURM_JOB_END_TIME": str(ends)})
        assert source.look() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert said(source.look()) == ("SIGUSR1 of SLURM", ends if is_deadline else None, True)
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- the watcher ------------------------------------------------------------------------------------------------------


class Heard:
    """A listener that notes it all, and a source that says what it is told to."""

    name, poll_seconds = "source", 0.01

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.answer: PreemptionNotice | Exception | None = None
        self.now = NOON
        self.watcher = NoticeWatcher(lambda: self, self, now=lambda: self.now)

    def look(self) -> PreemptionNotice | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def hear(self, notice: PreemptionNotice) -> None:
        self.calls.append(("hear", notice.reason))

    def leave(self, notice: PreemptionNotice) -> None:
        self.calls.append(("leave", notice.reason))

    def withdraw(self, notice: PreemptionNotice) -> None:
        self.calls.append(("withdraw", notice.reason))

    def warn(self, message: str) -> None:
        self.calls.append(message)

    def after(self, answer: PreemptionNotice | NoticeUnreadable | None, seconds: float = 1.0) -> list[Any]:
        """What is told when that is answered, after so many seconds."""
        self.answer, self.now = answer, self.now + seconds
        self.calls.clear()
        self.watcher.look(self)
        return list(self.calls)


def test_a_certain_notice_in_time() -> None:
    heard = Heard()
    far = PreemptionNotice("s", "reboot", NOON + 900)
    assert heard.after(None) == []
    assert heard.after(far) == [("hear", "reboot")]
    assert heard.after(far, 700) == []
    assert heard.after(far, 100) == [("leave", "reboot")]
    assert heard.after(far) == [], "told once"
    assert heard.after(None) == [("withdraw", "reboot")]
    assert heard.after(None) == []


def test_an_uncertain_notice_becomes_certain() -> None:
    heard = Heard()
    assert heard.after(PreemptionNotice("s", "perhaps", is_certain=False)) == [("hear", "perhaps")]
    assert heard.after(PreemptionNotice("s", "now")) == [("leave", "now"), ("hear", "now")]
    later = PreemptionNotice("s", "later", NOON + 900)
    assert heard.after(later) == [("withdraw", "now"), ("hear", "later")], "there is time again: the last word"
    assert heard.after(later, 800) == [("leave", "later")]


def test_an_endpoint_that_counts_from_now_is_told_of_once() -> None:
    """As others do that give the seconds which are left."""
    heard = Heard()

    def left(seconds: float) -> PreemptionNotice:
        return PreemptionNotice("s", f"in {seconds} s", heard.now + 2 + seconds)

    assert heard.after(left(600), 2) == [("hear", "in 600 s")]
    assert [heard.after(left(600), 2) for _ in range(9)] == [[]] * 9
    assert heard.after(left(500), 2) == [("hear", "in 500 s")]
    assert heard.after(left(60), 2) == [("leave", "in 60 s"), ("hear", "in 60 s")]
    assert [heard.after(left(60), 2) for _ in range(9)] == [[]] * 9
    assert heard.after(left(123), 2) == [("withdraw", "in 60 s"), ("hear", "in 123 s")]
    assert heard.after(left(119), 2) == [("leave", "in 119 s")]
    assert [heard.after(left(121 - number % 2), 2) for number in range(4)] == [[]] * 4, "on the edge"
    assert heard.after(left(30), 2) == [("leave", "in 30 s"), ("hear", "in 30 s")]
    assert heard.after(None) == [("withdraw", "in 30 s")]


def test_no_answer_withdraws_nothing() -> None:
    heard = Heard()
    heard.after(PreemptionNotice("s", "now"))
    told = [heard.after(NoticeUnreadable("HTTP status 500")) for _ in range(5)]
    assert [len(calls) for calls in told] == [0, 0, 1, 0, 0], "once, and not the first"
    assert "HTTP status 500" in told[2][0]
    assert heard.after(None) == [("withdraw", "now")]


def test_the_thread_asks_until_it_is_closed() -> None:
    heard = Heard()
    heard.answer = PreemptionNotice("s", "now")
    heard.watcher.start()
    wait_until(lambda: ("leave", "now") in heard.calls, "the notice", 20)
    heard.watcher.close()
    source: NoticeSource = heard
    heard.calls.clear()
    heard.answer = None
    heard.watcher.look(source)
    assert heard.calls == [], "it has ended"


def test_the_thread_asks_again_whatever_goes_wrong(caplog: pytest.LogCaptureFixture) -> None:
    """As where no thread can be started for a request: what comes later must still be heard."""
    heard = Heard()
    heard.answer = RuntimeError("can't start new thread")
    heard.watcher.start()
    wait_until(lambda: caplog.records, "the error in the log", 20)
    heard.answer = PreemptionNotice("s", "now")
    wait_until(lambda: ("leave", "now") in heard.calls, "the notice", 20)
    heard.watcher.close()
    assert len(caplog.records) == 1, "told once"


@pytest.mark.parametrize("way", ["leave", "withdraw"])
def test_what_could_not_be_told_is_told_at_the_next_turn(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no thread can be started for the time of a notice: the other workers of the node must hear of it."""
    heard, notice = Heard(), PreemptionNotice("s", "now")
    if way == "withdraw":
        assert heard.after(notice) == [("leave", "now"), ("hear", "now")]

    def refuse(_notice: PreemptionNotice) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(heard, way, refuse)
        with pytest.raises(RuntimeError):
            heard.after(notice if way == "leave" else None)
    if way == "leave":
        assert heard.calls == [("hear", "now")]
        assert heard.after(notice) == [("leave", "now")]
        assert heard.after(notice) == [], "told once"
    else:
        assert heard.after(None) == [("withdraw", "now")]
        assert heard.after(None) == [], "told once"
