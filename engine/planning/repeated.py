"""Steps of a dry walk that are walked once for the sizes they meet: what they take and leave depends on nothing else.
Later ones follow the record."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..network.plain import Half
from ..network.program import Step
from ..network.state import State
from .dryrun import Event, PeakMemory


@dataclass(frozen=True)
class _Made:
    """A tensor in a storage of its own, by the storage's number in the record."""

    number: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, number: int) -> _Made:
        nbytes = x.untyped_storage().nbytes()
        return cls(number, nbytes, x.shape, x.stride(), x.storage_offset(), x.dtype)

    def again(self) -> Tensor:
        whole = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device="meta")
        return whole.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Record:
    """events: of its memory; of histories that went, the key. result: None: its input. counts, through: what it noted
    besides."""

    events: list[tuple[Event, str | None]]
    result: _Made | None
    histories: dict[str, _Made | None]
    constants: dict[str, _Made]
    counts: Counter[str]
    through: frozenset[str]


class _Histories(dict[str, Tensor]):
    """Knows which were asked for, and which were written or dropped."""

    def __init__(self, histories: dict[str, Tensor]) -> None:
        super().__init__(histories)
        self.asked: set[str] = set()
        self.written: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.written.add(key)
        super().__setitem__(key, value)

    def pop(self, key: str, *default: Any) -> Any:
        self.asked.add(key)
        self.written.add(key)
        return super().pop(key, *default)


class Repeated:
    """Stands for a Step in a plain walk."""

    def __init__(self, step: Step, memory: PeakMemory) -> None:
        self.name = step.name
        self._step, self._memory = step, memory
        self._asks: set[str] = set()
        self._records: dict[Hashable, _Record] = {}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        if state is None:
            return self._step.plain(part, x, None)
        if not isinstance(state.histories, _Histories):
            state.histories = _Histories(state.histories)
        record = self._records.get(self._question(x, state))
        if record is None:
            return self._walked(part, x, state)
        with torch._C.DisableTorchFunction():  # what the modes would make of it is known
            return self._followed(record, x, state)

    def _question(self, x: Tensor, state: State) -> Hashable:
        with torch._C.DisableTorchFunction():
            histories = [dict.get(state.histories, key) for key in self._asks]
            forms = _form(x), *(h if h is None else _form(h) for h in histories)
        counted = frozenset(key for key, count in state.counts.items() if count)
        return forms, state.ending, state.inside, frozenset(state.through), frozenset(state.constants), counted

    def _walked(self, part: Callable[[str], nn.Module], x: Tensor, state: State) -> Tensor:
        histories, memory = state.histories, self._memory
        histories.asked, histories.written = set(), set()
        question, numbers = self._question(x, state), {memory.number(h): k for k, h in histories.items()}
        counts, through, constants = state.counts.copy(), frozenset(state.through), set(state.constants)
        with memory.recorded() as events:
            y = self._step.plain(part, x, state)
        asked = histories.asked | histories.written
        if not asked <= self._asks:
            self._asks |= asked
            self._records.clear()  # of questions that were too short
            return y
        noted = {k: t for k, t in state.constants.items() if k not in constants}
        left = {k: dict.get(histories, k) for k in histories.written}
        made = _named(memory, events, [y if y is not x else None, *left.values(), *noted.values()])
        gone = [(e, None if e.own else numbers.get(e.number)) for e in events]
        if made is not None and all(e.own or key is not None for e, key in gone):
            result, rest = made[0], iter(made[1:])
            self._records[question] = _Record(
                gone, result, {k: next(rest) for k in left}, {k: next(rest) for k in noted}, state.counts - counts,
                frozenset(state.through) - through,
            )  # fmt: skip
        return y

    def _followed(self, record: _Record, x: Tensor, state: State) -> Tensor:
        blocks = self._memory.follow(record.events, lambda key: dict.pop(state.histories, key))

        def again(made: _Made) -> Tensor:
            with self._memory.given(blocks[made.number]):
                return made.again()

        for key, history in record.histories.items():
            if history is None:
                dict.pop(state.histories, key, None)
            else:
                state.histories[key] = again(history)
        state.constants.update({key: again(made) for key, made in record.constants.items()})
        state.counts.update(record.counts)
        state.through |= record.through
        return x if record.result is None else again(record.result)


def _form(x: Tensor) -> Hashable:
    return x.shape, x.stride(), x.dtype


def _named(memory: PeakMemory, events: Iterable[Event], tensors: list[Tensor | None]) -> list[_Made | None] | None:
    """Tensors that a step left, by their storages' numbers; None where these are not exactly those that it made and did
    not give back: nobody can follow it then."""
    numbers = [memory.number(t) for t in tensors if t is not None]
    own = [e for e in events if e.own and e.number is not None]
    given_back = {e.number for e in own if not e.takes}
    if sorted(numbers) != sorted(e.number for e in own if e.takes and e.number not in given_back):
        return None
    found = iter(numbers)
    return [None if t is None else _Made.of(t, next(found)) for t in tensors]


def repeated(half: Half, memory: PeakMemory) -> Half:
    """The half with steps that are walked once for the sizes they meet."""
    other = copy.copy(half)
    for part in ("_low", "_mid", "_high"):
        setattr(other, part, [Repeated(step, memory) for step in getattr(half, part)])
    return other
