"""What the workers of one job share: the interface that membership speaks, and `peers.PeerJob` keeps.

Values are text. Every call answers at once or raises StoreUnreachable; none waits for others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from elastic_train.protocol.join_queue import Waiting
from elastic_train.protocol.store import Notes, SharedStore
from elastic_train.world import Member, World

if TYPE_CHECKING:
    from elastic_train.protocol.agreement import Decision

SETTLED_REDUCTIONS = 2
"""after which a world is settled for a member that has finished them"""


@dataclass(frozen=True)
class Denied:
    """A proposal that was not decided; the next look may."""

    votes: tuple[str, ...] = ()
    """uids of the voters without whom this side may not go on; empty where another one is proposing"""
    gone_on: int | None = None
    """generation of a world in which one of them trains, on another way than this member's: it is left behind"""


@dataclass(frozen=True)
class Admitted:
    """A newcomer is in a world."""

    world: World
    facts: Mapping[str, str]
    came_later: bool
    """whether others trained before"""


class Job(Protocol):
    """As the module says. `tend`, `queue` and `drop` are for the watcher's thread too."""

    @property
    def is_first(self) -> bool:
        """Whether no workers of this job had formed a world when this one came."""

    # --- the job ----------------------------------------------------------------------------------------------------

    @property
    def facts(self) -> Mapping[str, str]:
        """What the job has agreed on, as far as this member knows; it grows. For any thread."""

    def find(self) -> bool:
        """Look once for the job, or the place where it begins; whether there is one. Blocks for short timeouts.

        Raises: ElasticTrainError where there never will be.
        """

    def where(self) -> str:
        """Where `find` looks, for a person."""

    def create_fact(self, name: str, proposal: str) -> str:
        """The first value that was ever proposed under a name, ours or an earlier one."""

    def fact(self, name: str) -> str | None:
        """A value that was proposed, None where none was."""

    def host_says(self, key: str) -> str | None:
        """What the host of the queue has in its own store, for one in the queue; None where there is nothing."""

    # --- the join queue -----------------------------------------------------------------------------------------------

    def look_from_queue(self, mine: Waiting) -> Admitted | str:
        """Stand in the join queue, and see what becomes of it, or what is waited for, for a person. Called again and
        again by one that has no world. Raises: JobFinished."""

    def leave_queue(self) -> None:
        """This worker has a world, or ends."""

    def queue(self) -> list[Waiting]:
        """Workers in the join queue, for rank 0."""

    def drop(self, members: Sequence[Member]) -> None:
        """Some in the queue do not answer: they are not to be admitted again and again."""

    def is_over(self) -> bool:
        """Whether the job has reached its end, for one that is to be in a world whose others may never come."""

    # --- a join that is prepared while the world trains: for a thread of its own, but `told` --------------------------

    def beside(self, member: Member) -> Notes:
        """Notes for what is told to `member`, of a plan or of why it waits. Each call raises StoreUnreachable where
        there is no answer; the next one may have one."""

    def told(self, key: str) -> str | None:
        """What this worker, in the join queue, was told by `beside` under that key."""

    def decide_ahead(self, world: World, decision: Decision) -> bool:
        """Make `decision` the successor of `world`, which trains on, and announce it to its members. Returns whether it
        is the successor. For rank 0."""

    def stop_planning(self) -> None:
        """`beside` and `decide_ahead` are done with, on that thread."""

    # --- a world ------------------------------------------------------------------------------------------------------

    def enter(self, world: World, facts: Mapping[str, str], decision: Decision | None) -> None:
        """This member has adopted `world`, by `decision` or from the queue; newcomers find the job by it."""

    def settle(self, world: World) -> None:
        """This member has finished SETTLED_REDUCTIONS in the present world: all who train there have the state."""

    def say_present(self, world: World, text: str) -> None:
        """This member wants to be in the world after `world`."""

    def present(self, world: World, ranks: Sequence[int]) -> dict[int, str]:
        """What those of `ranks` that are present have said."""

    def announce(self, world: World, name: str, text: str) -> None:
        """Tell every member of `world` that can be reached; the first text under a name counts.

        `left/RANK` and `finished` are of this world alone, all else is of the job.
        """

    def heard(self, world: World, name: str) -> str | None:
        """What was announced to this member."""

    def left(self, world: World) -> frozenset[int]:
        """Ranks that have announced that they leave on purpose (`left/RANK`)."""

    def decided(self, world: World, asked: Sequence[int]) -> str | Denied | None:
        """The decision that stands, as far as this member or one of the ranks `asked` knows. Denied: one of these knows
        only that others have gone on long ago."""

    def ended_holders(self, gone: Collection[str]) -> frozenset[str]:
        """All who had the state, where each is among those that are gone for sure and a shared place tells whether one
        of them went on before it died; else nobody."""

    def decide(
        self, world: World, proposal: str, reachable: Sequence[int], *, dead: frozenset[str] = frozenset(),
        ended: frozenset[str] = frozenset(), answering: frozenset[str] = frozenset(),
    ) -> str | Denied:  # fmt: skip
        """Make the proposal, or one that others have accepted before, the successor of `world`.

        Args:
            reachable: ranks that may be asked, this member's first.
            dead: uids of members of `world` that are proven dead in time, or have left.
            ended: what `ended_holders` says.
            answering: uids of members of `world` that answer pings, whether they take part or not.
        """

    def show_place(self, world: World) -> None:
        """Leave a fresh name in the place that members may share, for others to see. Rank 0 of a world calls it before
        the world's first collective. Blocks for some seconds at most."""

    def sees_place(self, world: World) -> bool:
        """Whether this member sees that name: all workers tell it in their first collective. Blocks likewise."""

    def note_place(self, world: World, *, is_shared: bool | None) -> None:
        """Whether all of them do."""

    def release(self, world: World, decision: Decision) -> None:
        """This member is left out by what follows `world`, and goes on as nobody that had a vote: none waits for it."""

    def say_ready(self, world: World) -> None:
        """This member is about to make the process group of `world`; each call counts. Raises: StoreUnreachable."""

    def are_ready(self, world: World) -> bool:
        """Whether all who train have said so. Raises: StoreUnreachable."""

    def not_ready(self, world: World) -> tuple[int, ...]:
        """Ranks that have not, for a person. Raises: StoreUnreachable."""

    def world_store(self, world: World) -> SharedStore:
        """A store for what all members of `world` share while it stands, below its key. Raises: StoreUnreachable."""

    def seconds_to_wait(self, world: World, answered: Mapping[str, float]) -> float:
        """Until this member may enter its first reduction in `world`, so that those left out have stopped (law 2).

        Args:
            answered: seconds since this member last answered a ping of each uid.
        """

    # --- its thread and its end ---------------------------------------------------------------------------------------

    def tend(self, world: World | None, *, headless: World | None = None) -> None:
        """Background tasks, about once a second, on the watcher's thread.

        Args:
            headless: the world that has lost its rank 0, where the others are yet to agree on another one.
        """

    def finish(self, world: World) -> None:
        """The job has reached its end: tell those in the join queue. Rank 0 calls it."""

    def stand_down(self) -> None:
        """This member is in no world any more: no newcomer is to wait for it. Its watcher may still tend."""

    def close(self) -> None:
        """Leave nothing behind."""
