"""Precision of fp32 products: fp32 where rounding would be compounded or checked against, TF32 only on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from .settings import Setting

#: TF32 was requested by name. torch's own setting does not show that: it allows TF32 in convolutions by default.
_ASKED = ContextVar("tf32", default=False)
# torch 2.9 replaced the two booleans by fp32_precision and refuses a mixture of both.
_NEW = hasattr(torch.backends.cuda.matmul, "fp32_precision")
_NAME = "fp32_precision" if _NEW else "allow_tf32"
#: torch's settings for matrix products and for convolutions.
_HOLDERS = torch.backends.cuda.matmul, torch.backends.cudnn.conv if _NEW else torch.backends.cudnn


def _value(tf32: bool) -> str | bool:
    return ("tf32" if tf32 else "ieee") if _NEW else tf32


_PRODUCTS, _CONVOLUTIONS = (Setting.attribute(holder, _NAME, _value(False)) for holder in _HOLDERS)


def set_fp32_math(tf32: bool) -> Callable[[], None]:
    """Set the process's fp32 matrix products and convolutions to fp32 or TF32; return a function that undoes it."""
    kept = [getattr(holder, _NAME) for holder in _HOLDERS]
    for holder in _HOLDERS:
        setattr(holder, _NAME, _value(tf32))

    def restore() -> None:
        for holder, before in zip(_HOLDERS, kept, strict=True):
            setattr(holder, _NAME, before)

    return restore


@contextmanager
def fp32_math(tf32: bool) -> Iterator[None]:
    """Compute fp32 matrix products and convolutions inside in fp32 or TF32, by settings of the process (see Setting);
    our own fp32 modules follow it too (`tf32_asked`)."""
    token = _ASKED.set(tf32)
    try:
        with _PRODUCTS.hold(_value(tf32)), _CONVOLUTIONS.hold(_value(tf32)):
            yield
    finally:
        _ASKED.reset(token)


def exact_math(device: torch.device) -> AbstractContextManager[None]:
    """Compute without TF32 inside, on `device`. Only CUDA knows TF32: elsewhere, as in a plan's dry run parallel to
    another thread's work, the process' settings are left alone."""
    return fp32_math(tf32=False) if device.type == "cuda" else nullcontext()


def tf32_asked() -> bool:
    """Return True while `fp32_math` with TF32 holds."""
    return _ASKED.get()
