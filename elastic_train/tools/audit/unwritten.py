"""Lines that workers could not write, to a full disk or a failing mount: by their own word, once they could again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from elastic_train.runlog.reader import Line, dict_of, int_of

NOT_WRITTEN = "not written, by their workers' own word"


class Unwritten:
    """What the events `unwritten` of a run tell."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._ranges: dict[str, list[tuple[int, int, int, str]]] = defaultdict(list)
        """event -> generation, first and last step, writer; those of a ledger are `samples`"""
        self._num_torn = Counter[str]()
        """file -> how many of its lines are torn by that"""
        for line in lines:
            writer = str(line["writer"])
            self._num_torn[f"{line.get('file')}/{writer.replace('/', '-')}.jsonl"] += int_of(line, "torn") or 0
            for event, ranges in dict_of(line, "lines").items():
                self._ranges[event] += [(int(number), int(first), int(last), writer) for number, first, last in ranges]

    @property
    def num_lines(self) -> int:
        """How many at least: of those that do not belong to steps of their own one for each step."""
        return sum(last + 1 - first for ranges in self._ranges.values() for _, first, last, _ in ranges)

    def writers(self, event: str, step: int, generation: int = 0) -> dict[int, set[str]]:
        """Generation, from `generation` on -> who could not write its line of a step."""
        found = defaultdict[int, set[str]](set)
        for number, first, last, writer in self._ranges[event]:
            if number >= generation and first <= step <= last:
                found[number].add(writer)
        return found

    def newest(self, event: str, generation: int) -> int | None:
        """The newest step of a generation of which such a line could not be written; None where all could."""
        return max((last for number, _, last, _ in self._ranges[event] if number == generation), default=None)

    def unexplained(self, torn: Sequence[str]) -> list[str]:
        """Of the lines that are torn (`file: what`) those in whose file more are than its writer has told of."""
        found = Counter(line.partition(": ")[0] for line in torn)
        return [line for line in torn if found[(file := line.partition(": ")[0])] > self._num_torn[file]]
