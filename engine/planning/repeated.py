"""Steps of a dry walk that are walked once for the sizes they meet: what they take and leave depends on nothing else.
Later ones follow the record."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
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
        if self.nbytes == math.prod(self.shape) * self.dtype.itemsize:  # nothing of the storage lies outside
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        whole = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device="meta")
        return whole.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Record:
    """events: of its memory; of histories that went, the key. result: None: its input. counts, through, waits: what it
    noted besides, the last one of where its input waits for the clip's end."""

    events: list[tuple[Event, str | None]]
    result: _Made | None
    histories: dict[str, _Made | None]
    constants: dict[str, _Made]
    counts: Counter[str]
    through: frozenset[str]
    waits: list[str]


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


class _Counts(Counter[str]):
    """Knows which were asked for."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__(counts)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> int:
        self.asked.add(key)
        return super().__getitem__(key)


class _Through(set[str]):
    """Knows which were asked for."""

    def __init__(self, through: set[str]) -> None:
        super().__init__(through)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


@dataclass(frozen=True)
class _Facts:
    """asks: what a step has asked its State for: histories, constants, counts and norms that are through. records: by
    those."""

    asks: tuple[frozenset[str], ...] = (frozenset(),) * 4
    records: dict[Hashable, _Record] = field(default_factory=dict)


class Known:
    """What walks have found out of one step, for all of one half under the same operators. Threads may share it: facts
    are replaced, not changed, when a step asks for more."""

    def __init__(self) -> None:
        self.facts = _Facts()


class Repeated:
    """Stands for a Step in a plain walk."""

    def __init__(self, step: Step, memory: PeakMemory, known: Known) -> None:
        self.name, self.size = step.name, step.size
        self._step, self._memory, self._known = step, memory, known

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        if state is None:
            return self._step.plain(part, x, None)
        if not isinstance(state.histories, _Histories):
            state.histories, state.constants = _Histories(state.histories), _Histories(state.constants)
            state.counts, state.through = _Counts(state.counts), _Through(state.through)
        facts = self._known.facts
        question = self._question(facts, x, state)
        record = facts.records.get(question)
        if record is None:
            return self._walked(facts, question, part, x, state)
        with torch._C.DisableTorchFunction():  # what the modes would make of it is known
            return self._followed(record, x, state)

    def _question(self, facts: _Facts, x: Tensor, state: State) -> Hashable:
        """All that what the step takes, makes and leaves depends on."""
        histories, constants, counts, through = facts.asks
        with torch._C.DisableTorchFunction():
            found = [(key, _form(dict.__getitem__(state.histories, key)))
                     for key in histories if dict.__contains__(state.histories, key)]  # fmt: skip
            found += [key for key in constants if dict.__contains__(state.constants, key)]
            found += [key for key in counts if dict.get(state.counts, key)]
            found += [key for key in through if set.__contains__(state.through, key)]
            return _form(x), state.ending, state.inside, frozenset(found)

    def _walked(
        self, facts: _Facts, question: Hashable, part: Callable[[str], nn.Module], x: Tensor, state: State
    ) -> Tensor:
        watched, memory = (state.histories, state.constants, state.counts, state.through), self._memory
        for each in watched:
            each.asked.clear()
        state.histories.written, state.constants.written = set(), set()
        numbers = {memory.number(h): k for k, h in state.histories.items()}
        counts, through = dict(state.counts), frozenset(state.through)
        waiting = {k: len(frames) for k, frames in state.waiting.items()}
        with memory.recorded() as events:
            y = self._step.plain(part, x, state)
        written = state.histories.written
        asked = [written | state.histories.asked, *(each.asked for each in watched[1:])]
        asks = tuple(known | more for known, more in zip(facts.asks, asked, strict=True))
        if asks != facts.asks:  # its questions were too short
            self._known.facts = _Facts(asks)
            return y
        noted = {k: dict.__getitem__(state.constants, k) for k in state.constants.written}
        left = {k: dict.get(state.histories, k) for k in written}
        made = _named(memory, events, [y if y is not x else None, *left.values(), *noted.values()])
        gone = [(e, None if e.own else numbers.get(e.number)) for e in events]
        if made is not None and all(e.own or key is not None for e, key in gone):
            result, rest = made[0], iter(made[1:])
            facts.records[question] = _Record(
                gone, result, {k: next(rest) for k in left}, {k: next(rest) for k in noted},
                Counter({k: n - counts.get(k, 0) for k, n in state.counts.items() if n != counts.get(k, 0)}),
                frozenset(state.through) - through,
                [k for k, frames in state.waiting.items() if len(frames) > waiting.get(k, 0)],
            )  # fmt: skip
        return y

    def _followed(self, record: _Record, x: Tensor, state: State) -> Tensor:
        blocks = self._memory.follow(record.events, lambda key: dict.pop(state.histories, key))

        def again(made: _Made) -> Tensor:
            self._memory.give(blocks[made.number])
            return made.again()

        for key, history in record.histories.items():
            if history is None:
                dict.pop(state.histories, key, None)
            else:
                state.histories[key] = again(history)
        for key, made in record.constants.items():
            state.constants[key] = again(made)
        state.counts.update(record.counts)
        state.through |= record.through
        for key in record.waits:
            state.waiting[key].append(x)
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


def repeated(half: Half, memory: PeakMemory, known: Mapping[str, Known]) -> Half:
    """The half with steps that are walked once for the sizes they meet. known: of its steps, by their names."""
    other = copy.copy(half)
    for part in ("_low", "_mid", "_high"):
        setattr(other, part, [Repeated(step, memory, known[step.name]) for step in getattr(half, part)])
    return other
