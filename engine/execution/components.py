"""Components of one model (encoder and decoder) as clips go through them: packed for the fused operators, or plain
modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..families import own_halves
from ..network.architecture import Architecture
from ..network.fused import FusedDecoder, FusedEncoder, fuse
from ..network.gathered import gathered
from ..network.offload import lent, moving, moving_bytes
from ..network.packed import HEAVY
from ..network.plain import Half, Network
from ..network.steps import Steps
from ..network.stream import decode_features, decode_frames, encode_features, encode_moments
from ..options import Options
from ..planning.besides import reserved_for
from ..planning.fused_walk import FusedWalk
from ..planning.plan import Plan
from ..precision.policies import Policies
from ..precision.policy import Policy
from ..runtime.kept import KEPT
from ..system.devices import empty_device_cache
from .fused_pass import FusedComponent
from .passes import Component
from .plain_pass import PlainComponent
from .reuse import Runs


def other_half(half: str) -> str:
    """Return the other one of "encoder" and "decoder"."""
    return "encoder" if half == "decoder" else "decoder"


def of_family(model: Network, *given: Any) -> dict[str, Component]:
    """Return what runs the components ("encoder", "decoder") that their family runs itself, one object for those of one
    package. given: its further arguments."""
    found = own_halves(model, "components")
    made = {module: module.Components(model, *given) for module in dict.fromkeys(found.values())}
    return {name: made[module] for name, module in found.items()}


class FusedComponents:
    """The fused components of one model: packed when first used, dropped by `release`."""

    def __init__(self, model: Network, walk: FusedWalk, device: torch.device, policies: Policies) -> None:
        """walk: the dry run that plans follow; `use` changes it too. device: of the packed weights. policies: of the
        VAE, which may know a packed network already."""
        self._model = model
        self._walk = walk
        self._device = device
        self._architecture = walk.architecture
        self._dtype = walk.dtype
        self._options = walk.options
        self._policies = policies
        self._packed: dict[str, FusedDecoder | FusedEncoder] = {}
        self.runs = Runs(walk.options.cuda_graphs, walk.rate)

    def decoder(self) -> FusedDecoder:
        return self._get("decoder")  # type: ignore[return-value]

    def encoder(self) -> FusedEncoder:
        return self._get("encoder")  # type: ignore[return-value]

    def use(self, half: str, policy: Policy) -> bool:
        """Pack and plan "encoder" or "decoder" for these operands from now on; return True if they changed."""
        changed = self._walk.use(half, policy)
        if changed:
            self._packed.pop(half, None)
            self.runs.forget()
            self.runs = Runs(self._options.cuda_graphs, self._walk.rate)  # other kernels, other times
        return changed

    def release(self, keep: str = "") -> int:
        """Free kept runs and the packed weights, except those of the component `keep`; return the weights' bytes.

        The next use packs anew (0.15 s for the published decoder on an H200 that holds the original weights).
        """
        freed = sum(network.nbytes for half, network in self._packed.items() if half != keep)
        self._packed = {half: network for half, network in self._packed.items() if half == keep}
        self.runs.forget()
        return freed

    def packed_bytes(self, half: str) -> int:
        """Return the bytes of the packed weights now held for "encoder" or "decoder"; plans count them too."""
        return self._packed[half].nbytes if half in self._packed else 0

    def half(
        self, name: str, plan: Plan, device: torch.device, scale: float, seed: int | None = None
    ) -> FusedComponent:
        """Return "encoder" or "decoder" for clips, its weights packed; no such has noise."""
        program = getattr(self._model, name).program
        return FusedComponent(
            self._get(name), program, self.runs, self._architecture, self._options, scale, device,
        )  # fmt: skip

    def pack(self, half: str, most: int | None = None) -> None:
        """Pack "decoder" or "encoder", if it is not packed. most: bytes on the device that its run is planned with, the
        packed weights among them, and the model's where those lie there."""
        if half in self._packed:
            return
        part, make = getattr(self._model, half), functools.partial(self._prepared, half)
        if self._device.type != "cuda":
            self._packed[half] = make()
            return
        there = tuple(p for p in part.parameters() if p.is_cuda)
        room = None
        if most is not None:
            room = most - self._walk.network(half).nbytes - (moving_bytes(self._model) if there else 0)
        # Packed weights stay, and would pin the larger segments of an earlier run that they are allocated in. The run
        # that follows has a network of its own, so it cannot use kept memory.
        KEPT.release(self._device)
        empty_device_cache()
        self._packed[half] = gathered(make, there, self._device, room)
        empty_device_cache()

    def _get(self, half: str) -> FusedDecoder | FusedEncoder:
        self.pack(half)
        return self._packed[half]

    def _prepared(self, half: str) -> FusedDecoder | FusedEncoder:
        options, operands = self._options, self._walk.operands(half)
        form = f"F(2x2, 3x3) but {HEAVY} weights" if operands.winograd else False
        made_of = operands, options.composed_upsample, options.flash_attention, form
        make, plan = functools.partial(self._pack, half, self._model), functools.partial(self._walk.network, half)
        return self._policies.packed(make, plan, made_of, half, self._device)

    def _pack(self, half: str, model: Network) -> FusedDecoder | FusedEncoder:
        return fuse(getattr(model, half), self._dtype, self._options, self._walk.operands(half), self._device)


