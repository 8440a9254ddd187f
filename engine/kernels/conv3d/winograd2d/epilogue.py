"""The end of the kernel of `ptx.py`: bias, residual, the store, and sums for norms.

Weights are packed so that a thread has neighbouring channels of its tiles: it reads and writes 16 or 8 bytes at a time
without any exchange.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: Residuals are read for so many outputs ahead.
_AHEAD = 3


class _Output(NamedTuple):
    """One of a thread's eight outputs: its values before the end, whether it is in the plane, its row and column in the
    block, and the residual's registers."""

    values: list[str]
    keep: str
    y: str
    x: str
    residual: list[str]


def finish(kernel: Any) -> None:
    """Write the end behind the sums of a `ptx.Kernel`."""
    form, t, p = kernel.form, kernel.text, kernel.parameters
    each = form.each
    quarter = t.make("r", "and.b32", kernel.lane, 3)
    inside = t.make("r", "mad.lo.u32", kernel.across, form.per_warp, t.make("r", "mul.lo.u32", quarter, each))
    channel = t.make("r", "mad.lo.u32", kernel.n, form.outputs, inside)
    bias: list[str] = []
    if form.bias:
        bias = _load(t, "ld.global.nc", "f32", t.make("d", "mad.wide.u32", channel, 4, p["bias"]), each, 4)
    bases = {name: _base(kernel, name, channel) for name in ("out", *(["res"] if form.residual else []))}
    totals = [(t.make("f", "mov.f32", "0f00000000"), t.make("f", "mov.f32", "0f00000000"))
              for _ in range(max(each // form.span, 1) if form.span else 0)]  # fmt: skip
    outputs: list[_Output] = []
    for i in range(8 + _AHEAD):
        if i < 8:
            outputs.append(_output(kernel, bases, i // 4, i % 4))
        if i < _AHEAD:
            continue
        one = outputs[i - _AHEAD]
        values = one.values
        for more in (bias, [value for pair in one.residual for value in _floats(kernel, pair)]):
            if more:
                values = [t.make("f", "add.rn.f32", v, m) for v, m in zip(values, more, strict=True)]
        stored = [t.make("r", f"cvt.rn.{form.kind}x2.f32", values[i + 1], values[i]) for i in range(0, each, 2)]
        _store(t, _at(kernel, bases["out"], "out", one), stored, one.keep)
        if form.span:
            _add(kernel, totals, stored, one.keep)
    if form.span:
        _sums(kernel, totals, inside)


def _output(kernel: Any, bases: dict[str, str], half: int, number: int) -> _Output:
    """Find the output of a thread's tile that is sum `number`, of the first or second half of a warp's tiles."""
    form, t, p = kernel.form, kernel.text, kernel.parameters
    row = t.make("r", "add.u32", t.make("r", "shr.u32", kernel.lane, 2), 8 * half)
    tile = t.make("r", "mad.lo.u32", kernel.down, 16, row)
    line, j = t.make("r", "div.u32", tile, form.columns), t.make("r", "rem.u32", tile, form.columns)
    y, x = t.make("r", "mad.lo.u32", line, 2, number % 2), t.make("r", "mad.lo.u32", j, 2, number // 2)
    low = t.make("p", "setp.lt.u32", t.make("r", "add.u32", y, kernel.y0), p["height"])
    left = t.make("p", "setp.lt.u32", t.make("r", "add.u32", x, kernel.x0), p["width"])
    sums = kernel.sums[number]
    values = [sums[block * 4 + half * 2 + e] for block in range(form.each // 2) for e in range(2)]
    made = _Output(values, t.make("p", "and.pred", low, left), y, x, [])
    if form.residual:
        made.residual.extend(_load(t, "ld.global", "b32", _at(kernel, bases["res"], "res", made), form.each // 2,
                                   4 if form.each % 8 == 0 else 2, made.keep))  # fmt: skip
    return made


def _base(kernel: Any, name: str, channel: str) -> str:
    """Return the address of the block's first output (or residual), of a thread's channels."""
    t, p = kernel.text, kernel.parameters
    at = t.make("d", "mul.lo.u64", t.make("d", "cvt.u64.u32", kernel.d), p[f"{name}_t"])
    for where, stride in ((kernel.y0, p[f"{name}_y"]), (kernel.x0, p[f"{name}_x"]), (channel, 1)):
        at = t.make("d", "add.u64", at, t.make("d", "mul.wide.u32", where, stride))
    return t.make("d", "add.u64", t.make("d", "shl.b64", at, 1), p[name])


def _at(kernel: Any, base: str, name: str, one: _Output) -> str:
    t, p = kernel.text, kernel.parameters
    at = t.make("r", "mad.lo.u32", one.x, p[f"{name}_x"], t.make("r", "mul.lo.u32", one.y, p[f"{name}_y"]))
    return t.make("d", "mad.wide.u32", at, 2, base)


def _load(t: Any, load: str, kind: str, address: str, count: int, size: int, keep: str = "") -> list[str]:
    """Load `count` registers of 32 bits, `size` at a time; zeros where `keep` is false."""
    found = t.some("f" if kind == "f32" else "r", count)
    if keep:
        t.put(*(f"mov.b32 {one}, 0" for one in found))
    for i in range(0, count, size):
        t.put(f"{f'@{keep} ' if keep else ''}{load}.v{size}.{kind} {{{', '.join(found[i : i + size])}}}, "
              f"[{address}+{4 * i}]")  # fmt: skip
    return found


def _floats(kernel: Any, pair: str) -> list[str]:
    """Return both values of a register as floats."""
    t = kernel.text
    if kernel.form.kind == "bf16":
        return [t.make("f", "mov.b32", t.make("r", "shl.b32", pair, 16)),
                t.make("f", "mov.b32", t.make("r", "and.b32", pair, "0xFFFF0000"))]  # fmt: skip
    low, high = t.some("h", 2)
    t.put(f"mov.b32 {{{low}, {high}}}, {pair}")
    return [t.make("f", "cvt.f32.f16", one) for one in (low, high)]


def _store(t: Any, address: str, stored: list[str], keep: str) -> None:
    size = 4 if len(stored) % 4 == 0 else 2
    for i in range(0, len(stored), size):
        t.put(f"@{keep} st.global.v{size}.b32 [{address}+{i * 4}], {{{', '.join(stored[i : i + size])}}}")


def _add(kernel: Any, totals: list[tuple[str, str]], stored: list[str], keep: str) -> None:
    """Add what was stored, and its squares, to the sums of its span of channels."""
    t = kernel.text
    kept = [value for pair in stored for value in _floats(kernel, t.make("r", "selp.b32", pair, 0, keep))]
    for i, value in enumerate(kept):
        total, square = totals[i // kernel.form.span]
        t.put(f"add.rn.f32 {total}, {total}, {value}", f"fma.rn.f32 {square}, {value}, {value}, {square}")


def _sums(kernel: Any, totals: list[tuple[str, str]], inside: str) -> None:
    """Add the sums of all threads of a block, and store them: [frame, tile, span of channels, sum and sum of
    squares]."""
    form, t, p = kernel.form, kernel.text, kernel.parameters
    flat = [one for pair in totals for one in pair]
    for one in flat:
        # Over a warp's tiles, then over the threads that share a span.
        for step in (4, 8, 16, *(step for step in (1, 2) if form.each * step < form.span)):
            other, bits = t.new("r"), t.make("r", "mov.b32", one)
            t.put(f"shfl.sync.bfly.b32 {other}, {bits}, {step}, 31, 0xFFFFFFFF")
            t.put(f"add.rn.f32 {one}, {one}, {t.make('f', 'mov.b32', other)}")
    width = form.outputs // form.span * 2
    place = t.make("r", "mul.lo.u32", t.make("r", "div.u32", inside, form.span), 2)
    place = t.make("r", "mad.lo.u32", kernel.down, width, place)
    place = t.make("r", "mad.lo.u32", place, 4, kernel.memory)
    first = t.make("p", "setp.lt.u32", kernel.lane, 4)
    t.put("bar.sync 0")  # buffers were there
    for i, one in enumerate(flat):
        t.put(f"@{first} st.shared.f32 [{place}+{4 * i}], {one}")
    t.put("bar.sync 0")
    last = t.make("p", "setp.ge.u32", kernel.tid, width)
    t.put(f"@{last} ret")
    at = t.make("r", "mad.lo.u32", kernel.tid, 4, kernel.memory)
    total = t.make("f", "mov.f32", "0f00000000")
    for i in range(form.high):
        part = t.make("f", "ld.shared.f32", f"[{at}+{4 * width * i}]")
        t.put(f"add.rn.f32 {total}, {total}, {part}")
    tiles = t.make("r", "mul.lo.u32", p["tiles_x"], p["tiles_y"])
    block = t.make("r", "mad.lo.u32", kernel.d, tiles, kernel.tile)
    block = t.make("r", "mad.lo.u32", block, p["n_tiles"], kernel.n)
    to = t.make("d", "mad.wide.u32", block, 4 * width, p["partials"])
    to = t.make("d", "mad.wide.u32", kernel.tid, 4, to)
    t.put(f"st.global.f32 [{to}], {total}")
