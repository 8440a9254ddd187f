"""Errors a user can cause. Each message is one line that names the file or value and says what to do."""

from __future__ import annotations

import re

#: Characters of a whole line, and of one text of a file within it.
LINE, TEXT = 4000, 300
#: Characters that end a line, and those that a terminal obeys or that change how others are shown: controls (escape
#: sequences begin with one), marks for the direction of writing, invisible ones, and halves of pairs of code units.
_BREAKS = re.compile("[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]+")
_HIDDEN = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"
                     "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]")  # fmt: skip


def one_line(text: object, limit: int = TEXT) -> str:
    """Return a text of a file, or a line that holds such texts, so that it can be shown: on one line, without
    characters that a terminal obeys or nobody sees, cut to `limit` characters."""
    text = str(text)
    clean = _HIDDEN.sub("?", _BREAKS.sub(" ", text[: limit + 1]))
    return clean if len(text) <= limit else clean[:limit] + "…"


class ZeroWasteError(Exception):
    """Base of every error that is the input's fault and not a bug; front ends print it without a traceback. Its message
    is one line, whatever texts of a file it holds."""

    def __init__(self, *given: object) -> None:
        super().__init__(*(one_line(each, LINE) if isinstance(each, str) else each for each in given))


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
    return f"{type(error).__name__}: {one_line(lines[0], 160)}" if lines else type(error).__name__
