"""The report page of a run: its content, and that a real browser shows it without errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import webbrowser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from elastic_train.cli import main
from elastic_train.tools.audit.audit import audit_history
from elastic_train.tools.audit.history import History, read_history
from elastic_train.tools.audit.lives import Life
from elastic_train.tools.audit.lost_time import lost_time
from elastic_train.tools.audit.report import MAX_POINTS, TEMPLATE, Axis, _lanes, nice_step, thinned, write_report
from tests.drills.planting import restart
from tests.drills.small_run import MEMBERS, START, edit_json, mark_as_drill, write_small_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_small_run(tmp_path / "run")
    mark_as_drill(tmp_path / "run", nodes=3, nodes_as="processes", backend="c10d")
    return tmp_path / "run"


def browse(page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--enable-logging=stderr",
        f"--user-data-dir={page.parent / 'browser'}", *(["--no-sandbox"] if os.geteuid() == 0 else []),
        *arguments, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done


def shown(dom: str) -> dict[str, str]:
    """The numbers on the page by their names."""
    return dict(re.findall(r'data-name="([^"]+)"[^>]*>([^<]*)<', dom))


def test_an_output_that_names_no_file_is_told(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir), "--output", "."]) == 1
    told = "elastic-train: error: . cannot be written: Is a directory; --output says where else\n"
    assert capsys.readouterr() == ("", told)


def test_it_needs_nothing_else(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir)]) == 0
    page = Path(capsys.readouterr().out.strip())
    text = page.read_text()
    assert page == run_dir / "report.html"
    assert page.stat().st_size < 2_000_000
    assert not re.findall(r"https?://|@import|<script|<link(?! rel=\"icon\" href=\"data:)", text)


def test_no_browser_is_no_error(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _url: False)
    assert main(["report", str(run_dir), "--open"]) == 0
    assert "no browser" in capsys.readouterr().err


def test_what_comes_from_the_files_is_escaped(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(run_dir / "drill" / "drill.json", lambda settings: {**settings, "nodes_as": "<script>alert(1)</script>"})
    assert main(["report", str(run_dir)]) == 0
    assert "<script>" not in Path(capsys.readouterr().out.strip()).read_text()


@needs_browser
def test_a_browser_shows_the_numbers_of_the_files(run_dir: Path) -> None:
    assert main(["report", str(run_dir)]) == 0
    done = browse(run_dir / "report.html", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    found = shown(done.stdout)
    result = json.loads((run_dir / "result.json").read_text())
    lost = lost_time(read_history(run_dir))
    assert found["verdict"] == "PASS"
    assert found["goodput"] == f"{lost.ratio:.3f}"
    assert found["step"] == str(result["step"])
    assert (found["paid"], found["kept"]) == ("8", "3")
    assert found["cost"] == f"{result['bill']['cost_per_million_samples']:.2f}"
    assert found["generations"] == str(result["generations"])
    assert found["wall"] == f"{result['wall_seconds']:.2f} s"
    assert (found["recovered-0"], found["still-0"]) == ("0.55 s", "0.50 s")
    assert found["recovery-1"] == f"{sum(result['incidents'][0]['seconds'].values()):.3f} s"
    assert found["share-peer_lost"] == f"{lost.by_cause['peer_lost']:.2f} s"
    assert found["share-startup"] == f"{result['goodput']['startup']:.2f} s"
    assert {name for name in found if name.startswith("check-")} >= {"check-ledger", "check-state"}
    assert all(f"{member}: in no world" in done.stdout for member in MEMBERS)


@needs_browser
def test_it_fits_a_phone_and_follows_light_and_dark(run_dir: Path, tmp_path: Path) -> None:
    assert main(["report", str(run_dir)]) == 0
    page = tmp_path / "probe.html"
    script = (
        "console.error('probe');document.body.title=document.documentElement.scrollWidth>innerWidth;"
        "const cut=e=>e.scrollWidth>e.clientWidth;"
        "document.body.lang=[...document.querySelectorAll('.lane-name')].filter(cut).length"
        "+[...document.querySelectorAll('.prose')].filter(e=>cut(e.parentElement)).length"
    )
    text = (run_dir / "report.html").read_text()
    page.write_text(text.replace("</main>", f"</main><script>{script}</script>"))
    done = browse(page, "--window-size=390,900", "--dump-dom")
    assert "CONSOLE" in done.stderr, "a word of the page would be seen"
    dom = done.stdout
    assert re.search(r'<body[^>]* title="false"', dom), "it scrolls sideways on a phone"
    assert re.search(r'<body[^>]* lang="0"', dom), "a lane's name is cut off, or the audit"
    brightness = {}
    for scheme, flags in (("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",))):
        picture = tmp_path / f"{scheme}.png"
        browse(run_dir / "report.html", *flags, "--window-size=800,900", f"--screenshot={picture}")
        with Image.open(picture) as image:
            brightness[scheme] = sum(image.convert("RGB").getpixel((3, 3)))  # type: ignore[arg-type]
    assert brightness["light"] > 600
    assert brightness["dark"] < 150


def test_a_run_that_says_little_has_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events").mkdir()
    assert main(["report", str(tmp_path)]) == 0
    assert "FAIL" in Path(capsys.readouterr().out.strip()).read_text()


def test_a_run_that_formed_no_world_has_a_page_too(run_dir: Path) -> None:
    for log in (run_dir / "events").iterdir():
        log.write_text(log.read_text().partition("\n")[0] + "\n")
    assert main(["report", str(run_dir)]) == 0
    assert "in no world" in (run_dir / "report.html").read_text()


def test_every_mark_leads_somewhere(run_dir: Path) -> None:
    assert main(["report", str(run_dir)]) == 0
    text = (run_dir / "report.html").read_text()
    targets = set(re.findall(r'href="#([^"]+)"', text))
    assert targets
    assert targets <= set(re.findall(r'id="([^"]+)"', text))


def test_new_processes_have_a_bar_and_a_mark_that_leads_to_it(tmp_path: Path) -> None:
    write_small_run(tmp_path / "run")
    restart(tmp_path / "run", 3, "snapshot", 3)
    assert main(["report", str(tmp_path / "run")]) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    assert {"recovery-1", "recovery-2"} <= set(re.findall(r'href="#([^"]+)"', text)) & set(
        re.findall(r'id="([^"]+)"', text)
    )
    last_step, world = 2.2, 5.0
    assert shown(text)["recovery-2"] == f"{world - last_step:.3f} s"
    assert f"down and startup {world - last_step:.3f}" in text


def test_an_outage_after_the_drill_let_go_counts(run_dir: Path) -> None:
    edit_json(run_dir / "drill" / "drill.json", lambda settings: {**settings, "released": START + 1.3})
    assert main(["report", str(run_dir)]) == 0
    found = shown((run_dir / "report.html").read_text())
    assert (found["outages"], found["longest"]) == ("1", "0.50 s")
    assert (
        "between the first step and the moment at which the drill let its job run free"
        in (run_dir / "report.html").read_text()
    )


def test_the_page_is_of_the_audit_that_was_printed(run_dir: Path, tmp_path: Path) -> None:
    history = read_history(run_dir)
    found = audit_history(history)
    (run_dir / "result.json").unlink()
    elsewhere = write_report(history, found, tmp_path / "elsewhere.html")
    assert 'data-name="verdict">PASS<' in elsewhere.read_text()
    assert not (run_dir / "report.html").exists()
    assert write_report(history, found) == run_dir / "report.html"


def test_lanes_are_named_by_what_tells_them_apart() -> None:
    def names(*members: str) -> list[str]:
        return re.findall(
            r"<bdi>([^<]*)<",
            TEMPLATE.module.lanes([(member, []) for member in members], Axis(0.0, 1.0), [], "s"),  # type: ignore[attr-defined]
        )

    assert names("vm/0/2931", "vm/0/2944", "vm/1/2950") == ["0/2931", "0/2944", "1/2950"]
    assert names("node1", "node2") == ["node1", "node2"]
    assert names("vm/0/2931") == ["vm/0/2931"]


def test_lanes_of_many_members_look_at_each_line_a_few_times() -> None:
    looks = [0]

    class Counted(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            looks[0] += name == "writer"
            return super().__getitem__(name)

    members = [f"node{number}/0/1" for number in range(50)]
    clock = ("", 0)
    lives = [Life(member, spans={clock: (0.0, 19.5)}) for member in members]
    for number in range(20):
        of_all = {"generation": number, "step": 0, "cause": "start", "members": members}
        for rank, member in enumerate(members):
            for event, after in (("world", 0.0), ("done", 0.5)):
                line = {"time": number + after, "event": event, "writer": member, "rank": rank, "clock": clock}
                lives[rank].lines.append(Counted(of_all | line))
    history = History(Path(), tuple(lives), ())
    lanes = _lanes(history, 0.0, 20.0)
    assert looks[0] <= 3 * sum(len(life.lines) for life in lives)
    assert [(start, stop) for start, stop, kind, _ in lanes[0][1] if kind != "alive"] == [
        (number, number + 0.5) for number in range(20)
    ]


def test_thinning_keeps_the_spikes() -> None:
    points = [(float(index), 0.0) for index in range(100_000)]
    points[12_345] = (12_345.0, 9.0)
    points[77_777] = (77_777.0, -9.0)
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS
    assert {points[12_345], points[77_777]} <= set(kept)
    assert kept == sorted(kept)
    assert thinned([(0.0, float("nan")), (1.0, 2.0)]) == [(1.0, 2.0)]


@pytest.mark.parametrize("low", [0.0, -3.0, 17.3])
@pytest.mark.parametrize("span", [1e-3, 0.7, 1.0, 99.0, 1e6])
def test_ticks_are_few_round_and_within(low: float, span: float) -> None:
    axis = Axis(low, low + span)
    ticks = axis.ticks(5)
    assert 1 <= len(ticks) <= 6
    assert all(-1e-6 <= axis.percent(tick) <= 100 + 1e-6 for tick in ticks)
    assert f"{nice_step(span / 5):e}"[0] in "125"
    assert Axis.over([]).percent(0.5) == 50.0
    assert Axis.over([4.0, 4.0]).percent(4.0) == 0.0
