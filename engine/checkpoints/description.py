"""The description of a VAE in the folder of its file, which diffusers writes there."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, one_line
from ..network.architecture import BESIDE

#: Those of VAEs have two kilobytes.
_MOST_BYTES = 1 << 18
#: Names of the activation that all networks here have.
_SILU = ("silu", "swish")


def text_beside(path: Path) -> dict[str, str]:
    """Return {BESIDE: the description beside a weight file}; empty if there is none, or one of no VAE."""
    described = path.with_name(BESIDE)
    with suppress(OSError, ValueError, RecursionError):
        found = described.stat()
        if stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES:
            text = described.read_text(encoding="utf-8")
            if _of_vae(json.loads(text)):
                return {BESIDE: text}
    return {}


def _of_vae(found: object) -> bool:
    """Check that a JSON value describes a VAE: by its class, or by the widths that those of VAEs have."""
    if not isinstance(found, dict):
        return False
    named = found.get("_class_name")
    return "block_out_channels" in found if named is None else str(named).startswith("Autoencoder")


@dataclass(frozen=True)
class Description:
    """What a checkpoint's metadata have of the description beside its file."""

    said: Mapping[str, Any]

    @classmethod
    def of(cls, metadata: Mapping[str, object]) -> Description:
        found = None
        with suppress(ValueError, RecursionError):
            found = json.loads(str(metadata.get(BESIDE, "{}")))
        return cls(found if isinstance(found, dict) and _of_vae(found) else {})

    def fits(self, config: Any) -> bool:
        """Return whether it is about a network of these sizes: a folder may hold several VAEs."""
        widths = self.said.get("block_out_channels")
        own = (config.encoder_widths, config.decoder_widths)
        return widths is None or any(list(each) == widths for each in own if each is not None)

    def check_activation(self) -> None:
        """Raise InputError for networks that compute something else than those of these names here."""
        act = self.said.get("act_fn", _SILU[0])
        if act not in _SILU:
            raise InputError(f"{BESIDE} beside it says act_fn={one_line(repr(act), 40)}: only VAEs with silu are run; "
                             "decode with the program that it came with")  # fmt: skip

    def groups(self) -> int | None:
        """Return the norm groups; None if it names none. Raises InputError for a value that is no number."""
        number = self.said.get("norm_num_groups")
        if number is not None and type(number) is not int:
            raise InputError(f"{BESIDE} beside it says norm_num_groups={one_line(repr(number), 40)}, which is no "
                             "number; pass norm_groups=N")  # fmt: skip
        return number
