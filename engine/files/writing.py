"""Output files: refused early, written beside their place, renamed when complete."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

FRAME_NAME = "frame_{:06d}.png"
#: Beside the frames of an unfinished folder, of what they are.
IDENTITY = ".zerowaste"


def unwritable(error: OSError, path: Path) -> OSError:
    """The same, with the name of the file."""
    return OSError(error.errno, f"cannot be written ({error.strerror or error})", str(path))


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside `target`, which takes the target's place on success and is removed on any failure."""
    # Threads, and containers that share a folder, may write the same file.
    own = f".{target.name}.{secrets.token_hex(8)}"
    temporary = target.with_name(f"{own}.part")
    try:
        yield temporary
        if target.is_dir() and temporary.is_dir():  # a folder cannot be replaced in one step
            retired = target.with_name(f"{own}.old")
            os.replace(target, retired)
            try:
                os.replace(temporary, target)
            except OSError:
                os.replace(retired, target)
                raise
            shutil.rmtree(retired, ignore_errors=True)
        else:
            os.replace(temporary, target)
    except OSError as error:
        raise unwritable(error, target) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def check_target(path: str | Path, force: bool = False, folder: bool = False) -> Path:
    """Refuse, before any work is done, an output that exists (unless `force`) or cannot be made. Raises InputError."""
    path = Path(path)
    if path.name in ("", ".."):
        raise InputError(f"{path}: is no name; give the output one")
    if not path.parent.is_dir():
        raise InputError(f"{path}: its folder does not exist; create {path.parent} first")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: its folder is not writable; choose another place")
    if path.exists() and not force:
        raise InputError(f"{path}: exists already; choose another name or give --force to replace it")
    if path.exists() and path.is_dir() != folder:
        kinds = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise InputError(f"{path}: is a {kinds[0]} and is not replaced by a {kinds[1]}; choose another name")
    if folder and path.exists():
        refuse_foreign_files(path)
    return path


def refuse_foreign_files(folder: Path) -> None:
    """Raises InputError where a folder holds anything but what this package writes to one."""
    own = rf"\.?frame_\d+\.png|{re.escape(IDENTITY)}"
    foreign = [f.name for f in folder.iterdir() if not re.fullmatch(own, f.name)]
    if foreign:
        raise InputError(f"{folder}: holds other files ({foreign[0]}, ...), so it is not replaced; choose a new folder")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, replacing `path` when it is complete."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as JSON that every reader takes (no NaN, no infinity), replacing `path`."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, replacing `path`. Raises OSError when the disk is full or the place not writable."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(Path(path)) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask wants it; safetensors 0.8 makes files for the owner only
        try:
            save_file(plain, temporary, metadata=dict(metadata or {}))
            temporary.chmod(mode)
        except SafetensorError as error:  # the library reports the system's errors under its own name
            code = re.search(r"os error (\d+)", str(error))
            number = int(code[1]) if code else errno.EIO
            raise OSError(number, os.strerror(number) if code else str(error)) from error
