"""As much of a ComfyUI newer than 0.33.0 as the pack's VAE needs, on a CPU: the signatures and calls of 0.38 and of the
version that brought `encode_as`. It computes nothing itself."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace

import torch
import zerowaste_vae
from torch import Tensor, nn

CPU = torch.device("cpu")


class ModelPatcher:
    """With `fast_disk` (0.38), which says that weights can be read from their file again."""

    def __init__(
        self, model, load_device, offload_device, size=0, weight_inplace_update=False, fast_disk=False
    ) -> None:
        self.model, self.load_device, self.offload_device, self.size = model, load_device, offload_device, size
        self.fast_disk, self.patches_uuid, self.callbacks = fast_disk, 0, []

    def clone(self, disable_dynamic=False, model_override=None, force_deepcopy=False) -> ModelPatcher:
        return type(self)(self.model, self.load_device, self.offload_device, self.size, fast_disk=self.fast_disk)

    def add_callback(self, call_type, callback) -> None:
        self.callbacks.append((call_type, callback))

    def model_size(self) -> int:
        return self.size

    def loaded_size(self) -> int:
        return 0

    def current_loaded_device(self) -> torch.device:
        return self.offload_device

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        return 0


class VAE:
    """Knows pixel space, tiny autoencoders, and whatever network it is given under "network"."""

    refuses: tuple[str, ...] = ()  # kinds that this host builds no VAE of

    def __init__(self, sd=None, device=None, config=None, dtype=None, metadata=None) -> None:
        fast_disk = fast_disk_of(sd)
        self.not_video, self.latent_dim, self.crop_input, self.pad_channel_value = False, 2, True, None
        self.output_channels, self.latent_channels, self.downscale_ratio, self.upscale_ratio = 3, 4, 8, 8
        self.process_input, self.process_output = lambda x: 2 * x - 1, lambda x: (x + 1) / 2
        kind = next((k for k in ("pixel_space_vae", "taesd_decoder.1.weight", "network") if k in sd), None)
        if kind in self.refuses:
            raise ValueError("pixel_space is selected wrongly")
        self.first_stage_model = None
        if kind is None and not any(key.startswith("decoder.") for key in sd):
            return
        self.first_stage_model = sd[kind] if kind == "network" else nn.Identity()
        self.latent_dim = 3 if kind == "network" else 2
        self.device, self.output_device, self.vae_dtype = device or CPU, CPU, torch.float32
        self.patcher = ModelPatcher(self.first_stage_model, self.device, CPU, fast_disk=fast_disk)

    def throw_exception_if_invalid(self) -> None:
        if self.first_stage_model is None:
            raise RuntimeError("ERROR: VAE is invalid")

    def get_sd(self) -> dict[str, Tensor]:
        return self.first_stage_model.state_dict()

    def vae_encode_crop_pixels(self, pixels: Tensor) -> Tensor:
        return pixels[..., : self.output_channels]

    def encode(self, pixel_samples, not_video=None) -> Tensor:
        """One latent pixel a frame or clip, as many of them as the network would see."""
        x = pixel_samples.movedim(-1, 1)
        if self.latent_dim == 3 and x.ndim < 5:
            alone = self.not_video if not_video is None else not_video
            x = x.unsqueeze(2) if alone else x.movedim(1, 0).unsqueeze(0)
        return x[..., ::8, ::8]

    def encode_tiled(
        self, pixel_samples, tile_x=None, tile_y=None, overlap=None, tile_t=None, overlap_t=None, not_video=None
    ) -> Tensor:
        return self.encode(pixel_samples, not_video)

    def decode(self, samples_in, vae_options={}) -> Tensor:  # noqa: B006
        return samples_in.movedim(1, -1)

    def decode_tiled(self, samples, tile_x=None, tile_y=None, overlap=None, tile_t=None, overlap_t=None) -> Tensor:
        return self.decode(samples)


def fast_disk_of(state_dict) -> bool:
    """As storage.state_dict_fast_disk looks at what a VAE is made of."""
    for value in state_dict.values():
        if hasattr(value, "untyped_storage"):
            getattr(value.untyped_storage(), "_comfy_source_path", None)
    return False


class Recording:
    """The host's recorded memory: a lasting allocation must come while it is paused."""

    paused = 0

    @contextmanager
    def pause_malloc_graph(self, sync=False) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1


def load_models_gpu(
    models, memory_required=0, force_patch_weights=False, minimum_memory_required=None, force_full_load=False
) -> None:
    pass


def free_memory(
    memory_required, device, keep_loaded=(), for_dynamic=False, pins_required=0, ram_required=0
) -> None:
    pass


