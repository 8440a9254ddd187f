"""What a VAE of the engine needs of ComfyUI. Where a host lacks it, ComfyUI's own code runs every VAE."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import comfy.model_management as mm
import comfy.model_patcher
import comfy.sd
import comfy.utils
import torch

from ..engine import InputError, log
from ..engine.runtime.pressure import out_of_memory

_CPU = torch.device("cpu")
#: Calls of the host as this pack makes them, for a look at the host's signatures; none is made here.
_CALLS: tuple[Callable[[], partial[Any]], ...] = (
    lambda: partial(mm.load_models_gpu, [], memory_required=0, force_full_load=True),
    lambda: partial(mm.free_memory, 0, _CPU, keep_loaded=[]),
    lambda: partial(mm.get_free_memory, _CPU),
    lambda: partial(mm.minimum_inference_memory),
    lambda: partial(mm.extra_reserved_memory),
    lambda: partial(mm.soft_empty_cache),
    lambda: partial(mm.get_total_memory, _CPU),
    lambda: partial(mm.vae_device),
    lambda: partial(mm.vae_offload_device),
    lambda: partial(mm.processing_interrupted),
    lambda: partial(mm.throw_exception_if_processing_interrupted),
    lambda: partial(comfy.model_patcher.ModelPatcher, None, load_device=_CPU, offload_device=_CPU),
    lambda: partial(comfy.model_patcher.ModelPatcher.add_callback, None, "", print),
    lambda: partial(comfy.model_patcher.ModelPatcher.loaded_size, None),
    lambda: partial(comfy.model_patcher.ModelPatcher.model_size, None),
    lambda: partial(comfy.model_patcher.ModelPatcher.current_loaded_device, None),
    lambda: partial(comfy.model_patcher.ModelPatcher.partially_unload, None, _CPU, 0),
    lambda: partial(comfy.utils.ProgressBar, 1),
)
#: Weights of the host's smallest VAEs, the quickest to build first: a host may have dropped a kind.
_FLOATS = {"dtype": torch.float32, "device": "cpu"}
_SMALLEST = (
    {"pixel_space_vae": torch.tensor(1.0, **_FLOATS)}, {"taesd_decoder.1.weight": torch.zeros(64, 4, 3, 3, **_FLOATS)},
)  # fmt: skip
#: What a VAE has; a host that does not know its weights returns without.
_PARTS = ("first_stage_model", "patcher", "device", "output_device")


class Unfit(InputError):
    """This host cannot hold a VAE of the engine."""


def unfit() -> str:
    """Return why this host cannot hold VAEs of the engine, as far as is known by now; "" where it can."""
    return _changed() or next(iter(_failed), "")


_failed: list[str] = []


@functools.cache
def _changed() -> str:
    """Return the first call of the host that is missing or takes other arguments than ours, in a sentence, or ""."""
    for call in _CALLS:
        try:
            made = call()
            inspect.signature(made.func).bind(*made.args, **made.keywords)
        except ValueError:  # compiled code has no signature
            continue
        except (AttributeError, TypeError) as error:
            return _said(str(error))
    return ""


def _said(why: str) -> str:
    text = f"this pack does not know this version of ComfyUI ({why[:120]}): ComfyUI's own code runs all VAEs"
    log.once(f"{text}. A newer version of the pack may know it")
    return text


def begin(vae: comfy.sd.VAE, device: torch.device | None) -> None:
    """Give `vae` all attributes that this version of the host gives a VAE, those of its smallest one.

    device: of its runs; None: the host's for VAEs. Raises Unfit.
    """
    if why := unfit():
        raise Unfit(why)
    for smallest in _SMALLEST:
        try:
            comfy.sd.VAE.__init__(vae, sd=dict(smallest), device=device)
            missing = [name for name in _PARTS if getattr(vae, name, None) is None]
            why = f"its VAE has no {missing[0]}" if missing else ""
        except Exception as error:  # any kind: it is another version's code
            if out_of_memory(error):
                raise
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        if not why:
            return
        log.debug(f"no VAE of {next(iter(smallest))} in this host: {why}")
    _failed.append(_said(why))
    raise Unfit(_failed[0])


def own(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> comfy.sd.VAE:
    """Return the host's own VAE of these weights. Raises RuntimeError where it has no network for them."""
    # Hosts whose VAE takes no metadata have no network that needs them.
    told = {"metadata": metadata} if "config" in metadata else {}
    vae = comfy.sd.VAE(sd=dict(tensors), **told)
    vae.throw_exception_if_invalid()
    return vae


def own_or_refused(tensors: dict[str, torch.Tensor], metadata: dict[str, str], name: str) -> comfy.sd.VAE:
    """Return `own`; raise InputError, which names the VAE, where this host has no network for it."""
    try:
        return own(tensors, metadata)
    except RuntimeError as error:
        why = str(error).strip().split("\n", 1)[0].rstrip(":")[:120]
        raise InputError(f"{name}: this ComfyUI has no network of its own for this VAE ({why})") from error
