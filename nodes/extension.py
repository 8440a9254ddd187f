"""The pack's entry point for ComfyUI: its nodes and routes."""

from __future__ import annotations

import functools

from ..engine import ZeroWasteError, errors, log
from . import routes
from .compare import Compare
from .decode import Decode
from .demo import DemoClip
from .encode import Encode
from .folders import without_folders
from .from_video import EncodeFromVideo
from .host import ComfyExtension, io
from .loader import Loader
from .optimize import Optimize
from .save import Save
from .to_video import DecodeToVideo
from .widgets import CATEGORY as NAME


class Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        # Not in on_load, which hosts before 0.3.65 never call.
        routes.register()
        _name_for_host()
        nodes = [Loader, Optimize, Encode, Decode, EncodeFromVideo, DecodeToVideo, Save, Compare, DemoClip]
        return [_discreet(node) for node in nodes]


def _discreet(node: type[io.ComfyNode]) -> type[io.ComfyNode]:
    """Keep the host's folders out of a node's errors: their reader may be on another machine."""
    execute = node.execute.__func__

    @functools.wraps(execute)
    def discreet(cls: type[io.ComfyNode], *given: object, **inputs: object) -> io.NodeOutput:
        try:
            return execute(cls, *given, **inputs)
        except ZeroWasteError as error:
            error.args = tuple(without_folders(part) if isinstance(part, str) else part for part in error.args)
            raise

    node.execute = classmethod(discreet)
    return node


def _name_for_host() -> None:
    """Give the pack its own name in ComfyUI's log and error dialogs: the path it was loaded from means nothing
    there."""
    log.PREFIX = f"[{NAME}]"
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == errors.__name__:
            kind.__module__ = NAME
