"""Zero-Waste VAE for WanVideo and for SeedVR2: objects in the place of the VAEs of two packs, whose own nodes go on
calling them. Whatever of a pack is not as it was when this was written, its own VAE is passed on."""

from __future__ import annotations

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine import Checkpoint, CheckpointError, InputError, ZeroWasteError, log
from ..engine.extras.adapters import SeedVR2VAE, WanVideoVAE
from ..engine.families import renamed
from ..engine.runtime.pressure import out_of_memory
from .conversion import reading, with_precision
from .host import EngineVAE, io
from .networks import altered
from .reports import ui
from .services import node_here, offload_device, registered, unload
from .settings import Settings, from_widgets
from .widgets import report_output, schema, shared

UNTOUCHED = "the pack's own VAE is passed on unchanged"
WHOLE = "tiles that the pack's nodes ask for are not used: whole frames keep to the memory limit"
NO_COMPILE = "torch.compile has no effect on this engine"


class Hosted:
    """The engine of a VAE, whose runs the host prepares: room, weights, bar, stop button and status line. All else is
    as `VideoVAE` has it."""

    def __init__(self, held: EngineVAE) -> None:
        self.held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["held"].engine, name)

    def decode(self, latent: Tensor, **options: Any) -> Tensor:
        """Decode as `VideoVAE.decode` does."""
        return self._run("decode", self.held.layout.latent_size(latent.shape), latent, options)

    def encode(self, clip: Tensor, **options: Any) -> Tensor:
        """Encode as `VideoVAE.encode` does."""
        rest = tuple(n % self.held.engine.architecture.spatial for n in clip.shape[2:4])
        return self._run("encode", self.held.layout.clip_size(*clip.shape[:4]), clip, options, rest)

    def _run(
        self, operation: str, size: tuple[int, ...], given: Tensor, options: dict[str, Any],
        rest: tuple[int, ...] = (0, 0),
    ) -> Tensor:  # fmt: skip
        vae = self.held
        try:
            with vae.running(operation, size, vae.settings, {"range": options.pop("range")}, rest) as run:
                return getattr(vae.engine, operation)(given, **options, **run.options)
        except BaseException:  # the pack may never call again
            self.release()
            raise

    def release(self) -> int:
        """Free what runs have left on the device, the weights too; return the bytes of packed weights."""
        freed = self.held.engine.release()
        unload(self.held.patcher)
        return freed

    def follow(self, device: object) -> None:
        """Run on the CUDA device that a call names: MultiGPU chooses another one than the host does."""
        here, wanted = self.held.device, torch.device(device or "cpu")
        if here.type == wanted.type == "cuda" and wanted.index not in (None, here.index):
            self.release()
            vae = self.held
            self.held = EngineVAE(vae.source, vae.engine.asked, vae.settings, vae.name, wanted)


def passed_on(given: object, replaced: Callable[[], tuple[object, list[str]]]) -> io.NodeOutput:
    """Return what `replaced` makes in the place of a pack's object with its report in lines, or that object and why."""
    try:
        made, lines = replaced()
    except Exception as error:  # of any kind: it may be another version of the pack
        if out_of_memory(error):
            raise
        why = str(error) if isinstance(error, ZeroWasteError) else f"{type(error).__name__}: {error}"
        made, lines = given, [f"{UNTOUCHED}: {why}"]
    return io.NodeOutput(made, report := "\n".join(lines), ui=ui(report))


# -- WanVideoWrapper, seen in its version 1.4.5 ------------------------------------------------------------------------

_CLASSES = ("WanVideoVAE", "WanVideoVAE38")
_CONSTANTS = ("mean", "inv_std", "z_dim", "upsampling_factor", "dtype", "encode", "decode")
#: The arguments by name of its nodes' calls.
_CALL = dict.fromkeys(("device", "tiled", "end_", "tile_size", "tile_stride", "pbar"))


class WanVideo(WanVideoVAE):
    """A WANVAE on the engine, on the device that a call names."""

    def decode(self, hidden_states: Any, device: Any = None, *rest: Any, **named: Any) -> list[Tensor]:
        self.vae.follow(device)
        return super().decode(hidden_states, device, *rest, **named)

    def encode(self, videos: Any, device: Any = None, *rest: Any, **named: Any) -> Tensor:
        self.vae.follow(device)
        return super().encode(videos, device, *rest, **named)


