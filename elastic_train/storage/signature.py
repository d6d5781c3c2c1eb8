"""Signed manifests (--snapshot-key): without the key an attacker cannot add a snapshot that a run would restore."""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_train.errors import UsageError, cause_of

SIGNATURE = "signature"
LEAST_KEY_BYTES = 16
_UNSIGNED = frozenset({SIGNATURE, "format_version", "parts"})
"""Fields of the layout, which a copy changes. The content is protected by its SHA-256, which is signed."""


@functools.lru_cache
def read_key(path: Path) -> bytes:
    """Read the key from a file, without surrounding white space. Cached: a later change of the file has no effect.

    Raises:
        UsageError: the file cannot be read, or is too short for a key.
    """
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"--snapshot-key {path} cannot be read: {cause_of(error)}") from error
    if len(key) < LEAST_KEY_BYTES:
        raise UsageError(
            f"--snapshot-key {path} holds {len(key)} bytes: {LEAST_KEY_BYTES} at least make a key; "
            f"openssl rand -hex 32 > {path} makes one"
        )
    return key


def fingerprint(key: bytes | None) -> str:
    """A short hash that members compare: it distinguishes keys without revealing them."""
    return "none" if key is None else hmac.new(key, b"elastic_train: fingerprint", hashlib.sha256).hexdigest()[:12]


def signature_of(manifest: Mapping[str, Any], key: bytes) -> str:
    """HMAC-SHA256 over the signed fields of a manifest."""
    signed = {name: value for name, value in manifest.items() if name not in _UNSIGNED}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def sign(manifest: dict[str, Any], key: bytes | None) -> dict[str, Any]:
    return manifest if key is None else {**manifest, SIGNATURE: signature_of(manifest, key)}


def why_not_signed(manifest: Mapping[str, Any], key: bytes) -> str | None:
    """The reason to refuse a manifest; None if it is signed with `key`."""
    found = manifest.get(SIGNATURE)
    if not isinstance(found, str):
        return "it has no signature, and --snapshot-key asks for one"
    if not hmac.compare_digest(found.encode(), signature_of(manifest, key).encode()):
        return "its signature is not of --snapshot-key: another key wrote it, or it was changed"
    return None
