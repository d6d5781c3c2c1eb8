"""Every error that elastic_train raises on purpose.

ElasticTrainError            ends a worker with one line; `exit_code` says with which code
├── UsageError               a flag or a combination of flags is wrong (exit code 2)
│   └── ReturnedAlone        the training function has returned on some ranks, and not on all
├── UnsupportedSystem        training needs Linux, or macOS for a world of one
├── DatasetMissing           the data is not where the flags say
├── TaskMismatch             a snapshot, or another member, belongs to another task, seed, batch size, ...
├── BranchesMixed            two branches of one run are there to be continued
├── RunsMixed                snapshots of two runs are there to be continued
├── SnapshotError            a snapshot cannot be written or read
│   ├── SnapshotUnread       whoever reads goes on without this one
│   │   ├── SnapshotDamaged  its bytes are not the ones that its manifest promises
│   │   └── SnapshotDenied   the store refuses to give one of its objects
│   └── ObjectStoreError     the store of --snapshot-dir URL does not answer, or refuses
├── RunDirectoryError        the run directory cannot be used
│   ├── RunDirectoryInUse    another live job owns it
│   ├── SnapshotsInUse       another live job owns the snapshots of --snapshot-dir URL
│   └── OwnershipLost        another job has taken it over from this process
│       ├── NewerGeneration  the others of this job have gone on in it, without this process
│       └── RunDirectoryGone it was removed or moved
├── StoreUnreachable         a member's store, MASTER_ADDR's or etcd does not answer
├── StoreRefused             the rendezvous store refuses this user, this key or this write
├── FormationFailed          no process group could be formed
│   └── JobFailed            what another member has met in the code that is trained would meet all
├── StatesDiffer             the members' weights are not equal where they must be; no worker ends by it
├── TrainingDiverged         the loss is NaN or infinite
├── LeftOut                  the others go on without this worker
│   ├── Superseded           another branch has more committed steps
│   └── Refused              its flags, data or versions are not those of the run
│       └── SecondJob        two jobs of one run id have met, and the other one goes on
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
    """Base of all of them. The message is one line: what is wrong, with the value, and what to do."""

    exit_code = 1
    """of a worker that ends with it"""


class UsageError(ElasticTrainError):
    """A flag, or a combination of flags, that cannot work."""

    exit_code = 2


class ReturnedAlone(UsageError):
    """The training function has returned on some ranks and goes on on others; no rank has gone on with the state."""


class UnsupportedSystem(ElasticTrainError):
    """What is wanted takes another operating system."""


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
    """One snapshot that is not read. Whoever looks for one goes on with the others."""

    word: ClassVar[str]
    """what it is, at the start of a warning"""

    @property
    def warning(self) -> str:
        """Of who goes on without it."""
        return f"{self.word}: {self}"


class SnapshotDamaged(SnapshotUnread):
    """The bytes of a snapshot are not the ones that its manifest promises."""

    word = "damaged"


class SnapshotDenied(SnapshotUnread):
    """The store refuses to give an object of a snapshot, as an archived one: it may be whole."""

    word = "not read"


class StoreFault(StrEnum):
    """What went wrong at an object store."""

    TRANSIENT = "transient"
    """it may pass: a server's error, throttling, a lost connection"""
    MISSING = "missing"
    """no such object; or no such bucket, where the store does not say so"""
    NO_BUCKET = "no_bucket"
    REFUSED = "refused"
    """the condition of a write does not hold"""
    DENIED = "denied"
    """credentials are missing, wrong, or not for this"""
    ARCHIVED = "archived"
    """the object is in an archive, which no credentials change"""
    FULL = "full"
    OTHER = "other"
    """nobody knows: of the store, or of its library here"""


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
    """A newer generation of this job has the run directory: the others have gone on without this process."""


class RunDirectoryGone(OwnershipLost):
    """The run directory was removed or moved, and no other job is seen in its place."""


class StoreUnreachable(ElasticTrainError):
    """A member's store, MASTER_ADDR's or etcd does not answer."""


class StoreRefused(ElasticTrainError):
    """The rendezvous store refuses this user, this key, or this write; trying again would not help.

    Also where the two do not accept each other's certificates.
    """

    def __init__(self, what: str, do: str = "") -> None:
        super().__init__(f"{what}; {do}" if do else what)
        self.what = what
        self.do = do
        """what a person can do about it"""


