"""What the pack offers to ComfyUI."""

from __future__ import annotations

from . import routes
from .decode import Decode
from .demo import DemoClip
from .encode import Encode
from .host import ComfyExtension, io
from .loader import Loader
from .optimize import Optimize
from .save import Save


class Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        # Here and not in on_load, which hosts before 0.3.65 never call.
        routes.register()
        return [Loader, Optimize, Encode, Decode, Save, DemoClip]
