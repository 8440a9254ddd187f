"""Zero-Waste VAE Save."""

from __future__ import annotations

import time

from ..engine import InputError
from ..engine.files.checkpoint import save_checkpoint
from . import folders, host
from .host import io
from .packages import needing_gguf
from .reports import ui
from .saving import DEFAULT_TYPE, SAVE_TYPES, describe
from .weights import checkpoint_of
from .widgets import report_output, schema, vae_input

_TYPE = (
    "File format and type of the weights; norms, biases, first and last convolutions keep their own. Size of a "
    "full-width SeedVR2 VAE beside f16 (478 MiB): q8_0 53.3 %, q6_k 41.2 %, q4_k 28.3 %. Decode beside that of f16, "
    "measured with the demo VAE: q8_0 57.8 dB, q6_k 44.1 dB, q4_k 34.1 dB (PSNR, peak 2.0, 5 frames of the demo clip)."
)


class Save(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAESave",
            "Zero-Waste VAE Save",
            ["save vae", "convert vae", "quantize vae", "gguf vae", "export vae"],
            description="Writes a VAE to a .safetensors or .gguf file in the output folder and reads it back "
            "before it takes its name. The weights are those of the VAE's file, whatever precision it runs in.",
            inputs=[
                vae_input("The VAE to write; one of a network this pack knows."),
                io.String.Input(
                    "filename_prefix",
                    display_name="File name",
                    default="vae/zerowaste_vae",
                    tooltip="Name, or folder/name, in the output folder; a counter and the suffix are added. "
                    "%date:yyyy-MM-dd% stands for the day, hh, mm and ss for the time.",
                ),
                io.Combo.Input(
                    "type",
                    display_name="Format and type",
                    options=list(SAVE_TYPES),
                    default=DEFAULT_TYPE,
                    tooltip=_TYPE,
                ),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="The file that was written."), report_output()],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, vae: object, filename_prefix: str, type: str) -> io.NodeOutput:
        if type not in SAVE_TYPES:
            raise InputError(f"type={type!r} is not known: use one of {', '.join(SAVE_TYPES)}")
        suffix, kind = SAVE_TYPES[type]
        checkpoint = checkpoint_of(vae)
        path = folders.output_file(filename_prefix, suffix)
        started = time.perf_counter()
        with needing_gguf(path.name):
            result = save_checkpoint(checkpoint, path, kind, progress=host.Progress())
        report = folders.without_folders(describe(result, checkpoint, time.perf_counter() - started))
        return io.NodeOutput(str(path), report, ui=ui(report))
