"""The manifests of deploy/kubernetes: built by kustomize, checked strictly, and their commands really run.

There is no API server here, so that CEL rules, defaulting, admission and the controllers stay untested.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_train.tools.drills.etcd_cluster import find_program
from elastic_train.tools.drills.network import Network
from tests.audits import audit
from tests.certificates import make_tls
from tests.deploy.tools import DEPLOY, program, programs_folder
from tests.integration.cluster import Cluster, free_port, result, wait_until

Manifest = dict[str, Any]

KUBERNETES = DEPLOY / "kubernetes"
SCHEMAS = Path(__file__).parents[3] / "shared" / "schemas"
"""the CRDs of JobSet and Kubeflow, beside the repository"""
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
WITHOUT_OPERATOR = ("c10d", "etcd3", "gpu")
VERSIONS = ("1.31", "1.37")
"""of Kubernetes: the first in which everything that is used is switched on, and the newest that can be checked"""


@functools.cache
def build(overlay: str) -> tuple[Manifest, ...]:
    return build_folder(KUBERNETES / "overlays" / overlay)


def build_folder(path: Path) -> tuple[Manifest, ...]:
    import yaml

    command = [program("kubectl"), "kustomize", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def find(manifests: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    return next(found for found in manifests if found["kind"] == kind and found["metadata"]["name"] == name)


def pods(node: Any) -> Iterator[Manifest]:
    """Every pod template within a manifest."""
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node
        for value in node.values():
            yield from pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from pods(value)


def every_pod(manifests: tuple[Manifest, ...]) -> Iterator[Manifest]:
    for manifest in manifests:
        yield from pods(manifest)


def environment_of(manifests: tuple[Manifest, ...], container: Manifest) -> dict[str, str]:
    """What the manifests give a container, without what comes of the pod itself."""
    env: dict[str, str] = {}
    for source in container.get("envFrom", []):
        env |= find(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    return env | {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}


# --- the files --------------------------------------------------------------------------------------------------------


def test_the_files_are_clean() -> None:
    command = [program("yamllint"), "--strict", "-c", str(DEPLOY / "yamllint.yaml"), str(DEPLOY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_plain_objects_are_valid(overlay: str, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    unknown = []
    for manifest in build(overlay):
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            unknown.append(manifest["kind"])
    assert len(unknown) == {"jobset": 1, "pytorchjob": 1, "trainjob": 2}.get(overlay, 0), unknown


def test_a_wrong_object_is_not() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    job = find(build("c10d"), "Job", "trainer")
    for wrong in ({"paralelism": 4}, {"parallelism": "four"}):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(job | {"spec": job["spec"] | wrong}, VERSIONS[0], strict=True)


@functools.cache
def crds() -> dict[tuple[str, str], Any]:
    """Schemas by (apiVersion, kind), closed: a field that they do not name is an error, not dropped."""
    import yaml

    if not SCHEMAS.is_dir():
        pytest.skip(f"no CRDs: {SCHEMAS} is not there")
    found = {}
    for path in SCHEMAS.glob("*.yaml"):
        # The parser in C: these are long files, and the one in Python takes seconds for each.
        spec = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]
        for version in spec["versions"]:
            key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
            found[key] = closed(version["schema"]["openAPIV3Schema"])
    return found


def closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    shut = {name: closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        shut.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string") is True:
        shut.pop("type", None)
    return shut


@pytest.mark.parametrize("overlay", sorted(set(OVERLAYS) - set(WITHOUT_OPERATOR)))
def test_objects_of_operators_are_valid(overlay: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    checked = 0
    for manifest in build(overlay):
        schema = crds().get((manifest["apiVersion"], manifest["kind"]))
        if schema is not None:
            checked += 1
            jsonschema.Draft202012Validator(schema).validate(manifest)
            wrong = manifest | {"spec": manifest["spec"] | {"surprise": 1}}
            assert not jsonschema.Draft202012Validator(schema).is_valid(wrong)
    assert checked == {"trainjob": 2}.get(overlay, 1)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_locked_down(overlay: str) -> None:
    manifests = build(overlay)
    policies = [found["spec"] for found in manifests if found["kind"] == "NetworkPolicy"]
    assert all(found["policyTypes"] == ["Ingress", "Egress"] for found in policies)
    fenced = [found["podSelector"]["matchLabels"] for found in policies]
    seen = [pod for manifest in manifests for pod in pods(manifest)]
    assert seen
    for pod in seen:
        labels, spec = pod["metadata"]["labels"], pod["spec"]
        assert sum(selector.items() <= labels.items() for selector in fenced) == 1, labels
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            claims = {"data"} if labels["role"] == "etcd" else set()
            assert mounted <= {volume["name"] for volume in spec["volumes"]} | claims


CLUSTER_DNS = {
    "CoreDNS": ({"kubernetes.io/metadata.name": "kube-system"}, {"k8s-app": "kube-dns"}, 53),
    "NodeLocal DNSCache": (None, None, 53),  # the node's own address, and so no pod's
    "OpenShift": (
        {"kubernetes.io/metadata.name": "openshift-dns"},
        {"dns.operator.openshift.io/daemonset-dns": ""},
        5353,
    ),
}
"""who answers a pod that asks for a name: labels of namespace and pod, and the port behind the service's 53"""


