"""deploy/etcd: the commands of its page, against real members; `elastic-train etcd`."""

from __future__ import annotations

import contextlib
import functools
import os
import pty
import re
import select
import shlex
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from elastic_train.rendezvous.command_line import read_command
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.tools.check.endpoint import look_at_etcd
from elastic_train.tools.drills.etcd_cluster import find_program
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import clean_environment, wait_until
from tests.certificates import make_tls, openssl_lines
from tests.etcd_cluster import OwnEtcd

PAGE = (Path(__file__).parents[2] / "deploy" / "etcd" / "README.md").read_text()
CONSOLE = [sys.executable, "-m", "elastic_train.cli"]


def lines_of_page(program: str) -> list[list[str]]:
    """The page's commands with a program, as words."""
    text = re.sub(r"\\\n", " ", PAGE)
    return [shlex.split(line) for line in text.splitlines() if line.startswith(f"    {program} ")]


class TestCertificates:
    def test_a_check_says_what_is_wrong_with_certificates_and_what_to_do(self, tmp_path: Path) -> None:
        """Once for all members; in words of --rdzv-conf."""
        tls, stranger = make_tls(tmp_path / "ours"), make_tls(tmp_path / "theirs")
        ours = replace(tls, needs_client_cert=True)
        cluster = OwnEtcd(tmp_path, 3, ours)
        files = {"cert": str(tls.client_cert), "key": str(tls.client_key)}
        own_files = {"cert": str(stranger.client_cert), "key": str(stranger.client_key)}
        try:
            cluster.start()
            good = cluster.settings(ca=str(tls.ca), **files)
            assert look_at_etcd(good, "a").problems == ()
            for given, what, do in (
                ({"ca": str(stranger.ca), **files}, f"not signed by ca={stranger.ca}", "ca="),
                ({"ca": str(tls.ca)}, "asks for a client certificate", "cert=FILE and key=FILE"),
                ({"ca": str(tls.ca), **own_files}, f"cert={stranger.client_cert}", "--trusted-ca-file"),
                ({}, "speaks TLS, and no ca= is given", "ca=FILE"),
            ):
                facts = look_at_etcd(cluster.settings(**given), "a")
                assert not facts.is_usable
                (problem,) = facts.problems
                assert problem.what.startswith(f"etcd at {', '.join(member.endpoint for member in cluster.members)}: ")
                assert problem.what.count(cluster.members[0].endpoint) == 1
                assert what in problem.what
                assert do in problem.do
        finally:
            cluster.end()

    def test_a_check_says_that_nobody_speaks_tls_or_listens(self, tmp_path: Path) -> None:
        ca = make_tls(tmp_path).ca
        cluster = OwnEtcd(tmp_path, 1)
        (member,) = cluster.members
        try:
            cluster.start()
            (problem,) = look_at_etcd(cluster.settings(ca=str(ca)), "a").problems
            assert problem.what == f"etcd at {member.endpoint}: it does not speak TLS, and ca= is given"
            assert "leave ca=" in problem.do
        finally:
            cluster.end()
        (problem,) = look_at_etcd(cluster.settings(), "a").problems
        assert problem.what == f"etcd at {member.endpoint}: it does not answer: Connection refused"
        assert "firewall" in problem.do

    def test_a_check_tells_a_member_that_says_nothing_from_one_without_tls(self, tmp_path: Path) -> None:
        """It takes the connection, as a frozen process does."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
            (problem,) = look_at_etcd(EtcdSettings((endpoint,), ca=str(make_tls(tmp_path).ca)), "a").problems
        assert f"{endpoint}: it takes connections and does not answer" in problem.what
        assert "ca=" not in problem.do

    def test_what_the_page_makes(self, tmp_path: Path) -> None:
        tls = make_tls(tmp_path, ["etcd-1.lan", "10.0.0.11", "fd00::1"], client="trainer")
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "ca.key", "ca.pem", "server.key", "server.pem", "trainer.key", "trainer.pem",
        ]  # fmt: skip
        for key in tmp_path.glob("*.key"):
            assert stat.S_IMODE(key.stat().st_mode) == 0o600, "for its owner alone"
        context = ssl.create_default_context(cafile=str(tls.ca))
        context.load_cert_chain(tls.client_cert, tls.client_key)  # they belong together

    def test_new_ones_leave_the_authority_as_it_is(self, tmp_path: Path) -> None:
        """As once a year, and for one more user: the page's lines without that of `ca`."""
        make_tls(tmp_path, client="trainer")
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        lines = [line for line in openssl_lines() if not line.startswith("new ca ")]
        assert len(lines) == len(openssl_lines()) - 1
        type_in(lines, tmp_path)
        after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        changed = {name for name in before if after[name] != before[name]}
        assert changed == {"server.pem", "server.key", "trainer.pem", "trainer.key"}
        type_in(["openssl verify -CAfile ca.pem server.pem trainer.pem"], tmp_path)


