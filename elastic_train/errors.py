"""Every error that elastic_train raises on purpose.

ElasticTrainError            ends a worker with a message of one line and with `exit_code`
├── UsageError               a flag or a combination of flags is wrong (exit code 2)
│   └── ReturnedAlone        the training function has returned on some ranks, and not on all
├── UnsupportedSystem        training needs Linux, or macOS for a world of one
├── DatasetMissing           the data is not where the flags say
├── TaskMismatch             a snapshot, or another member, belongs to another task, seed, batch size, ...
├── BranchesMixed            two branches of one run are there to be continued
├── RunsMixed                snapshots of two runs are there to be continued
├── SnapshotError            a snapshot cannot be written or read
│   ├── SnapshotUnread       one snapshot is skipped; the reader tries the next
│   │   ├── SnapshotDamaged  its bytes do not match its manifest
│   │   └── SnapshotDenied   the object store refuses to return one of its objects
│   └── ObjectStoreError     the object store of --snapshot-dir URL does not answer, or refuses
├── RunDirectoryError        the run directory cannot be used
│   ├── RunDirectoryInUse    another live job owns it
│   ├── SnapshotsInUse       another live job owns the snapshots of --snapshot-dir URL
│   └── OwnershipLost        another job has taken it over from this process
│       ├── NewerGeneration  the other members of this job use it in a newer world, without this process
│       └── RunDirectoryGone it was removed or moved
├── StoreUnreachable         a member's store, MASTER_ADDR's or etcd does not answer
├── StoreRefused             the rendezvous store refuses this user, this key or this write
├── FormationFailed          no process group could be formed
│   └── JobFailed            another member failed in the code that is trained, and all members would
├── StatesDiffer             the members' weights are not equal where they must be; no worker ends by it
├── TrainingDiverged         the loss is NaN or infinite
├── LeftOut                  the other members train on without this worker
│   ├── Superseded           another branch has more committed steps
│   └── Refused              its flags, data or versions are not those of the run
│       └── SecondJob        two jobs of one run id have met, and the other job goes on
├── JobFinished              the job reached its end while this worker waited to be admitted (exit code 0)
└── Stopped                  a signal ended this worker while it waited for others (exit code 143, 130 or 129)

Anything else that reaches the end of the process is a bug, ours or the task's, and shows its traceback.
"""

from __future__ import annotations

import errno
import logging
import signal
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from elastic_train.branches import Position


TRACEBACK_HEAD = "Traceback (most recent call last):"
OWN_NOTE = "elastic_train: "


class ElasticTrainError(Exception):
    """Base class. The message is one line: what is wrong, with the value, and what to do."""

    exit_code = 1
    """The exit code of a worker that ends with this error."""


class UsageError(ElasticTrainError):
    """A flag, or a combination of flags, that cannot work."""

    exit_code = 2


class ReturnedAlone(UsageError):
    """The training function has returned on some ranks and still runs on others; no rank has used the state since."""


class UnsupportedSystem(ElasticTrainError):
    """The request needs another operating system."""


class DatasetMissing(ElasticTrainError):
    """The data set is not where the flags say."""


class TaskMismatch(ElasticTrainError):
    """Two things that must agree (a snapshot and the flags, two members) do not; names both values."""


class BranchesMixed(ElasticTrainError):
    """Two branches of one run (--on-split) are there to be continued; names host and step of both."""


class RunsMixed(ElasticTrainError):
    """Snapshots of two runs are there to be continued, and nothing says which is meant; names host and step of both."""


class SnapshotError(ElasticTrainError):
    """A snapshot cannot be written or read."""


class SnapshotUnread(SnapshotError):
    """One snapshot cannot be read. A search for a snapshot skips it and goes on with the others."""

    word: ClassVar[str]
    """The first word of the warning: the state of the snapshot."""

    @property
    def warning(self) -> str:
        """The text for the log of a search that skips this snapshot."""
        return f"{self.word}: {self}"


