"""ComfyUI's devices, progress bar, stop button and web server."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import comfy.model_management as mm
import comfy.sd as sd
import comfy.utils
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from PIL import Image

from ..engine import log
from ..engine.families import DEFAULT
from ..engine.loader import PRECISIONS, auto_precision
from ..engine.network.architecture import Architecture
from ..engine.planning.budget import Machine
from ..engine.planning.fusable import availability
from ..engine.request import NATIVE_BLENDS
from ..engine.runtime.pinned import POOL, forbid
from .fit import unfit
from .runs import PREVIEW_SIZE, Preview
from .settings import obey

#: Name of the message that carries a line.
PROGRESS = "zerowaste_vae.progress"


def server() -> object | None:
    """Return ComfyUI's web server; None where none runs (tests, scripts)."""
    # Not imported here: importing it without running it would start half of ComfyUI.
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def machine() -> Machine:
    """Return the machine that decodes run on, as it was when a VAE last ran; no device is touched."""
    return _machine or sampled()


_machine: Machine | None = None


def sampled() -> Machine:
    """Return the machine that decodes run on, as it is now."""
    global _machine
    if getattr(args, "disable_pinned_memory", False):
        forbid("--disable-pinned-memory")
    obey(args)
    _machine = bare(_vae_device())
    return _machine


class HostPins:
    """The host's count of page-locked memory, as `pinned.Ledger`: it locks models up to a limit of its own, 40 % of all
    memory on Windows, and drops idle ones for others. Older hosts have neither count nor limit."""

    def grant(self, size: int) -> bool:
        most = getattr(mm, "MAX_PINNED_MEMORY", -1)
        if most > 0:  # else it locks nothing itself
            ensure = getattr(mm, "ensure_pin_registerable", None)
            if ensure is None:
                free = getattr(mm, "TOTAL_PINNED_MEMORY", 0) + size <= most
            elif "evict_active" in inspect.signature(ensure).parameters:
                free = ensure(size, evict_active=False)  # models that run keep theirs
            else:
                free = ensure(size)
            if not free:
                return False
        self.free(-size)
        return True

    def free(self, size: int) -> None:
        if hasattr(mm, "TOTAL_PINNED_MEMORY"):
            mm.TOTAL_PINNED_MEMORY = max(0, mm.TOTAL_PINNED_MEMORY - size)  # some versions set it to 0 themselves


POOL.ledger = HostPins()


def _vae_device() -> torch.device:
    return torch.device("cpu") if unfit() else mm.vae_device()


def bare(device: torch.device) -> Machine:
    """Return a device of this machine, with the host's figure of its memory."""
    return Machine.bare(device, None if device.type == "cpu" else mm.get_total_memory(device))


def offload_device() -> torch.device:
    """Return the device that holds the weights of a VAE while it does not run."""
    return mm.vae_offload_device()


def forgets_files() -> bool:
    """Return True if VAEs of this host do not know the file they were read from."""
    return not hasattr(sd, "load_vae_patcher")


@functools.cache
def unavailable() -> dict[str, str | None]:
    """Return optimisation -> why it has no effect here for the first family's VAE in its default precision, or None."""
    device = _vae_device()
    return availability(device, DEFAULT.name, None, PRECISIONS[auto_precision(device, DEFAULT)])


@functools.cache
def native_blend(architecture: Architecture) -> str:
    """Return the rule by which this host blends the tiles of a VAE that tiles itself, one of `NATIVE_BLENDS`.

    Four tiles of the same numbers are put together by the host's own code: where their overlaps cross, the first corner
    is the first tile's, or by the older rule that of the tile to the left.
    """
    try:
        module, _, name = architecture.host.rpartition(".")
        network = getattr(importlib.import_module(module), name)
        probe = network.__new__(network)
        torch.nn.Module.__init__(probe)
        probe.vae_ratio, probe.tile_size, probe.tile_overlap_min = 1, 4, 2
        probe._decode_pixels = lambda z: z + torch.arange(16.0, dtype=torch.float32, device="cpu").view(4, 4)
        corner = float(probe.tiled_decode(torch.zeros(1, 1, 1, 6, 6, dtype=torch.float32, device="cpu"))[..., 2, 2])
    except Exception as error:  # a host without such a network, or with another one
        log.debug(f"the host's blending of native tiles is not known: {error}")
        return NATIVE_BLENDS[0]
    return NATIVE_BLENDS[corner != 10.0]


