"""Repeat the tensor-core products of a kernel's PTX, so that they take k times as long and nothing else does.

Every `mma.sync` is followed by k - 1 more (on the average of the text) that add zero times the same operand to the same
sums. The zero is read from the hardware, so no compiler can know it, and results keep their bits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ....errors import InputError

#: Kind of a product, the type of its sums -> types of its operands whose rate is known.
KINDS = {"f32": ("f16", "bf16"), "f16": ("f16",), "s32": ("s8", "u8")}
#: A text whose products are not k times as many within this share is refused.
SHARE = 0.05
#: Products after which the repeated ones stand: as many lie between two of the same sums, which hides their latency.
_GROUP = 8
#: Products that stand alone, on the average fewer than so many beside each other, have their repeated ones spread.
_ALONE = 4
_LABEL = re.compile(r"([A-Za-z_$][\w$]*):")
_MMA = re.compile(r"(mma\.sync\.aligned\.m16n8k(?:16|32)\.row\.col\.(?:satfinite\.)?(\w+)\.(\w+)\.\w+\.\w+) *"
                  r"\{([^}]*)\}, *\{([^}]*)\}, *\{([^}]*)\}, *\{([^}]*)\};")  # fmt: skip
_OTHERS = re.compile(r"\b(wgmma|tcgen05|wmma|mma\.sp)\b")
_ZERO = "%zero_of_ratio"


class RatioError(InputError):
    """A kernel cannot be run at a ratio. Its text is one line with the reason."""


class Repeated(NamedTuple):
    """A text whose products are repeated, and how many products it holds by kind, before and after."""

    text: str
    before: dict[str, int]
    after: dict[str, int]


def repeated(ptx: str, factors: Mapping[str, float], name: str) -> Repeated:
    """Return a kernel's text with repeated products.

    Args:
        ptx: the text of one kernel.
        factors: k of each kind in KINDS, 1 or more.
        name: of the kernel, for errors.

    Raises: RatioError where a product is of a kind whose rate cannot be set so.
    """
    out: list[str] = []
    group: list[tuple[str, int]] = []
    before, after, owed = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.5)
    began = False

    def flush() -> None:
        for turn in range(max((times for _, times in group), default=0)):
            out.extend(line for line, times in group if turn < times)
        group.clear()

    lines = ptx.split("\n")
    earlier = _earlier(lines)
    for number, line in enumerate(lines):
        bare = line.strip()
        match = _MMA.fullmatch(bare)
        if match is None:
            _check(bare, name)
            if group and not bare.startswith(("mov.b32", "ldmatrix")):
                flush()
            out.append(line)
            if not began and bare == "{":
                out += [f".reg .b32 {_ZERO};", f"mov.u32 {_ZERO}, %smid;", f"shr.u32 {_ZERO}, {_ZERO}, 16;"]
                began = True
            continue
        operation, kind, operand, sums, a, b, _ = match.groups()
        if operand not in KINDS.get(kind, ()):
            raise RatioError(_refusal(name, operation))
        owed[kind] += factors[kind] - 1
        times = int(owed[kind])
        owed[kind] -= times
        before[kind] += 1
        after[kind] += 1 + times
        zeros = ", ".join([_ZERO] * len(b.split(",")))
        out.append(line)
        if number in earlier:
            for one in earlier[number][:times]:
                out.append(f"{operation} {{{one}}}, {{{a}}}, {{{zeros}}}, {{{one}}};")
            continue
        group.append((f"{operation} {{{sums}}}, {{{a}}}, {{{zeros}}}, {{{sums}}};", times))
        if len(group) == _GROUP:
            flush()
    for kind, count in before.items():
        if count and abs(after[kind] / count / factors[kind] - 1) > SHARE:
            raise RatioError(f"{name}: its {count} products with {kind} sums cannot be {factors[kind]:.2f} times as "
                             "many")  # fmt: skip
    return Repeated("\n".join(out), before, after)


def _earlier(lines: list[str]) -> dict[int, list[str]]:
    """Return, for the number of each line with a product in a loop whose products stand alone, the sums of the products
    before it, the latest first: these are repeated behind it. On a card such a loop's loads and sums have the time of
    the products around them; repeated ones at once would leave them none. Before a loop's first product come its last
    ones: repeated products change no sum."""
    found: dict[int, list[str]] = {}
    labels = {match[1]: number for number, line in enumerate(lines) if (match := _LABEL.fullmatch(line.strip()))}
    for end, line in enumerate(lines):
        match = re.search(r"\bbra(?:\.uni)? +([\w$]+);", line)
        if match is None or labels.get(match[1], end) >= end:
            continue
        body = range(labels[match[1]], end)
        products = [number for number in body if _MMA.fullmatch(lines[number].strip())]
        groups = sum(number - 1 not in products for number in products)
        if len(products) < _GROUP or len(products) >= _ALONE * groups:
            continue
        sums = [_MMA.fullmatch(lines[number].strip())[4] for number in products]  # type: ignore[index]
        for at, number in enumerate(products):
            found[number] = [sums[(at - back) % len(sums)] for back in range(1, _GROUP)]
    return found


def _check(bare: str, name: str) -> None:
    """Raise RatioError for a line with products that are spelt in another way than `mma.sync` in one line."""
    if bare.startswith("//"):
        return
    if (found := _OTHERS.search(bare)) is not None:
        raise RatioError(f"{name}: multiplies by {found[1]}, which no GeForce has; run the code of the card's "
                         "generation")  # fmt: skip
    if "mma." in bare:
        raise RatioError(_refusal(name, bare))


def _refusal(name: str, spelling: str) -> str:
    if "e4m3" in spelling or "e5m2" in spelling:
        return (f"{name}: fp8 cannot be run at a ratio: an H100 or H200 has no fp8 mma.sync and multiplies in fp16 "
                "there, whose repeated products its assembler drops; int8 has the rate of block-scaled fp8")
    return f"{name}: a product is spelt in a way that is not known here ({spelling[:80]})"
