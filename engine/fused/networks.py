"""The fused networks there are."""

from __future__ import annotations

import torch
from torch import nn

from ..models import seedvr2, wan
from ..optimize import DEFAULTS, Options
from ..precision.operands import Operands
from .decoder import FusedDecoder
from .encoder import FusedEncoder
from .staged import StagedDecoder
from .wan_decoder import FusedWanDecoder
from .wan_encoder import FusedWanEncoder

AnyEncoder = FusedEncoder | FusedWanEncoder

#: Plain encoder or decoder -> the fused one.
NETWORKS: dict[type[nn.Module], type[StagedDecoder] | type[AnyEncoder]] = {
    seedvr2.Encoder: FusedEncoder,
    seedvr2.Decoder: FusedDecoder,
    wan.Encoder: FusedWanEncoder,
    wan.Decoder: FusedWanDecoder,
}
#: Names of the architectures they belong to.
ARCHITECTURES = ("seedvr2", "wan2.1", "wan2.2")


def fuse(
    half: nn.Module, dtype: torch.dtype, options: Options = DEFAULTS, operands: Operands | None = None
) -> StagedDecoder | AnyEncoder:
    """Pack an encoder or decoder. dtype: of activations; operands: of its convolutions, if they differ from that."""
    return NETWORKS[type(half)](half, dtype, options, operands)
