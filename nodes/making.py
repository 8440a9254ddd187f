"""Engine VAEs made from files and from VAEs that the host's own nodes loaded."""

from __future__ import annotations

import json
from pathlib import Path

from ..engine import Checkpoint, CheckpointError, InputError, log, read_checkpoint
from ..engine.archs import detect
from ..engine.precision.modes import MIXED
from .altered import altered, patched, replaced
from .direct import SETTINGS
from .host import EngineVAE
from .machine import offload_device
from .packages import needing_gguf
from .settings import Settings


def from_file(path: Path, precision: str, norm_groups: int | None, settings: Settings, name: str = "") -> EngineVAE:
    """Return the VAE of a .safetensors or .gguf file, listed under `name`."""

    stamp = _stamp(path)

    def source() -> Checkpoint:
        if _stamp(path) != stamp:
            raise CheckpointError(f"{path}: was changed or removed after it was loaded; run the graph again")
        with needing_gguf(path.name):
            checkpoint = read_checkpoint(path)
        if norm_groups:
            checkpoint.metadata["norm_num_groups"] = norm_groups
        return checkpoint

    return EngineVAE(source, precision, settings, name)


def from_host_vae(vae: object, precision: str) -> EngineVAE | None:
    """Return an engine VAE with the weights of a host VAE, which is left as it is; None if its network is not known, or
    other nodes have changed it."""
    if not known(vae) or not follows_vae(vae):
        return None

    network = vae.first_stage_model  # not the VAE: `conversion` drops its entry when that is freed
    return EngineVAE(lambda: of_network(network), precision, Settings(), device=vae.device)


def of_network(network: object) -> Checkpoint:
    """Return the weights of a host VAE's network that the engine knows, with the metadata that only files carry."""
    tensors = {key: t.detach().to(offload_device()) for key, t in network.state_dict().items()}
    config, metadata = getattr(network, "config", None), {}
    if isinstance(config, dict):
        # Nodes may have set these after loading.
        now = {name: getattr(network, name) for name in SETTINGS if hasattr(network, name)}
        metadata = {"config": json.dumps({"vae": config | now})}
    return Checkpoint(detect(tensors).completed(tensors), metadata)


def with_precision(vae: EngineVAE, precision: str) -> EngineVAE:
    """Return `vae` itself if it runs in `precision`, else a new one with its weights and settings."""
    # Options may have chosen its 8 bit: other options from a later node would take it away again.
    chosen = precision in MIXED and vae.engine.asked != precision
    if precision == "auto" or (precision == vae.engine.precision and not chosen):
        return vae
    other = EngineVAE(vae.source, precision, vae.settings, vae.name, vae.device)
    other.decoder = vae.decoder
    return other


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:  # reading it reports the error
        return None
    return stat.st_mtime_ns, stat.st_size


def known(vae: object) -> bool:
    """Return True if the engine has the network of a host VAE. Log the reason once where only its sizes prevent it."""
    network = getattr(vae, "first_stage_model", None)
    names = () if network is None else vae.get_sd()
    architecture = detect(names)
    # Layers that the host has quantised are in a form that only its own code runs.
    if architecture is None or any(name.endswith(".comfy_quant") for name in names):
        return False
    checkpoint = of_network(network)
    try:
        architecture.config_of({key: tuple(t.shape) for key, t in checkpoint.tensors.items()}, checkpoint.metadata)
    except InputError as error:
        log.once(f"{type(network).__name__} runs by ComfyUI's own code: {error}")
        return False
    return follows(network)


def follows(network: object) -> bool:
    """Return True if the engine computes the same as a host VAE's network, as nodes have left it. Log the reason once
    if not."""
    layer = altered(network)
    if layer is not None:
        log.once(f"{type(network).__name__} runs by ComfyUI's own code: another node has changed its layer {layer}")
    return layer is None


def follows_vae(vae: object) -> bool:
    """Return True if the engine does the same as a VAE's own calls, as nodes have left them and the patches over its
    weights. Log the reason once if not."""
    ours = isinstance(vae, EngineVAE)
    name, network = replaced(vae, EngineVAE if ours else None), type(vae.first_stage_model).__name__
    if name is not None:
        log.once(f"{network} runs by ComfyUI's own code: another node has changed {name} of its VAE")
    elif not ours and patched(getattr(vae, "patcher", None)) is not None:
        log.once(f"{network} runs by ComfyUI's own code: another node has laid patches over its weights")
        return False
    return name is None
