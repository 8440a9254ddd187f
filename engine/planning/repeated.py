"""Run each step of a dry run once for each set of sizes, and replay the record for equal ones.

A step's memory and results depend on the sizes alone. Later calls replay the record, and so do steps that differ only
in their names. It keeps first plans short, and changes no plan: without it those of 1280x704 took twice the CPU time in
most families, and of 30 latents of LTX 1.2 s in place of 0.2, of Mochi's encoder below 6 GB 2.9 in place of 0.7."""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

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


#: Records of steps that are alike, by everything that their memory and results depend on, with _OWN for the step's name
#: in keys of the State. Threads may share it.
Known = dict[Hashable, _Record]
_OWN = "\0"


class Repeated:
    """Stand-in for a Step in a dry run of plain torch."""

    def __init__(self, step: Step, memory: PeakMemory, known: Known) -> None:
        self.name, self.size = step.name, step.size
        self._step, self._memory, self._known = step, memory, known
        self._owns = functools.cache(lambda key: f".{step.name}." in f".{key.partition(' ')[0]}.")

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        if state is None and not isinstance(self._step, _Row):
            with seen():
                return self._step.plain(part, x, None)
        kept = State() if state is None else state  # steps of a picture have none
        question = self._question(x, kept)
        record = self._known.get(question)
        if record is None:
            return self._walked(question, part, x, kept, state)
        with torch._C._DisableTorchDispatch():  # the modes would count again what the record holds
            return self._followed(record, x, kept)

    def each(self, part: Callable[[str], nn.Module], x: Tensor, state: State) -> Iterator[Tensor]:
        yield self.plain(part, x, state)

    def _own(self, keys: Iterable[str]) -> list[str]:
        """Return the step's own keys of a part of the State."""
        return [key for key in keys if self._owns(key)]

    def _local(self, key: str) -> str:
        return key.replace(self.name, _OWN, 1)

    def _full(self, key: str) -> str:
        return key.replace(_OWN, self.name, 1)

    def _question(self, x: Tensor, state: State) -> Hashable:
        """Return everything that the step's memory and results depend on, as a key of its records."""
        own, local = self._own, self._local
        found = [(local(key), _form(state.histories[key])) for key in own(state.histories)]
        found += [("constant", local(key)) for key in own(state.constants)]
        start, period = self._step.beat
        counts = ((key, n if n < start else start + (n - start) % period) for key, n in state.counts.items())
        found += [("frames before", local(key), n) for key, n in counts if n and self._owns(key)]
        found += [("through", local(key)) for key in own(state.through)]
        if state.ending:  # earlier, steps do not look at frames that wait
            found += [(local(key), *map(_form, state.waiting[key])) for key in own(state.waiting)]
        return _form(x), state.ending, state.inside, frozenset(found)

    def _walked(
        self, question: Hashable, part: Callable[[str], nn.Module], x: Tensor, state: State, given: State | None
    ) -> Tensor:
        """Run the step with the State that was given, and record what it does to `state`."""
        own, local, number = self._own, self._local, self._memory.number
        # By their numbers: a reference would keep them in memory.
        histories = {key: number(state.histories[key]) for key in own(state.histories)}
        waiting = {key: [*map(number, state.waiting[key])] for key in own(state.waiting)}
        constants, through = {*own(state.constants)}, {*own(state.through)}
        counts = {key: state.counts[key] for key in own(state.counts)}
        gone: dict[int, _Gone] = {n: (local(key), None) for key, n in histories.items()}
        gone |= {n: (local(key), i) for key, frames in waiting.items() for i, n in enumerate(frames)}
        with self._memory.recorded() as events, seen():
            y = self._step.plain(part, x, given)
        left = {key: state.histories.get(key) for key in {**histories, **dict.fromkeys(own(state.histories))}}
        left = {key: h for key, h in left.items() if (None if h is None else number(h)) != histories.get(key)}
        noted = {key: state.constants[key] for key in own(state.constants) if key not in constants}
        made = _named(self._memory, events, [y if y is not x else None, *left.values(), *noted.values()])
        named = [(e, None if e.own else gone.get(e.number)) for e in events]
        if made is not None and all(e.own or what is not None for e, what in named):
            rest = iter(made[1:])
            more = {key: state.counts[key] - counts.get(key, 0) for key in own(state.counts)}
            self._known[question] = _Record(
                named, made[0], {local(k): next(rest) for k in left}, {local(k): next(rest) for k in noted},
                Counter({local(k): n for k, n in more.items() if n}),
                frozenset(map(local, {*own(state.through)} - through)),
                [local(k) for k in own(state.waiting) if len(state.waiting[k]) > len(waiting.get(k, ()))],
                [local(k) for k in waiting if k not in state.waiting],
            )  # fmt: skip
        return y

    def _followed(self, record: _Record, x: Tensor, state: State) -> Tensor:
        full = self._full
        waited: dict[str, list[Tensor | None]] = {key: [*state.waiting.pop(full(key))] for key in record.taken}

        def drop(what: _Gone) -> None:
            key, place = what
            if place is None:
                state.histories.pop(full(key))
            else:
                waited[key][place] = None

        blocks = self._memory.follow(record.events, drop)

        def again(made: _Made) -> Tensor:
            return self._memory.lay(made.again(), blocks[made.number])

        for key, history in record.histories.items():
            if history is None:
                state.histories.pop(full(key), None)
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


@dataclass(frozen=True)
class _Row(Step):
    """Steps of one picture as one, so that they are recorded together: a chunk may have thousands of pictures."""

    name: str
    steps: tuple[Step, ...]

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        for step in self.steps:
            x = step.plain(part, x, state)
        return x


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
        return replace(step, steps=(Repeated(_Row(step.name, step.steps), memory, known),))
    return Repeated(step, memory, known)


def _nameless(step: Step) -> Step:
    named = any(field.name == "name" for field in fields(step))  # type: ignore[arg-type]
    return replace(step, name="") if named else step  # type: ignore[type-var]
