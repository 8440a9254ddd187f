"""Known architectures, found by the keys in a file.

To add one, write one file here (seedvr2.py and wan.py are the examples) and name it in registry.py:

1. A KeySet: a few keys that only its files have, and other dialects' names for them.
2. A frozen `Config` with `from_shapes(shapes, norm_groups)`, which reads the sizes from tensor shapes (best from
   biases: every file dialect keeps them). It has `latent_channels`, `encoder_widths` and `decoder_widths` from full to
   lowest resolution (None: the file lacks that half), and `norm_groups` (None where the norms have none).
3. `decoder(config)` and `encoder(config)`: Programs of steps from engine/network/ops under their names in the file. A
   kind of step that is not there yet is one file more in that folder.
4. An `Architecture`: keys, factors, latent scale, and what "auto" precision means.

Loading, planning, streaming, tiles, parking, 8 bit, speed limits, the command line and the nodes then work. Test
against outputs recorded from the original, whole and chunked (tests/engine/archs/test_wan.py).
"""

from .arch import Architecture, KeySet
from .registry import ARCHITECTURES, by_name, detect, find_key_set, find_prefix, native_names

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "KeySet",
    "by_name",
    "detect",
    "find_key_set",
    "find_prefix",
    "native_names",
]
