"""How fp32 is multiplied: in fp32 where rounding would be compounded or checked against, in TF32 only when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from .settings import Setting

#: TF32 was asked for by name. torch's own setting says nothing: it allows TF32 in convolutions by default.
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
    """fp32 matrix products and convolutions of the process in fp32 or TF32; returns what undoes it."""
    kept = [getattr(holder, _NAME) for holder in _HOLDERS]
    for holder in _HOLDERS:
        setattr(holder, _NAME, _value(tf32))

    def restore() -> None:
        for holder, before in zip(_HOLDERS, kept, strict=True):
            setattr(holder, _NAME, before)

    return restore


@contextmanager
def fp32_math(tf32: bool) -> Iterator[None]:
    """fp32 matrix products and convolutions in fp32 or TF32 inside, by settings of the process (see Setting); our own
    fp32 modules follow it too (`tf32_asked`)."""
    token = _ASKED.set(tf32)
    try:
        with _PRODUCTS.hold(_value(tf32)), _CONVOLUTIONS.hold(_value(tf32)):
            yield
    finally:
        _ASKED.reset(token)


def exact_math(device: torch.device) -> AbstractContextManager[None]:
    """No TF32 in what is computed inside on `device`. Only CUDA knows TF32: elsewhere, as in a plan's dry run beside
    another thread's work, the process' settings are left alone."""
    return fp32_math(tf32=False) if device.type == "cuda" else nullcontext()


def tf32_asked() -> bool:
    """Whether `fp32_math` with TF32 is in force."""
    return _ASKED.get()
