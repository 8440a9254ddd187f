"""The VAEs of other packs with random weights, read from checkouts of those packs; nothing of theirs is kept here."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.extras.bench.calls import synchronize
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import by_name
from zerowaste_vae.engine.families.seedvr2 import Config as SeedVR2

#: Environment variables that name the checkouts.
UPSCALER, WANVIDEO = "SEEDVR2_PACK", "WANVIDEO_PACK"


def checkout(variable: str) -> Path:
    """Return the folder that an environment variable names. Raises InputError."""
    folder = Path(os.environ.get(variable, ""))
    if not os.environ.get(variable) or not folder.is_dir():
        raise InputError(f"${variable} names no checkout of the pack")
    return folder


# -- WanVideoWrapper ---------------------------------------------------------------------------------------------------


def wanvideo_vae(family: str, small: bool, dtype: torch.dtype) -> nn.Module:
    """Return the pack's object for Wan 2.1 on the CPU, as its loader makes it; `small` takes the widths of LightVAE.

    Only its file with the VAE is read. Of ComfyUI that one uses a progress bar, the name of the device and Conv3d,
    which is torch's but for a fault of torch 2.9.
    """
    published = by_name(family).published
    config = published.sizes("lightvaew2_1") if small else published.config
    module = _wan_video_vae(checkout(WANVIDEO) / "wanvideo" / "wan_video_vae.py")
    vae = module.WanVideoVAE(dtype=dtype, pruning_rate=0.75 if small else 0.0)
    drawn = random_checkpoint(config, architecture=by_name(family)).tensors
    vae.load_state_dict({f"model.{name}": tensor for name, tensor in drawn.items()})
    return vae.eval().to("cpu", dtype)


def _wan_video_vae(file: Path) -> types.ModuleType:
    """Import the pack's file beside modules with the few names of ComfyUI and of the pack that it imports."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = {
        "comfy": {}, "comfy.utils": {"ProgressBar": _Bar},
        "comfy.ops": {"disable_weight_init": types.SimpleNamespace(Conv3d=nn.Conv3d)},
        "comfy.model_management": {"get_torch_device": lambda: device},
        "other_pack": {}, "other_pack.utils": {"print_memory": _nothing, "log": types.SimpleNamespace(info=_nothing)},
        "other_pack.wanvideo": {},
    }  # fmt: skip
    for name, content in made.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    spec = importlib.util.spec_from_file_location(f"other_pack.wanvideo.{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Bar:
    def __init__(self, *_: Any) -> None:
        pass

    update = update_absolute = lambda *_: None


def _nothing(*_: Any, **__: Any) -> None:
    pass


# -- the SeedVR2 upscaler ----------------------------------------------------------------------------------------------


@dataclass
class Phase:
    """Seconds of a phase in all and of each batch, which are marked once the device is idle."""

    began: float = field(default_factory=time.perf_counter)
    marks: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.marks[-1] - self.began

    @property
    def batches(self) -> list[float]:
        return [b - a for a, b in zip([self.began, *self.marks], self.marks, strict=False)]


class Upscaler:
    """Phases 1 and 3 of the upscaler (encoding and decoding) on any VAE, without its network between them."""

    def __init__(self, device: torch.device, small: bool) -> None:
        """small: take narrow networks of random weights in the place of the published widths."""
        sys.path.insert(0, str(checkout(UPSCALER)))
        self.device = device
        with _quiet():
            self._phases, self._setup, infer, config, models, types, debug = (
                importlib.import_module(f"src.{name}")
                for name in ("core.generation_phases", "core.generation_utils", "core.infer", "common.config",
                             "core.model_configuration", "optimization.compatibility", "utils.debug")
            )  # fmt: skip
        self.dtype: torch.dtype = types.COMPUTE_DTYPE
        folder = checkout(UPSCALER)
        settings = config.load_config(str(folder / "configs_3b" / "main.yaml"))
        sizes = config.load_config(str(folder / "src/models/video_vae_v3/s8_c16_t4_inflation_sd3.yaml"))
        widths = (32, 32, 64, 64) if small else tuple(sizes.block_out_channels)
        sizes.block_out_channels = list(widths)
        settings.vae.model.update(sizes)
        settings.vae.dtype = str(self.dtype).removeprefix("torch.")
        self._debug = debug.Debug(enabled=False)
        self._runner = infer.VideoDiffusionInfer(settings, self._debug)
        self._runner.dit, self._runner._tensor_offload_device = None, torch.device("cpu")
        #: The file's weights, fp16, which the upscaler casts to its computing type.
        self.weights = random_checkpoint(SeedVR2(widths, widths), architecture=by_name("seedvr2")).tensors
        with torch.device("meta"):
            self.own = config.create_object(settings.vae.model)
        cast = {name: tensor.to(self.dtype) for name, tensor in self.weights.items()}
        self.own.load_state_dict(cast, strict=False, assign=True)
        if missing := [name for name, tensor in self.own.state_dict().items() if tensor.is_meta]:
            raise InputError(f"the upscaler's VAE has {missing[0]}, which no weights were drawn for")
        models.apply_model_specific_config(self.own, self._runner, settings, False, self._debug)

    def run(
        self, vae: nn.Module, frames: Tensor, batch: int, overlap: int, tile: tuple[int, int] | None = None,
        after: Callable[[], None] = _nothing,
    ) -> tuple[Tensor, Phase, Phase]:  # fmt: skip
        """Encode and decode a clip in the upscaler's batches; the VAE leaves the device between, as for small cards.

        Args:
            vae: the upscaler's own or a stand-in.
            frames: [F, H, W, 3] in 0..1.
            batch, overlap: frames of a batch, and how many the next one shares with it.
            tile: size and overlap of its tiles in pixels; None: whole frames.
            after: called after each batch.

        Returns: frames [F, H, W, 3] in -1..1 and beyond, and the two phases.
        """
        runner, on = self._runner, tile is not None
        size, over = tile or (1024, 128)
        runner.vae, runner.encode_tiled, runner.decode_tiled = vae, on, on
        runner.encode_tile_size = runner.decode_tile_size = (size, size)
        runner.encode_tile_overlap = runner.decode_tile_overlap = (over, over)
        context = self._setup.setup_generation_context(
            vae_device=self.device, vae_offload_device="cpu", tensor_offload_device="cpu", debug=self._debug
        )
        context["cache_context"] = {"vae_cache": False, "cached_vae": None}

        def mark(*_: Any) -> None:
            synchronize(self.device)
            phases[-1].marks.append(time.perf_counter())
            after()

        phases = [Phase()]
        with _quiet(), torch.no_grad():
            context = self._phases.encode_all_batches(
                runner, context, frames, self._debug, batch, progress_callback=mark, temporal_overlap=overlap,
                resolution=min(frames.shape[1:3]), color_correction="none",
            )  # fmt: skip
            context["all_upscaled_latents"] = context.pop("all_latents")
            phases.append(Phase())
            context = self._phases.decode_all_batches(runner, context, self._debug, mark, cache_model=True)
        return context["final_video"], *phases


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the pack prints for its users to itself, unless it fails."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except Exception:
            sys.stderr.write(said.getvalue())
            raise
