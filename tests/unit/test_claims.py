"""Claims in a directory: the first one counts, whatever the file system reports."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from elastic_train.elastic.claims import Bounded, Directory, Objects
from elastic_train.protocol.arbiter import MOST_REMOVED, OLD_SECONDS, OUTDATED, ArbiterSilent, Claims, Folder
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.store_urls import parse_url
from tests.claims import check_all_read_the_same, check_first_claim_stands

Make = Callable[[Path], Folder]


def in_bucket(path: Path) -> Objects:
    """Whose claims lie in the same files."""
    return Objects(ObjectStore(parse_url(f"file://{path.parent}")))


@pytest.fixture(params=[Directory, in_bucket], ids=["directory", "bucket"])
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


def files_in(path: Path) -> set[str]:
    return {path.name for path in path.iterdir() if not path.name.startswith(".")}  # its locks


def claims(folder: Folder) -> Claims:
    names = itertools.count()
    return Claims(folder, lambda: f"{id(folder)}-{next(names)}")


def show(arbiter: Claims, name: str) -> None:
    """As a world that forms."""
    arbiter.show(name)
    arbiter.tidy()


@contextmanager
def links_go(trouble: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """As `trouble` says, which is given the call."""
    link = os.link
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", lambda *paths: trouble(partial(link, *paths)))
        yield


def test_the_first_claim_of_a_generation_stands(tmp_path: Path, make: Make) -> None:
    one, other = claims(make(tmp_path / "claims")), claims(make(tmp_path / "claims"))
    check_first_claim_stands(one, other)
    assert files_in(tmp_path / "claims") == {"claim-another-3", "claim-job-3", "claim-job-4"}


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
def test_a_claim_stands_though_its_reply_was_lost(tmp_path: Path, code: int) -> None:
    def lose(link: Callable[[], None]) -> None:
        link()
        raise OSError(code, "lost")

    with links_go(lose):
        assert claims(Directory(tmp_path / "claims")).claim("job", 0, "a") == "a"
    assert claims(Directory(tmp_path / "claims")).claim("job", 0, "b") == "a"


def test_a_claim_that_was_not_made_is_none(tmp_path: Path) -> None:
    def refuse(_link: Callable[[], None]) -> None:
        raise OSError(errno.EIO, "broken")

    with links_go(refuse), pytest.raises(ArbiterSilent, match="broken"):
        claims(Directory(tmp_path / "claims")).claim("job", 0, "a")
    assert claims(Directory(tmp_path / "claims")).claim("job", 0, "b") == "b"


def test_many_claim_at_once_and_all_read_the_same(tmp_path: Path, make: Make) -> None:
    check_all_read_the_same(
        [Claims(make(tmp_path / "claims"), partial(str, f"draft-of-{number}")) for number in range(8)]
    )


def test_a_shown_name_is_seen_in_that_directory_alone(tmp_path: Path, make: Make) -> None:
    for name in ("shared", "copy"):
        (tmp_path / name).mkdir()
    shown = claims(make(tmp_path / "shared" / "claims"))
    show(shown, "world7")
    assert claims(make(tmp_path / "shared" / "claims")).sees("world7")
    assert not claims(make(tmp_path / "copy" / "claims")).sees("world7")
    show(shown, "world8")
    assert claims(make(tmp_path / "shared" / "claims")).sees("world7"), "members of that world may be about to look"
    show(shown, "world9")
    assert not shown.sees("world7"), "nothing piles up"


def test_old_claims_are_removed_and_count_for_nothing(tmp_path: Path, make: Make) -> None:
    """Thousands of worlds leave some claims; who asks for one that is gone is told of the newest, and makes none."""
    path, newest = tmp_path / "claims", 2 * OUTDATED + MOST_REMOVED + 5
    one, frozen = claims(make(path)), claims(make(path))
    assert frozen.claim("another", 0, "its own") == "its own"
    for generation in range(newest + 1):
        assert one.claim("job", generation, f"after {generation}") == f"after {generation}"
    assert len(list(path.glob("claim-job-*"))) == newest + 1
    show(one, "world")
    assert len(list(path.glob("claim-job-*"))) == newest + 1 - MOST_REMOVED, "some at a time, for a world waits"
    show(one, "another world")
    kept = files_in(path)
    assert kept == {
        "claim-another-0",
        "seen-world",
        "seen-another world",
        *(f"claim-job-{newest - number}" for number in range(2 * OUTDATED)),
    }
    for decision in (None, "its own"):
        assert frozen.claim("job", 0, decision) == f"after {newest}"
    assert frozen.claim("job", newest - OUTDATED, None) == f"after {newest}", "though it stands"
    assert frozen.claim("job", newest - OUTDATED + 1, None) == f"after {newest - OUTDATED + 1}"
    assert frozen.claim("another", 0, None) == "its own"
    show(one, "a third world")
    assert not (path / "claim-job-0").exists(), "what the frozen one made in vain"


def test_what_others_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "claims"
    path.mkdir()
    now = time.time()
    for name, seconds in (("old", OLD_SECONDS + 60), ("new", OLD_SECONDS / 2), ("ahead", -OLD_SECONDS)):
        for kind in ("draft", "seen", "claim-job", "notes"):
            (path / f"{kind}-{name}").touch()
            os.utime(path / f"{kind}-{name}", (now - seconds, now - seconds))
    show(claims(Directory(path)), "world")
    left = {path.name for path in path.iterdir()}
    assert left == {f"{kind}-{name}" for kind in ("claim-job", "notes") for name in ("old", "new", "ahead")} | {
        "draft-new", "draft-ahead", "seen-new", "seen-ahead", "seen-world",
    }  # fmt: skip


def test_what_is_old_goes_by_the_newest_of_ones_own(tmp_path: Path) -> None:
    """The world before may have stood for hours."""
    path = tmp_path / "claims"
    arbiter = claims(Directory(path))
    arbiter.show("world before")
    (path / "draft-old").touch()
    for name, seconds in (("seen-world before", 3 * OLD_SECONDS), ("draft-old", 2 * OLD_SECONDS)):
        os.utime(path / name, (time.time() - seconds,) * 2)
    show(arbiter, "world")
    assert files_in(path) == {"seen-world"}


def test_what_others_left_in_a_bucket_is_removed_when_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "claims", time.time()
    for name, seconds in (("old", OLD_SECONDS + 60), ("new", OLD_SECONDS / 2)):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda at=now - seconds: at)
            show(claims(in_bucket(path)), name)
    show(claims(in_bucket(path)), "world")
    assert files_in(path) == {"seen-new", "seen-world"}


def test_a_bucket_without_conditional_put_is_no_arbiter(tmp_path: Path) -> None:
    store = ObjectStore(parse_url(f"file://{tmp_path}"))
    store._arm.is_atomic = False
    arbiter = claims(Objects(store))
    for ask in (lambda: arbiter.show("world"), lambda: arbiter.claim("job", 0, "a")):
        with pytest.raises(ArbiterSilent, match="has no conditional put"):
            ask()
    assert not arbiter.sees("world")


def test_what_cannot_be_removed_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "claims"
    (path / "seen-old").mkdir(parents=True)  # it cannot be unlinked
    (path / "draft-old").touch()
    for name in ("seen-old", "draft-old"):
        os.utime(path / name, (0, 0))
    arbiter = claims(Directory(path))
    show(arbiter, "world")
    assert arbiter.sees("world")
    assert sorted(path.name for path in path.iterdir()) == ["seen-old", "seen-world"]


def test_a_directory_that_hangs_is_silent_and_is_not_asked_again_meanwhile(tmp_path: Path) -> None:
    let_go = threading.Event()

    def hang(link: Callable[[], None]) -> None:
        assert let_go.wait(30)
        link()

    arbiter = Bounded(claims(Directory(tmp_path / "claims")), seconds=0.5)
    with links_go(hang):
        with pytest.raises(ArbiterSilent, match="no answer"):
            arbiter.claim("job", 0, "a")
        with pytest.raises(ArbiterSilent, match="before"):
            arbiter.claim("job", 0, "b")
        let_go.set()
        assert arbiter.claim("job", 0, "b") == "a", "what was executed late stands"


def test_two_threads_ask_at_once(tmp_path: Path) -> None:
    """One prepares the next world while the other forms the present one."""

    def take_some_time(link: Callable[[], None]) -> None:
        time.sleep(0.1)
        link()

    arbiter = Bounded(claims(Directory(tmp_path / "claims")))
    threads = [threading.Thread(target=arbiter.show, args=(name,)) for name in ("present", "planned")]
    with links_go(take_some_time):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert arbiter.sees("present")
    assert arbiter.sees("planned")


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_damaged_claim_is_none_and_no_error(tmp_path: Path, make: Make, text: str) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "claim-job-0").write_text(text)
    with pytest.raises(ArbiterSilent, match=r"claim-job-0 .*is no claim"):
        claims(make(tmp_path / "claims")).claim("job", 0, None)
