"""Engine VAEs made from files and from VAEs of the host's own nodes; the others run by ComfyUI's own code."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..engine import Checkpoint, CheckpointError, InputError, log, read_checkpoint
from ..engine.checkpoints import from_stored, quantised
from ..engine.checkpoints.safetensors_file import FP8
from ..engine.families import detect, renamed
from ..engine.kernels.precision import fp32_math
from ..engine.network.stamp import Stamp
from ..engine.options import Options
from ..engine.planning.fusable import availability
from ..engine.precision.digest import digest
from ..engine.precision.modes import MIXED
from ..engine.report import Report
from ..engine.runtime.scope import CUDNN_BENCHMARK
from .fit import Unfit, own_or_refused, unfit
from .frames import of_frames
from .host import EngineVAE
from .networks import SETTINGS, altered, file_of, patched, replaced
from .reports import Outcome
from .services import offload_device
from .settings import DEFAULT_OVERLAP, Settings

CONVERTED = (
    "another node's VAE: the engine runs it on a copy of its weights, kept as long as that VAE is; "
    "Zero-Waste VAE Optimize gives it a precision and optimisations of its own"
)
UNKNOWN = "ComfyUI's own code, because the engine does not know this network"
CHANGED = "ComfyUI's own code, because another node has changed this VAE"
UNFIT = "ComfyUI's own code, because this pack does not know this version of ComfyUI"


def from_file(
    path: Path, precision: str, norm_groups: int | None, settings: Settings, name: str = "",
    device: torch.device | None = None,
) -> EngineVAE:  # fmt: skip
    """Return the VAE of a .safetensors or .gguf file, listed under `name`; device: as of EngineVAE."""
    read = reading(path)

    def source() -> Checkpoint:
        checkpoint = read()
        if norm_groups:
            checkpoint.metadata["norm_num_groups"] = norm_groups
        return checkpoint

    return EngineVAE(source, precision, settings, name, device)


def host_file(path: Path, name: str) -> object:
    """Return the host's own VAE of a file, listed under `name`. Raises InputError where it has no network for it."""
    stored = read_checkpoint(path)
    return own_or_refused(stored.tensors, stored.metadata, name)


def reading(path: Path) -> Callable[[], Checkpoint]:
    """Return a function that reads a file, and refuses it once it has been changed or removed."""

    def stamp() -> tuple[int, int] | None:
        try:
            stat = path.stat()
        except OSError:  # reading it reports the error
            return None
        return stat.st_mtime_ns, stat.st_size

    begun = stamp()

    def source() -> Checkpoint:
        if stamp() != begun:
            raise CheckpointError(f"{path}: was changed or removed after it was loaded; run the graph again")
        return read_checkpoint(path)

    return source


def from_host_vae(vae: object, precision: str) -> EngineVAE | None:
    """Return an engine VAE with a copy of a host VAE's weights; None if its network is unknown or nodes changed it."""
    if not known(vae) or not follows_vae(vae):
        return None
    try:
        made = EngineVAE(weights_of(vae), precision, Settings(), device=vae.device)
    except Unfit:  # which has been logged
        return None
    except CheckpointError as error:  # layers in a form that only the host's code runs
        _left_to_host(vae.first_stage_model, str(error))
        return None
    made.not_video = getattr(vae, "not_video", False)
    if (path := file_of(vae)) is not None:
        made.file = path.name
    return made


def weights_of(vae: object) -> Callable[[], Checkpoint]:
    """Return a function that reads the weights of a host VAE: from its network, or from its file where that has
    quantised layers and the host's network none. There the host has taken their codes for weights."""
    network, path = vae.first_stage_model, file_of(vae)  # not the VAE: `_converted` drops its entry when that is freed
    if path is not None and not quantised(network.state_dict()):
        with suppress(CheckpointError):  # a file that only the host reads
            if quantised(read_checkpoint(path, shapes_only=True).tensors):
                log.once(f"{path.name}: ComfyUI leaves the scales of its weights out; it was read anew", log.info)
                read = reading(path)
                return lambda: replace(found := read(), metadata=found.metadata | _metadata(network))
    return lambda: _of_network(network)


