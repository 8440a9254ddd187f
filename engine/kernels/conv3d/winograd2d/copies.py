"""The part of the kernel that brings a step's positions and weights into shared memory.

Two barriers a buffer say that all copies into it are there, and that all warps have read it. So a warp waits for what
it needs only, never for the slowest of the others: with one meeting a step the same kernel is a tenth slower.
"""

from __future__ import annotations

from .form import CELL, PARAMETERS, Form, Text


class Copies:
    """Writes lines into `text`; what a thread keeps in registers has their names here."""

    def __init__(self, form: Form) -> None:
        self.form, self.text = form, Text()
        t = self.text
        self.parameters = {name: t.make("d" if kind == "u64" else "r", f"ld.param.{kind}", f"[{name}]")
                           for name, kind in PARAMETERS.items()}  # fmt: skip
        self.memory = t.make("r", "mov.u32", "memory")
        self._waits = 0

    def place(self) -> None:
        """Find the block's tiles and channels, and the thread's place among its warps."""
        t, p, form = self.text, self.parameters, self.form
        pid, self.tid = t.make("r", "mov.u32", "%ctaid.x"), t.make("r", "mov.u32", "%tid.x")
        self.lane, warp = t.make("r", "and.b32", self.tid, 31), t.make("r", "shr.u32", self.tid, 5)
        self.across, self.down = t.make("r", "div.u32", warp, form.high), t.make("r", "rem.u32", warp, form.high)
        self.n, rest = t.make("r", "rem.u32", pid, p["n_tiles"]), t.make("r", "div.u32", pid, p["n_tiles"])
        tiles = t.make("r", "mul.lo.u32", p["tiles_x"], p["tiles_y"])
        self.tile, self.d = t.make("r", "rem.u32", rest, tiles), t.make("r", "div.u32", rest, tiles)
        row = t.make("r", "div.u32", self.tile, p["tiles_x"])
        column = t.make("r", "rem.u32", self.tile, p["tiles_x"])
        self.y0 = t.make("r", "mul.lo.u32", row, 2 * form.rows)
        self.x0 = t.make("r", "mul.lo.u32", column, 2 * form.columns)

    def sources(self) -> None:
        """Find what this thread copies: its positions' offsets from the block's first row, and where these go in a
        buffer; and where the first step is."""
        form, t, p = self.form, self.text, self.parameters
        self.size = t.make("r", "shl.b32", p["channels"], 1)
        self.offsets: list[str] = []
        self.goals: list[str] = []
        self.partly: str | None = None
        pieces, width = 2 * form.patch[0] * form.patch[1], form.patch[1]
        last_y = t.make("r", "sub.u32", p["last_y"], self.y0)
        for i in range(-(-pieces // form.threads)):
            piece = t.make("r", "add.u32", self.tid, i * form.threads)
            if (i + 1) * form.threads > pieces:
                self.partly = t.make("p", "setp.lt.u32", piece, pieces)
            part, position = t.make("r", "and.b32", piece, 1), t.make("r", "shr.u32", piece, 1)
            row, column = t.make("r", "div.u32", position, width), t.make("r", "rem.u32", position, width)
            y = t.make("r", "min.u32", row, last_y)
            x = t.make("r", "min.u32", t.make("r", "add.u32", self.x0, column), p["last_x"])
            at = t.make("r", "mul.lo.u32", t.make("r", "mad.lo.u32", y, p["in_pitch"], x), self.size)
            self.offsets.append(t.make("r", "mad.lo.u32", part, 16, at))
            cell, odd = t.make("r", "shr.u32", column, 1), t.make("r", "and.b32", column, 1)
            to = t.make("r", "mad.lo.u32", row, 2 * form.plane, form.weight_bytes)
            to = self.cell(t.make("r", "mad.lo.u32", odd, form.plane, to), cell, part)
            self.goals.append(t.make("r", "add.u32", to, self.memory))
        top = t.make("r", "mad.lo.u32", self.y0, p["in_pitch"], p["origin"])
        self.frames = t.make("d", "mad.lo.u64", t.make("d", "cvt.u64.u32", top), t.make("d", "cvt.u64.u32", self.size),
                             p["x"])  # fmt: skip
        self.frame = t.make("d", "mul.wide.u32", p["in_frame"], self.size)
        self.first = t.make("r", "add.u32", p["start"], self.d)
        over = t.make("p", "setp.ge.u32", self.first, p["slots"])
        t.put(f"@{over} sub.u32 {self.first}, {self.first}, {p['slots']}")
        # Of the next step that is copied: its slot, its frame of the window, bytes before its channels, its address.
        self.slot, self.time = t.make("r", "mov.b32", self.first), t.make("r", "mov.b32", 0)
        self.behind = t.make("r", "mov.b32", 0)
        self.here = t.make("d", "mad.lo.u64", t.make("d", "cvt.u64.u32", self.slot), self.frame, self.frames)
        self.steps = t.make("r", "mul.lo.u32", p["depth"], t.make("r", "shr.u32", p["channels"], 4))
        self.left = t.make("r", "shl.b32", self.steps, 2)
        block = t.make("d", "mul.wide.u32", t.make("r", "mul.lo.u32", self.left, self.n), form.weight_bytes)
        own = t.make("d", "mul.wide.u32", self.tid, 16)
        self.source = t.make("d", "add.u64", t.make("d", "add.u64", p["u"], block), own)
        self.goal = t.make("r", "mad.lo.u32", self.tid, 16, self.memory)

    def cell(self, base: str, cell: str, part: str) -> str:
        """Return the place of half (part) a cell: cells of four swap halves with the next four's, against conflicts."""
        t = self.text
        turned = t.make("r", "xor.b32", part, t.make("r", "and.b32", t.make("r", "shr.u32", cell, 2), 1))
        return t.make("r", "mad.lo.u32", turned, 16, t.make("r", "mad.lo.u32", cell, CELL, base))

    def barriers(self) -> None:
        """Make the barriers: a buffer's copies are there, for all buffers; then, it has been read, for all buffers."""
        form, t = self.form, self.text
        self.full = t.make("r", "add.u32", self.memory, form.stages * form.stage)
        # The next buffer that is filled; phases of barriers, of the buffers that are read and filled next.
        self.fill, self.filling = t.make("r", "mov.b32", 0), t.make("r", "mov.b32", self.full)
        self.turn, self.fill_turn = t.make("r", "mov.b32", 0), t.make("r", "mov.b32", 1)
        self.leader = t.make("p", "setp.eq.u32", self.lane, 0)
        first = t.make("p", "setp.eq.u32", self.tid, 0)
        for i in range(form.stages):
            t.put(f"@{first} mbarrier.init.shared.b64 [{self.full}+{8 * i}], {form.threads}")
            t.put(f"@{first} mbarrier.init.shared.b64 [{self.full}+{8 * (form.stages + i)}], {form.threads // 32}")
        t.put("bar.sync 0")

    def filled(self) -> list[str]:
        """Return the lines that wait for the copies into the buffer that is read next."""
        return self._wait(self.full, self.turn)

    def emptied(self) -> list[str]:
        """Return the lines that wait until all warps have read the buffer that is filled next."""
        return self._wait(f"{self.filling}+{8 * self.form.stages}", self.fill_turn)

    def _wait(self, barrier: str, turn: str) -> list[str]:
        self._waits += 1
        over = self.text.new("p")
        return [f"WAIT{self._waits}:", f"mbarrier.test_wait.parity.shared.b64 {over}, [{barrier}], {turn}",
                f"@!{over} bra WAIT{self._waits}"]  # fmt: skip

    def issue(self) -> list[str]:
        """Return the lines that start the copies of a step, if one is left, and turn to the next one."""
        form, t, lines = self.form, self.text, []
        some, last, to, wrap = t.new("p"), t.new("p"), t.new("r"), t.new("p")
        lines += [f"setp.ne.u32 {some}, {self.left}, 0", f"add.u32 {to}, {self.goal}, {self.fill}"]
        for at in range(0, form.weight_bytes, 16 * form.threads):
            lines.append(f"@{some} cp.async.cg.shared.global [{to}+{at}], [{self.source}+{at}], 16")
        if self.partly:
            lines.append(f"and.pred {last}, {some}, {self.partly}")
        for offset, goal in zip(self.offsets, self.goals, strict=True):
            wide, at, into = t.new("d"), t.new("d"), t.new("r")
            allowed = last if self.partly and offset == self.offsets[-1] else some
            lines += [f"cvt.u64.u32 {wide}, {offset}", f"add.u64 {at}, {self.here}, {wide}",
                      f"add.u32 {into}, {goal}, {self.fill}",
                      f"@{allowed} cp.async.cg.shared.global [{into}], [{at}], 16"]  # fmt: skip
        lines += [
            f"cp.async.mbarrier.arrive.noinc.shared.b64 [{self.filling}]",
            f"@{some} sub.u32 {self.left}, {self.left}, 1",
            f"add.u64 {self.source}, {self.source}, {form.weight_bytes}",
            f"add.u32 {self.fill}, {self.fill}, {form.stage}", f"add.u32 {self.filling}, {self.filling}, 8",
            f"setp.eq.u32 {wrap}, {self.fill}, {form.stages * form.stage}",
            f"selp.b32 {self.fill}, 0, {self.fill}, {wrap}",
            f"@{wrap} sub.u32 {self.filling}, {self.filling}, {8 * form.stages}",
            f"@{wrap} xor.b32 {self.fill_turn}, {self.fill_turn}, 1",
        ]  # fmt: skip
        return lines + self._advance()

    def _advance(self) -> list[str]:
        """Return the lines that turn to the next channels, behind the last ones to the next frame, behind that to the
        first frame again."""
        t, p = self.text, self.parameters
        over, end, wrap, after, wide, base = t.new("p"), t.new("p"), t.new("p"), t.new("r"), t.new("d"), t.new("d")
        return [
            f"add.u64 {self.here}, {self.here}, {CELL}", f"add.u32 {self.behind}, {self.behind}, {CELL}",
            f"setp.eq.u32 {over}, {self.behind}, {self.size}", f"selp.b32 {self.behind}, 0, {self.behind}, {over}",
            f"@{over} add.u32 {self.time}, {self.time}, 1", f"setp.eq.u32 {end}, {self.time}, {p['depth']}",
            f"selp.b32 {self.time}, 0, {self.time}, {end}", f"add.u32 {after}, {self.slot}, 1",
            f"setp.eq.u32 {wrap}, {after}, {p['slots']}", f"selp.b32 {after}, 0, {after}, {wrap}",
            f"selp.b32 {after}, {self.first}, {after}, {end}", f"selp.b32 {self.slot}, {after}, {self.slot}, {over}",
            f"cvt.u64.u32 {wide}, {self.slot}", f"mad.lo.u64 {base}, {wide}, {self.frame}, {self.frames}",
            f"selp.b64 {self.here}, {base}, {self.here}, {over}",
        ]  # fmt: skip
