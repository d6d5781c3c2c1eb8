"""OpenStack Swift with its S3 interface: a store in production use, that checks signatures and writes to a disk.

It is no dependency: `pip install swift` in an environment of its own, and its programs last on the PATH.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from elastic_train.tools.drills.nodes import free_port, wait_until

RINGS = """
import sys
from swift.common.ring import RingBuilder
directory, *ports = sys.argv[1:]
for name, port in zip(("account", "container", "object"), map(int, ports)):
    builder = RingBuilder(4, 1, 0)
    builder.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": port, "replication_ip": "127.0.0.1",
                     "replication_port": port, "device": "disk", "weight": 1.0, "meta": ""})
    builder.rebalance()
    builder.get_ring().save(f"{directory}/{name}.ring.gz")
"""
SERVER = """
import sys
from importlib import import_module
from swift.common import utils
module, directory = sys.argv[1:]
utils.SWIFT_CONF_FILE = f"{directory}/swift.conf"
utils.validate_hash_conf()
sys.argv = [module, f"{directory}/{module}.conf"]
import_module(f"swift.{module}.server").main()
"""
STORAGE = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
devices = {directory}
mount_check = false
workers = 0
swift_dir = {directory}
recon_cache_path = {directory}
log_statsd_host =

[pipeline:main]
pipeline = {name}-server

[app:{name}-server]
use = egg:swift#{name}
"""
PROXY = """
[DEFAULT]
bind_ip = {address}
bind_port = {port}
workers = 0
swift_dir = {directory}

[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck bulk s3api tempauth slo dlo proxy-server

[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true

[filter:tempauth]
use = egg:swift#tempauth
user_{user} = {secret} .admin

[filter:s3api]
use = egg:swift#s3api
location = us-east-1

{plain}"""
PLAIN = "catch_errors gatekeeper healthcheck bulk slo dlo"
"""filters that need no settings"""


@contextlib.contextmanager
def swift_server(address: str, port: int, access_key: str, secret: str) -> Iterator[str]:
    """The endpoint of a Swift of this process, with one account, on a disk of its own; `access_key` is ACCOUNT:USER."""
    program = shutil.which("swift-proxy-server")
    assert program is not None, "it is not on the PATH: `pip install swift` in an environment of its own"
    python = str(Path(program).resolve().with_name("python3"))
    with tempfile.TemporaryDirectory() as path, contextlib.ExitStack() as running:
        directory = Path(path)
        (directory / "disk").mkdir()
        (directory / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = tests\n")
        ports = {name: free_port() for name in ("account", "container", "object")}
        proxy = port or free_port()
        modules = {"account": "account", "container": "container", "object": "obj"}
        for name, its_port in ports.items():
            text = STORAGE.format(port=its_port, directory=directory, name=name)
            (directory / f"{modules[name]}.conf").write_text(text)
        user = access_key.replace(":", "_")
        plain = "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in PLAIN.split())
        text = PROXY.format(address=address, port=proxy, directory=directory, user=user, secret=secret, plain=plain)
        (directory / "proxy.conf").write_text(text)
        subprocess.run([python, "-c", RINGS, path, *map(str, ports.values())], check=True)
        for module in (*modules.values(), "proxy"):
            running.enter_context(server_of(python, module, directory))
        wait_until(lambda: is_listening(address, proxy), "answer of Swift")
        yield f"http://{address}:{proxy}"


@contextlib.contextmanager
def server_of(python: str, module: str, directory: Path) -> Iterator[None]:
    with (
        (directory / f"{module}.log").open("wb") as log,
        subprocess.Popen([python, "-c", SERVER, module, str(directory)], stdout=log, stderr=log) as process,
    ):
        try:
            yield
        finally:
            process.kill()


def is_listening(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1.0):
        return True
    return False
