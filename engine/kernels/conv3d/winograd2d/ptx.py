"""The kernel F(2x2, 3x3) as PTX, written by this package: a 3x3 convolution of one to three frames, in 16 bit.

A block makes rows x columns tiles of 2 x 2 outputs, of all channels that its warps have. Four sweeps over channels and
frames make four of the sixteen products of a tile each, in four sums (`algebra.SWEEPS`). A step of a sweep is sixteen
channels: its part of the input and its weights lie in one of a few buffers (`copies.py`).

Positions of a row lie in shared memory even columns first, so that the columns 2j + x of neighbouring tiles are
neighbours: one ldmatrix brings position (y, x) of sixteen tiles, all in the layout of a product's left operand, and the
transform is sums of registers. Weights come packed as products take them (`pack.py`).

Between the products of one slot of a step stand the loads of the next slot's operands, then the sums of these: nothing
waits for what was asked for just before. A compiler chooses registers, and the order of neighbouring instructions.
"""

from __future__ import annotations

from itertools import chain

from .algebra import BETWEEN, SLOTS, SWEEPS, Task, tasks
from .copies import Copies
from .epilogue import finish
from .form import DEPTH, Form

#: Pairs of 1 and of -1 in bf16.
_ONES = {"+": "0x3F803F80", "-": "0xBF80BF80"}
#: The slot of a step that starts copies: those who read the buffer last have had two slots to leave it.
_COPYING = 1


def text(form: Form) -> str:
    """Return the kernel's PTX, for sm_80 and all later cards."""
    return Kernel(form).write()


