"""Both halves of one model as plain torch modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .archs import Architecture
from .network.stream import PlainHalf, decode_features, decode_frames, encode_features, encode_moments
from .options import Options
from .run.plan import Steps


class PlainPath:
    """Runs are in `dtype`, wherever the model is."""

    def __init__(self, model: nn.Module, architecture: Architecture, dtype: torch.dtype) -> None:
        self._model = model
        self._architecture = architecture
        self._dtype = dtype

    def half(self, name: str, scale: float, device: torch.device) -> PlainHalf:
        """"encoder" or "decoder" for clips. scale: what latents are divided by."""
        a = self._architecture
        return PlainHalf(getattr(self._model, name), a.spatial, a.temporal, scale, self._dtype, device)

    def frames(
        self, z: Tensor, steps: Steps, device: torch.device, check: Callable[[], None]
    ) -> Iterator[list[Tensor]]:
        """The network's latents [B, C, T, h, w] -> per chunk, the list of its frames [B, 3, f, H, W]."""
        parts = (part.to(device, self._dtype) for part in z.split(steps.latents or z.shape[2], 2))
        return decode_frames(self._model.decoder, decode_features(self._model.decoder, parts, check), steps, check)

    def moments(
        self, video: Iterator[Tensor], steps: Steps, device: torch.device, check: Callable[[], None]
    ) -> Iterator[Tensor]:
        """Frame chunks [B, 3, f, H, W] in -1..1 -> moments [B, 2C, n, h, w], chunk by chunk."""
        parts = (part.to(device, self._dtype) for part in video)
        return encode_moments(self._model.encoder, encode_features(self._model.encoder, parts, steps, check), check)

    def set_layout(self, options: Options) -> str:
        """Give the convolutions' weights the layout that the options ask for; theirs decides their inputs'."""
        last = options.channels_last_3d is True
        layout = torch.channels_last_3d if last else torch.contiguous_format
        for module in self._model.modules():
            if isinstance(module, nn.Conv3d) and not module.weight.is_contiguous(memory_format=layout):
                module.to(memory_format=layout)
        return "NDHWC" if last else "NCDHW"
