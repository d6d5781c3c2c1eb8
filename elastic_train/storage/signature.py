"""Signed manifests (--snapshot-key): whoever does not have the key cannot put a snapshot of their own in the way."""

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
"""how the bytes are laid out, which a copy changes; what they are, their SHA-256 says, and that is signed"""


@functools.lru_cache
def read_key(path: Path) -> bytes:
    """The key in a file, without the white space around it; read once, for what becomes of it during a run is late.

    Raises:
        UsageError: it cannot be read, or is too short for a key.
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
    """What members compare: it tells one key from another, and not what it is."""
    return "none" if key is None else hmac.new(key, b"elastic_train: fingerprint", hashlib.sha256).hexdigest()[:12]


def signature_of(manifest: Mapping[str, Any], key: bytes) -> str:
    """HMAC-SHA256 over what a manifest says."""
    signed = {name: value for name, value in manifest.items() if name not in _UNSIGNED}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def sign(manifest: dict[str, Any], key: bytes | None) -> dict[str, Any]:
    return manifest if key is None else {**manifest, SIGNATURE: signature_of(manifest, key)}


def why_not_signed(manifest: Mapping[str, Any], key: bytes) -> str | None:
    """Why a manifest is refused; None where its signature is that of `key`."""
    found = manifest.get(SIGNATURE)
    if not isinstance(found, str):
        return "it has no signature, and --snapshot-key asks for one"
    if not hmac.compare_digest(found.encode(), signature_of(manifest, key).encode()):
        return "its signature is not of --snapshot-key: another key wrote it, or it was changed"
    return None
