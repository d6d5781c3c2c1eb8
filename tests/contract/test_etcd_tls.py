"""etcd with certificates and users: every error names a remedy, and renewed files are read again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_train.errors import StoreRefused, StoreUnreachable
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import Connections, import_etcd3
from elastic_train.rendezvous.etcd_job import delete_job, open_job
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.rendezvous.etcd_store import EtcdStore
from elastic_train.tools.drills.nodes import is_listening, wait_until
from elastic_train.world import to_json
from tests.certificates import make_tls
from tests.contract.test_etcd import PATIENCE, connect
from tests.etcd_cluster import OwnEtcd, etcd_running, fence_in_trainer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OwnEtcd, Path]]:
    """One member that wants client certificates, and a user fenced in below /team."""
    path = tmp_path_factory.mktemp("secure")
    with etcd_running(path, 1, make_tls(path)) as cluster:
        yield cluster, fence_in_trainer(cluster, path)


def secure_settings(cluster: OwnEtcd, password: Path, **changes: object) -> EtcdSettings:
    assert cluster.tls is not None
    fields: dict[str, object] = {
        "ca": str(cluster.tls.ca),
        "cert": str(cluster.tls.client_cert),
        "key": str(cluster.tls.client_key),
        "user": "trainer",
        "password_file": str(password),
        "prefix": "/team/a",
    }
    return cluster.settings(**fields | changes)


def test_mutual_tls_with_a_user_and_a_prefix(secure: tuple[OwnEtcd, Path]) -> None:
    cluster, password = secure
    settings = secure_settings(cluster, password)
    etcd = connect(settings)
    job = open_job(etcd, settings, "run", lambda job: job)
    store = job.store(etcd)
    store.put(f"{job.prefix}/key", "value")
    assert store.get(f"{job.prefix}/key") == "value"
    delete_job(etcd, job)


def test_another_teams_prefix_is_refused(secure: tuple[OwnEtcd, Path]) -> None:
    etcd = connect(secure_settings(*secure))
    with pytest.raises(StoreRefused, match=r"permission denied.*prefix="):
        EtcdStore(etcd).put("/other/key", "value")


def test_a_wrong_password_is_refused_at_once(secure: tuple[OwnEtcd, Path], tmp_path: Path) -> None:
    cluster, _ = secure
    wrong = tmp_path / "wrong"
    wrong.write_text("guess")
    started = time.monotonic()
    with pytest.raises(StoreRefused, match="invalid user ID or password") as caught:
        connect(secure_settings(cluster, wrong)).get("/team/x")
    assert time.monotonic() - started < PATIENCE / 2
    assert "guess" not in str(caught.value)


def test_no_user_where_one_is_needed(secure: tuple[OwnEtcd, Path]) -> None:
    cluster, password = secure
    with pytest.raises(StoreRefused, match=r"permission denied|user name is empty"):
        connect(secure_settings(cluster, password, user=None)).get("/team/x")


def test_an_expired_token_is_fetched_anew(secure: tuple[OwnEtcd, Path]) -> None:
    """Tokens live for 3 s here; the client itself fetches one in its life."""
    etcd = connect(secure_settings(*secure))
    EtcdStore(etcd).put("/team/token", "1")
    client = etcd.connections.client()[1]
    deadline = time.monotonic() + PATIENCE
    time.sleep(4.0)  # the token's own time: nothing but time makes it expire
    while etcd.connections.client()[1] is client:
        EtcdStore(etcd).put("/team/token", "2")
        assert time.monotonic() < deadline
        time.sleep(4.0)
    assert EtcdStore(etcd).get("/team/token") == "2"


def test_a_password_that_is_changed_has_the_grace_to_come_into_the_file(
    secure: tuple[OwnEtcd, Path], tmp_path: Path
) -> None:
    """The change makes all tokens invalid at once, while something else renews the file, some seconds later."""
    cluster, _ = secure
    of_root, of_renewed = tmp_path / "root", tmp_path / "renewed"
    of_root.write_text("rootpw")
    of_renewed.write_text("before")
    root = connect(secure_settings(cluster, of_root, user="root")).connections.client()[1]
    rpc, cut = import_etcd3().etcdrpc, {"timeout": PATIENCE, "metadata": root.metadata}
    root.auth_stub.UserAdd(rpc.AuthUserAddRequest(name="renewed", password="before"), **cut)
    root.auth_stub.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="renewed", role="team"), **cut)
    connections = Connections(secure_settings(cluster, of_renewed, user="renewed"))
    EtcdStore(Etcd(connections, deadline=PATIENCE)).put("/team/renewed", "1")
    root = connect(secure_settings(cluster, of_root, user="root")).connections.client()[1]  # its token has gone
    cut["metadata"] = root.metadata
    root.auth_stub.UserChangePassword(rpc.AuthUserChangePasswordRequest(name="renewed", password="after"), **cut)
    with pytest.raises(StoreUnreachable, match="invalid user ID or password"):
        EtcdStore(Etcd(connections, deadline=3)).get("/team/renewed")  # a check takes a busy machine a second
    of_renewed.write_text("after")
    assert EtcdStore(Etcd(connections, deadline=PATIENCE)).get("/team/renewed") == "1"


def test_without_a_client_certificate_there_is_no_connection(secure: tuple[OwnEtcd, Path]) -> None:
    cluster, password = secure
    with pytest.raises(StoreRefused, match=r"asks for a client certificate; give cert=FILE"):
        connect(secure_settings(cluster, password, cert=None, key=None)).get("/team/x")


def test_another_authoritys_client_certificate(secure: tuple[OwnEtcd, Path], tmp_path: Path) -> None:
    cluster, password = secure
    stranger = make_tls(tmp_path)
    files = {"cert": str(stranger.client_cert), "key": str(stranger.client_key)}
    with pytest.raises(StoreRefused, match=f"does not accept the client certificate cert={stranger.client_cert}"):
        connect(secure_settings(cluster, password, **files)).get("/team/x")


def test_a_stranger_authority_is_told_at_once_and_in_one_line(secure: tuple[OwnEtcd, Path], tmp_path: Path) -> None:
    """No certificate heals within the grace; and gRPC's log of every handshake would bury the line."""
    cluster, password = secure
    stranger = make_tls(tmp_path, needs_client_cert=False)
    settings = secure_settings(cluster, password, ca=str(stranger.ca))
    code = f"""
from elastic_train.errors import StoreRefused
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import Connections, import_etcd3
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.world import from_json
try:
    Etcd(Connections(from_json(EtcdSettings, {to_json(settings)!r})), deadline={PATIENCE}).get("/team/x")
except StoreRefused as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert time.monotonic() - started < PATIENCE / 2
    assert done.stdout.startswith(
        f"etcd at {cluster.endpoint}: its certificate is not signed by ca={stranger.ca} (unable to get local issuer "
        "certificate); give ca= in --rdzv-conf"
    ), done.stderr
    assert done.stderr == ""


def test_a_member_with_another_certificate_ends_nothing_while_another_serves(
    secure: tuple[OwnEtcd, Path], tmp_path: Path
) -> None:
    cluster, password = secure
    settings = secure_settings(cluster, password)
    with etcd_running(tmp_path, 1, make_tls(tmp_path)) as stranger:
        both = Connections(replace(settings, endpoints=(stranger.endpoint, cluster.endpoint)))
        while both.present != 0:
            both.rotate(both.present)
        assert Etcd(both, deadline=PATIENCE).get("/team/none") is None
        assert both.present == 1
        cut_off = Connections(replace(settings, endpoints=(stranger.endpoint, "127.0.0.1:1")))
        with pytest.raises(StoreUnreachable, match="not signed by ca="):  # the one that does not answer might
            Etcd(cut_off, deadline=2).get("/team/none")


def test_where_certificates_were_good_once_they_have_the_grace_to_be_so_again(
    secure: tuple[OwnEtcd, Path], tmp_path: Path
) -> None:
    cluster, password = secure
    assert cluster.tls is not None
    ca = tmp_path / "given.pem"
    ca.write_bytes(cluster.tls.ca.read_bytes())
    connections = Connections(secure_settings(cluster, password, ca=str(ca)))
    assert Etcd(connections, deadline=PATIENCE).get("/team/none") is None
    ca.write_bytes(make_tls(tmp_path).ca.read_bytes())
    for index in range(len(cluster.members)):
        connections.rotate(index)
    with pytest.raises(StoreUnreachable, match="not signed by ca="):
        Etcd(connections, deadline=1).get("/team/none")


def test_a_certificate_for_another_name(tmp_path: Path) -> None:
    tls = make_tls(tmp_path / "certs", ["etcd-1.lan"], needs_client_cert=False)
    cluster = OwnEtcd(tmp_path, 1, tls)
    (member,) = cluster.members
    try:
        member.start()
        wait_until(lambda: is_listening(member.client_port, member.host), "etcd")
        with pytest.raises(StoreRefused, match=r"its certificate is not for 127\.0\.0\.1; .*deploy/etcd"):
            connect(cluster.settings(ca=str(tls.ca))).get("x")
    finally:
        cluster.end()


def test_certificates_that_were_renewed_are_read_anew(tmp_path: Path) -> None:
    """Both sides get those of another authority while the connection stands; the old ones are good for nothing."""
    folder = tmp_path / "tls"
    folder.mkdir()
    with etcd_running(tmp_path, 1, make_tls(folder)) as cluster:
        assert cluster.tls is not None
        ca, cert, key = map(str, (cluster.tls.ca, cluster.tls.client_cert, cluster.tls.client_key))
        store = EtcdStore(connect(cluster.settings(ca=ca, cert=cert, key=key)))
        store.put("/x", "before")
        cluster.members[0].kill()
        shutil.rmtree(folder)
        impatient = store.with_timeouts(2.0, 1.0)
        with pytest.raises(StoreUnreachable):  # nothing worse, in the middle of the renewal
            impatient.put("/x", "lost")
        folder.mkdir()
        for path in (ca, cert, key):
            Path(path).touch()
        with pytest.raises(StoreUnreachable, match="renewed"):
            connect(store.etcd.connections.settings, deadline=2.0).get("/x")
        shutil.rmtree(folder)
        folder.mkdir()
        make_tls(folder)
        cluster.members[0].start()
        cluster.wait_until_healthy()
        assert store.get("/x") == "before"


def test_a_user_without_tls(tmp_path: Path) -> None:
    """grpc refuses to send call credentials over plaintext; the token travels as metadata."""
    with etcd_running(tmp_path) as cluster:
        cluster.ctl("user", "add", "root:rootpw")
        cluster.ctl("user", "grant-role", "root", "root")
        cluster.ctl("auth", "enable")
        password = tmp_path / "password"
        password.write_text("rootpw")
        store = EtcdStore(connect(cluster.settings(user="root", password_file=str(password))))
        store.put("key", "value")
        assert store.get("key") == "value"