ROOT_PASSWORD, TRAINER_PASSWORD = "of-root", "of-the-trainer"


def users_of_page() -> list[str]:
    """The lines that make the users and roles, as one types them."""
    lines = [line.strip() for line in PAGE.splitlines() if line.startswith(("    export ETCDCTL_", "    etcdctl "))]
    assert lines[-1] == "etcdctl auth enable"
    return lines


def type_in(lines: list[str], folder: Path, prefix: Sequence[str] = ()) -> str:
    """Types lines into a shell at a terminal of its own, and a password whenever it is asked for; what was shown.

    Fails where one of them does.
    """
    ours, theirs = pty.openpty()
    path = f"{Path(find_program('etcdctl')).parent}:{os.environ['PATH']}"
    with subprocess.Popen(
        [*prefix, "bash", "-ec", "\n".join(lines)],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, start_new_session=True,
        env=clean_environment() | {"PATH": path, "ETCDCTL_API": "3"},
    ) as shell:  # fmt: skip
        os.close(theirs)
        shown, answered = "", 0
        try:
            with contextlib.suppress(OSError):  # EIO: nobody has the terminal any more
                while select.select([ours], [], [], 60)[0]:
                    shown += os.read(ours, 4096).decode()
                    asked = re.findall(r"[Pp]assword(?: of (\w+)[^:\n]*)?: ", shown)
                    for user in asked[answered:]:
                        os.write(ours, f"{TRAINER_PASSWORD if user == 'trainer' else ROOT_PASSWORD}\n".encode())
                    answered = len(asked)
            assert shell.wait(10) == 0, shown
        finally:
            shell.kill()
            os.close(ours)
    return shown


@contextlib.contextmanager
def member_with_users(path: Path, lines: list[str], *, needs_client_cert: bool) -> Iterator[tuple[OwnEtcd, Path]]:
    """One member here with TLS in which the lines of the page have been typed, and the folder of its certificates."""
    tls = make_tls(path / "certs", client="trainer", needs_client_cert=needs_client_cert)
    cluster = OwnEtcd(path, 1, tls)
    try:
        cluster.start()
        here = f"ETCDCTL_ENDPOINTS={cluster.members[0].url}"
        type_in([re.sub(r"ETCDCTL_ENDPOINTS=\S+", here, line) for line in lines], tls.ca.parent)
        yield cluster, tls.ca.parent
    finally:
        cluster.end()


