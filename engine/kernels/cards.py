"""Table of the forms of the prebuilt kernels that GPUs run, best first. Plain data, no torch."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from .. import log
from ..errors import InputError

TRITON, PLAIN, AUTO = "triton", "plain", "auto"
#: Form -> the compute capability that its code is made for (schedules, how it copies): RTX 30, 40, 50 and 50.
FORMS = {"A": 86, "B": 89, "C": 120, "D": 120}
#: Shared memory of a block in these forms (KiB), the limit of RTX cards.
SHARED_KIB = 99
#: Environment variable that stands in for `--kernels` and the node's widget.
VARIABLE = "ZEROWASTE_KERNELS"
CHOICES = (AUTO, TRITON, PLAIN, "A", "B", "C", "D")


class Card(NamedTuple):
    """A generation of GPUs.

    forms: forms of the prebuilt kernels that it runs, best first. native: Triton's own code for it is much faster than
    any of them (wgmma, tcgen05, large shared memory) and comes first where Triton works.
    """

    names: str
    forms: tuple[str, ...]
    native: bool = False


#: Compute capability -> the card's forms.
CARDS = {
    80: Card("A100, A30", ("A",), True),
    86: Card("RTX 30, A10, A40", ("A",)),
    87: Card("Jetson Orin", ("A",)),
    89: Card("RTX 40, L4, L40", ("B", "A")),
    90: Card("H100, H200", ("C", "B", "A"), True),
    100: Card("B200", ("C", "B", "A"), True),
    103: Card("B300", ("C", "B", "A"), True),
    110: Card("Jetson Thor", ("C", "B", "A")),
    120: Card("RTX 50", ("D", "C", "B", "A")),
    121: Card("DGX Spark", ("D", "C", "B", "A")),
}
#: PTX for sm_90 is compiled for every later card; future cards are not measured.
_LATER = Card("", ("C", "B", "A"))


def card(sm: int) -> Card:
    """Return the forms for a compute capability (89 for 8.9), also of later cards; no forms below 80."""
    if sm in CARDS:
        return CARDS[sm]
    if sm > max(CARDS):
        return _LATER
    below = max((known for known in CARDS if known <= sm), default=None)
    return Card("", ()) if below is None else CARDS[below]


def find(text: str, option: str) -> tuple[str, int]:
    """Return the name and compute capability of a GPU by its usual names: "sm_89", "8.9", "RTX 4090", "H200".

    Raises InputError, with the option's name, where the text names no generation.
    """
    name = " ".join(text.split())
    if number := re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", name, re.IGNORECASE):
        sm = int(number[1] + number[2])
        return f"sm_{sm}", sm
    if found := re.search(r"\bRTX\s*([345]0)\d\d\b", name, re.IGNORECASE):
        return name, {"30": 86, "40": 89, "50": 120}[found[1]]
    for sm, known in CARDS.items():
        if any(one.lower() in name.lower() for one in known.names.split(", ") if not one.startswith("RTX")):
            return name, sm
    raise InputError(f"{option} {text!r} names no GPU that is known here: write its compute capability, such as sm_89, "
                     "or a name such as RTX 4090")  # fmt: skip


def order(sm: int, asked: str) -> tuple[str, ...]:
    """Return the ways to run kernels on a compute capability, in the order in which they are tried.

    Args:
        sm: the GPU's compute capability.
        asked: one of CHOICES. Another way than AUTO comes first, on any card; the others follow it, except for PLAIN.

    Returns:
        Letters of forms, and TRITON; empty where plain torch is requested.
    """
    if asked == PLAIN:
        return ()
    known = card(sm)
    usual = (TRITON, *known.forms) if known.native else (*known.forms, TRITON)
    return usual if asked == AUTO else (asked, *(way for way in usual if way != asked))


def wish(option: str = AUTO) -> str:
    """Return the requested kernels: the option's value, or where that is AUTO the environment's; a value there that is
    none of CHOICES is logged and counts as AUTO."""
    if option != AUTO:
        return option
    try:
        return checked(os.environ.get(VARIABLE) or AUTO, VARIABLE)
    except InputError as error:
        log.once(f"{error}; auto is used")
        return AUTO


def checked(value: str, name: str) -> str:
    """Return `value` if it is one of CHOICES, in any case; raises InputError with the option's name if not."""
    for choice in CHOICES:
        if isinstance(value, str) and value.lower() == choice.lower():
            return choice
    raise InputError(f"{name}={value!r} names no kernels: give {', '.join(CHOICES)}")
