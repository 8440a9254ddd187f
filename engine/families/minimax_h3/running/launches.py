"""Every kernel that the transformer launches."""

from __future__ import annotations

import torch

from ....network.codes import Codes, forget
from ....network.plain import Half
from ....planning.launches import LARGE, META
from ..tokens import Matrix
from .transformer import TokenNetwork

#: Columns of its inputs that are rotated together, as the published file has them; fewer where they do not divide a
#: width.
ROTATED = (256, 64, 16, 4)


def launch(half: Half, dtype: torch.dtype, kind: str | None) -> None:
    """Launch every kernel of a decoder on the meta device; an encoder has those of the fused operators. kind: type of
    its products, "fp8" or "int8"; None: `dtype`."""
    if half.program.half == "encoder":
        return
    size = (1, LARGE // 8, LARGE // 8)
    latents = torch.empty(half.program.takes, *size, device=META, dtype=torch.float32)

    def decode() -> None:
        network = TokenNetwork(half, dtype, META, kind)
        run = network.memory(size, 1)
        run.allocate()
        for _ in network.decode([latents], 1, lambda: None, run):
            pass

    decode()
    if kind == "int8":  # a file's own codes have rotated inputs
        for layer in (m for m in half.modules() if isinstance(m, Matrix)):
            rows = torch.empty(len(layer.weight), device=META, dtype=torch.float32)
            group = next(g for g in ROTATED if layer.weight.shape[1] % g == 0)
            Codes(layer.weight.to(torch.int8), rows, group).attach(layer)
        decode()
        forget(half)