def is_let_out(
    policy: Manifest, namespace: Mapping[str, str] | None, pod: Mapping[str, str] | None, port: int, protocol: str
) -> bool:
    """Whether a NetworkPolicy's `egress` has a rule for this; None for what is not in a pod."""

    def fits(selector: Manifest | None, labels: Mapping[str, str] | None) -> bool:
        return selector is None or (labels is not None and selector.get("matchLabels", {}).items() <= labels.items())

    def is_meant(peer: Manifest) -> bool:
        assert "ipBlock" not in peer, "not known here"
        if "namespaceSelector" not in peer and namespace is not None:
            return False  # in the policy's own namespace, which this is not
        return fits(peer.get("namespaceSelector"), namespace) and fits(peer.get("podSelector"), pod)

    def has_port(rule: Manifest) -> bool:
        ports = [(one["port"], one.get("protocol", "TCP")) for one in rule.get("ports", [])]
        return not ports or (port, protocol) in ports

    rules = policy["spec"]["egress"]
    return any(has_port(rule) and ("to" not in rule or any(map(is_meant, rule["to"]))) for rule in rules)


@pytest.mark.parametrize("dns", CLUSTER_DNS)
@pytest.mark.parametrize(("overlay", "name"), [("c10d", "trainer"), ("etcd3", "trainer"), ("etcd3", "etcd")])
def test_names_can_be_asked_for_and_nothing_else(overlay: str, name: str, dns: str) -> None:
    policy = find(build(overlay), "NetworkPolicy", name)
    namespace, pod, port = CLUSTER_DNS[dns]
    for protocol in ("UDP", "TCP"):
        assert is_let_out(policy, namespace, pod, port, protocol)
    for other in (443, 2379, 29400):
        assert not is_let_out(policy, namespace, pod, other, "TCP")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_prometheus_finds_the_trainers(overlay: str) -> None:
    """By the name in deploy/monitoring, the same for every overlay; and nobody but them."""
    yaml = pytest.importorskip("yaml")
    scrape = yaml.safe_load((DEPLOY / "monitoring" / "prometheus-kubernetes.yml").read_text())["scrape_configs"][0]
    ((name,),) = [found["names"] for found in scrape["dns_sd_configs"]]
    manifests = build(overlay)
    service = find(manifests, "Service", name.split(".")[0])
    assert name == f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert service["spec"]["clusterIP"] == "None"
    labels = [pod["metadata"]["labels"] for pod in every_pod(manifests)]
    assert {one["role"] for one in labels if service["spec"]["selector"].items() <= one.items()} == {"trainer"}