def _of_network(network: object) -> Checkpoint:
    """Return the weights of a host VAE's network that the engine knows, with the metadata that only files carry."""
    stored = network.state_dict()
    if empty := next((key for key, t in stored.items() if t.is_meta), None):
        raise CheckpointError(f"its {empty} is in no file that was loaded")
    # Newer hosts lay weights out anew in place (channels last), and readers of raw values want them in order.
    tensors = {key: t.detach().to(offload_device()).contiguous() for key, t in stored.items()}
    fp8 = {key: t.half() for key, t in tensors.items() if t.dtype in FP8}  # as hosts with dynamic VRAM leave it
    tensors |= fp8
    found = Checkpoint(tensors, _metadata(network))
    if quantised(tensors):
        found = replace(from_stored(tensors, found.metadata, Path(type(network).__name__), fp8), path=None)
    elif layer := next((key for key, t in tensors.items() if _is_code(key, t)), None):
        raise InputError(f"{layer} of this VAE holds codes: its loader has left out the scales of a quantised file; "
                         "load it with Zero-Waste VAE Loader")  # fmt: skip
    tensors = renamed(found.tensors)
    return replace(found, tensors=detect(tensors).completed(tensors))


def _is_code(name: str, tensor: Tensor) -> bool:
    """Return True for a weight whose values are all whole numbers, as no training leaves them."""
    return name.endswith(".weight") and tensor.ndim > 1 and tensor.abs().max() > 16 and tensor.equal(tensor.round())


def _metadata(network: object) -> dict[str, str]:
    config = getattr(network, "config", None)
    if not isinstance(config, dict):
        return {}
    # Nodes may have set these after loading.
    now = {name: getattr(network, name) for name in SETTINGS if hasattr(network, name)}
    return {"config": json.dumps({"vae": config | now})}


def with_precision(vae: EngineVAE, precision: str) -> EngineVAE:
    """Return `vae` itself if it runs in `precision`, else a new one with its weights and settings."""
    # Options may have chosen its 8 bit: other options from a later node would take it away again.
    chosen = precision in MIXED and vae.engine.asked != precision
    if precision == "auto" or (precision == vae.engine.precision and not chosen):
        return vae
    other = EngineVAE(vae.source, precision, vae.settings, vae.name, vae.device)
    other.decoder, other.not_video, other.file = vae.decoder, vae.not_video, vae.file
    return other


def known(vae: object) -> bool:
    """Return True if the engine has the network of a host VAE. Log the reason once where only its sizes prevent it."""
    network = getattr(vae, "first_stage_model", None)
    names = () if network is None else vae.get_sd()
    architecture = detect(names)
    if architecture is None:
        return False
    # The sizes of quantised layers are those of their biases too; making floats of their codes takes long.
    shapes = {key: tuple(t.shape) for key, t in architecture.completed(renamed(network.state_dict())).items()}
    try:
        architecture.config_of(shapes, _metadata(network))
    except InputError as error:
        return not _left_to_host(network, str(error))
    return follows(network)


def follows(network: object) -> bool:
    """Return True if no node has changed what a host VAE's network computes. Log the reason once if one has."""
    layer = altered(network)
    return layer is None or not _left_to_host(network, f"another node has changed its layer {layer}")


def follows_vae(vae: object) -> bool:
    """Return True if no node has changed a VAE's calls or patched its weights. Log the reason once if one has."""
    ours = isinstance(vae, EngineVAE)
    name = replaced(vae, EngineVAE if ours else EngineVAE.__base__)
    why = "" if name is None else f"another node has changed {name} of its VAE"
    if not why and not ours and patched(getattr(vae, "patcher", None)) is not None:
        why = "another node has laid patches over its weights"
    return not why or not _left_to_host(vae.first_stage_model, why)


