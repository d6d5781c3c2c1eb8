"""Checks of a run's results: its end, its wall time, its weights."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from elastic_train.errors import SnapshotError
from elastic_train.observe.status import RunState
from elastic_train.observe.status_files import HEARD_SECONDS
from elastic_train.runlog.events import FINISHED
from elastic_train.runlog.reader import Line, dict_of, int_of
from elastic_train.tools.audit.finding import WALL_TOLERANCE, Found, Skip
from elastic_train.tools.audit.history import History
from elastic_train.tools.audit.lives import Clock
from elastic_train.tools.audit.lost_time import lost_time
from elastic_train.tools.audit.node_directories import other_results
from elastic_train.tools.audit.record import DrillRecord
from elastic_train.tools.audit.remains_checks import find_snapshots_of
from elastic_train.training.planned_steps import planned_steps
from elastic_train.wording import duration

if TYPE_CHECKING:
    import torch

PHASE_TOLERANCE = 0.05
"""seconds, for rounding"""
RATIO_TOLERANCE = 1e-6
"""relative: both numbers are of one moment, and one is computed from the other"""
LOSS_TOLERANCE = 0.1
"""relative: how far the mean loss of a `fast` run may be from the undisturbed run's. The loss of a single step depends
too much on its samples"""
BATCHNORM_TOLERANCE = 0.5
"""the same for a model with BatchNorm: its statistics are of each rank's samples (16 instead of 64), and so every loss
differs. A lost state still exceeds it"""
ACCURACY_TOLERANCE = 0.05
"""absolute: how far the test accuracy may be from the undisturbed run's"""
ENDING_SECONDS = 60.0
"""seconds from the last step to the end of every node, besides evaluation and snapshots, on an idle machine"""
SILENT_STEPS = 20
"""for how many median steps a worker on another machine may write nothing, if that is longer than HEARD_SECONDS"""


def check_end(history: History) -> Found:
    """The job reached its end: result.json is there, and the members of the last world reported `finished`."""
    findings = []
    if history.drill is not None and history.drill.settings.get("interrupted") is True:
        findings.append("the drill was interrupted, so that its job was ended and the faults to come were not injected")
    if history.drill is not None:  # its nodes share one run directory
        findings += [f"of {name}, a member of a world, there is no file in events/" for name in history.elsewhere]
    if not history.is_finished:
        return f"step {history.last_step}", [*findings, _why_not_finished(history)]
    if history.result is None:
        findings.append(f"finished, but {history.why_no_result}")
    findings += _too_early(history)
    elsewhere = history.elsewhere if history.drill is None else ()
    for member in (member for member in history.worlds[-1].members if member not in elsewhere):
        if (outcome := history.outcomes.get(member, "without a word")) not in FINISHED:
            findings.append(f"{member} was in the last world and ended {outcome}")
    if history.drill is not None:
        findings += _wrong_ends(history, history.drill)
    return f"step {history.last_step}", findings


def _too_early(history: History) -> Iterable[str]:
    """Yield how an end lies before the one that the flags ask for. A user's own training function may return before."""
    config = history.config
    if "task" not in config:
        return
    last = planned_steps(history.length, history.batch, int_of(config, "epochs"), int_of(config, "max_steps"))
    if last is not None and history.last_step < last:
        yield f"finished at step {history.last_step}, and the flags ask for {last} steps"


def _why_not_finished(history: History) -> str:
    """Describe why the run has no end. Raises: Skip: the run goes on, or was asked to stop."""
    nobody = f"nobody finished; the newest committed step is {history.last_step}"
    if history.drill is not None:
        return nobody
    if not history.lives:
        raise Skip("no worker has written anything")
    status = history.status
    if status.state in (RunState.FAILED, RunState.DEAD):
        return f"the run is {status.state}: {status.error or nobody}"
    if status.state is RunState.SILENT and not is_live(history):
        silence = duration(time.time() - (status.last_line_time or 0.0))
        return f"its workers, on other machines, have written nothing for {silence}: {nobody}"
    raise Skip(f"the run is {status.state}")


def is_live(history: History) -> bool:
    """Return whether the run has yet to end. Silent workers on other machines may be within a step or wait for others;
    after the limit below they count as dead."""
    if history.is_finished or not history.lives:
        return False
    status = history.status
    if status.state is not RunState.SILENT:
        return status.state in (RunState.STARTING, RunState.RUNNING)
    step_seconds = max(lost_time(history).step_seconds.values(), default=0.0)
    limit = max(HEARD_SECONDS, SILENT_STEPS * step_seconds, float(history.config.get("wait_timeout") or 0.0))
    return time.time() - (status.last_line_time or 0.0) <= limit


