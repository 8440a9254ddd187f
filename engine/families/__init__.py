"""Known architectures, found by the keys in a file.

To add one, see CONTRIBUTING.md: one file here, named in registry.py.
"""

from .drafters import TINY, latents_of
from .registry import (
    ARCHITECTURES,
    DEFAULT,
    WORDS,
    by_file,
    by_name,
    by_words,
    detect,
    find_key_set,
    latent_space,
    native_names,
    other_vaes,
    own,
    own_halves,
    renamed,
    unwrapped,
)
from .unsupported import kind_of, lies_beside

__all__ = [
    "ARCHITECTURES",
    "DEFAULT",
    "TINY",
    "WORDS",
    "by_file",
    "by_name",
    "by_words",
    "detect",
    "find_key_set",
    "kind_of",
    "latent_space",
    "latents_of",
    "lies_beside",
    "native_names",
    "other_vaes",
    "own",
    "own_halves",
    "renamed",
    "unwrapped",
]