def _left_to_host(network: object, why: str) -> bool:
    log.once(f"{type(network).__name__} runs by ComfyUI's own code: {why}")
    return True


#: Objects that packs hand on as a VAE although no call of the host's fits them -> the pack, and what helps.
_OTHERS = {
    "AutoencoderKLCausal3D": (
        "HunyuanVideoWrapper", "load the same VAE with Load VAE or Zero-Waste VAE Loader, which takes its latents"),
    "AutoencoderKLCogVideoX": (
        "CogVideoXWrapper", "keep that pack's own decode and encode, as its latents have another form"),
}  # fmt: skip


def check_vae(vae: object) -> None:
    """Refuse an input where a loader gave no VAE, as checkpoints without one do, or one of another kind than the
    host's. Raises InputError."""
    if getattr(vae, "first_stage_model", None) is not None:
        return
    kind = type(vae).__name__
    if kind in _OTHERS:
        pack, cure = _OTHERS[kind]
        raise InputError(f"This VAE is an object of {pack}, which only that pack's nodes can use: {cure}")
    if isinstance(vae, nn.Module):
        raise InputError(f"This VAE is an object of another pack ({kind}), not ComfyUI's: load the same file with Load "
                         "VAE or Zero-Waste VAE Loader")  # fmt: skip
    raise InputError("There is no VAE at this input: choose a file that holds one in the loader")


class _Conversion(NamedTuple):
    """An engine VAE made of a host VAE, and the weights it was made of."""

    vae: EngineVAE
    stamp: Stamp
    held: str
    settings: tuple[object, ...]


# The conversions hold the networks they were made from, never the VAE objects: those would live as long as their keys.
_converted: WeakKeyDictionary[object, _Conversion] = WeakKeyDictionary()


def engine_vae(vae: object) -> EngineVAE | None:
    """Return `vae` itself if it is an engine VAE, or an engine VAE converted from it.

    The conversion has the defaults of Zero-Waste VAE Optimize, and is made anew whenever the network, weights or device
    change. None: the engine does not know its network, or nodes have changed it. Raises InputError where there is no
    VAE.
    """
    check_vae(vae)
    if not follows_vae(vae):
        return None
    if isinstance(vae, EngineVAE):
        return vae
    network, last = vae.first_stage_model, _converted.get(vae)
    settings = type(network), vae.device, *(getattr(network, name, None) for name in SETTINGS)
    if last is not None and last.settings == settings:
        # Hosts that load weights piece by piece put other tensors with the same values in their place.
        stamp = last.stamp if last.stamp.holds(network) else Stamp(network)
        if stamp is last.stamp or last.held == _held(network, last.vae):
            _converted[vae] = last._replace(stamp=stamp)
            last.vae.not_video = getattr(vae, "not_video", False)  # nodes may set it at any time
            return last.vae if follows(network) else None
    del last  # its weights, before others take their place
    _converted.pop(vae, None)
    converted = from_host_vae(vae, "auto")
    if converted is not None:
        converted.notes = [CONVERTED]
        _converted[vae] = _Conversion(converted, Stamp(network), _held(network, converted), settings)
    return converted


def _held(network: object, vae: EngineVAE) -> str:
    """Return a digest of the values in a host's network, as the engine rounds them."""
    return digest(network.state_dict(), vae.engine.dtype)


