"""Zero-Waste Demo Clip."""

from __future__ import annotations

from ..engine import CheckpointError
from ..engine.files.media import read_video
from ..engine.loader import demo_clip_path
from .host import io
from .reports import ui
from .widgets import report_output, schema
from .wording import counted


class DemoClip(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEDemoClip",
            "Zero-Waste Demo Clip",
            ["demo video", "sample clip", "test video", "example frames"],
            description="Frames of the short clip that comes with this pack, for trying things out on a fresh host.",
            inputs=[
                io.Int.Input(
                    "frames",
                    display_name="Frames",
                    default=9,
                    min=1,
                    max=1024,
                    tooltip="How many from its start; 4n+1 fill latents of most video VAEs.",
                )
            ],
            outputs=[
                io.Image.Output(display_name="Images", tooltip="The frames."),
                io.Float.Output(display_name="fps", tooltip="Frames per second."),
                report_output(),
            ],
        )

    @classmethod
    def execute(cls, frames: int) -> io.NodeOutput:
        path = demo_clip_path()
        if not path.is_file():
            raise CheckpointError(f"{path}: the demo clip is missing; install the pack again")
        images, fps = read_video(path, frames)
        count, height, width, _ = images.shape
        report = counted(f"{count} frames of {width}x{height} at {float(fps):g} frames per second, from {path.name}")
        return io.NodeOutput(images, float(fps), report, ui=ui(report))