def network_of(vae: object) -> nn.Module:
    """Return the network of a WANVAE. Raises InputError where it is none of those that `WanVideo` stands in for."""
    kind, network = type(vae).__name__, getattr(vae, "model", None)
    if kind not in _CLASSES:
        raise InputError(f"{kind} is no VAE of Wan's own kind")
    lacking = [n for n in _CONSTANTS if not hasattr(vae, n)]
    lacking += [n for n in ("encoder", "decoder") if not hasattr(network, n)]
    if lacking:
        raise InputError(f"this version of WanVideoWrapper is not known here: its VAE has no {lacking[0]}")
    for name in ("encode", "decode"):
        try:
            inspect.signature(getattr(vae, name)).bind(None, **_CALL)
        except TypeError as error:
            raise InputError(f"this version of WanVideoWrapper is not known here: {name}, {error}") from error
    parts = {"encoder": network.encoder, "decoder": getattr(network.decoder, "_orig_mod", network.decoder)}
    changed = [name for one in (vae, network) for name in ("encode", "decode") if name in vars(one)]
    changed += [f"{name}.{layer}" for name, part in parts.items() if (layer := altered(part))]
    if changed:
        raise InputError(f"another node has changed {changed[0]} of this VAE")
    return network


def weights_of(network: nn.Module) -> Checkpoint:
    """Return the weights of a WANVAE's network, as its loader left them. Raises CheckpointError."""
    # torch.compile puts a layer of its own around the decoder.
    stored = {key.replace("_orig_mod.", ""): t for key, t in network.state_dict().items()}
    if empty := next((key for key, t in stored.items() if t.is_meta), None):
        raise CheckpointError(f"its {empty} is in no file that was loaded")
    return Checkpoint(renamed({key: t.detach().to(offload_device()).contiguous() for key, t in stored.items()}), {})


def _in_place_of_wan(vae: Any, precision: str, wishes: Settings) -> tuple[object, list[str]]:
    if isinstance(vae, tuple) and len(vae) == 1:  # as MultiGPU hands it on
        made, lines = _in_place_of_wan(vae[0], precision, wishes)
        return (made,), lines
    if isinstance(vae, WanVideo):  # of another node of ours
        fast = with_precision(vae.vae.held, precision)
        fast, notes = fast.with_wishes(wishes.over(fast.settings)), []
    else:
        network = network_of(vae)
        fast = EngineVAE(lambda: weights_of(network), precision, wishes)
        notes = [NO_COMPILE] if hasattr(network.decoder, "_orig_mod") else []
    return WanVideo(Hosted(fast), vae), [fast.describe(), WHOLE, *notes]


class ForWanVideo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEForWanVideo", "Zero-Waste VAE for WanVideo",
            ["wanvideo vae", "wanvideowrapper", "wanvae", "wan vae oom", "vace", "animate"],
            description="Makes the nodes of WanVideoWrapper run their Wan VAE on this pack's engine: put it after "
            "WanVideo VAE Loader. Decodes and encodes, those inside its samplers too, run whole frames within the "
            "memory you allow. What it does not know (TAEHV and other small decoders, another version of that pack) is "
            "passed on unchanged, and the report says why.",
            inputs=[
                io.Custom("WANVAE").Input("vae", display_name="VAE", tooltip="From WanVideo VAE Loader."),
                shared("precision"), shared("vram_gb"), shared("ram_gb", operation="run"),
            ],
            outputs=[
                io.Custom("WANVAE").Output(display_name="VAE", tooltip="For the nodes of WanVideoWrapper."),
                report_output(),
            ],
        )  # fmt: skip

    @classmethod
    def execute(cls, vae: object, precision: str = "auto", **given: object) -> io.NodeOutput:
        return passed_on(vae, lambda: _in_place_of_wan(vae, precision, from_widgets(**given)))


# -- the SeedVR2 upscaler, seen in its version 2.5.24 ------------------------------------------------------------------

_UPSCALER, _PROBE = "SeedVR2VideoUpscaler", "zerowaste probe"
_PARTS = ("core.model_configuration", "core.model_cache", "utils.constants", "optimization.compatibility")
#: What the upscaler reads of a VAE's settings when it looks for one in its cache.
_LOOKS = ("model", "cache_model", "node_id")


class Upscaler(NamedTuple):
    """The parts of the upscaler that ours meets: its cache of models, its look for a file, the type it computes in."""

    cache: Any
    find: Callable[[str], str]
    dtype: torch.dtype


@functools.cache
def upscaler() -> Upscaler:
    """Return the parts of the upscaler, once they have been tried. Raises InputError where they are not as known."""
    node = registered(_UPSCALER)
    if node is None:
        raise InputError("the SeedVR2 upscaler is not installed")
    folder = node.__module__.rpartition(".")[0]  # its name is the user's
    try:
        config, caches, constants, types = (importlib.import_module(f"..{name}", folder) for name in _PARTS)
        cache, probe, key = caches.get_global_cache(), nn.Module(), {"node_id": _PROBE, "cache_model": True}
        probe._model_name = _PROBE
        cache.set_vae(key, probe, _PROBE)
        try:
            found = config._initialize_cache_context(
                dit_cache=False, vae_cache=True, dit_id=None, vae_id=_PROBE, dit_model="", vae_model=_PROBE, debug=None
            )["cached_vae"]  # fmt: skip
        finally:
            cache.remove_vae(key)
        if found is not probe or cache.get_vae(key) is not None or not isinstance(types.COMPUTE_DTYPE, torch.dtype):
            raise InputError("its cache is another one")
        return Upscaler(cache, constants.find_model_file, types.COMPUTE_DTYPE)
    except Exception as error:  # of any kind: it is another version
        raise InputError(f"this version of the SeedVR2 upscaler is not known here ({error})") from error