def host_decode(vae: object, samples: Tensor, settings: Settings) -> tuple[Tensor, Outcome]:
    """Decode with the host's VAE Decode, in its own tiles where a size is wished for: images [F, H, W, C] in 0..1. The
    report says which wishes had no effect."""
    samples = of_frames(samples)
    report = _report(vae, "decode")
    with report.measured(torch.device(vae.device)), report.stage("decode"):
        if settings.tiling in ("blended", "exact") and settings.tile:
            unit = max(1, vae.spacial_compression_decode())
            overlap = DEFAULT_OVERLAP if settings.overlap is None else settings.overlap
            tile = max(settings.tile // unit, 1)
            images = vae.decode_tiled(samples, tile_x=tile, tile_y=tile, overlap=min(overlap // unit, tile // 4))
        else:
            images = vae.decode(samples)
    if images.ndim not in (4, 5):
        raise InputError(f"this VAE makes {list(images.shape)}, no images: decode it with the node made for it")
    report.clip = tuple(images.shape[:4]) if images.ndim == 5 else (1, *images.shape[:3])
    return images.reshape(-1, *images.shape[-3:]), _outcome(report, settings)


def host_encode(
    vae: object, images: Tensor, settings: Settings, not_video: bool | None = None
) -> tuple[Tensor, Outcome]:
    """Encode images [F, H, W, C] or [B, F, H, W, C] with the host's VAE Encode; return the samples.

    not_video: each image is a picture (True), all are one clip (False), or as the host takes them (None). Hosts before
    `encode_as` cannot be told: there pictures go one by one, and a clip as the host takes it.
    """
    if images.ndim not in (4, 5) or 0 in images.shape:
        raise InputError(f"There are no frames in these images: connect [F, H, W, 3], not {list(images.shape)}")
    images = images.flatten(0, -4)
    report = _report(vae, "encode")
    report.clip = (1, *images.shape[:3])
    images = images[..., :3]
    told = {} if not_video is None or not _takes_choice(vae.encode) else {"not_video": not_video}
    one_by_one = bool(not_video) and not told and getattr(vae, "latent_dim", 2) == 3
    with report.stage("encode"):
        parts = images.split(1) if one_by_one else [images]
        samples = torch.cat([vae.encode(part, **told) for part in parts])
    return samples, _outcome(report, settings)


def _takes_choice(encode: Callable[..., Tensor]) -> bool:
    return "not_video" in inspect.signature(encode).parameters


def _report(vae: object, operation: str) -> Report:
    precision = str(vae.vae_dtype).removeprefix("torch.")
    network = type(vae.first_stage_model).__name__
    mode = UNFIT if unfit() else UNKNOWN if follows_vae(vae) and follows(vae.first_stage_model) else CHANGED
    return Report(operation, (0, 0, 0, 0), network, precision, str(vae.device), mode=mode)


def _outcome(report: Report, settings: Settings) -> Outcome:
    report.complete = True
    rest = settings
    if report.operation == "decode" and settings.tile:
        rest = replace(settings, tiling="auto", tile=0, overlap=None)
        report.mode = f"{report.mode}, in its own tiles of {settings.tile} pixels"
    ignored = [] if rest == Settings() else [f"without effect on it: {rest.describe()}"]
    return Outcome(report, None, notes=ignored)


def with_scoped_settings(vae: object, options: Options) -> tuple[object, list[str]]:
    """Return a VAE the engine does not know, with the settings of torch that `options` name in force during its own
    calls.

    Also return the settings that apply here. Weights and network are shared, and the given VAE is not changed; where no
    setting applies it is returned itself.
    """
    reasons = availability(vae.device, "", None, vae.vae_dtype)
    names = [n for n in ("tf32", "cudnn_benchmark") if getattr(options, n) and reasons[n] is None]
    if not names:
        return vae, []

    def within(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(call)
        def scoped(*args: object, **kwargs: object) -> Tensor:
            with (
                fp32_math(tf32=True) if "tf32" in names else nullcontext(),
                CUDNN_BENCHMARK.hold(True) if "cudnn_benchmark" in names else nullcontext(),
            ):
                return call(*args, **kwargs)

        return scoped

    other = copy.copy(vae)
    for method in ("decode", "decode_tiled", "encode", "encode_tiled"):
        setattr(other, method, within(getattr(vae, method)))
    return other, names
