"""Algebra of the form: what each sweep multiplies, and how its left operands are summed.

Outputs 2j and 2j + 1 of a line read inputs d0..d3. With taps g0..g2
    inputs   v0 = d0 - d2    v1 = d1 + d2                v2 = d2 - d1                v3 = d3 - d1
    weights  u0 = g0         u1 = (g0 + g1 + g2) / 2     u2 = (g0 - g1 + g2) / 2     u3 = g2
    outputs  2j: m0 + m1 + m2      2j + 1: m1 - m2 + m3, of the products m = v u summed over frames and channels
along y (q) and x (p): sixteen products make four outputs, instead of 36. Four sums are enough: those of q and p of 1, 2
become sums and differences along y, take q of 0 and 3, become the same along x; go back along y for p of 0 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

#: Products of a step of a sweep, one for each of the four sums.
SLOTS = 4


class Slot(NamedTuple):
    """One product of a sweep: its place along y and x, and which sum it goes into (2 * column + row of the output)."""

    q: int
    p: int
    sum: int


@dataclass(frozen=True)
class Task:
    """Work that makes the left operands of some slots.

    loads: name -> position (y, x) of the patch. sums: (name, sign, name, name), in order; a result's name is its slot.
    """

    slots: tuple[int, ...]
    loads: dict[str, tuple[int, int]]
    sums: tuple[tuple[str, str, str, str], ...]


SWEEPS = (
    (Slot(1, 1, 0), Slot(2, 1, 1), Slot(1, 2, 2), Slot(2, 2, 3)),
    (Slot(0, 1, 0), Slot(0, 2, 2), Slot(3, 1, 1), Slot(3, 2, 3)),
    (Slot(1, 0, 0), Slot(2, 0, 1), Slot(1, 3, 2), Slot(2, 3, 3)),
    (Slot(0, 0, 0), Slot(0, 3, 2), Slot(3, 0, 1), Slot(3, 3, 3)),
)
#: Behind each sweep: the sums that become their sum and difference, and whether these are halved.
BETWEEN: tuple[tuple[tuple[int, int, bool], ...], ...] = (
    ((0, 1, False), (2, 3, False)),
    ((0, 2, False), (1, 3, False), (0, 1, True), (2, 3, True)),
    ((0, 1, False), (2, 3, False)),
    (),
)
#: v0 and v3 as (plus, minus).
_OUTER = {0: (0, 2), 3: (3, 1)}


def tasks(sweep: int) -> list[Task]:
    """Return the work of one step of a sweep, in the order in which it is needed."""
    if sweep == 0:
        loads = {f"d{y}{x}": (y, x) for y in (1, 2) for x in (1, 2)}
        sums = (("s1", "+", "d11", "d12"), ("s2", "+", "d21", "d22"), ("m1", "-", "d12", "d11"),
                ("m2", "-", "d22", "d21"), ("0", "+", "s1", "s2"), ("1", "-", "s2", "s1"), ("2", "+", "m1", "m2"),
                ("3", "-", "m2", "m1"))  # fmt: skip
        return [Task((0, 1, 2, 3), loads, sums)]
    found = []
    if sweep == 3:
        for slot, (q, p, _) in enumerate(SWEEPS[3]):
            (up, down), (left, right) = _OUTER[q], _OUTER[p]
            loads = {f"d{y}{x}": (y, x) for y in (up, down) for x in (left, right)}
            sums = (("a", "-", f"d{up}{left}", f"d{up}{right}"), ("b", "-", f"d{down}{left}", f"d{down}{right}"),
                    (str(slot), "-", "a", "b"))  # fmt: skip
            found.append(Task((slot,), loads, sums))
        return found
    for number, outer in enumerate((0, 3)):
        plus, minus = _OUTER[outer]
        loads, sums = {}, []
        for inner in (1, 2):
            a, b = ((plus, inner), (minus, inner)) if sweep == 1 else ((inner, plus), (inner, minus))
            loads |= {"d{}{}".format(*at): at for at in (a, b)}
            sums.append((f"g{inner}", "-", "d{}{}".format(*a), "d{}{}".format(*b)))
        slots = 2 * number, 2 * number + 1
        sums += [(str(slots[0]), "+", "g1", "g2"), (str(slots[1]), "-", "g2", "g1")]
        found.append(Task(slots, loads, tuple(sums)))
    return found
