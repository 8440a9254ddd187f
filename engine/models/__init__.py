"""Known architectures, found by the keys in a file.

To add one, write one file here (seedvr2.py and wan.py are the examples) and name it below:

1. A key set in checkpoint/names.py, if the family has none yet: a few keys that only its files have.
2. A frozen `Config` with `from_shapes(shapes, norm_groups)`, which reads the sizes from tensor shapes (best from
   biases: every file dialect keeps them). It has `latent_channels`, `encoder_widths` and `decoder_widths` from full to
   lowest resolution (None: the file lacks that half), and `norm_groups` (None where the norms have none).
3. A `Network` with the parameter names of the published files, built from layers.py: what two families share lives
   there once, with a parameter for what differs. Its halves have the three parts of arch.Decoder and arch.Encoder;
   history goes through the State, by each convolution's key (`name_halos`), so that any chunking gives the same frames.
4. An `Architecture`: name, factors, latent scale, and what "auto" precision means.

Loading, planning, streaming, tiles, the command line and the nodes then work, on PyTorch's own operators. Fused halves
are apart: engine/fused/networks.py has a table of them. Test against outputs recorded from the original, whole and
chunked (tests/engine/models/test_wan.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from ..checkpoint.names import find_key_set
from . import seedvr2, wan
from .arch import Architecture

ARCHITECTURES: tuple[Architecture, ...] = (seedvr2.ARCHITECTURE, wan.WAN21, wan.WAN22)


def detect(keys: Iterable[str]) -> Architecture | None:
    """The architecture whose key set (checkpoint/names.py) is among `keys`, or None."""
    found = find_key_set(keys)
    return next((a for a in ARCHITECTURES if found is not None and a.name == found.name), None)
