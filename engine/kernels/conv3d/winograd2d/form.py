"""What tells one text of the kernel from another, and the lines of such a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .algebra import SLOTS

#: Channels of a step, and bytes of a position's channels in a buffer.
DEPTH, CELL = 16, 32
#: Operands and outputs -> their name in PTX.
KINDS = {torch.float16: "f16", torch.bfloat16: "bf16"}
#: The kernel's parameters, in order. last_y, last_x: the last row and column behind the origin; what a tile would read
#: beyond them is read from them. depth: frames of the window. n_tiles: blocks for all output channels.
PARAMETERS = {
    "x": "u64", "u": "u64", "out": "u64", "res": "u64", "bias": "u64", "partials": "u64",
    "slots": "u32", "start": "u32", "in_frame": "u32", "in_pitch": "u32", "origin": "u32", "last_y": "u32",
    "last_x": "u32", "height": "u32", "width": "u32", "depth": "u32", "channels": "u32", "n_tiles": "u32",
    "tiles_x": "u32", "tiles_y": "u32", "out_t": "u64", "out_y": "u32", "out_x": "u32", "res_t": "u64",
    "res_y": "u32", "res_x": "u32",
}  # fmt: skip
_REGISTERS = {"r": "b32", "d": "b64", "f": "f32", "p": "pred", "h": "b16"}


@dataclass(frozen=True)
class Form:
    """One text. Channels of the input and output, frames of the window and sizes are the kernel's parameters.

    kind: a value of KINDS. rows, columns: tiles of a block. per_warp: output channels of a warp, a multiple of 16.
    wide: warps beside each other. residual: whether one is added. bias: whether one is. span: neighbouring channels
    that are summed together for norms, a divisor or a multiple of a thread's; 0: no sums. stages: buffers.
    """

    kind: str
    rows: int = 4
    columns: int = 16
    per_warp: int = 64
    wide: int = 2
    residual: bool = False
    bias: bool = True
    span: int = 0
    stages: int = 3

    @property
    def high(self) -> int:
        """Return how many warps have tiles of their own: sixteen each."""
        return self.rows * self.columns // 16

    @property
    def threads(self) -> int:
        return 32 * self.wide * self.high

    @property
    def outputs(self) -> int:
        """Return the output channels of a block."""
        return self.wide * self.per_warp

    @property
    def each(self) -> int:
        """Return the output channels of a thread: neighbours."""
        return self.per_warp // 4

    @property
    def plane(self) -> int:
        """Return the bytes of a row's even (or odd) columns: 64 more than a multiple of 128, so that copies of four
        neighbouring positions have no bank conflict."""
        return -(-((self.columns + 1) * CELL - 64) // 128) * 128 + 64

    @property
    def patch(self) -> tuple[int, int]:
        """Return the rows and columns that a block reads."""
        return 2 * self.rows + 2, 2 * self.columns + 2

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of a step's weights."""
        return self.outputs * SLOTS * DEPTH * 2

    @property
    def stage(self) -> int:
        """Return the bytes of a buffer."""
        return self.weight_bytes + self.patch[0] * 2 * self.plane

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory of a block: buffers, and two barriers each."""
        return self.stages * (self.stage + 16)

    @property
    def symbol(self) -> str:
        return f"winograd2d_{self.kind}"


class Text:
    """Lines of PTX, and the registers that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._counts: dict[str, int] = {}

    def new(self, kind: str) -> str:
        """Name a register: of 32 bits (r), 64 bits (d), 16 bits (h), a float (f) or a predicate (p)."""
        number = self._counts[kind] = self._counts.get(kind, -1) + 1
        return f"%{kind}{number}"

    def some(self, kind: str, count: int) -> list[str]:
        return [self.new(kind) for _ in range(count)]

    def put(self, *lines: str) -> None:
        """Append instructions and labels."""
        self.lines += [line + ("" if line.endswith(":") else ";") for line in lines]

    def make(self, kind: str, operation: str, *operands: str | int) -> str:
        """Append an operation whose result goes into a new register, and return that."""
        to = self.new(kind)
        self.put(f"{operation} {', '.join(map(str, (to, *operands)))}")
        return to

    def whole(self, form: Form) -> str:
        """Return the text of the kernel that the lines make."""
        head = [".version 7.4", ".target sm_80", ".address_size 64", ".extern .shared .align 128 .b8 memory[];",
                f".visible .entry {form.symbol}(", ",\n".join(f".param .{k} {name}" for name, k in PARAMETERS.items()),
                ")", f".maxntid {form.threads}, 1, 1", "{"]  # fmt: skip
        registers = [f".reg .{_REGISTERS[kind]} %{kind}<{count + 1}>;" for kind, count in self._counts.items()]
        return "\n".join([*head, *registers, *self.lines, "}", ""])
