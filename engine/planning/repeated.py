"""Run each step of a dry run once for each set of sizes, and replay the record for equal ones.

A step's memory and results depend on the sizes alone. Later calls replay the record, and so do steps that differ only
in their names."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..network.ops.pictures import EachPicture
from ..network.plain import Half
from ..network.program import Step
from ..network.state import State
from .dryrun import Event, PeakMemory, seen


@dataclass(frozen=True)
class _Made:
    """Description of a tensor in a storage of its own, by the storage's number in the record."""

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
        """Return an equal tensor on the meta device."""
        if self.nbytes == math.prod(self.shape) * self.dtype.itemsize:  # the tensor covers all of its storage
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        whole = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device="meta")
        return whole.as_strided(self.shape, self.stride, self.offset)


#: Key of a history and None, or key and place of a frame that has waited for the clip's end.
_Gone = tuple[str, "int | None"]


@dataclass(frozen=True)
class _Record:
    """Record of a step.

    events: its allocations and releases; with each release of an older storage, the history or frame that it was.
    result: None where it is the input. histories, constants: those that it wrote (None: dropped). counts, through: its
    changes to these fields of the State. waits: keys under which its input waits for the clip's end. taken: keys whose
    waiting frames it took."""

    events: list[tuple[Event, _Gone | None]]
    result: _Made | None
    histories: dict[str, _Made | None] = field(default_factory=dict)
    constants: dict[str, _Made] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    through: frozenset[str] = frozenset()
    waits: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)


class _Histories(dict[str, Tensor]):
    """Histories that note which keys were read, and which were written or dropped."""

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
    """Counts that note which keys were read."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__(counts)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> int:
        self.asked.add(key)
        return super().__getitem__(key)


class _Through(set[str]):
    """Set of finished norms that notes which keys were looked up."""

    def __init__(self, through: set[str]) -> None:
        super().__init__(through)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


@dataclass(frozen=True)
class _Facts:
    """Findings about steps that are alike.

    asks: keys that a step has looked up in its State: histories, constants, counts and finished norms. records: by the
    input and what was found under these keys. In all keys `_OWN` stands for the step's name."""

    asks: tuple[frozenset[str], ...] = (frozenset(),) * 4
    records: dict[Hashable, _Record] = field(default_factory=dict)


class Known:
    """Holder of the facts about steps that are alike, for one component under the same operators.

    Threads may share it: when a step looks up more keys, the facts are replaced, not changed."""

    def __init__(self) -> None:
        self.facts = _Facts()


#: Stands for the name of a step.
_OWN = "\0"


class Repeated:
    """Stand-in for a Step in a dry run of plain torch."""

    lazy = False  # a lazy step knows its memory, so no dry run meets it

    def __init__(self, step: Step, memory: PeakMemory, known: Known) -> None:
        self.name, self.size = step.name, step.size
        self._step, self._memory, self._known = step, memory, known

    def _local(self, key: str) -> str:
        return key.replace(self.name, _OWN, 1)

    def _full(self, key: str) -> str:
        return key.replace(_OWN, self.name, 1)

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        if state is None:
            with seen():
                return self._step.plain(part, x, None)
        if not isinstance(state.histories, _Histories):
            state.histories, state.constants = _Histories(state.histories), _Histories(state.constants)
            state.counts, state.through = _Counts(state.counts), _Through(state.through)
        facts = self._known.facts
        question = self._question(facts, x, state)
        record = facts.records.get(question)
        if record is None:
            return self._walked(facts, question, part, x, state)
        with torch._C._DisableTorchDispatch():  # the modes would count again what the record holds
            return self._followed(record, x, state)

    def _question(self, facts: _Facts, x: Tensor, state: State) -> Hashable:
        """Return everything that the step's memory and results depend on, as a key of its records."""
        histories, constants, counts, through = facts.asks
        found = [(key, _form(history)) for key in histories
                 if (history := dict.get(state.histories, self._full(key))) is not None]  # fmt: skip
        found += [key for key in constants if dict.__contains__(state.constants, self._full(key))]
        found += [key for key in counts if dict.get(state.counts, self._full(key))]
        found += [key for key in through if set.__contains__(state.through, self._full(key))]
        if state.ending:  # earlier, steps do not look at frames that wait
            found += [(self._local(key), *map(_form, frames)) for key, frames in state.waiting.items()
                      if self.name in key]  # fmt: skip
        return _form(x), state.ending, state.inside, frozenset(found)

    def _walked(
        self, facts: _Facts, question: Hashable, part: Callable[[str], nn.Module], x: Tensor, state: State
    ) -> Tensor:
        watched, memory = (state.histories, state.constants, state.counts, state.through), self._memory
        for each in watched:
            each.asked.clear()
        state.histories.written, state.constants.written = set(), set()
        local = self._local
        gone = {memory.number(h): (local(k), None) for k, h in state.histories.items()}
        gone |= {memory.number(f): (local(k), i) for k, frames in state.waiting.items() for i, f in enumerate(frames)}
        counts, through = dict(state.counts), frozenset(state.through)
        waiting = {k: len(frames) for k, frames in state.waiting.items()}
        with memory.recorded() as events, seen():
            y = self._step.plain(part, x, state)
        written = state.histories.written
        asked = [written | state.histories.asked, *(each.asked for each in watched[1:])]
        asks = tuple(known.union(map(local, more)) for known, more in zip(facts.asks, asked, strict=True))
        if asks != facts.asks:  # the question lacked keys that the step depends on
            self._known.facts = _Facts(asks)
            return y
        noted = {k: dict.__getitem__(state.constants, k) for k in state.constants.written}
        left = {k: dict.get(state.histories, k) for k in written}
        made = _named(memory, events, [y if y is not x else None, *left.values(), *noted.values()])
        named = [(e, None if e.own else gone.get(e.number)) for e in events]
        if made is not None and all(e.own or what is not None for e, what in named):
            rest = iter(made[1:])
            facts.records[question] = _Record(
                named, made[0], {local(k): next(rest) for k in left}, {local(k): next(rest) for k in noted},
                Counter({local(k): n - counts.get(k, 0) for k, n in state.counts.items() if n != counts.get(k, 0)}),
                frozenset(map(local, state.through - through)),
                [local(k) for k, frames in state.waiting.items() if len(frames) > waiting.get(k, 0)],
                [local(k) for k in waiting if k not in state.waiting],
            )  # fmt: skip
        return y

    def _followed(self, record: _Record, x: Tensor, state: State) -> Tensor:
        full = self._full
        waited: dict[str, list[Tensor | None]] = {key: [*state.waiting.pop(full(key))] for key in record.taken}

        def drop(what: _Gone) -> None:
            key, place = what
            if place is None:
                dict.pop(state.histories, full(key))
            else:
                waited[key][place] = None

        blocks = self._memory.follow(record.events, drop)

        def again(made: _Made) -> Tensor:
            return self._memory.lay(made.again(), blocks[made.number])

        for key, history in record.histories.items():
            if history is None:
                dict.pop(state.histories, full(key), None)
            else:
                state.histories[full(key)] = again(history)
        for key, made in record.constants.items():
            state.constants[full(key)] = again(made)
        for key, more in record.counts.items():
            state.counts[full(key)] += more
        state.through.update(map(full, record.through))
        for key in record.waits:
            state.waiting[full(key)].append(x)
        return x if record.result is None else again(record.result)