class Seeded(dict):
    """The upscaler's settings of a VAE. Who reads them to look for it finds ours in the upscaler's cache.

    Until then there is nothing in that cache, nor once the VAE has been taken out: from there on the run alone has it,
    however that ends.
    """

    def __init__(self, given: dict, there: Upscaler, make: Callable[[], EngineVAE | None]) -> None:
        """make: returns the VAE; None while its file is not there, as the upscaler downloads it in its first run."""
        super().__init__(given)
        self._there, self._make = there, make
        self._key = {"node_id": f"zerowaste {node_here()}", "cache_model": True}
        self.stand_in: SeedVR2 | None = None
        self.prepare()

    def prepare(self) -> None:
        """Make the stand-in if its file is there."""
        if self.stand_in is None and (vae := self._make()) is not None:
            self.stand_in = SeedVR2(Hosted(vae), self._there, self._key, dict.__getitem__(self, "model"))
            self.update(self._key)
            weakref.finalize(self, self.stand_in.forget).atexit = False

    def _look(self, key: object) -> None:
        if key not in _LOOKS:
            return
        try:
            self.prepare()
        except ZeroWasteError as error:
            log.once(f"{UNTOUCHED}: {error}")
        if self.stand_in is not None:
            self._there.cache.set_vae(self._key, self.stand_in, self.stand_in._file)

    def __getitem__(self, key: object) -> Any:
        self._look(key)
        return super().__getitem__(key)

    def get(self, key: object, default: Any = None) -> Any:
        self._look(key)
        return super().get(key, default)


class SeedVR2(SeedVR2VAE):
    """The upscaler's VAE on the engine."""

    def __init__(self, vae: Hosted, there: Upscaler, key: dict, name: str) -> None:
        super().__init__(vae, dtype=there.dtype)
        self._cache, self._key, self._file = there.cache, key, name
        self.eval()

    @property
    def _model_name(self) -> str:
        """Return the file it stands for. The upscaler asks for it when it takes a VAE out of its cache."""
        self._withdraw()
        return self._file

    def _withdraw(self) -> None:
        if self._cache.get_vae(self._key) is self:
            self._cache.remove_vae(self._key)

    def forget(self) -> None:
        """Leave the upscaler's cache and its kept runs without weights."""
        self._withdraw()
        self.vae.release()
        object.__setattr__(self, "vae", None)


def _in_place_of_seedvr2(given: Any, precision: str, wishes: Settings) -> tuple[object, list[str]]:
    there = upscaler()
    if not isinstance(given, dict) or any(key not in given for key in (*_LOOKS, "device")):
        raise InputError("this version of the SeedVR2 upscaler is not known here: its VAE has other settings")
    device, name = torch.device(given["device"]), given["model"]
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"the engine does not run on {device.type}")

    def make() -> EngineVAE | None:
        path = Path(there.find(name))
        try:
            return EngineVAE(reading(path), precision, wishes, name, device) if path.is_file() else None
        except ZeroWasteError as error:  # whose reader may be on another machine
            why = str(error).replace(str(path), name)
            raise InputError(why) from error

    seeded = Seeded(given, there, make)
    if seeded.stand_in is None:
        return seeded, [f"{name} is not there yet: the pack's own VAE runs until the upscaler has downloaded it"]
    notes = [WHOLE] if given.get("encode_tiled") or given.get("decode_tiled") else []
    notes += [NO_COMPILE] if given.get("torch_compile_args") else []
    return seeded, [seeded.stand_in.vae.held.describe(), *notes]


class ForSeedVR2(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEForSeedVR2", "Zero-Waste VAE for SeedVR2",
            ["seedvr2 vae", "video upscaler", "seedvr2 upscaler", "upscale oom", "seedvr2 oom"],
            description="Makes the SeedVR2 Video Upscaler run its VAE on this pack's engine: put it after SeedVR2 "
            "(Down)Load VAE Model. Its phases of encoding and decoding run whole frames within the memory you allow, "
            "with the weights as the file has them. What it does not know (another version of that pack) is passed on "
            "unchanged, and the report says why.",
            inputs=[
                io.Custom("SEEDVR2_VAE").Input("vae", display_name="VAE",
                                               tooltip="From SeedVR2 (Down)Load VAE Model."),
                shared("precision"), shared("vram_gb"), shared("ram_gb", operation="run"),
            ],
            outputs=[
                io.Custom("SEEDVR2_VAE").Output(display_name="VAE", tooltip="For SeedVR2 Video Upscaler."),
                report_output(),
            ],
        )  # fmt: skip

    @classmethod
    def execute(cls, vae: object, precision: str = "auto", **given: object) -> io.NodeOutput:
        return passed_on(vae, lambda: _in_place_of_seedvr2(vae, precision, from_widgets(**given)))
