"""Errors a user can cause. Each message is one line that names the file or value and says what to do."""

from __future__ import annotations


class ZeroWasteError(Exception):
    """Base of every error that is the input's fault and not a bug; front ends print it without a traceback."""


class CheckpointError(ZeroWasteError):
    """A weight file cannot be used. The message starts with the file's path."""


class InputError(ZeroWasteError, ValueError):
    """A latent, video or option has a wrong shape, type or value."""


class PlanError(ZeroWasteError):
    """Nothing fits the given memory target; the message says what would."""


class NonFiniteError(ZeroWasteError):
    """A result is NaN or Inf even in the safest precision."""


class Cancelled(Exception):
    """The caller's `cancel` callback asked to stop. Finished work is released, the VAE stays usable."""


def named(error: BaseException) -> str:
    """Return the error's class name with the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