def management() -> ModuleType:
    """comfy.model_management: `pin_memory` may now leave models that run their pins."""
    return module(
        "comfy.model_management", current_loaded_models=[], load_models_gpu=load_models_gpu, free_memory=free_memory,
        pin_memory=lambda tensor, evict_active=True: False, TOTAL_PINNED_MEMORY=0, MAX_PINNED_MEMORY=-1,
        ensure_pin_registerable=lambda size, evict_active=True: True,
        get_free_memory=lambda dev=None, torch_free_too=False: 1 << 40,
        get_total_memory=lambda dev=None, torch_total_too=False: 1 << 40,
        minimum_inference_memory=lambda: 1 << 30, extra_reserved_memory=lambda: 400 << 20, DISABLE_SMART_MEMORY=False,
        soft_empty_cache=lambda force=False: None, processing_interrupted=lambda: False,
        throw_exception_if_processing_interrupted=lambda: None, vae_device=lambda: CPU,
        InterruptProcessingException=type("InterruptProcessingException", (BaseException,), {}),
        vae_offload_device=lambda: CPU, cuda_device_context=lambda device: nullcontext(),
    )  # fmt: skip


class Anything:
    """A namespace of the host's node types: whatever is asked for, called and read."""

    def __getattr__(self, name: str) -> Anything:
        return Anything()

    def __call__(self, *args: object, **options: object) -> Anything:
        return Anything()


class ProgressBar:
    def __init__(self, total, node_id=None) -> None:
        pass

    def update_absolute(self, value, total=None, preview=None) -> None:
        pass


def module(name: str, **parts: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(parts)
    return made


def modules() -> dict[str, ModuleType]:
    """The host's modules that nodes/ import, made anew."""
    recording = Recording()
    io = SimpleNamespace(
        ComfyNode=object, Schema=SimpleNamespace(__dataclass_fields__={}), Combo=Anything(), Float=Anything(),
        NodeOutput=lambda *args, ui=None: SimpleNamespace(args=args, ui=ui), Input=object,
        **{name: Anything() for name in ("Boolean", "Image", "Int", "Latent", "String", "Vae", "Video", "Audio")},
        Custom=Anything(),
    )  # fmt: skip
    parts = {
        "model_management": management(),
        "model_patcher": module("comfy.model_patcher", ModelPatcher=ModelPatcher),
        "patcher_extension": module(
            "comfy.patcher_extension", CallbacksMP=SimpleNamespace(ON_DETACH="on_detach")
        ),
        "sd": module("comfy.sd", VAE=type("VAE", (VAE,), {})),
        "utils": module("comfy.utils", ProgressBar=ProgressBar),
        "cli_args": module("comfy.cli_args", LatentPreviewMethod=SimpleNamespace(NoPreviews="none"),
                           args=SimpleNamespace(preview_method="none")),
        "model_prefetch": module("comfy.model_prefetch", recording=recording,
                                 pause_malloc_graph=recording.pause_malloc_graph),
    }  # fmt: skip
    latest = {"ComfyExtension": object, "InputImpl": SimpleNamespace(VideoFromFile=object), "io": io, "ui": Anything()}
    return {
        "comfy": module("comfy", __path__=[], **parts), **{f"comfy.{name}": part for name, part in parts.items()},
        "comfy_api": module("comfy_api", __path__=[]), "comfy_api.latest": module("comfy_api.latest", **latest),
        "comfy_execution": module("comfy_execution", __path__=[]),
        "comfy_execution.progress": module("comfy_execution.progress", get_progress_state=lambda: None),
        "comfy_execution.utils": module("comfy_execution.utils", get_executing_context=lambda: None),
        "folder_paths": module("folder_paths"), "aiohttp": module("aiohttp", web=Anything()),
    }  # fmt: skip


class Pack:
    """The pack's modules beside that host; `pack.host` is nodes/host.py."""

    def __init__(self, comfy: ModuleType) -> None:
        self.comfy = comfy

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(f"zerowaste_vae.nodes.{name}")


@contextmanager
def beside() -> Iterator[Pack]:
    """The pack within a host that is newer than any that can be had here; afterwards nothing of it is left."""
    nodes, made = "zerowaste_vae.nodes", modules()
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name == nodes or name.startswith(f"{nodes}.")
              or name in made}  # fmt: skip
    sys.modules.update(made)
    try:
        yield Pack(made["comfy"])
    finally:
        for name in [m for m in sys.modules if m == nodes or m.startswith(f"{nodes}.") or m in made]:
            del sys.modules[name]
        sys.modules.update(before)
        if nodes in before:
            zerowaste_vae.nodes = before[nodes]


def host_vae(pack: Pack, network: nn.Module) -> VAE:
    """A VAE of the host's own around a network."""
    return pack.comfy.sd.VAE(sd={"network": copy.deepcopy(network)})