class SnapshotDamaged(SnapshotUnread):
    """The bytes of a snapshot do not match its manifest."""

    word = "damaged"


class SnapshotDenied(SnapshotUnread):
    """The object store refuses to return an object of a snapshot, such as an archived one. The snapshot may be fine."""

    word = "not read"


class StoreFault(StrEnum):
    """What went wrong at an object store."""

    TRANSIENT = "transient"
    """A retry may help: a server error, throttling, a lost connection."""
    MISSING = "missing"
    """No such object; or no such bucket, if the store does not distinguish the two."""
    NO_BUCKET = "no_bucket"
    REFUSED = "refused"
    """The condition of a conditional write does not hold."""
    DENIED = "denied"
    """Credentials are missing, wrong, or do not allow this."""
    ARCHIVED = "archived"
    """The object is in an archive; other credentials would not help."""
    FULL = "full"
    OTHER = "other"
    """An unknown error, of the store or of its client library."""


class ObjectStoreError(SnapshotError):
    """An object store does not answer, or refuses; the message holds no credentials."""

    def __init__(self, message: str, fault: StoreFault) -> None:
        super().__init__(message)
        self.fault = fault


class RunDirectoryError(ElasticTrainError):
    """The run directory cannot be used."""


class RunDirectoryInUse(RunDirectoryError):
    """Another live job owns the run directory."""


class SnapshotsInUse(RunDirectoryError):
    """Another live job owns the snapshots of a URL."""


class OwnershipLost(RunDirectoryError):
    """A newer generation, or another job, has taken the run directory over from this process."""


class NewerGeneration(OwnershipLost):
    """A newer generation of this job owns the run directory: the other members train on without this process."""


class RunDirectoryGone(OwnershipLost):
    """The run directory was removed or moved, and no other job was seen in its place."""


class StoreUnreachable(ElasticTrainError):
    """A member's store, MASTER_ADDR's or etcd does not answer."""


class StoreRefused(ElasticTrainError):
    """The rendezvous store refuses this user, key or write, or one side rejects the other's certificate. Trying again
    would not help."""

    def __init__(self, what: str, do: str = "") -> None:
        super().__init__(f"{what}; {do}" if do else what)
        self.what = what
        self.do = do
        """What a person can do about it."""


class FormationFailed(ElasticTrainError):
    """No process group could be formed."""


class JobFailed(FormationFailed):
    """Another member has failed with an error that every member would meet: in the code that is trained, or its use."""


class StatesDiffer(ElasticTrainError):
    """The members' weights or optimizer states are not equal where they must be. The current step does not count."""

    def __init__(self, wrong: Sequence[int], num_voters: int, *, has_majority: bool) -> None:
        majority = "where most agree" if has_majority else "without a majority"
        super().__init__(f"the weights or optimizer states of {num_voters} workers differ, {majority}")
        self.wrong = tuple(wrong)
        """The ranks whose state must not be used."""
        self.has_majority = has_majority
        """Whether the remaining ranks have the right state. If False, `wrong` holds all ranks."""


class TrainingDiverged(ElasticTrainError):
    """The loss became NaN or infinite."""


class LeftOut(ElasticTrainError):
    """The other members have gone on without this worker; it must not train on."""

    by: str | None = None
    """uid of the world that left it out, where it has given up its vote for that"""


class Superseded(LeftOut):
    """This worker has met another branch of the run (--on-split), which has more committed steps."""

    def __init__(self, winner: Position) -> None:
        super().__init__(f"this side has met another at {winner.name}, which goes on, with no fewer committed steps")
        self.winner = winner


class Refused(LeftOut):
    """This worker may not join the job: its flags, data or versions are not those of the run."""


class SecondJob(Refused):
    """Two jobs of one run id have met; this one has fewer committed steps, and stops."""

    def __init__(self, own_place: str, winner: Position) -> None:
        host, port = winner.store
        super().__init__(
            f"two jobs of one run id have met: this one, {own_place}, stops for the one at {winner.name} "
            f"({host}:{port}), which has no fewer committed steps: start this node again with the same command to join "
            "that one, or give each job an --rdzv-id of its own"
        )
        self.winner = winner