class PlainComponents:
    """The plain components of one model, run in `dtype`. A component whose weights wait in host memory runs as a copy
    with the weights on the device, made at its first use and kept for the next run until `release`: before the
    component runs fused, or with the packed weights."""

    def __init__(self, model: Network, architecture: Architecture, dtype: torch.dtype, options: Options) -> None:
        self._model = model
        self.architecture = architecture
        self._dtype, self._last = dtype, options.channels_last_3d is True
        self._copies: dict[str, Half] = {}
        #: Bytes of each parameter of a copy.
        self._sizes: dict[str, list[int]] = {}

    @property
    def layout(self) -> str:
        """Return the layout of the convolutions' weights, as the options ask for; it decides that of their inputs."""
        return "NDHWC" if self._last else "NCDHW"

    def there(self, name: str, device: torch.device) -> Half:
        """Return "encoder" or "decoder" with its weights on the device."""
        own = getattr(self._model, name)
        half = self._copies.get(name) or lent(device, *own.everything())[0]
        if half is not own and name not in self._copies:
            self._copies[name], self._sizes[name] = half, moving(*half.everything())
        layout = torch.channels_last_3d if self._last else torch.contiguous_format
        for module in (m for part in half.everything() if isinstance(part, nn.Module) for m in part.modules()):
            if isinstance(module, nn.Conv3d) and not module.weight.is_contiguous(memory_format=layout):
                module.to(memory_format=layout)
        return half

    def packed_bytes(self, half: str) -> int:
        """Return the bytes of the copy of "encoder" or "decoder"."""
        return sum(self._sizes.get(half, ()))

    def gaps(self, name: str) -> int:
        """Return the bytes that torch reserves for the copy of "encoder" or "decoder" in addition to its own."""
        sizes = self._sizes.get(name, [])
        return reserved_for(sizes) - sum(sizes)

    def release(self, keep: str = "") -> int:
        """Free the copies, except that of the component `keep`; return their bytes."""
        gone = [name for name in self._copies if name != keep]
        freed = sum(map(self.packed_bytes, gone))
        for name in gone:
            del self._copies[name], self._sizes[name]
        return freed

    def half(
        self, name: str, plan: Plan, device: torch.device, scale: float, seed: int | None = None
    ) -> PlainComponent:
        a, there = self.architecture, self.there(name, device)
        return PlainComponent(there, a.spatial, a.temporal, scale, self._dtype, device, seed)

    def frames(
        self, z: Tensor, steps: Steps, device: torch.device, check: Callable[[], None]
    ) -> Iterator[Iterator[Tensor]]:
        """Decode the network's latents [B, C, T, h, w]; yield per chunk its frames [B, 3, f, H, W], as `decode_frames`
        does."""
        half = self.there("decoder", device)
        if half.program.piece:
            steps = half.program.fixed(z.shape[2])
        parts = (part.to(device, self._dtype) for part in z.split(steps.latents or z.shape[2], 2))
        return decode_frames(half, decode_features(half, parts, check), steps, check)

    def moments(
        self, video: Iterator[Tensor], steps: Steps, device: torch.device, check: Callable[[], None]
    ) -> Iterator[Tensor]:
        """Encode frame chunks [B, 3, f, H, W] in -1..1; yield moments [B, 2C, n, h, w] chunk by chunk."""
        half = self.there("encoder", device)
        steps = Steps() if half.program.piece else steps
        parts = (part.to(device, half.input_type(self._dtype)) for part in video)
        return encode_moments(half, encode_features(half, parts, steps, check), check)
