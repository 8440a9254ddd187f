"""Profile of a decode or encode: time of the operators by stage and shape, compared with their speed limits.

Times are of the operators alone (CUDA events around each call, a clock on a CPU); the time between them (copies,
attention's projections, a GPU that waits) is one line of its own. A speed limit is FLOP at the rate of matrix products
plus bytes at that of copies, both measured right after the runs, when the GPU is as warm as they left it."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.observe import watching
from ...system.words import many
from ...vae import VideoVAE
from .calls import synchronize
from .rows import word
from .timing import copy_rate, elapsed, mark, matrix_rate

BETWEEN = "between operators"
_COLUMNS = ("operator", "stage", "what", "calls", "ms/frame", "share", "TFLOP/s", "TB/s", "limit", "of limit")
_LAYOUT = "{:17} {:>5} {:34} {:>6} {:>9} {:>7} {:>8} {:>6} {:>8} {:>8}"


@dataclass(frozen=True)
class Work:
    """Work of one call: FLOP in products of `dtype` operands, and the bytes `moved`, read and written once each.

    Its stage is `scale`, or follows from the width of a row, or from the positions of a frame where no width is known.
    half_sums: products are summed in fp16.
    """

    operator: str
    what: str
    dtype: torch.dtype
    flop: float
    moved: float
    width: int = 0
    positions: int = 0
    scale: int = 0
    half_sums: bool = False


@dataclass
class Row:
    """All calls of one kind; sums over the profiled frames. floor_ms is None where no ceilings were measured.

    kind: of its products' sums, "f32", "f16" or "s32". fetched: bytes from L2, where they are counted."""

    operator: str
    stage: str
    what: str
    dtype: str
    kind: str = "f32"
    calls: int = 0
    ms: float = 0.0
    flop: float = 0.0
    moved: float = 0.0
    fetched: float = 0.0
    floor_ms: float | None = None


@dataclass(frozen=True)
class Profile:
    """Rows from the costliest down, over `frames` frames in all.

    total_ms: from the first operator to the last. call_ms: of the whole calls, host memory to host memory. rates:
    TFLOP/s by operand type, and TB/s of "copy"."""

    title: str
    frames: int
    total_ms: float
    call_ms: float
    rates: dict[str, float]
    rows: list[Row]

    def stages(self) -> list[dict[str, Any]]:
        """Return milliseconds per frame and speed limit by stage, from the latent's resolution up."""
        found: dict[str, dict[str, Any]] = {}
        for row in sorted(self.rows, key=lambda r: (r.operator == BETWEEN, int(r.stage[:-1] or 0))):
            name = row.stage or BETWEEN
            entry = found.setdefault(name, {"name": name, "ms": 0.0, "floor_ms": 0.0 if self.rates else None})
            entry["ms"] += row.ms / self.frames
            if self.rates:
                entry["floor_ms"] += (row.floor_ms or 0.0) / self.frames
        return list(found.values())

    def record(self) -> dict[str, Any]:
        """Return the profile for JSON; figures of rows are sums over all frames."""
        return {**vars(self), "rows": [vars(r) for r in self.rows], "stages": self.stages()}

    def lines(self) -> list[str]:
        """Format the profile as a table."""
        found = [self.title]
        if self.rates:
            found.append("ceilings after it: " + ", ".join(
                f"{k} {v:.2f} TB/s" if k == "copy" else f"{k} {v:.0f} TFLOP/s" for k, v in self.rates.items()))
        found.append(_LAYOUT.format(*_COLUMNS).rstrip())
        found += [self._line(r) for r in self.rows]
        limit = sum(r.floor_ms or 0.0 for r in self.rows)
        share = f"{100 * limit / self.total_ms:.0f} % of it"
        of = f", speed limit {limit / self.frames:.2f} ({share})" if self.rates else ""
        found.append(f"first operator to last: {self.total_ms / self.frames:.2f} ms/frame{of}; "
                     f"whole call: {self.call_ms / self.frames:.2f} ms/frame")
        return found

    def _line(self, r: Row) -> str:
        rate = f"{r.flop * 1e-9 / r.ms:.3g}" if r.flop else ""
        width = f"{r.moved * 1e-9 / r.ms:.3g}" if r.moved else ""
        limit = "" if r.floor_ms is None else f"{r.floor_ms / self.frames:.3f}"
        share = f"{100 * r.floor_ms / r.ms:.0f} %" if r.floor_ms else ""
        return _LAYOUT.format(r.operator, r.stage, r.what, r.calls, f"{r.ms / self.frames:.3f}",
                              f"{100 * r.ms / self.total_ms:.1f} %", rate, width, limit, share).rstrip()


