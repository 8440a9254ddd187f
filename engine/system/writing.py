"""Write output files: targets are checked early, written to a temporary name in the same folder, renamed when
complete."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

FRAME_NAME = "frame_{:06d}.png"
#: File in an unfinished folder of frames with their identity.
IDENTITY = ".zerowaste"
#: Longest name if the file system does not give a limit.
NAME_MAX = 255


def unwritable(error: OSError, path: Path) -> OSError:
    """Return the error with the name of the file."""
    said = error.strerror or str(error)
    if not said.startswith("cannot be written"):  # else it comes from a file inside
        said = f"cannot be written ({said})"
    return OSError(error.errno, said, str(path))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of the system in the body the name of the file: writing to an open file, and closing it, raise them
    without one."""
    try:
        yield
    except OSError as error:
        raise unwritable(error, path) from error


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Return the identity of the file with this name, which changes when it is written; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


#: Characters of a target's name in that of its temporary file.
_BEGINNING = 20


def sweep(target: Path) -> None:
    """Remove the temporary files of processes that were killed while they replaced `target`; call it only if no other
    process can be replacing it now. A long name is kept only in part, so its owner is unknown, and its files stay."""
    if len(target.name) > _BEGINNING:
        return
    own = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.part")
    for each in target.parent.iterdir():
        if own.fullmatch(each.name):
            with suppress(OSError):
                each.unlink()


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Provide a temporary path next to `target`; it replaces the target on success and is removed on any failure."""
    # Threads, and containers that share a folder, may write the same file. The temporary name must not be too long.
    own = f".{target.name[:_BEGINNING]}.{secrets.token_hex(8)}"
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
            with suppress(OSError):  # an error here would hide the first one
                temporary.unlink(missing_ok=True)


@contextmanager
def held(part: Path) -> Iterator[None]:
    """Lock an unfinished file or folder against other runs, until the body or the process ends. If nothing can be
    locked (Windows, some file systems), this has no effect. Raises InputError if another run has the lock."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    lock = os.open(part, os.O_RDONLY if part.is_dir() else os.O_RDWR)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.path.samestat(os.fstat(lock), part.stat())  # not renamed since it was opened
        except (BlockingIOError, FileNotFoundError):
            free = False
        except OSError:
            free = True
        if not free:
            raise InputError(f"{part}: another run is writing it; wait for it or choose another name")
        yield
    finally:
        os.close(lock)


def check_target(
    path: str | Path, force: bool = False, folder: bool = False, inputs: Iterable[Path | None] = ()
) -> Path:
    """Refuse an unusable output before any work is done.

    Raises:
        InputError: it exists (unless `force`), is one of `inputs`, or cannot be made.
    """
    path = Path(path)
    if path.name in ("", ".."):
        raise InputError(f"{path}: is not a file name; name the output")
    if not path.parent.is_dir():
        raise InputError(f"{path}: its folder does not exist; create {path.parent} first")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: its folder is not writable; choose another place")
    check_name(path)
    if any(given is not None and given.exists() and path.exists() and path.samefile(given) for given in inputs):
        raise InputError(f"{path}: input and output are the same file; choose another output")
    if path.exists() and not force:
        raise InputError(f"{path}: exists already; choose another name or give --force to replace it")
    if path.exists() and path.is_dir() != folder:
        kinds = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise InputError(f"{path}: is a {kinds[0]} and is not replaced by a {kinds[1]}; choose another name")
    if folder and path.exists():
        refuse_foreign_files(path)
    return path


def check_name(path: Path) -> None:
    """Raise InputError if a name is longer than its file system allows."""
    try:
        size, most = len(os.fsencode(path.name)), os.pathconf(path.parent, "PC_NAME_MAX")
    except (AttributeError, OSError):  # Windows, and file systems without a stated limit
        size, most = len(path.name), NAME_MAX
    if size > most:
        raise InputError(f"{path}: the name is too long ({size}, the file system takes {most}); choose a shorter one")


def refuse_foreign_files(folder: Path) -> None:
    """Raise InputError if a folder holds files that this package does not write there."""
    own = rf"\.?frame_\d+\.png|{re.escape(IDENTITY)}"
    foreign = [f.name for f in folder.iterdir() if not re.fullmatch(own, f.name)]
    if foreign:
        raise InputError(f"{folder}: holds other files ({foreign[0]}, ...), so it is not replaced; choose a new folder")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, replacing `path` when it is complete."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as JSON that every reader accepts (no NaN, no infinity), replacing `path`."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, replacing `path`. Raises OSError if the disk is full or the place not writable."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(Path(path)) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # by the user's umask; safetensors 0.8 makes files for the owner only
        try:
            save_file(plain, temporary, metadata=dict(metadata or {}))
            temporary.chmod(mode)
        except SafetensorError as error:  # the library reports the system's errors under its own name
            code = re.search(r"os error (\d+)", str(error))
            number = int(code[1]) if code else errno.EIO
            raise OSError(number, os.strerror(number) if code else str(error)) from error