def test_the_user_of_a_run_may_write_below_its_prefix_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a password, which is asked for as the page says."""
    assert "`etcdctl user add trainer` asks for one" in PAGE
    lines = [line.replace("user add trainer --no-password", "user add trainer") for line in users_of_page()]
    with member_with_users(tmp_path, lines, needs_client_cert=False) as (cluster, folder):
        settings = cluster.settings(ca=str(folder / "ca.pem"), user="trainer")
        monkeypatch.setenv("ELASTIC_TRAIN_ETCD_PASSWORD", TRAINER_PASSWORD)
        own = look_at_etcd(settings, "run-a")
        assert own.problems == ()
        assert "trainer may write below /elastic_train/run-a" in own.notes[0]
        others = look_at_etcd(settings, "run-b")
        assert not others.is_usable
        (problem,) = others.problems
        assert "role does not allow" in problem.what
        assert "--rdzv-id that the role has" in problem.do
        monkeypatch.setenv("ELASTIC_TRAIN_ETCD_PASSWORD", "wrong")
        wrong = look_at_etcd(settings, "run-a")
        assert not wrong.is_usable
        assert "password_file=" in wrong.problems[0].do
        nobody = look_at_etcd(cluster.settings(ca=str(folder / "ca.pem")), "run-a")
        assert not nobody.is_usable
        assert "user= and password_file=" in nobody.problems[0].do


def test_a_client_certificate_alone_is_a_user(tmp_path: Path) -> None:
    """By its common name, without a password."""
    with member_with_users(tmp_path, users_of_page(), needs_client_cert=True) as (cluster, folder):
        files = {"cert": str(folder / "trainer.pem"), "key": str(folder / "trainer.key")}
        settings = cluster.settings(ca=str(folder / "ca.pem"), **files)
        assert look_at_etcd(settings, "run-a").problems == ()
        assert "role does not allow" in look_at_etcd(settings, "run-b").problems[-1].what


def test_no_password_stands_on_a_command_line() -> None:
    """etcdctl's `user add NAME:PASSWORD`, `--user NAME:PASSWORD` and `--new-user-password`; our user is in a file."""
    assert not re.search(r"user add \S+:|--user[ =]\S+:|--new-user-password|--password|[ ,]password=", PAGE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(Network.why_not() is not None, reason=f"no network namespaces: {Network.why_not()}")
def test_three_members_as_the_page_starts_them(tmp_path: Path) -> None:
    """Everything that the page has one type, in its order and as it stands, each member under its name and address."""
    (check,) = [words for words in lines_of_page("elastic-train") if words[1] == "check"]
    (etcd,) = lines_of_page("etcd")
    (torchrun,) = lines_of_page("torchrun")
    (backup,) = re.findall(r"`([^`]* snapshot save FILE)`", PAGE)
    names = ["etcd-1", "etcd-2", "etcd-3"]
    folder, run_dir = tmp_path / "certs", ["--run-dir", str(tmp_path / "run")]
    folder.mkdir()
    type_in(openssl_lines(), folder)
    network = Network(4, aliases=[f"{name}.lan" for name in names])
    trainer = network.node_prefix(3)
    members = []
    try:
        for index, name in enumerate(names):
            pairs = {"NAME": name, "ADDRESS": network.address(index), "/var/lib/etcd": str(tmp_path / name)}
            words = [functools.reduce(lambda text, pair: text.replace(*pair), pairs.items(), word) for word in etcd]
            with (tmp_path / f"{name}.log").open("wb") as log:
                members.append(
                    subprocess.Popen(
                        [*network.node_prefix(index), find_program("etcd"), *words[1:]],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        cwd=folder,
                    )
                )
        exports = [line for line in users_of_page() if line.startswith("export")]
        until_healthy = "for _ in $(seq 60); do etcdctl endpoint health && exit; sleep 1; done; exit 1"
        type_in([*exports, until_healthy], folder, trainer)
        type_in(users_of_page(), folder, trainer)
        type_in([*exports, backup], folder, trainer)
        assert (folder / "FILE").stat().st_size > 0

        def run(program: Sequence[str], words: Sequence[str]) -> str:
            done = subprocess.run(
                [*trainer, sys.executable, "-m", *program, *words],
                capture_output=True, text=True, timeout=300, cwd=folder, env=clean_environment(), check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        checked = run(["elastic_train.cli"], [*check[1:], "--", *run_dir])
        assert "etcd with 3 members over TLS; the client certificate may" in checked
        run(["torch.distributed.run"], [*torchrun[1:], *run_dir, "--max-steps", "5"])
        assert '"step": 5' in (tmp_path / "run" / "result.json").read_text()
    finally:
        for member in members:
            member.kill()
            member.wait(10)
        network.close()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "a terminal that closes"])
def test_a_local_cluster_lives_until_it_is_ended(tmp_path: Path, signum: signal.Signals) -> None:
    log = tmp_path / "log"
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup all of them ignore it, as they should
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*CONSOLE, "etcd", "--members", "3"],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=clean_environment(), cwd=tmp_path,
            )  # fmt: skip
    finally:
        signal.signal(signal.SIGHUP, inherited)
    try:
        line = wait_until(lambda: re.search(r"^  torchrun (.*)$", log.read_text(), re.M), "the torchrun line", 100)
        options = read_command(shlex.split(line[1])).options
        assert options["rdzv-backend"] == "etcd3"
        assert options["rdzv-id"] == "try-1"
        assert "Another --rdzv-id is another run" in log.read_text()
        settings = EtcdSettings.from_torchrun(options["rdzv-endpoint"], {}, {}, min_nodes=1, max_nodes=4)
        assert len(settings.endpoints) == 3
        assert look_at_etcd(settings, "none").problems == ()
        folder = Path(re.findall(r", in (\S+) \(removed at the end\)", log.read_text())[0])
        members = [psutil.Process(int(pid)) for pid in re.findall(r"pid (\d+)", log.read_text())]
        members[0].kill()
        wait_until(lambda: "m0 has ended, 2 of 3 are left" in log.read_text(), "word of the lost member")
        assert look_at_etcd(settings, "none").is_usable
        process.send_signal(signum)
        assert process.wait(60) == 0
        assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in members)
        assert not folder.exists()
    finally:
        process.kill()
        process.wait(10)
