"""What the pack offers to ComfyUI."""

from __future__ import annotations

from ..engine import errors, log
from . import routes
from .compare import Compare
from .decode import Decode
from .demo import DemoClip
from .encode import Encode
from .from_video import EncodeFromVideo
from .host import ComfyExtension, io
from .loader import Loader
from .optimize import Optimize
from .save import Save
from .to_video import DecodeToVideo
from .widgets import CATEGORY as NAME


class Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        # Here and not in on_load, which hosts before 0.3.65 never call.
        routes.register()
        _name_for_host()
        return [Loader, Optimize, Encode, Decode, EncodeFromVideo, DecodeToVideo, Save, Compare, DemoClip]


def _name_for_host() -> None:
    """In ComfyUI's log and error dialogs the pack has its own name: the path it was loaded from says nothing there."""
    log.PREFIX = f"[{NAME}]"
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == errors.__name__:
            kind.__module__ = NAME
