"""VAE files of the user: those in the folders where programs keep them, found by path or by family."""

from __future__ import annotations

import os
from pathlib import Path

from ... import log
from ...errors import InputError
from .options import family_of

SUFFIXES = (".safetensors", ".gguf")
#: This pack's folder, which may lie in ComfyUI/custom_nodes.
_PACK = Path(__file__).resolve().parents[3]


def folders() -> list[Path]:
    """Return the folders that hold VAEs: models/vae and models/vae_approx of $COMFYUI_DIR, of the ComfyUI that this
    pack lies in, and of the current folder; those that exist, each once."""
    roots = [Path(os.environ["COMFYUI_DIR"])] if os.environ.get("COMFYUI_DIR") else []
    if _PACK.parent.name == "custom_nodes":
        roots.append(_PACK.parent.parent)
    kinds = [root / "models" / kind for root in (*roots, Path()) for kind in ("vae", "vae_approx")]
    there = [folder.resolve() for folder in kinds if folder.is_dir()]
    return list(dict.fromkeys(there))


def files() -> list[Path]:
    """Return the VAE files in `folders`, and in the folders below them, by name."""
    return [path for folder in folders() for path in sorted(folder.rglob("*"))
            if path.suffix.lower() in SUFFIXES and path.is_file()]  # fmt: skip


def vae_file(text: str | Path | None) -> Path | None:
    """Return the file of a VAE that is named by path or by family; None: none is named.

    Raises:
        InputError: no file of the family is in `folders`, or several are.
    """
    family = family_of(None if text is None else str(text))
    if family is None:
        return None if text is None else Path(text)
    from ...families import by_file

    where = ", ".join(map(str, folders())) or "models/vae, which is not here; $COMFYUI_DIR says where ComfyUI is"
    found = [path for path in files() if by_file(path.name) is family]
    if not found:
        raise InputError(f"--vae {text}: no file of the family {family.name} in {where}: give its path")
    if len(found) > 1:
        raise InputError(f"--vae {text}: there are {', '.join(path.name for path in found)} in {where}: give the path "
                         "of one")  # fmt: skip
    log.info(f"--vae {text}: {found[0]}")
    return found[0]