class FormationFailed(ElasticTrainError):
    """No process group could be formed."""


class JobFailed(FormationFailed):
    """Another member has met what would meet all: an error of the code that is trained, or of its use."""


class StatesDiffer(ElasticTrainError):
    """The members' weights or optimizer states are not equal where they must be: the step in hand does not count."""

    def __init__(self, wrong: Sequence[int], num_voters: int, *, has_majority: bool) -> None:
        majority = "where most agree" if has_majority else "without a majority"
        super().__init__(f"the weights or optimizer states of {num_voters} workers differ, {majority}")
        self.wrong = tuple(wrong)
        """ranks whose state is not to be used"""
        self.has_majority = has_majority
        """whether the others' is right; else `wrong` are all ranks"""


class TrainingDiverged(ElasticTrainError):
    """The loss became NaN or infinite."""


class LeftOut(ElasticTrainError):
    """The others have gone on without this worker; it must not train on."""


class Superseded(LeftOut):
    """Another branch of the run (--on-split) was met, and has more committed steps."""

    def __init__(self, winner: Position) -> None:
        super().__init__(f"this side has met another at {winner.name}, which goes on, with no fewer committed steps")
        self.winner = winner


class Refused(LeftOut):
    """This worker may not train with the others: its flags, data or versions are not those of the run."""


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
    """An error of a library, fit for one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def kind_and_line(error: BaseException) -> str:
    """An error of the code that is trained, with its type, fit for one line; of one that a loader process has raised
    the original, which torch puts with its traceback into the message. With what `add_own_note` has said of it."""
    name, line = type(error).__name__, first_line(error)
    lines = str(error).strip().splitlines()
    texts = (*lines, *getattr(error, "__notes__", ()))  # a loader process has it in the traceback
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
    """Below its traceback, and in its one line: the error's own words seldom say where it was."""
    error.add_note(OWN_NOTE + note)


DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""the numbers of an OSError after which there may be room again"""


def cause_of(error: OSError) -> str:
    """What the system says, without number and path."""
    return error.strerror or str(error)


def report(error: ElasticTrainError, *, rank: str, is_debug: bool) -> None:
    """The last line of a worker that gives up, on stderr; with `is_debug` the traceback before it."""
    if is_debug:
        show_traceback(error, is_debug=True)
    where = f" (rank {rank})" if rank != "0" else ""
    write_line(f"error{where}: {error}")


def write_line(text: str) -> None:
    """One line of ours on stderr. It is lost where stderr takes none, as a terminal that has gone, a closed pipe or a
    full disk: no reason to end a training."""
    with suppress(OSError):
        print(f"elastic_train: {text}", file=sys.stderr, flush=True)


@contextmanager
def going_on(told: set[str], where: str) -> Iterator[None]:
    """For a turn of a thread after which nobody looks: what fails inside the block is logged, once of each kind, and
    the next turn begins.

    Args:
        told: what was logged before; it grows.
    """
    try:
        yield
    except Exception as error:
        line = f"{where}: {kind_and_line(error)}"
        if line not in told:
            told.add(line)
            logging.getLogger("elastic_train").warning("%s", line)


def show_traceback(error: BaseException, *, is_debug: bool) -> None:
    """On stderr, beginning with the user's own code where it is there; with `is_debug` whole."""
    theirs = None if is_debug else first_frame_of_user(error)
    traceback.print_exception(type(error), error, theirs or error.__traceback__)


def first_frame_of_user(error: BaseException) -> TracebackType | None:
    """Where an error's traceback enters code that is neither ours nor installed; None where it never does."""
    frame = error.__traceback__
    while frame is not None and not is_of_user(frame.tb_frame):
        frame = frame.tb_next
    return frame


def is_of_user(frame: FrameType) -> bool:
    """Whether its code is neither ours nor installed."""
    return not frame.f_code.co_filename.startswith(_not_of_user())


@cache
def _not_of_user() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return ("<", str(Path(__file__).parent), *(paths[name] for name in ("stdlib", "purelib", "platlib")))
