"""Detect changes of a network's weights: packed weights, graphs, copies and files under their digest are valid only as
long as the weights stay the same."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from ..runtime.pinned import staging
from ..runtime.scope import as_usual

#: Parts of a network that run without each other.
HALVES = ("encoder", "decoder")
#: Larger tensors, in bytes, are compared at many places, others whole; up to SMALL bytes value by value.
WHOLE, SMALL = 1 << 20, 1 << 16
#: Values in a row that are compared at each place of a large tensor. A place costs a CPU a wait for its memory, more
#: values in a row nothing.
RUN = 8
#: Words of 8 bytes of which one sum is compared. A prime: sums of whole rows would stay the same if channels changed
#: places.
WORDS = 61
#: Types of whole numbers by their bytes.
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Bytes that are gathered at once. On a GPU torch finds so many in what it has reserved for small tensors; for more
#: than 1 MB it would reserve 20.
AT_ONCE = 1 << 18


class Stamp:
    """The layers and weights of a network when this was made.

    Every check compares which objects they are, how often they were written to as far as torch counts that (not for
    tensors made in inference mode, nor for writes to `weight.data`), and values: of tensors up to 1 MB all, of larger
    ones 8 in a row at so many places that each output channel, input channel and tap has some. (Flux's decoder: 0.05 of
    its 95 MB.) A network that was moved to another device and back, or laid out otherwise, is still the same.
    """

    def __init__(self, network: nn.Module, later: bool = False) -> None:
        """later: take the values with the first check, before anything is made of them: loading does not wait for
        it."""
        self._network = weakref.ref(network)
        self._layers = [
            (m._modules, name, weakref.ref(child))
            for m in network.modules() for name, child in m._modules.items() if child is not None
        ]  # fmt: skip
        weights = [
            (place, name, t, first if (first := path.partition(".")[0]) in HALVES else "")
            for path, m in network.named_modules() for place in (m._parameters, m._buffers)
            for name, t in place.items() if t is not None
        ]  # fmt: skip
        weights.sort(key=lambda weight: str(weight[2].dtype))  # those of one type are gathered together
        self._absent = [
            (place, name) for m in network.modules() for place in (m._parameters, m._buffers, m._modules)
            for name, one in place.items() if one is None
        ]  # fmt: skip
        self._weights = [(place, name, weakref.ref(t), part) for place, name, t, part in weights]
        #: How often each tensor was written to, None where torch does not count that.
        self._writes = [None if t.is_inference() else t._version for _, _, t, _ in weights]
        self._values: dict[str, list[bytes]] = {}
        if not later:
            self._look(_by_part((part, t) for _, _, t, part in weights))

    @as_usual()
    @torch.no_grad()
    def _look(self, tensors: dict[str, list[Tensor]]) -> None:
        """Take the values that checks compare."""
        self._values = {part: list(values_of(some)) for part, some in tensors.items()}

    @as_usual()
    @torch.no_grad()
    def holds(self, network: nn.Module, half: str = "", values: bool = True) -> bool:
        """Check whether `network` is the one that this was made of, with the same layers and weights.

        half: "encoder" or "decoder" leaves out the values of the other one. values: compare them; without, it takes a
        fraction of the time, and a write that torch does not count goes unseen.
        """
        if self._network() is not network:
            return False
        # Loops, not any(): every call waits for this, and generators are slower.
        for place, name, known in self._layers:
            if (layer := place.get(name)) is None or layer is not known():
                return False
        for place, name in self._absent:
            if place.get(name) is not None:
                return False
        writes: list[int | None] = []
        tensors = _by_part(())
        for (place, name, known, part), before in zip(self._weights, self._writes, strict=True):
            t = place.get(name)
            if t is None or t is not known():
                return False
            now = None if t.is_inference() else t._version
            if now != before and now is not None and before is not None:
                return False
            writes.append(now)
            tensors[part].append(t)
        if not self._values:
            self._look(tensors)
        elif values:
            parts = ("", half) if half in HALVES else self._values
            pieces = ((self._values[part], values_of(tensors[part])) for part in parts)
            if not all(then == now for known, found in pieces for then, now in itertools.zip_longest(known, found)):
                return False
        self._writes = writes  # a tensor that was moved may count its writes now, or no longer
        return True


def _by_part(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[Tensor]]:
    """Return the tensors of each half, and under "" those of neither."""
    parts: dict[str, list[Tensor]] = {part: [] for part in ("", *HALVES)}
    for part, tensor in tensors:
        parts[part].append(tensor)
    return parts


def values_of(tensors: list[Tensor]) -> Iterator[bytes]:
    """Yield what a Stamp compares of tensors, in pieces. It does not depend on their devices and layouts.

    On a CPU a piece is made when it is asked for, in memory that is still in the cache; a GPU makes all, and is waited
    for once."""
    pieces: Iterable[Tensor] = map(_joined, _lines_of(tensors))
    if gpus := {t.device for t in tensors if t.is_cuda}:
        pieces = list(pieces)
        for device in gpus:
            torch.cuda.current_stream(device).synchronize()
    for piece in pieces:
        yield piece.view(torch.uint8).numpy().tobytes()


def _lines_of(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the compared values of tensors as lists of tensors on their devices; each list makes a piece."""
    lines: list[Tensor] = []
    sums: list[Tensor] = []
    runs: list[Tensor] = []
    for t in tensors:
        size = 0 if t.is_meta else t.nbytes
        if size > WHOLE and t.ndim > 1 and spacing(tuple(t.shape)):
            runs.append(_runs(t))
        elif size > SMALL:
            found, rest = _sums(t.reshape(-1))
            sums.append(found)
            lines.append(rest)
        elif size:
            lines.append(t if t.ndim == 1 else t.reshape(-1))
    for kind in (lines, sums, runs):
        yield from _gathered(kind)


