"""The host's progress bar, its stop button, and the line on the node that runs."""

from __future__ import annotations

from collections.abc import Callable

import comfy.model_management as mm
import comfy.utils
from comfy.cli_args import LatentPreviewMethod, args
from comfy_execution.utils import get_executing_context

from .preview import SIZE as PREVIEW_SIZE
from .preview import Preview
from .server import say


def shows_previews() -> bool:
    """Return True if the user switched on previews of sampler steps, which counts for chunks too."""
    return args.preview_method != LatentPreviewMethod.NoPreviews


def say_here(text: str) -> None:
    """Show a line on the running node; do nothing outside of a run."""
    context = get_executing_context()
    if context is not None:
        say(text, context.node_id)


class Progress:
    """A progress(done, total) callback that moves the host's bar and ends the work when its stop button is pressed."""

    def __init__(self) -> None:
        self._stages: Callable[[int, int], str] | None = None
        self._preview: Preview | None = None
        self._bar: comfy.utils.ProgressBar | None = None
        self._expected = 0

    def start(self, total: int, stages: Callable[[int, int], str], preview: Preview | None) -> None:
        """Show the bar from the first second on, before a first step of `total` is done. `stages` describes the present
        step in words and `preview` gives a picture of it; the host shows both on the node."""
        self._stages, self._preview = stages, preview
        self._expected = total
        self._bar = comfy.utils.ProgressBar(total)
        self._bar.update_absolute(0, total)

    def __call__(self, done: int, total: int) -> None:
        mm.throw_exception_if_processing_interrupted()
        total = total or max(done + 1, self._expected)  # a stream of frames does not know its end
        if self._bar is None:
            self._bar = comfy.utils.ProgressBar(total)
        picture = self._preview(done, total) if self._preview else None
        self._bar.update_absolute(done, total, picture and ("JPEG", picture, PREVIEW_SIZE))
        if self._stages:
            say_here(self._stages(done, total))
