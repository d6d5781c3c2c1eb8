"""The store of a member without a server: for the simulation, and for tests of what stands above the stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from elastic_train.errors import StoreUnreachable


class MemoryStore:
    """As TorchStore in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> str | None:
        return self.values.get(key)

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        return [self.values.get(key) for key in keys]

    def put(self, key: str, value: str) -> None:
        self.values[key] = value

    def create(self, key: str, value: str) -> str:
        with self._lock:
            standing = self.values[key] = self.values.get(key) or value
            return standing

    def swap(self, key: str, expected: str, value: str) -> bool:
        with self._lock:
            if self.values.get(key, "") == expected:
                self.values[key] = value
            return self.values.get(key) == value

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.values[key] = str(int(self.values.get(key, "0")) + amount)
            return int(self.values[key])

    def delete(self, key: str) -> None:
        with self._lock:
            self.values.pop(key, None)

    def keys(self) -> list[str]:
        return list(self.values)


class MemoryClient(MemoryStore):
    """A client of such a store. Like a TorchStore it is of no use any more after one read without an answer."""

    def __init__(self, served: MemoryStore, is_silent: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.values, self._is_silent, self._is_lost = served.values, is_silent, False

    def get(self, key: str) -> str | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        self._is_lost = self._is_lost or self._is_silent()
        if self._is_lost:
            raise StoreUnreachable("no answer")
        return super().get_many(keys)
