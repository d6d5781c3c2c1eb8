"""Numbers as a person reads them, and the words of a command line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches

# torchrun's own options, of torch 2.11 to 2.15, to tell its arguments from the program's.
TORCHRUN_SWITCHES = ("standalone", "module", "no-python", "run-path", "virtual-local-rank", "help")
TORCHRUN_OPTIONS = (
    "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts",
    "monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee",
    "log-line-prefix-template", "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters",
    "node-rank", "master-addr", "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle",
    "shutdown-timeout", "print-completion",
)  # fmt: skip

SHOWN_NAMES = 3
"""of parameters, in a message"""


def count(number: int | None, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def named(parameters: Sequence[str]) -> str:
    """`2 parameters (a.weight, a.bias)`, with the first few names."""
    shown = ", ".join(parameters[:SHOWN_NAMES]) + ", ..." * (len(parameters) > SHOWN_NAMES)
    return f"{count(len(parameters), 'parameter')} ({shown})"


def workers_go_on(world_size: int, step: int) -> str:
    """`2 workers go on at step 144`, after `step` committed ones."""
    return f"{count(world_size, 'worker')} {'goes' if world_size == 1 else 'go'} on at step {step + 1}"


def kind_of(value: object) -> str:
    """What was given in place of something else: `nothing (no return?)`, `a float`, `an int`, `the class AdamW`."""
    if value is None:
        return "nothing (is its return missing?)"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def main_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    """All that was measured of a test set, `0.0153`, the accuracy first, `97.50%`; then without the loss."""
    numbers = {name: f"{value:.4g}" for name, value in metrics.items()}
    if "accuracy" not in metrics:
        return numbers
    accuracy = {"accuracy": f"{metrics['accuracy']:.2%}"}
    return accuracy | {name: text for name, text in numbers.items() if name not in ("accuracy", "loss")}


def flags_in(words: Iterable[str]) -> list[str]:
    """Of a command line, without their values."""
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def flag_without_value(words: Sequence[str], unset: Collection[str]) -> str | None:
    """The first flag of a command line whose value is empty, or that is `unset` all the same."""
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        if name in unset or (equals and not value and name.startswith("--")):
            return name
        if not word and before.startswith("--"):
            return before
        before = word
    return None


def no_value(name: str) -> str:
    return f"{name} has no value: is a variable not set? Leave the flag out for the default"


def of_torchrun(words: Sequence[str]) -> str:
    """What is to be said of torchrun's own flags among those of a script; nothing where there are none."""
    names = (*TORCHRUN_OPTIONS, *TORCHRUN_SWITCHES)
    found = [flag for flag in flags_in(words) if flag.removeprefix("--").replace("_", "-") in names]
    if not found:
        return ""
    belong, stand = ("belong", "stand") if len(found) > 1 else ("belongs", "stands")
    return f"{' and '.join(found)} {belong} to torchrun and {stand} before the script, or before -m; "


def unrecognized(words: Sequence[str], known: Collection[str], where: str) -> str:
    """`unrecognized arguments: --epoch (did you mean --epochs? ...)`; `where` says where all can be read."""
    found: list[str] = []
    for flag in flags_in(words):
        longer = sorted(name for name in known if name.endswith(flag[1:]))
        found += longer or get_close_matches(flag, known, n=1)
    hint = f"did you mean {' or '.join(found)}? " if found else ""
    return f"unrecognized arguments: {' '.join(words)} ({hint}{where})"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Lines of a table: cells to the right, those of the columns `left` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def duration(seconds: float) -> str:
    """Two units at most; a time that lies ahead, by a clock of another machine, is none."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"


def human_bytes(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    value, unit = count / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if value >= 1000:
            value, unit = value / 1000, larger
    return f"{value:.1f} {unit}"


def nearest_multiples(value: int, divisor: int) -> list[int]:
    """The multiples of `divisor` next to `value`, below and above, without zero."""
    below = value // divisor * divisor
    return [m for m in (below, below + divisor) if m > 0]