WITH_SCALE = {"Deployment", "StatefulSet", "ReplicaSet"}
"""owners that tell how many pods there are to be; without, Kubernetes takes nothing but a number that are to stay"""


def number_of_trainers(manifests: tuple[Manifest, ...]) -> int:
    """As the object says that whoever applies an overlay edits."""
    by_kind = {found["kind"]: found.get("spec", {}) for found in manifests}
    if "TrainJob" in by_kind:
        return int(by_kind["TrainJob"]["trainer"]["numNodes"])
    if "PyTorchJob" in by_kind:
        return int(by_kind["PyTorchJob"]["pytorchReplicaSpecs"]["Worker"]["replicas"])
    if "JobSet" in by_kind:
        jobs = {job["name"]: job["template"]["spec"] for job in by_kind["JobSet"]["replicatedJobs"]}
        return int(jobs["trainer"]["parallelism"])
    return int(by_kind["Job"]["parallelism"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_drain_takes_one_pod_at_a_time(overlay: str) -> None:
    """And takes it: with `maxUnavailable` over a Job's pods no eviction is ever allowed."""
    manifests = build(overlay)
    seen = set()
    for budget in (found["spec"] for found in manifests if found["kind"] == "PodDisruptionBudget"):
        selector = budget["selector"]["matchLabels"]
        owners = {
            manifest["kind"]
            for manifest in manifests
            for pod in pods(manifest)
            if selector.items() <= pod["metadata"]["labels"].items()
        }
        seen.add(selector["role"])
        if not owners <= WITH_SCALE:
            assert "maxUnavailable" not in budget, owners
            assert budget["minAvailable"] == number_of_trainers(manifests) - 1
    assert "trainer" in seen


def test_the_page_knows_its_versions_and_the_time_to_save() -> None:
    page = (KUBERNETES / "README.md").read_text()
    assert re.findall(r"Kubernetes (\S+) or newer", page) == [VERSIONS[0]]
    assert f"schemas of Kubernetes {VERSIONS[0]} and {VERSIONS[1]}" in page
    trainers = [pod_of(build(overlay), "trainer") for overlay in OVERLAYS]
    assert all("--grace 30 " in str(pod["initContainers"][0]["args"]) for pod in trainers)
    (grace,) = {pod["terminationGracePeriodSeconds"] for pod in trainers}
    assert f"within torchrun's 30 s, the first half of `terminationGracePeriodSeconds` ({grace})" in page


def test_the_page_knows_every_overlay_and_the_names_of_etcd() -> None:
    page = (KUBERNETES / "README.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.M)) == OVERLAYS
    (names,) = re.findall(r"^    SERVERS=(\S+) CLIENT=client$", page, re.M)
    assert "(../etcd/README.md#certificates)" in page
    members = environment_of(build("etcd3"), pod_of(build("etcd3"), "trainer")["containers"][0])["RDZV_ENDPOINT"]
    assert [f"{name.removeprefix('DNS:')}:2379" for name in names.split(",")] == members.split(",")
    secrets = dict(re.findall(r"create secret generic (\S+) (.*)$", page, re.M))
    for role in ("etcd", "trainer"):
        for volume in pod_of(build("etcd3"), role)["volumes"]:
            if "secret" not in volume:
                continue
            files = secrets[volume["secret"]["secretName"]]
            (mounted,) = {
                mount["mountPath"]
                for mount in pod_of(build("etcd3"), role)["containers"][0]["volumeMounts"]
                if mount["name"] == volume["name"]
            }
            wanted = re.findall(rf"{mounted}/([\w.]+)", str(build("etcd3")))
            assert wanted
            assert all(f"--from-file={name}" in files for name in wanted)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_check_comes_first_with_what_the_trainer_has(overlay: str) -> None:
    """The same image, room, devices and mounts: else it would find fault with what the trainer does not lack."""
    (pod,) = (pod for pod in every_pod(build(overlay)) if pod["metadata"]["labels"]["role"] == "trainer")
    (check,) = pod["spec"]["initContainers"]
    trainer = pod["spec"]["containers"][0]
    assert "elastic-train check" in check["args"][-1]
    for what in ("image", "resources", "securityContext", "volumeMounts"):
        assert check[what] == trainer[what], what
    text = (KUBERNETES / "overlays" / overlay / "kustomization.yaml").read_text()
    flags = environment_of(build(overlay), check)["FLAGS"]
    assert f"FLAGS={flags}" in text or f"value: {flags}}}" in text, "those at the top of the overlay"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_trainer_is_told_the_name_of_its_pod(overlay: str) -> None:
    """By which --notices kubernetes asks for it: in an Indexed Job the host has another one."""
    env = {one["name"]: one for one in pod_of(build(overlay), "trainer")["containers"][0]["env"]}
    assert env["POD_NAME"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_referred_to_is_there(overlay: str) -> None:
    manifests = build(overlay)
    names = {(found["kind"], found["metadata"]["name"]) for found in manifests}
    for manifest in manifests:
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == "elastic-train"
        for pod in pods(manifest):
            for volume in pod["spec"]["volumes"]:
                claim = volume.get("persistentVolumeClaim")
                assert claim is None or ("PersistentVolumeClaim", claim["claimName"]) in names
            for container in pod["spec"]["containers"]:
                for source in container.get("envFrom", []):
                    assert ("ConfigMap", source["configMapRef"]["name"]) in names
    labels = [pod["metadata"]["labels"] for manifest in manifests for pod in pods(manifest)]
    for kind in ("Service", "PodDisruptionBudget"):
        for manifest in (found for found in manifests if found["kind"] == kind):
            selector = manifest["spec"]["selector"]
            selector = selector.get("matchLabels", selector)
            assert any(selector.items() <= pod.items() for pod in labels), manifest["metadata"]["name"]


def test_the_variables_at_the_top_are_enough(tmp_path: Path) -> None:
    """Another namespace, image and number of pods, by nothing but what stands between the two lines."""
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    path = tmp_path / "kubernetes" / "overlays" / "gpu" / "kustomization.yaml"
    head, variables, rest = re.split(r"# ---[^\n]*\n", path.read_text())
    changes = {
        "namespace: elastic-train": "namespace: other",
        "newName: elastic_train": "newName: registry.example/trainer",
        "value: 4}": "value: 6}",
        "value: 3}": "value: 5}",
        "WORKERS=1 ": "WORKERS=8 ",
    }
    for old, new in changes.items():
        assert old in variables
        variables = variables.replace(old, new)
    path.write_text(head + variables + rest)
    manifests = build_folder(path.parent)
    assert {found["metadata"].get("namespace", "other") for found in manifests} == {"other"}
    assert find(manifests, "Namespace", "other")
    job = find(manifests, "Job", "trainer")["spec"]
    container = job["template"]["spec"]["containers"][0]
    assert job["parallelism"] == job["completions"] == 6
    assert find(manifests, "PodDisruptionBudget", "trainer")["spec"]["minAvailable"] == 5
    assert container["image"] == "registry.example/trainer:1-cuda"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_the_page_deletes_to_begin_again_is_what_trains(overlay: str) -> None:
    page = (
        (KUBERNETES / "README.md")
        .read_text()
        .partition("`kubectl -n elastic-train delete`")[2]
        .partition("`kubectl delete")[0]
    )
    named = {word for code in re.findall("`([^`]+)`", page) for word in code.split() if "/" in word}
    there = {f"{found['kind'].lower()}/{found['metadata']['name']}" for found in build(overlay)}
    trains = {name for name in there if name.partition("/")[0] in ("job", "jobset", "trainjob", "pytorchjob")}
    assert trains
    assert trains <= named


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_volume_is_among_the_variables(overlay: str, tmp_path: Path) -> None:
    """Of a cluster of one node, say, where no default class can be written from several."""
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    path = tmp_path / "kubernetes" / "overlays" / overlay / "kustomization.yaml"
    head, variables, rest = re.split(r"# ---[^\n]*\n", path.read_text())
    for old, new in {
        "value: ReadWriteMany}": "value: ReadWriteOnce}", "value: 10Gi}": "value: 1Ti}", "# - {op: add": "- {op: add",
        "value: NAME}": "value: fast}",
    }.items():  # fmt: skip
        assert old in variables
        variables = variables.replace(old, new)
    path.write_text(head + variables + rest)
    spec = find(build_folder(path.parent), "PersistentVolumeClaim", "runs")["spec"]
    assert (spec["accessModes"], spec["storageClassName"]) == (["ReadWriteOnce"], "fast")
    assert spec["resources"]["requests"]["storage"] == "1Ti"


@pytest.mark.parametrize("overlay", ["c10d", "etcd3"])
def test_the_check_has_what_the_trainer_is_given(overlay: str, tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    path = tmp_path / "kubernetes" / "overlays" / overlay / "kustomization.yaml"
    text = path.read_text()
    assert "memory: 2Gi}" in text
    path.write_text(text.replace("memory: 2Gi}", "memory: 3Gi}"))
    pod = find(build_folder(path.parent), "Job", "trainer")["spec"]["template"]["spec"]
    for container in (pod["containers"][0], pod["initContainers"][0]):
        assert container["resources"]["requests"] == {"cpu": "1", "memory": "3Gi"}


# --- the commands -----------------------------------------------------------------------------------------------------


class Pods:
    """Runs containers' commands here, with the environment that a cluster would give them.

    What a cluster provides and this machine has not is given in place of it: names (`names`) and mounts (`folders`).
    """

    def __init__(self, path: Path, cluster: Cluster, names: Mapping[str, str], folders: Mapping[str, Path]) -> None:
        self._cluster = cluster
        self._instead = {**names, **{f"{mount}/": f"{folder}/" for mount, folder in folders.items()}}
        self._programs = programs_folder(path)

    def here(self, text: str) -> str:
        for theirs, ours in self._instead.items():
            text = text.replace(theirs, ours)
        return text

    def start(
        self,
        manifests: tuple[Manifest, ...],
        container: Manifest,
        given: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> Any:
        """A container's process; `given` is what an operator or the kubelet adds to its environment."""
        env = environment_of(manifests, container) | dict(given or {})
        for one in container.get("env", []):
            assert one["name"] in env, "what comes of the pod itself must be given"
        env = {name: self.here(value) for name, value in env.items()}
        words = [*container.get("command", []), *container.get("args", [])]
        words = [self.here(re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], word)) for word in words]
        path = f"{self._programs}:{os.environ['PATH']}"
        return self._cluster.launch([*prefix, *words], {**env, "PATH": path})


def pod_of(manifests: tuple[Manifest, ...], role: str) -> Manifest:
    """The specification of the pod that trains, or is a member of etcd."""
    return next(pod["spec"] for pod in every_pod(manifests) if pod["metadata"]["labels"]["role"] == role)


def container_of(manifests: tuple[Manifest, ...], role: str) -> Manifest:
    container: Manifest = pod_of(manifests, role)["containers"][0]
    return container


SHORT = {"FLAGS": "--max-steps 30 --no-progress --ledger --reduction ordered", "POD_NAME": "trainer-0-x7k2p"}
GIVEN = {
    "c10d": SHORT,
    "gpu": SHORT | {"WORKERS": "2"},
    "jobset": SHORT,
    "trainjob": SHORT
    | {"NNODES": "1:4", "TRAINJOB": "first", "PET_NPROC_PER_NODE": "1", "PET_NNODES": "4", "PET_NODE_RANK": "1",
       "PET_MASTER_ADDR": "first-node-0-0.first", "PET_MASTER_PORT": "29400"},
    "pytorchjob": SHORT
    | {"PET_NNODES": "1:4", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "train-worker-0:29400",
       "PET_RDZV_ID": "train", "PET_RDZV_CONF": "join_timeout=31536000", "PET_NPROC_PER_NODE": "1"},
}  # fmt: skip
"""what the kubelet and an operator add to the environment, and fewer steps"""
C10D = sorted(set(OVERLAYS) - {"etcd3"})


def endpoint_of(overlay: str) -> str:
    """As its trainers are given it."""
    return environment_of(build(overlay), pod_of(build(overlay), "trainer")["containers"][0])["RDZV_ENDPOINT"]


@pytest.mark.parametrize(
    ("overlay", "name"),
    [
        ("c10d", "trainer-{}.trainer"),
        ("gpu", "trainer-{}.trainer"),
        ("jobset", "train-trainer-0-{}.train"),
        ("pytorchjob", "train-worker-{}"),
        ("trainjob", "$(TRAINJOB)-node-0-{}.$(TRAINJOB)"),
    ],
)
def test_the_pods_meet_at_each_others_names(overlay: str, name: str) -> None:
    """As an indexed Job, a JobSet, a TrainJob and a PyTorchJob call their pods; the check is given the same ones."""
    number = number_of_trainers(build(overlay))
    assert endpoint_of(overlay) == ",".join(f"{name.format(index)}:29400" for index in range(number))
    if overlay in ("c10d", "gpu"):
        job = find(build(overlay), "Job", "trainer")
        assert job["spec"]["completionMode"] == "Indexed"
        assert name == f"{job['metadata']['name']}-{{}}.{job['spec']['template']['spec']['subdomain']}"
    (check,) = pod_of(build(overlay), "trainer")["initContainers"]
    assert environment_of(build(overlay), check)["RDZV_ENDPOINT"] == endpoint_of(overlay)
    assert "--rdzv-endpoint=$RDZV_ENDPOINT " in check["args"][-1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "overlay",
    ["c10d", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpu", "jobset", "pytorchjob", "trainjob"))],
)
def test_the_containers_train(overlay: str, tmp_path: Path, cluster: Cluster) -> None:
    manifests = build(overlay)
    (tmp_path / "runs").mkdir()
    here = {endpoint_of(overlay): f"localhost:{free_port()}"}
    run = Pods(tmp_path, cluster, here, {"/runs": tmp_path / "runs"})
    container = container_of(manifests, "trainer")
    trainers = [run.start(manifests, container, GIVEN[overlay]) for _ in range(2)]
    cluster.finish(trainers, timeout=300)
    run_dir = tmp_path / "runs" / "first"
    assert result(run_dir)["step"] == 30
    found = audit(run_dir)
    assert found.passed, "\n".join(found.reasons)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overlay", C10D)
def test_the_check_before_the_job(overlay: str, tmp_path: Path, cluster: Cluster) -> None:
    """With names that resolve and without; an operator adds nothing to its environment but the job's name."""
    manifests = build(overlay)
    (tmp_path / "runs").mkdir()
    (check,) = pod_of(manifests, "trainer")["initContainers"]
    given = SHORT | {name: value for name, value in GIVEN[overlay].items() if name == "TRAINJOB"}

    def look(endpoint: str) -> Any:
        pods = Pods(tmp_path, cluster, {endpoint_of(overlay): endpoint}, {"/runs": tmp_path / "runs"})
        return pods.start(manifests, check, given)

    looking = look("trainer.invalid:29400")
    assert looking.wait(300) == 1
    assert "trainer.invalid" in looking.text()
    assert looking.text().rstrip().endswith("FAIL")
    looking = look(f"0.0.0.0:{free_port()},trainer.invalid:29400")  # this machine, by no loopback address
    assert looking.wait(300) == 0, looking.text()
    assert looking.text().rstrip().endswith("PASS")
    assert "answers; nobody listens there yet" in looking.text()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_member_of_etcd_listens_whichever_ip_its_pod_has(address: str, tmp_path: Path, cluster: Cluster) -> None:
    """Its own listeners, without TLS and at free ports of this machine."""
    ports = {port: free_port() for port in (2379, 2380, 2381)}
    listeners = [word for word in container_of(build("etcd3"), "etcd")["command"] if word.startswith("--listen-")]
    words = [re.sub(r":(\d+)$", lambda found: f":{ports[int(found[1])]}", word) for word in listeners]
    words = [word.replace("https:", "http:") for word in words]
    own = [
        f"--initial-advertise-peer-urls=http://localhost:{ports[2380]}",
        "--advertise-client-urls=http://localhost:1",
    ]
    name = f"--initial-cluster=default=http://localhost:{ports[2380]}"
    member = cluster.launch([str(find_program("etcd")), f"--data-dir={tmp_path / 'etcd'}", name, *own, *words], {})

    def accepts(port: int) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), 5).close()
            return True
        assert member.process.poll() is None, member.text()[-2000:]
        return False

    for port in ports.values():
        wait_until(lambda port=port: accepts(port), f"listener at {port}", 60)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(Network.why_not() is not None, reason=f"no network namespaces: {Network.why_not()}")
def test_the_trainer_meets_in_the_etcd_of_the_overlay(tmp_path: Path, cluster: Cluster) -> None:
    """Three members with TLS by their commands, each under the name and address that a pod would have."""
    manifests = build("etcd3")
    for folder in ("runs", "tls", "client"):
        (tmp_path / folder).mkdir()
    make_secrets(tmp_path, [f"etcd-{number}.etcd" for number in range(3)])
    container = find(manifests, "StatefulSet", "etcd")["spec"]["template"]["spec"]["containers"][0]
    network = Network(4, aliases=[f"etcd-{number}.etcd" for number in range(3)])
    try:
        for number in range(3):
            folders = {"/runs": tmp_path / "runs", "/tls": tmp_path / "tls", "/data": tmp_path / f"data-{number}"}
            (tmp_path / f"data-{number}").mkdir(mode=0o700)
            (tmp_path / "programs").mkdir(exist_ok=True)
            member = Pods(tmp_path, cluster, {}, folders)
            link = tmp_path / "programs" / "etcd"
            link.unlink(missing_ok=True)
            link.symlink_to(find_program("etcd"))
            member.start(manifests, container, {"POD_NAME": f"etcd-{number}"}, tuple(network.node_prefix(number)))
        run = Pods(tmp_path, cluster, {}, {"/runs": tmp_path / "runs", "/etcd": tmp_path / "client"})
        (check,) = pod_of(manifests, "trainer")["initContainers"]
        looking = run.start(manifests, check, SHORT, tuple(network.node_prefix(3)))
        assert looking.wait(300) == 0, looking.text()
        assert "etcd with 3 members over TLS" in looking.text()
        trainer = run.start(manifests, container_of(manifests, "trainer"), SHORT, tuple(network.node_prefix(3)))
        cluster.finish([trainer], timeout=300)
    finally:
        cluster.end()
        network.close()
    assert result(tmp_path / "runs" / "first")["step"] == 30


def make_secrets(path: Path, hosts: list[str]) -> None:
    """The secrets etcd-server (`tls`) and etcd-client (`client`), as the page makes them."""
    make_tls(path / "certs", hosts)
    for folder, owner in (("tls", "server"), ("client", "client")):
        for name in ("ca.pem", f"{owner}.pem", f"{owner}.key"):
            shutil.copy(path / "certs" / name, path / folder / name)
