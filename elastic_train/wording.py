"""Texts for people: numbers in readable form, and errors of a command line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
"""The number of parameter names in a message."""


def count(number: int | None, noun: str) -> str:
    """A number with its noun: `1 step`, `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def named(parameters: Sequence[str]) -> str:
    """`2 parameters (a.weight, a.bias)`, with the first few names."""
    shown = ", ".join(parameters[:SHOWN_NAMES]) + ", ..." * (len(parameters) > SHOWN_NAMES)
    return f"{count(len(parameters), 'parameter')} ({shown})"


def workers_go_on(world_size: int, step: int) -> str:
    """`2 workers go on at step 144`, after `step` committed ones."""
    return f"{count(world_size, 'worker')} {'goes' if world_size == 1 else 'go'} on at step {step + 1}"


def kind_of(value: object) -> str:
    """Describe a value of a wrong type: `nothing (is its return missing?)`, `a float`, `an int`, `the class AdamW`."""
    if value is None:
        return "nothing (is its return missing?)"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def main_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    """Format the metrics of a test set, such as `0.0153`. The accuracy, if any, comes first and replaces the loss."""
    numbers = {name: f"{value:.4g}" for name, value in metrics.items()}
    if "accuracy" not in metrics:
        return numbers
    accuracy = {"accuracy": f"{metrics['accuracy']:.2%}"}
    return accuracy | {name: text for name, text in numbers.items() if name not in ("accuracy", "loss")}


def flags_in(words: Iterable[str]) -> list[str]:
    """The flags of a command line, without their values."""
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def empty_values(words: Iterable[str]) -> Iterator[str]:
    """Yield the flag before each empty value of a command line (`--task ""`, `--task=`); "" if there is no flag. A
    shell variable is probably not set; the default is not meant."""
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        if not word:
            yield before if before.startswith("--") else ""
        elif equals and not value and name.startswith("--"):
            yield name
        before = word


def no_value(name: str) -> str:
    return f"{name} has no value: is a variable not set? Leave the flag out for the default"


def of_torchrun(words: Sequence[str]) -> str:
    """The hint for torchrun's own flags among those of a script; empty if there are none."""
    names = (*TORCHRUN_OPTIONS, *TORCHRUN_SWITCHES)
    found = [flag for flag in flags_in(words) if flag.removeprefix("--").replace("_", "-") in names]
    if not found:
        return ""
    belong, stand = ("belong", "stand") if len(found) > 1 else ("belongs", "stands")
    return f"{' and '.join(found)} {belong} to torchrun and {stand} before the script, or before -m; "


def unrecognized(words: Sequence[str], known: Collection[str], where: str) -> str:
    """The error `unrecognized arguments: --epoch (did you mean --epochs? ...)`; `where` points to the list of flags."""
    found: list[str] = []
    for flag in flags_in(words):
        longer = sorted(name for name in known if name.endswith(flag[1:]))
        found += longer or get_close_matches(flag, known, n=1)
    hint = f"did you mean {' or '.join(found)}? " if found else ""
    return f"unrecognized arguments: {' '.join(words)} ({hint}{where})"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """The lines of a table: cells are right-aligned, those in the columns `left` left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def duration(seconds: float) -> str:
    """A duration in at most two units. A negative one, by another machine's clock, counts as 0."""
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
    """The multiples of `divisor` nearest to `value`, below and above, without zero."""
    below = value // divisor * divisor
    return [m for m in (below, below + divisor) if m > 0]
