"""The weights of a VAE for writing."""

from __future__ import annotations

from ..engine import Checkpoint, InputError
from ..engine.archs import detect
from ..engine.files.checkpoint import restore_shapes
from .altered import patched
from .host import EngineVAE
from .making import known, of_network


def checkpoint_of(vae: object) -> Checkpoint:
    """Return the weights of an engine VAE, or of a host VAE whose network the engine knows, complete for a file that
    loads again."""
    if isinstance(vae, EngineVAE):
        checkpoint, model = vae.source(), vae.engine.model
        shapes = {key: tuple(t.shape) for key, t in model.state_dict().items()}
        config = model.config
    elif known(vae) and patched(getattr(vae, "patcher", None)) is not None:
        raise InputError("Another node has laid patches over this VAE's weights: save it with ComfyUI's own VAE Save")
    elif known(vae):
        checkpoint = of_network(vae.first_stage_model)
        shapes = {key: tuple(t.shape) for key, t in checkpoint.tensors.items()}
        config = detect(shapes).config_of(shapes, checkpoint.metadata)
    else:
        network = type(getattr(vae, "first_stage_model", vae)).__name__
        raise InputError(f"{network}: not a VAE the engine knows; save it with ComfyUI's own VAE Save")
    tensors = restore_shapes(checkpoint, shapes).tensors
    groups = {} if config.norm_groups is None else {"norm_num_groups": config.norm_groups}
    return Checkpoint({key: tensors[key] for key in shapes}, {**checkpoint.metadata, **groups})
