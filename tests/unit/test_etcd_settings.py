"""The settings of an etcd cluster, from torchrun's options and the environment; mistakes are named at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.errors import UsageError
from elastic_train.rendezvous.etcd_connections import Connections
from elastic_train.rendezvous.etcd_errors import Transient
from elastic_train.rendezvous.etcd_settings import EtcdSettings, parse_endpoints
from elastic_train.world import from_json, to_json


def settings(
    conf: dict[str, object] | None = None, environ: dict[str, str] | None = None, endpoint: str = "h:1"
) -> EtcdSettings:
    return EtcdSettings.from_torchrun(endpoint, conf or {}, environ or {}, min_nodes=1, max_nodes=4)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, object]:
    made = {}
    for name in ("ca", "cert", "key", "password_file"):
        path = tmp_path / name
        path.write_text("secret\n")
        made[name] = str(path)
    return made  # type: ignore[return-value]


def test_endpoints() -> None:
    assert parse_endpoints("h1:2379, h2,[::1]:80") == (("h1:2379", "h2:2379", "[::1]:80"), set())
    assert parse_endpoints("https://h1:1,http://h2") == (("h1:1", "h2:2379"), {"https", "http"})


@pytest.mark.parametrize("text", ["a:b", "a:1:2", "ftp://a", "::1", "a/b"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not HOST:PORT"):
        parse_endpoints(text)


@pytest.mark.parametrize("text", ["h:99999", "h1:2379,[::1]:65536", "https://h:0"])
def test_a_port_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^etcd: '\S+' in --rdzv-endpoint: a port is 1 to 65535$"):
        parse_endpoints(text)
    assert parse_endpoints("h:1,h:65535") == (("h:1", "h:65535"), set())


def test_no_endpoint() -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        settings(endpoint="")


def test_a_certificate_without_an_authority_would_be_plaintext(files: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="need ca="):
        settings({"cert": files["cert"], "key": files["key"]})


def test_a_certificate_without_its_key(files: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="needs both"):
        settings({"ca": files["ca"], "cert": files["cert"]})


def test_schemes_must_agree_with_the_certificates(files: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="need ca="):
        settings(endpoint="https://h:1")
    with pytest.raises(UsageError, match="http://"):
        settings({"ca": files["ca"]}, endpoint="http://h:1")


def test_files_must_be_readable() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        settings({"ca": "/no/such/file"})


def test_a_password_never_stands_on_a_command_line() -> None:
    with pytest.raises(UsageError, match="command line") as caught:
        settings({"user": "u", "password": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_a_user_needs_a_password() -> None:
    with pytest.raises(UsageError, match="needs a password"):
        settings({"user": "u"})


def test_passwords_come_from_a_file_or_the_environment(files: dict[str, object]) -> None:
    environ = {"ELASTIC_TRAIN_ETCD_USER": "u", "ELASTIC_TRAIN_ETCD_PASSWORD": "from env"}
    assert settings({}, environ).password(environ) == "from env"
    by_file = settings({"user": "u", "password_file": files["password_file"]}, {})
    assert by_file.password({}) == "secret"
    named = {"ELASTIC_TRAIN_ETCD_USER": "u", "ELASTIC_TRAIN_ETCD_PASSWORD_FILE": str(files["password_file"])}
    assert settings({}, named).password({}) == "secret"


def test_what_an_agent_tells_its_workers_holds_no_password() -> None:
    environ = {"ELASTIC_TRAIN_ETCD_USER": "u", "ELASTIC_TRAIN_ETCD_PASSWORD": "hunter2"}
    made = settings({"prefix": "/team", "grace": "7.5", "last_call_timeout": "3"}, environ)
    assert "hunter2" not in to_json(made)
    assert from_json(EtcdSettings, to_json(made)) == made
    assert (made.prefix, made.grace, made.last_call, made.max_nodes) == ("/team", 7.5, 3.0, 4)


def test_a_misspelt_key_is_named() -> None:
    with pytest.raises(UsageError, match="knows no graze; it knows ca"):
        settings({"graze": "5"})


@pytest.mark.parametrize("value", ["x", "0", "-1", "nan", "inf"])
@pytest.mark.parametrize("key", ["grace", "last_call", "last_call_timeout"])
def test_seconds_that_nobody_can_wait(key: str, value: str) -> None:
    """No call would ever give up after `nan` seconds."""
    with pytest.raises(UsageError, match=f"^{key}={value} in --rdzv-conf: give a number of seconds above 0$"):
        settings({key: value})


@pytest.mark.parametrize("prefix", ["team", "/team/"])
def test_a_prefix_that_cannot_work(prefix: str) -> None:
    with pytest.raises(UsageError, match=f"prefix={prefix} must begin with a slash"):
        settings({"prefix": prefix})


# --- files that are being replaced ------------------------------------------------------------------------------------


def test_a_password_that_cannot_be_read_for_a_moment_ends_nothing_once_etcd_has_answered(
    files: dict[str, object],
) -> None:
    """Its client is dropped where a token has expired; the file may be on NFS, or be replaced at this moment."""
    connections = Connections(settings({"user": "u", "password_file": files["password_file"]}))
    path = Path(str(files["password_file"]))
    for spoil in (lambda: path.write_text(""), path.unlink):
        spoil()
        connections.has_answered = False
        with pytest.raises(UsageError, match="password_file="):  # at the start it is a mistake
            connections.client()
        connections.has_answered = True
        with pytest.raises(Transient, match="renewed: etcd: password_file="):
            connections.client()


def test_a_certificate_that_cannot_be_read_for_a_moment_ends_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    folder.mkdir()
    ca = folder / "ca.pem"
    ca.write_text("x")
    connections = Connections(settings({"ca": str(ca)}))
    ca.unlink()
    ca.mkdir()
    (ca / "entry").touch()
    with pytest.raises(Transient, match="renewed"):  # it can be looked at, and not be read
        connections.client()
    folder.rename(tmp_path / "away")
    folder.touch()
    with pytest.raises(Transient, match="renewed"):  # another error than that there is no such file
        connections.client()
    connections.rotate(0)