class _Picture:
    """Stand-in for all steps of one picture in a dry run of plain torch.

    They have no State, so a record depends on the picture's size alone. A chunk may have thousands of pictures."""

    lazy = False

    def __init__(self, steps: Sequence[Step], memory: PeakMemory, known: Known) -> None:
        self._steps, self._memory, self._known = steps, memory, known

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: None) -> Tensor:
        question, memory = _form(x), self._memory
        record = self._known.facts.records.get(question)
        if record is not None:
            with torch._C._DisableTorchDispatch():
                blocks = memory.follow(record.events, lambda _: None)
                return memory.lay(record.result.again(), blocks[record.result.number])
        y = x
        with memory.recorded() as events, seen():
            for step in self._steps:
                y = step.plain(part, y, state)
        made = _named(memory, events, [y])
        if made is not None and all(e.own for e in events):
            self._known.facts.records[question] = _Record([(e, None) for e in events], made[0])
        return y


def _form(x: Tensor) -> Hashable:
    return x.shape, x.stride(), x.dtype


def _named(memory: PeakMemory, events: Iterable[Event], tensors: list[Tensor | None]) -> list[_Made | None] | None:
    """Describe the tensors that a step left, by the numbers of their storages.

    Returns None where these are not exactly the storages that it made and did not release: it cannot be replayed then.
    """
    numbers = [memory.number(t) for t in tensors if t is not None]
    own = [e for e in events if e.own and e.number is not None]
    given_back = {e.number for e in own if not e.takes}
    if sorted(numbers) != sorted(e.number for e in own if e.takes and e.number not in given_back):
        return None
    found = iter(numbers)
    return [None if t is None else _Made.of(t, next(found)) for t in tensors]


def repeated(half: Half, memory: PeakMemory, known: Mapping[Step, Known]) -> Half:
    """Return the component with steps that run once for each set of sizes and are replayed afterwards.

    Args:
        half: the component, on the meta device.
        memory: counts its tensors.
        known: step without its name -> facts, kept from one dry run to the next.
    """
    other = copy.copy(half)
    for part in ("_low", "_mid", "_high"):
        setattr(other, part, [_stand_in(step, memory, known[_nameless(step)]) for step in getattr(half, part)])
    return other


def _stand_in(step: Step, memory: PeakMemory, known: Known) -> Repeated | EachPicture:
    if isinstance(step, EachPicture):
        return replace(step, steps=(_Picture(step.steps, memory, known),))
    return Repeated(step, memory, known)


def _nameless(step: Step) -> Step:
    named = any(field.name == "name" for field in fields(step))  # type: ignore[arg-type]
    return replace(step, name="") if named else step  # type: ignore[type-var]
