"""Lines that workers could not write to a full disk or a failing mount. They reported them once they could again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from elastic_train.runlog.reader import Line, dict_of, int_of

NOT_WRITTEN = "not written, by their workers' own word"


class Unwritten:
    """The contents of a run's `unwritten` events."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._ranges: dict[str, list[tuple[int, int, int, str]]] = defaultdict(list)
        """event -> (generation, first and last step, writer); the lines of a ledger are `samples`"""
        self._num_torn = Counter[str]()
        """file -> how many of its lines were torn thereby"""
        for line in lines:
            writer = str(line["writer"])
            self._num_torn[f"{line.get('file')}/{writer.replace('/', '-')}.jsonl"] += int_of(line, "torn") or 0
            for event, ranges in dict_of(line, "lines").items():
                self._ranges[event] += [(int(number), int(first), int(last), writer) for number, first, last in ranges]

    @property
    def num_lines(self) -> int:
        """A lower bound of the missing lines: those of the same event, writer and step count as one."""
        return sum(last + 1 - first for ranges in self._ranges.values() for _, first, last, _ in ranges)

    def writers(self, event: str, step: int, generation: int = 0) -> dict[int, set[str]]:
        """Map each generation, from `generation` on, to the workers that could not write their line of a step."""
        found = defaultdict[int, set[str]](set)
        for number, first, last, writer in self._ranges[event]:
            if number >= generation and first <= step <= last:
                found[number].add(writer)
        return found

    def newest(self, event: str, generation: int) -> int | None:
        """The newest step of a generation whose line could not be written; None if all were."""
        return max((last for number, _, last, _ in self._ranges[event] if number == generation), default=None)

    def unexplained(self, torn: Sequence[str]) -> list[str]:
        """Return the torn lines (`file: what`) of files with more torn lines than their writer reported."""
        found = Counter(line.partition(": ")[0] for line in torn)
        return [line for line in torn if found[(file := line.partition(": ")[0])] > self._num_torn[file]]