class JobFinished(ElasticTrainError):
    """The job reached its end while this worker waited to be admitted: there is nothing left to do."""

    exit_code = 0


class Stopped(ElasticTrainError):
    """SIGTERM, SIGINT, SIGHUP or a notice told this worker to stop before it had anything to save."""

    def __init__(self, signum: int, why: str | None = None) -> None:
        super().__init__(f"stopped by {why or signal.Signals(signum).name}")
        self.exit_code = 128 + signum


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def kind_and_line(error: BaseException) -> str:
    """Describe an error of the code that is trained in one line: its type, its message and the notes of `add_own_note`.

    For an error of a DataLoader process, the line is that of the original error, whose traceback torch puts into the
    message."""
    name, line = type(error).__name__, first_line(error)
    lines = str(error).strip().splitlines()
    texts = (*lines, *getattr(error, "__notes__", ()))  # notes of a loader process are in the traceback text
    notes = [one.removeprefix(OWN_NOTE) for one in texts if one.startswith(OWN_NOTE)]
    said = f" ({'; '.join(notes)})" if notes else ""
    if TRACEBACK_HEAD in str(error):
        lines = [one for one in lines if not one.startswith(OWN_NOTE)]
        named = [one for one in lines if one.partition(":")[0].rpartition(".")[2] == name]
        if named:
            return named[-1] + said
        line = lines[-1]
    return (line if line == name else f"{name}: {line}") + said


def add_own_note(error: BaseException, note: str) -> None:
    """Add a note about where the error happened. It appears below the traceback and in `kind_and_line`."""
    error.add_note(OWN_NOTE + note)


DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The errno values of an OSError for a full disk or quota; deleting files may help."""


def cause_of(error: OSError) -> str:
    """The operating system's message, without number and path."""
    return error.strerror or str(error)


def report(error: ElasticTrainError, *, rank: str, is_debug: bool) -> None:
    """Print the last line of a worker that gives up to stderr; with `is_debug` the traceback before it."""
    if is_debug:
        show_traceback(error, is_debug=True)
    where = f" (rank {rank})" if rank != "0" else ""
    write_line(f"error{where}: {error}")


def write_line(text: str) -> None:
    """Print one line to stderr. If stderr fails (a closed terminal or pipe, a full disk), the line is lost: that is no
    reason to end a training."""
    with suppress(OSError):
        print(f"elastic_train: {text}", file=sys.stderr, flush=True)


@contextmanager
def going_on(told: set[str], where: str) -> Iterator[None]:
    """Log any exception of the block and suppress it, so that a background loop goes on with its next iteration.

    Args:
        told: the lines that were logged before, each of which is logged only once; the set grows.
    """
    try:
        yield
    except Exception as error:
        line = f"{where}: {kind_and_line(error)}"
        if line not in told:
            told.add(line)
            logging.getLogger("elastic_train").warning("%s", line)


def show_traceback(error: BaseException, *, is_debug: bool) -> None:
    """Print the traceback to stderr from the first frame of the user's code on, if any; with `is_debug` all of it."""
    theirs = None if is_debug else first_frame_of_user(error)
    traceback.print_exception(type(error), error, theirs or error.__traceback__)


def first_frame_of_user(error: BaseException) -> TracebackType | None:
    """The part of an error's traceback from the first frame of the user's code on; None if there is no such frame."""
    frame = error.__traceback__
    while frame is not None and not is_of_user(frame.tb_frame):
        frame = frame.tb_next
    return frame


def is_of_user(frame: FrameType) -> bool:
    """Whether the frame's code belongs neither to elastic_train nor to Python's standard library or site-packages."""
    return not frame.f_code.co_filename.startswith(_not_of_user())


@cache
def _not_of_user() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return ("<", str(Path(__file__).parent), *(paths[name] for name in ("stdlib", "purelib", "platlib")))