def _gathered(lines: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one type, up to AT_ONCE bytes of them at a time."""
    waiting: list[Tensor] = []
    size = 0
    for line in lines:
        more = line.nbytes
        if waiting and (size + more > AT_ONCE or line.dtype != waiting[0].dtype):
            yield waiting
            waiting, size = [], 0
        waiting.append(line)
        size += more
    if waiting:
        yield waiting


def _joined(lines: list[Tensor]) -> Tensor:
    """Return tensors as one in host memory; from a GPU it is on its way."""
    if len({line.device for line in lines}) > 1:
        lines = [line.cpu() for line in lines]
    if lines[0].device.type == "cpu":  # numpy has one thread: torch's would be woken for each of these, 2 ms at worst
        whole = _WHOLE_NUMBERS[lines[0].element_size()]
        return torch.from_numpy(np.concatenate([line.view(whole).numpy() for line in lines]))
    joined = torch.cat(lines)
    target = staging(tuple(joined.shape), joined.dtype) if joined.is_cuda else None
    return joined.cpu() if target is None else target.copy_(joined, non_blocking=True)


def _sums(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums modulo 2^64 over each WORDS words of values [n], int64, and the values that are left over."""
    if values.storage_offset() * values.element_size() % 8:  # torch takes no words that begin there
        values = values.clone()
    each = 8 * WORDS // values.element_size()
    count = values.numel() // each * each
    words = values[:count].view(torch.int64).view(-1, WORDS)
    sums = torch.from_numpy(words.numpy().sum(1)) if words.device.type == "cpu" else words.sum(1)
    return sums, values[count:]


def _runs(t: Tensor) -> Tensor:
    """Return values of a large tensor, [places, RUN]."""
    apart = spacing(tuple(t.shape))
    places = (t.numel() - RUN) // apart + 1
    if t.is_contiguous():
        return t.as_strided((places, RUN), (apart, 1))
    offsets = _offsets(tuple(t.shape), t.stride()).to(t.device)
    return t.as_strided((sum(s * (n - 1) for n, s in zip(t.shape, t.stride(), strict=True)) + 1,), (1,))[offsets]


@functools.lru_cache(256)
def _offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return where the values of `_runs` are in the memory of a tensor that is laid out in another order."""
    apart = spacing(shape)
    places = np.arange(0, math.prod(shape) - RUN + 1, apart)[:, None] + np.arange(RUN)
    axes = np.unravel_index(places, shape)
    return torch.from_numpy(sum(axis * stride for axis, stride in zip(axes, strides, strict=True)))


@functools.lru_cache(4096)
def spacing(shape: tuple[int, ...]) -> int:
    """Return the distance of two places of a large tensor [outputs, inputs, ...taps] in the order of its values.

    Each output, input and tap has a place, and so does each block of about the square root of `inputs` in both axes:
    from one output to the next the place moves by so many inputs, and a tap. 0: too many places would be needed."""
    outputs, inputs, taps = shape[0], shape[1], math.prod(shape[2:])
    apart = (inputs * taps - math.isqrt(inputs) * taps - 1) // -(-inputs // outputs)
    while apart > RUN and not _covers(apart, outputs, inputs, taps):
        apart -= 1
    return apart if apart > RUN else 0


def _covers(apart: int, outputs: int, inputs: int, taps: int) -> bool:
    places = np.arange(0, outputs * inputs * taps - RUN + 1, apart)
    runs = (places[:, None] + np.arange(RUN)).ravel()
    seen = (places // (inputs * taps), outputs), (runs // taps % inputs, inputs), (runs % taps, taps)
    return all(np.bincount(index, minlength=count).all() for index, count in seen)
