"""How fp32 is multiplied: in fp32 where rounding would be compounded or checked against, in TF32 only when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch

#: TF32 was asked for by name. torch's own setting says nothing: it allows TF32 in convolutions by default.
_ASKED = ContextVar("tf32", default=False)


def set_fp32_math(tf32: bool, convolutions: bool = True) -> Callable[[], None]:
    """fp32 matrix products (and convolutions) of the process in fp32 or TF32; returns what undoes it."""
    product, conv = torch.backends.cuda.matmul, torch.backends.cudnn
    # torch 2.9 replaced the two booleans by fp32_precision and refuses a mixture of both.
    new = hasattr(product, "fp32_precision")
    name, value = ("fp32_precision", "tf32" if tf32 else "ieee") if new else ("allow_tf32", tf32)
    holders = [product, *([conv.conv if new else conv] if convolutions else [])]
    kept = [getattr(h, name) for h in holders]
    for holder in holders:
        setattr(holder, name, value)

    def restore() -> None:
        for holder, before in zip(holders, kept, strict=True):
            setattr(holder, name, before)

    return restore


@contextmanager
def fp32_math(tf32: bool, convolutions: bool = True) -> Iterator[None]:
    """As `set_fp32_math`, inside only; our own fp32 modules then follow it too (`tf32_asked`)."""
    restore = set_fp32_math(tf32, convolutions)
    token = _ASKED.set(tf32)
    try:
        yield
    finally:
        _ASKED.reset(token)
        restore()


def exact_matmul() -> AbstractContextManager[None]:
    """No TF32 in fp32 matrix products inside."""
    return fp32_math(tf32=False, convolutions=False)


def tf32_asked() -> bool:
    """Whether `fp32_math` with TF32 is in force."""
    return _ASKED.get()
