"""Zero-Waste VAE Save."""

from __future__ import annotations

from ..engine import Checkpoint, InputError
from ..engine.checkpoints import restore_shapes
from ..engine.extras.convert import save_checkpoint
from ..engine.families import detect
from . import files
from .conversion import known, weights_of
from .host import EngineVAE, io
from .networks import patched
from .reports import ui
from .services import Progress
from .widgets import choice, report_output, schema, shared


class Save(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAESave", "Zero-Waste VAE Save",
            ["save vae", "convert vae", "quantize vae", "gguf vae", "export vae"],
            description="Writes a VAE to a .safetensors or .gguf file in the output folder and reads it back "
            "before it takes its name. The weights are those of the VAE's file, whatever precision it runs in.",
            inputs=[
                shared("vae", "The VAE to write; one of a network this pack knows."),
                io.String.Input(
                    "filename_prefix", display_name="File name", default="vae/zerowaste_vae",
                    tooltip="Name, or folder/name, in the output folder; a counter and the suffix are added. "
                    "%date:yyyy-MM-dd% stands for the day, hh, mm and ss for the time.",
                ),
                choice("type", "Format and type", list(files.SAVE_TYPES), files.DEFAULT_TYPE,
                       "File format and type of the weights; norms, biases, first and last convolutions keep their "
                       "own. Against f16, size of a full-width SeedVR2 VAE (478 MiB) and PSNR of a decode (demo VAE, 5 "
                       "frames of the demo clip, peak 2.0): q8_0 53.3 %, 57.8 dB; q6_k 41.2 %, 44.1 dB; q4_k 28.3 %, "
                       "34.1 dB.", optional=False),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="The file that was written."), report_output()],
            is_output_node=True,
        )  # fmt: skip

    @classmethod
    def execute(cls, vae: object, filename_prefix: str, type: str) -> io.NodeOutput:
        if type not in files.SAVE_TYPES:
            raise InputError(f"type={type!r} is not known: use one of {', '.join(files.SAVE_TYPES)}")
        suffix, kind = files.SAVE_TYPES[type]
        checkpoint = checkpoint_of(vae)
        path = files.output_file(filename_prefix, suffix)
        result = save_checkpoint(checkpoint, path, kind, progress=Progress())
        report = files.without_folders("\n".join(result.summary()))
        return io.NodeOutput(str(path), report, ui=ui(report))


def checkpoint_of(vae: object) -> Checkpoint:
    """Return the weights of an engine VAE, or of a host VAE with a known network, as a file needs them to load."""
    if isinstance(vae, EngineVAE):
        checkpoint, model = vae.source(), vae.engine.model
        shapes = {key: tuple(t.shape) for key, t in model.state_dict().items()}
        config = model.config
    elif not known(vae):
        network = type(getattr(vae, "first_stage_model", vae)).__name__
        raise InputError(f"{network}: not a VAE the engine knows; save it with ComfyUI's own VAE Save")
    elif patched(getattr(vae, "patcher", None)) is not None:
        raise InputError("Another node has laid patches over this VAE's weights: save it with ComfyUI's own VAE Save")
    else:
        checkpoint = weights_of(vae)()
        shapes = {key: tuple(t.shape) for key, t in checkpoint.tensors.items()}
        config = detect(shapes).config_of(shapes, checkpoint.metadata)
    tensors = restore_shapes(checkpoint, shapes).tensors
    groups = {} if config.norm_groups is None else {"norm_num_groups": config.norm_groups}
    return Checkpoint({key: tensors[key] for key in shapes}, {**checkpoint.metadata, **groups})
