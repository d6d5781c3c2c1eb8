"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
from pathlib import Path

from elastic_train.errors import RunDirectoryError, cause_of

_LINK_MISSING = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
"""The errors of link(2) on FAT, SMB and object stores behind FUSE."""


def draft_beside(path: Path) -> Path:
    """The path of a file until it is renamed to `path`. Raises IsADirectoryError for `.` and `/`: they have no name."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old bytes or the new ones, also after a power cut. Blocks for two
    fsyncs. Raises OSError, and leaves the old file and no temporary one."""
    temporary = draft_beside(path)
    try:
        write_durably(temporary, data)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)


def write_durably(path: Path, data: bytes, mode: str = "wb") -> None:
    """Write a file and fsync it; blocks. The file's name is not durable yet. Raises OSError."""
    with open(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def create_once(path: Path, data: bytes) -> None:
    """Create a file unless it exists. Readers see it whole. Without link(2) it is empty for a moment, or for good if
    its writer ends in that moment. Raises FileExistsError and other OSErrors."""
    draft = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    write_atomic(draft, data)
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in _LINK_MISSING:
            raise
        # rename(2) would replace a file that another process has created and a third one has read
        write_durably(path, data, "xb")
    finally:
        draft.unlink()


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable if its file system can (some network file systems return EINVAL)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Create a folder and its parents if missing, and make each new name durable, except in a parent without read
    permission. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with contextlib.suppress(PermissionError):
            fsync_directory(folder.parent)


def require_writable(folder: Path, what: str) -> None:
    """Create a folder if it is missing, and check that files can be created in it.

    Raises:
        RunDirectoryError: the folder cannot be created or written to.
    """
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else cause_of(error)
        raise RunDirectoryError(f"{what} {folder} cannot be written to: {why}; choose another one") from error
