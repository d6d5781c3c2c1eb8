"""The etcd3 client, loaded although its generated code is older than protobuf's runtime."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

from elastic_train.errors import UsageError


@functools.cache
def import_etcd3() -> Any:
    """The `etcd3` package, whatever protobuf is installed, and whatever has imported it before.

    Its generated modules build descriptors by hand, which protobuf refuses since version 4 (unless it is switched to
    its slow Python form before its first import in the process). They also carry the serialized descriptors, from
    which protobuf's own builder makes the same messages; the modules themselves are never run.

    Raises:
        UsageError: it is not installed.
    """
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("--rdzv-backend=etcd3 needs the etcd3 client, which is missing: pip install etcd3==0.12.0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when gRPC is loaded; it would log every failed handshake
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.internal import builder

    pool = DescriptorPool()
    for name in ("kv", "auth", "rpc"):
        source = Path(spec.submodule_search_locations[0]) / "etcdrpc" / f"{name}_pb2.py"
        descriptor = pool.AddSerializedFile(serialized_descriptor(source)) or pool.FindFileByName(f"{name}.proto")
        module = types.ModuleType(f"etcd3.etcdrpc.{name}_pb2", "Made by elastic_train from the descriptors.")
        builder.BuildMessageAndEnumDescriptors(descriptor, module.__dict__)
        builder.BuildTopDescriptorsAndMessages(descriptor, module.__name__, module.__dict__)
        sys.modules.setdefault(module.__name__, module)
    etcd3 = importlib.import_module("etcd3")
    event = sys.modules["etcd3.etcdrpc.kv_pb2"].Event
    etcd3.etcdrpc._event_delete = event.DELETE
    return etcd3


def serialized_descriptor(source: Path) -> bytes:
    """The serialized FileDescriptorProto in a module that protoc generated before 2022."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
            literal = node.value.args[0]
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                return literal.value.encode("latin-1")
    raise UsageError(f"{source} is not of etcd3 0.12.0, the version that this package knows")