def profile(
    vae: VideoVAE, half: str, data: Tensor, runs: int = 3, fetched: Callable[[], float] = lambda: 0.0
) -> Profile:  # fmt: skip
    """Profile `runs` calls of decode or encode, after one that is not watched.

    Where the fused kernels do not run, the same network runs on the reference operators.

    Args:
        vae: the loaded VAE.
        half: "decode" or "encode".
        data: a latent [1, C, T, h, w] as the host scales it, or frames [F, H, W, 3] in 0..1.
        runs: watched calls.
        fetched: bytes that kernels have fetched from L2 up to now.
    """
    fused, own = vae.fused() is not None, vae.architecture.sections if vae.architecture.in_tiles else None
    frames = vae.frames(data.shape[2]) if half == "decode" else data.shape[0]
    height, width = data.shape[3:] if half == "decode" else (n // vae.spatial for n in data.shape[1:3])
    tile = (height, width) if own is None else [own.spans(own.unit * n)[0].end // own.unit for n in (height, width)]
    watch = _Watch(vae.device, *tile, fetched)
    total = whole = 0.0
    with nullcontext() if fused or (own is not None and half == "decode") else _emulated(vae):
        getattr(vae, half)(data)
        for _ in range(runs):
            start = time.perf_counter()
            with watching(watch):
                getattr(vae, half)(data)
            whole += 1e3 * (time.perf_counter() - start)
            total += watch.collect()
    rates = _rates(vae.device, watch.types()) if vae.device.type == "cuda" else {}
    rows = list(watch.rows.values())
    for row in rows if rates else ():
        row.floor_ms = row.flop * 1e-9 / rates.get(row.dtype, math.inf) + row.moved * 1e-9 / rates["copy"]
    rows.append(Row(BETWEEN, "", "", "", ms=max(total - sum(r.ms for r in rows), 0.0)))
    rows.sort(key=lambda r: -r.ms)
    size = f"{width * vae.spatial}x{height * vae.spatial}"
    device = torch.cuda.get_device_name(vae.device) if vae.device.type == "cuda" else "CPU"
    how = "fused kernels" if fused else "reference operators"
    title = f"{half} of {frames} frames {size}, {vae.precision}, {how}, {many(runs, 'run')}, {device}, torch "
    return Profile(title + torch.__version__, runs * frames, total, whole, rates, rows)


class _Watch:
    """Times every operator call and sums up by kind."""

    def __init__(self, device: torch.device, height: int, width: int, fetched: Callable[[], float]) -> None:
        """Prepare for frames of height x width latent pixels (or tiles of them, where the network cuts its own).

        Stages take their names from these sizes. fetched: as of `profile`."""
        self._device, self._fetched = device, fetched
        self._width = width
        self._positions = height * width
        self._marks: list[tuple[Row, Any, Any]] = []
        self.rows: dict[tuple[str, ...], Row] = {}

    def __call__(self, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        describe = _DESCRIBE.get(operator) or functools.partial(self._passed, operator)
        row = self._row(describe(*args, **kwargs))
        start, before = mark(self._device), self._fetched()
        result = call()
        self._marks.append((row, start, mark(self._device)))
        row.fetched += self._fetched() - before
        return result

    def _row(self, work: Work) -> Row:
        scale = work.scale or (
            work.width / self._width if work.width else math.sqrt(work.positions / self._positions)
        )
        kind = "s32" if work.dtype == torch.int8 else "f16" if work.half_sums else "f32"
        key = (work.operator, f"{round(scale)}x", work.what, word(work.dtype), kind)
        row = self.rows.setdefault(key, Row(*key))
        row.calls += 1
        row.flop += work.flop
        row.moved += work.moved
        return row

    def _passed(self, operator: str, *args: Any, **kwargs: Any) -> Work:
        """Describe an operator without a row in _DESCRIBE by the tensors that it gets; the first one has its rows."""
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        rows = max(given[0].numel() // given[0].shape[-1], self._positions)
        return Work(operator, "", given[0].dtype, 0.0, sum(t.nbytes for t in given), positions=rows)

    def collect(self) -> float:
        """Sum up the marked calls; return the milliseconds from the first operator to the last."""
        synchronize(self._device)
        for row, start, end in self._marks:
            row.ms += elapsed(start, end)
        total = elapsed(self._marks[0][1], self._marks[-1][2])
        self._marks.clear()
        return total

    def types(self) -> set[str]:
        return {r.dtype for r in self.rows.values() if r.flop}


def _rates(device: torch.device, types: set[str]) -> dict[str, float]:
    known = {word(t): t for t in (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8)}
    found = {name: matrix_rate(device, known[name]) for name in sorted(types)}
    return {**{k: v for k, v in found.items() if v is not None}, "copy": copy_rate(device)}


@contextmanager
def _emulated(vae: VideoVAE) -> Iterator[None]:
    """Run the fused network where its kernels do not run: the operators are torch's there."""
    vae._kernels_off = lambda emulate=False: None
    try:
        yield
    finally:
        del vae._kernels_off


def _conv3d(x: Tensor, weight: Any, out: Tensor, *, geometry: Any = None, epilogue: Any = None, **_: Any) -> Work:
    pt, py, px = weight.phases
    positions = out.numel() / (weight.out_channels * pt * py * px)
    stride = geometry.stride if geometry is not None else (1, 1, 1)
    read = (math.ceil(out.shape[0] / pt) - 1) * stride[0] + weight.kernel[0]
    moved = min(read, x.shape[0]) * x[0].nbytes + weight.data.nbytes / (weight.folded or 1) + out.nbytes
    what = f"{weight.channels}->{weight.out_channels} {'x'.join(map(str, weight.kernel))}"
    what += " strided" if stride[1] > 1 else ""
    if epilogue is not None and epilogue.residual is not None:
        moved += epilogue.residual.nbytes
        what += " +residual"
    what += " +sums" if epilogue is not None and epilogue.groups else ""
    half_sums = epilogue is not None and epilogue.half_accumulate and x.dtype == torch.float16
    return Work("upsample" if weight.shifted else "conv3d", what, x.dtype, weight.flops_per_position * positions, moved,
                out.shape[2], half_sums=half_sums)


def _norm_act(x: Tensor, norm: Any, buffer: Tensor, **_: Any) -> Work:
    what = f"{x.shape[3]} {'copy' if norm.kind == 'none' else norm.kind} -> {word(buffer.dtype)}"
    return Work("norm_act", what, x.dtype, 0.0, x.nbytes + x.shape[0] * buffer[0].nbytes, x.shape[2])


def _statistics(x: Tensor, groups: int, *_: Any, **__: Any) -> Work:
    return Work("statistics", f"{x.shape[3]} in {groups} groups", x.dtype, 0.0, x.nbytes, x.shape[2])


def _coefficients(partials: Any, norm: Any, positions: int, *_: Any, **__: Any) -> Work:
    return Work("coefficients", f"{norm.groups} groups", partials.data.dtype, 0.0, partials.data.nbytes,
                positions=positions)


def _attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Work:
    frames, tokens, head = q.shape
    return Work("attention", f"head {head}", q.dtype, 4.0 * frames * tokens**2 * head, 4.0 * q.nbytes,
                positions=tokens)


def _to_pixels(x: Tensor, weight: Any, bias: Tensor, out: Tensor, **_: Any) -> Work:
    positions = out.numel() / weight.out_channels
    moved = (out.shape[0] + weight.kernel[0] - 1) * x[0].nbytes + out.nbytes
    return Work("to_pixels", f"{weight.channels}->{weight.out_channels} {word(out.dtype)}", x.dtype,
                weight.flops_per_position * positions, moved, out.shape[2])


def _normalised(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, *_: Any, y: Tensor | None = None, **__: Any
) -> Work:  # fmt: skip
    moved = x.nbytes + out.nbytes + (0 if y is None else x.nbytes + y.nbytes)
    what = f"{x.shape[1]} rms -> {word(out.dtype)}" + ("" if y is None else " +residual")
    return Work("normalised", what, x.dtype, 0.0, moved, scale=1)


def _rotated(qkv: Tensor, turns: Tensor, head: int, *_: Any, **__: Any) -> Work:
    return Work("rotated", f"head {head}", qkv.dtype, 0.0, 2 * 2 / 3 * qkv.nbytes + turns.nbytes, scale=1)


def _rows(operator: str) -> Callable[..., Work]:
    """Return the description of an operator that makes rows `out` of rows x."""

    def work(x: Tensor, out: Tensor, *_: Any, **__: Any) -> Work:
        return Work(operator, f"{out.shape[1]} -> {word(out.dtype)}", x.dtype, 0.0, x.nbytes + out.nbytes, scale=1)

    return work


def _product(p: Any, x: Tensor, out: Tensor, *_: Any, **__: Any) -> Work:
    what = f"{x.shape[1]}->{out.shape[1]} {word(out.dtype)}"
    moved = x.nbytes + p.weight.nbytes + out.nbytes
    return Work("product", what, x.dtype, 2.0 * x.shape[0] * p.weight.numel(), moved, scale=1)


def _attended(qkv: Tensor, tokens: int, head: int, *_: Any, **__: Any) -> Work:
    rows, width = qkv.shape[0], qkv.shape[1] // 3
    return Work("attention", f"head {head}", qkv.dtype, 4.0 * rows * tokens * width, 4 / 3 * qkv.nbytes, scale=1)


def _attended_by_torch(qkv: Tensor, head: int) -> Work:
    return _attended(qkv, len(qkv), head)


def _blended(canvas: Any, place: Any, made: Tensor) -> Work:
    return Work("blend", "a tile's pixels", made.dtype, 0.0, made.nbytes + 4.0 * made.numel(), scale=canvas.own.unit)


_DESCRIBE: dict[str, Callable[..., Work]] = {
    "conv3d": _conv3d, "norm_act": _norm_act, "statistics": _statistics, "coefficients": _coefficients,
    "attention": _attention, "to_pixels": _to_pixels, "normalised": _normalised, "rotated": _rotated,
    "gated": _rows("gated"), "rounded": _rows("rounded"), "product": _product, "attended": _attended,
    "attended_by_torch": _attended_by_torch, "add": _blended,
}  # fmt: skip