class Kernel(Copies):
    """Writes the kernel of a form."""

    def write(self) -> str:
        form, t = self.form, self.text
        self._signs = {sign: t.make("r", "mov.b32", one) for sign, one in _ONES.items() if form.kind == "bf16"}
        self.place()
        self.sources()
        self._operands()
        #: The sums of each output of a tile: [eight channels][half of the rows][two channels].
        self.sums = [t.some("f", form.per_warp // 2) for _ in range(SLOTS)]
        t.put(*(f"mov.f32 {one}, 0f00000000" for sums in self.sums for one in sums))
        self.barriers()
        for _ in range(form.stages - 1):
            t.put(*self.issue())
        t.put(*self.filled())
        self._right = t.some("r", form.each)
        t.put(*self._weights(0, self._right))
        for number in range(len(SWEEPS)):
            self._sweep(number)
            self._between(number)
        finish(self)
        t.put("ret")
        return t.whole(form)

    def _operands(self) -> None:
        """Find where this thread's rows of left operands and its weights begin in the buffer that is read."""
        form, t = self.form, self.text
        row, part = t.make("r", "and.b32", self.lane, 15), t.make("r", "shr.u32", self.lane, 4)
        tile = t.make("r", "mad.lo.u32", self.down, 16, row)
        line, j = t.make("r", "div.u32", tile, form.columns), t.make("r", "rem.u32", tile, form.columns)
        base = t.make("r", "mad.lo.u32", line, 4 * form.plane, self.memory)
        base = t.make("r", "add.u32", base, form.weight_bytes)
        # Of columns 2j, 2j + 1, and of 2j + 2, 2j + 3, whose halves may lie the other way.
        self._lefts = [self.cell(base, t.make("r", "add.u32", j, i), part) for i in range(2)]
        at = t.make("r", "mad.lo.u32", self.lane, 16, self.memory)
        self._rights = t.make("r", "mad.lo.u32", self.across, form.per_warp * SLOTS * DEPTH * 2, at)
        self._read = t.make("r", "mov.b32", 0)

    def _weights(self, slot: int, to: list[str]) -> list[str]:
        """Return the lines that load a slot's weights."""
        at = slot * self.form.per_warp * DEPTH * 2
        return [f"ld.shared.v4.b32 {{{', '.join(to[4 * i : 4 * i + 4])}}}, [{self._rights}+{at + 512 * i}]"
                for i in range(len(to) // 4)]  # fmt: skip

    def _task(self, task: Task, results: dict[int, list[str]]) -> tuple[list[str], list[str]]:
        """Return the lines that load positions, and those that sum them to the left operands of slots."""
        loads, sums, known = [], [], {}
        for name, (y, x) in task.loads.items():
            known[name] = self.text.some("r", 4)
            at = (2 * y + x % 2) * self.form.plane
            loads.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{', '.join(known[name])}}}, "
                         f"[{self._lefts[x // 2]}+{at}]")  # fmt: skip
        for name, sign, left, right in task.sums:
            to = known[name] = results[int(name)] if name.isdigit() else self.text.some("r", 4)
            sums += [self._sum(r, sign, a, b) for r, a, b in zip(to, known[left], known[right], strict=True)]
        return loads, sums

    def _sum(self, to: str, sign: str, left: str, right: str) -> str:
        if self.form.kind == "bf16":  # sums of pairs of bf16 need sm_90; products with sums do not, and round alike
            return f"fma.rn.bf16x2 {to}, {right}, {self._signs[sign]}, {left}"
        return f"{'add' if sign == '+' else 'sub'}.rn.f16x2 {to}, {left}, {right}"

    def _turn(self) -> list[str]:
        """Return the lines that turn to the next buffer."""
        form, t = self.form, self.text
        wrap, by, ahead, self._left_to = t.new("p"), t.new("r"), t.new("r"), t.new("r")
        back = form.stages - 1
        return [f"add.u32 {self._left_to}, {self.full}, {8 * form.stages}", f"add.u32 {self._read}, {self._read}, 1",
                f"setp.eq.u32 {wrap}, {self._read}, {form.stages}", f"selp.b32 {self._read}, 0, {self._read}, {wrap}",
                f"selp.b32 {by}, {-back * form.stage}, {form.stage}, {wrap}",
                f"selp.b32 {ahead}, {-back * 8}, 8, {wrap}", f"add.s32 {self.full}, {self.full}, {ahead}",
                f"@{wrap} xor.b32 {self.turn}, {self.turn}, 1",
                *(f"add.s32 {one}, {one}, {by}" for one in (*self._lefts, self._rights))]  # fmt: skip

    def _sweep(self, number: int) -> None:
        """Write one loop over all frames and channels."""
        t, form = self.text, self.form
        work, label = tasks(number), f"SWEEP{number}"
        held = {slot: t.some("r", 4) for slot in work[0].slots}
        for lines in self._task(work[0], held):
            t.put(*lines)
        count, kept = t.make("r", "mov.b32", self.steps), [*chain(*held.values()), *self._right]
        t.put(f"{label}:")
        next_step = {slot: t.some("r", 4) for slot in work[0].slots}
        right = self._right
        for slot in range(SLOTS):
            following, early, late = t.some("r", form.each), [], []
            if slot == SLOTS - 1:
                t.put(*self._turn(), *self.filled())
            for task in work:
                if (task.slots[0] - 1) % SLOTS == slot:
                    made = next_step if task is work[0] else {s: t.some("r", 4) for s in task.slots}
                    held |= {} if task is work[0] else made
                    early, late = self._task(task, made)
            early = early + self._weights((slot + 1) % SLOTS, following)
            if slot == _COPYING:
                t.put(*self.emptied())
                early += self.issue()
            self._products(self.sums[SWEEPS[number][slot].sum], held[slot], right, early, late)
            right = following
        t.put("bar.warp.sync 0xFFFFFFFF", f"@{self.leader} mbarrier.arrive.shared.b64 _, [{self._left_to}]")
        for old, new in zip(kept, [*chain(*next_step.values()), *right], strict=True):
            t.put(f"mov.b32 {old}, {new}")
        t.put(f"sub.u32 {count}, {count}, 1")
        t.put(f"@{t.make('p', 'setp.ne.u32', count, 0)} bra {label}")

    def _products(self, sums: list[str], left: list[str], right: list[str], early: list[str], late: list[str]) -> None:
        """Write a slot's products, with other lines behind the first three of eight, and behind the rest."""
        count = len(right) // 2
        turn = max(count * 3 // 8, 1) if late else count
        a, product = ", ".join(left), f"mma.sync.aligned.m16n8k16.row.col.f32.{self.form.kind}.{self.form.kind}.f32"
        for i in range(count):
            d = ", ".join(sums[4 * i : 4 * i + 4])
            self.text.put(f"{product} {{{d}}}, {{{a}}}, {{{right[2 * i]}, {right[2 * i + 1]}}}, {{{d}}}")
            lines, at, of = (early, i, turn) if i < turn else (late, i - turn, count - turn)
            self.text.put(*lines[len(lines) * at // of : len(lines) * (at + 1) // of])

    def _between(self, number: int) -> None:
        """Combine the sums behind a sweep."""
        for one, other, half in BETWEEN[number]:
            for a, b in zip(self.sums[one], self.sums[other], strict=True):
                total = self.text.make("f", "add.rn.f32", a, b)
                self.text.put(f"sub.rn.f32 {b}, {a}, {b}", f"mov.f32 {a}, {total}")
                if half:
                    self.text.put(f"mul.rn.f32 {a}, {a}, 0f3F000000", f"mul.rn.f32 {b}, {b}, 0f3F000000")