def unrecorded() -> AbstractContextManager[object]:
    """Return a context in which the host records no allocations of this thread.

    Hosts from 0.38 on record those of a sampler's blocks and of previews, and play them back: memory that outlives the
    recording, as packed weights and graphs do, would end the process.
    """
    try:
        from comfy.model_prefetch import pause_malloc_graph
    except ImportError:  # a host that records nothing
        return nullcontext()
    return pause_malloc_graph()


def shows_previews() -> bool:
    """Return True if the user switched on previews of sampler steps, which counts for chunks too."""
    return args.preview_method != LatentPreviewMethod.NoPreviews


def registered(kind: str) -> type | None:
    """Return the class of a node that some pack has registered; None where none has."""
    return getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {}).get(kind)


def unload(patcher: object) -> None:
    """Have the host take a model off its device, and no other."""
    others = [m for m in mm.current_loaded_models if m.model is not patcher]
    mm.free_memory(1e30, patcher.load_device, keep_loaded=others)


def node_here() -> str | None:
    """Return the id of the node that runs; None outside of a run."""
    return getattr(get_executing_context(), "node_id", None)


def busy() -> bool:
    """Return True if a workflow runs or waits to."""
    here = server()
    return here is not None and here.prompt_queue.get_tasks_remaining() > 0


def say_here(text: str, activity: str | None = None) -> None:
    """Show a line on the running node (its status line, which web/js/runs.js fills); do nothing outside of a run.

    activity: what the node spends its time on before its bar moves, in a word that hosts after 0.38 show in its head.
    They translate "loading" alone; the next line takes it away.
    """
    context, here = get_executing_context(), server()
    if not text or context is None or here is None:
        return
    if (show := getattr(get_progress_state(), "set_activity", None)) is not None:
        show(context.node_id, activity)
    here.send_sync(PROGRESS, {"node": context.node_id, "text": text}, here.client_id)


def pictures_here() -> Callable[[Image.Image], bool] | None:
    """Return a function that shows a picture on the running node, from any thread, and returns whether the run goes on;
    None outside of a run."""
    context, here = get_executing_context(), server()
    if context is None or here is None:
        return None
    nodes, bar = get_progress_state().nodes, comfy.utils.ProgressBar(1, node_id=context.node_id)

    def show(picture: Image.Image) -> bool:
        now = nodes.get(context.node_id, {"value": 0, "max": 1})  # the bar stays where it is
        try:
            bar.update_absolute(now["value"], now["max"], ("JPEG", picture, PREVIEW_SIZE))
        except mm.InterruptProcessingException:
            mm.interrupt_current_processing()  # who finds the button pressed takes that back; the run is to end by it
            return False
        return True

    return show


def interrupted() -> type[BaseException]:
    """Return the exception by which the host ends a run."""
    return mm.InterruptProcessingException


class Progress:
    """A progress(done, total) callback that moves the host's bar and ends the work when its stop button is pressed."""

    def __init__(self, told: bool = True) -> None:
        """told: move the bar, and not the button alone."""
        self._told = told
        self._stages = self._preview = self._bar = None
        self._expected = 0

    def start(self, total: int, stages: Callable[[int, int], str], preview: Preview | None) -> None:
        """Show the bar from the first second on, before a first step of `total` is done. `stages` describes the present
        step in words and `preview` gives a picture of it; the host shows both on the node."""
        if not self._told:
            return
        self._stages, self._preview = stages, preview
        self._expected = total
        self._bar = comfy.utils.ProgressBar(total)
        self._bar.update_absolute(0, total)

    def __call__(self, done: int, total: int) -> None:
        mm.throw_exception_if_processing_interrupted()
        if not self._told:
            return
        total = total or max(done + 1, self._expected)  # a stream of frames does not know its end
        if self._bar is None:
            self._bar = comfy.utils.ProgressBar(total)
        picture = self._preview(done, total) if self._preview else None
        self._bar.update_absolute(done, total, picture and ("JPEG", picture, PREVIEW_SIZE))
        if self._stages:
            say_here(self._stages(done, total))