def _wrong_ends(history: History, drill: DrillRecord) -> Iterable[str]:
    """Yield which torchruns did not end, and what is wrong with the exit codes and times of the last world's nodes."""
    ends = {line["node"]: line for line in drill.nodes if line["what"] == "ended"}
    limit = ENDING_SECONDS + sum(history.phases.get(name, 0.0) for name in ("evaluate", "snapshot"))
    nodes = {member: drill.node_of.get(member) for member in history.worlds[-1].members}
    for member, found in nodes.items():
        if found is None:
            yield f"{member} was in the last world, and was seen on no node of the drill"
    begun = {line["node"]: line["time"] for line in drill.nodes if line["what"] == "started"}
    for node, at in sorted(begun.items()):
        if node not in ends or ends[node]["time"] < at:
            yield f"the torchrun of {node} did not end"
    for node in sorted({found for found in nodes.values() if found is not None} & ends.keys()):
        if (code := ends[node].get("code")) != 0:
            yield f"{node} finished, but its torchrun exited with {code}"
        if history.kept and (seconds := ends[node]["time"] - history.kept[-1].time) > limit:
            yield f"{node} ended {seconds:.0f} s after the last step, limit {limit:.0f} s"


def _no_result_yet(history: History) -> str:
    if history.result is None and "result.json" in history.names:
        return history.why_no_result
    return "no result.json of this end; it is written at the end of training"


def check_state(history: History) -> Found:
    """The final snapshot has the final weights, and so has a drill's undisturbed job: in ordered mode bit for bit."""
    findings = [
        f"the ranks' weights were not equal after step {event.get('step')}, and training went on"
        for event in history.of("states_differ")
        if event.get("is_mended") is False
    ]
    result = history.final_result
    if result is None:
        if findings:
            return "no result yet", findings
        raise Skip(_no_result_yet(history))
    looked_at = list[str]()
    tolerance, how = LOSS_TOLERANCE, "by its losses"
    told = str(result.get("state_sha256"))
    for name, weights in _final_weights(history, int(result.get("step") or 0)):
        from elastic_train.training.state import state_sha256

        looked_at = ["the final snapshot" if not looked_at else "all final snapshots"]
        if (stored := state_sha256(weights)) != told:
            findings.append(f"the final snapshot has {stored[:16]}, result.json says {told[:16]} ({name})")
        if any(key.endswith("num_batches_tracked") for key in weights):
            tolerance, how = BATCHNORM_TOLERANCE, "by its losses (roughly: BatchNorm sees each rank's samples)"
    for other in other_results(history):
        if (their := str(other.get("state_sha256"))) != told:
            findings.append(f"one node's result.json says {told[:16]}, another one's {their[:16]}")
    reference = history.drill.reference if history.drill else None
    if history.drill is not None and reference is None:
        findings.append("the undisturbed run failed or was interrupted: there is nothing to compare with")
    if reference is not None:
        looked_at.append("an undisturbed run" if _is_ordered(result) else f"an undisturbed run, {how}")
        findings += list(_differences(history, result, reference, tolerance))
    if not looked_at and not findings:
        raise Skip(f"neither a snapshot of the last step nor an undisturbed run to compare with{history.in_bucket}")
    return f"{told[:16]}, compared with {' and '.join(looked_at) or 'nothing'}", findings


def _is_ordered(result: Line) -> bool:
    return dict_of(result, "config").get("reduction") == "ordered"


def _differences(history: History, result: Line, reference: Line, tolerance: float) -> Iterable[str]:
    """Yield how a result differs from the undisturbed one. `tolerance` is relative, for the losses of fast mode."""
    if result.get("step") != reference.get("step"):
        yield f"step {result.get('step')}, undisturbed {reference.get('step')}"
        return
    if _is_ordered(result):
        if result.get("state_sha256") != reference.get("state_sha256"):
            ours, theirs = str(result.get("state_sha256"))[:16], str(reference.get("state_sha256"))[:16]
            yield f"state_sha256 {ours}, undisturbed {theirs}"
        return
    loss, undisturbed = history.early_loss, reference.get("early_loss")
    if loss is None or undisturbed is None:
        yield "no loss of the one or of the other run"
        return
    if not math.isclose(loss, undisturbed, rel_tol=tolerance):
        yield f"the mean loss of the first half of the steps is {loss:.4f}, undisturbed {undisturbed:.4f}"
    # An easy task has hardly any loss left by then, and the ratio of two such losses is chance.
    if _are_apart(history.late_loss, reference.get("late_loss"), tolerance, tolerance * abs(undisturbed)):
        late = f"{history.late_loss:.4f}, undisturbed {reference['late_loss']:.4f}"
        yield f"the mean loss of the second half of the steps is {late}"
    if _are_apart(result.get("test_accuracy"), reference.get("test_accuracy"), 0.0, ACCURACY_TOLERANCE):
        yield f"the test accuracy is {result['test_accuracy']:.4f}, undisturbed {reference['test_accuracy']:.4f}"


def _are_apart(one: float | None, other: float | None, relative: float, absolute: float) -> bool:
    """Return whether two numbers differ by more than the tolerances; False if one is unknown."""
    return one is not None and other is not None and not math.isclose(one, other, rel_tol=relative, abs_tol=absolute)


def _final_weights(history: History, step: int) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """Yield the name and the weights of each snapshot of the end: several nodes may have saved it. One of the same step
    and an earlier generation may be of steps that a restart undid."""
    from elastic_train.storage.snapshot import load_state

    infos = [info for info in find_snapshots_of(history)[0] if info.step == step]
    for info in infos:
        if info.generation == max(one.generation for one in infos):
            with contextlib.suppress(SnapshotError):  # check_snapshots reports it
                yield info.name, dict(load_state(info)["model"])


def check_phases(history: History) -> Found:
    """The phases sum to the wall, and the wall matches the span of the events."""
    result = history.final_result
    if result is None:
        raise Skip(_no_result_yet(history))
    told, seconds, wall = dict_of(result, "goodput"), history.phases, float(result.get("wall_seconds") or 0.0)
    findings = [
        f"phase {name} has {value:.3f} s" for name, value in seconds.items() if value < 0 or not math.isfinite(value)
    ]
    total = sum(seconds.values())
    if abs(total - wall) > PHASE_TOLERANCE:
        findings.append(f"the phases sum to {total:.3f} s, the wall is {wall:.3f} s")
    ratio = seconds.get("train", 0.0) / wall if wall > 0 else 0.0
    for name, expected in (("wall", wall), ("ratio", ratio)):
        value = float(told.get(name, expected))
        if not math.isclose(value, expected, rel_tol=RATIO_TOLERANCE, abs_tol=RATIO_TOLERANCE):
            findings.append(f"goodput says that the {name} is {value:g}, and it is {expected:g}")
    if history.kept and result.get("step") == history.last_step:
        last, began = history.kept[-1], _begun(history)
        span = last.time - began.get(last.clock, math.inf)
        if wall < span - WALL_TOLERANCE:
            findings.append(f"the wall is {wall:.1f} s, but the events span {span:.1f} s")
        ended: dict[Clock, float] = {}
        for life in history.lives:
            ended |= {clock: max(end, ended.get(clock, end)) for clock, (_, end) in life.spans.items()}
        # The startup is added: a process has imported torch before it writes its first event.
        # The spans of all clocks are added up: how far those of two machines overlap is unknown.
        longest = sum(ended[clock] - since for clock, since in began.items()) + seconds.get("startup", 0.0)
        is_set = len({host for host, _ in ended}) < len(ended)  # no span covers the time between two clocks of a host
        is_seen = span > -math.inf and not history.begins_after and not is_set and not history.elsewhere
        if is_seen and wall > longest + WALL_TOLERANCE:
            findings.append(f"the wall is {wall:.1f} s, but the startup and all events together span {longest:.1f} s")
    return f"{total:.2f} s in {len(seconds)} phases", findings


def _begun(history: History) -> dict[Clock, float]:
    """Map each clock to the first event of a worker that began from scratch. An earlier attempt that saved nothing is
    not in the state's times; lost_time.py counts it."""
    began = [line for line in history.of("restore") if line["source"] == "scratch"]
    newest = max((int(line["generation"]) for line in began), default=None)
    found: dict[Clock, float] = {}
    for life in history.lives:  # in containers, processes of the attempts before have the same names
        own = (line["event"] == "restore" and line["generation"] == newest for line in life.lines)
        if newest is None or any(own):
            found |= {clock: min(first, found.get(clock, first)) for clock, (first, _) in life.spans.items()}
    return found
