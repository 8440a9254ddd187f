"""Write output files: targets are checked early, written to a temporary name in the same folder, renamed when
complete."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import log
from ...errors import InputError
from .patience import clear, replace

if TYPE_CHECKING:
    from torch import Tensor

FRAME_NAME = "frame_{:06d}.png"
#: File in an unfinished folder of frames with their identity.
IDENTITY = ".zerowaste"
#: Suffix of files that are `part_of` first, as folders of frames are.
MP4 = ".mp4"
#: Longest name if the file system does not give a limit.
NAME_MAX = 255


def unwritable(error: OSError, path: Path) -> OSError:
    """Return the error with the name of the file. Two of Windows' errors mean a full disk; C knows one of them."""
    said = error.strerror or str(error)
    if not said.startswith("cannot be written"):  # else it comes from a file inside
        said = f"cannot be written ({said})"
    full = getattr(error, "winerror", None) in (39, 112)
    return OSError(errno.ENOSPC if full else error.errno, said, str(path))


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
            with suppress(OSError):  # once: another user's stay
                each.unlink()


def _temporary(target: Path, end: str = "part") -> Path:
    # Threads, and containers that share a folder, may write the same file. The temporary name must not be too long.
    return target.with_name(f".{target.name[:_BEGINNING]}.{secrets.token_hex(8)}.{end}")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Provide a temporary path next to `target`; it replaces the target on success and is removed on any failure.

    Raises OSError with the target's name. What is complete and cannot be renamed stays (class Unplaced)."""
    temporary = _temporary(target)
    try:
        yield temporary
    except OSError as error:
        clear(temporary)  # an error here would hide the first one
        raise unwritable(error, target) from error
    except BaseException:
        clear(temporary)
        raise
    try:
        put(temporary, target)
    except OSError as error:
        kept = target.with_name(f"{target.stem[:_BEGINNING]}.{secrets.token_hex(4)}{target.suffix}")
        try:
            os.replace(temporary, kept)
        except OSError:
            kept = temporary
        raise Unplaced(error, target, kept) from error


class Unplaced(OSError):
    """A file or folder is complete, but could not get its name. kept: the one under which it stays."""

    def __init__(self, error: OSError, target: Path, kept: Path) -> None:
        """error: of renaming."""
        said = unwritable(error, target)
        super().__init__(said.errno, f"{said.strerror}; the finished one is {kept.name} in its folder", str(target))
        self.kept, self.why = kept, said.strerror


def put(made: Path, target: Path) -> None:
    """Rename what is complete to `target`, which it replaces. On an error both are as they were. Raises OSError."""
    if not (target.is_dir() and made.is_dir()):
        replace(made, target)
        return
    retired = _temporary(target, "old")  # a folder cannot be replaced in one step
    replace(target, retired)
    try:
        replace(made, target)
    except OSError:
        replace(retired, target)
        raise
    if left := clear(retired):
        log.warn(f"{retired}: the folder that {target.name} replaces is still there ({left}); remove it")


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
    check_name(part_of(path) if folder or path.suffix.lower() == MP4 else path)
    try:
        try_names(path, folder)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
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


def part_of(path: Path) -> Path:
    """Return the path of an unfinished MP4 or folder of frames."""
    return path.with_name(f"{path.stem}.part{path.suffix}")


def check_name(path: Path) -> None:
    """Raise InputError if a name is longer than its file system allows."""
    try:
        size, most = len(os.fsencode(path.name)), os.pathconf(path.parent, "PC_NAME_MAX")
    except (AttributeError, OSError):  # Windows, and file systems without a stated limit
        size, most = len(path.name), NAME_MAX
    if size > most:
        raise InputError(f"{path}: the name is too long ({size}, the file system takes {most}); choose a shorter one")


def try_names(path: Path, folder: bool = False) -> None:
    """Make the longest name that writing `path` takes, and remove it: names beside it are longer than its own, and
    Windows takes paths of 259 characters (folders: 247) unless it was told to take longer ones.

    Args:
        folder: `path` will be a folder of frames.

    Raises:
        OSError: the system does not take it.
    """
    longest = _temporary(path)
    if folder or path.suffix.lower() == MP4:
        longest = longest.with_name(longest.name.ljust(len(part_of(path).name), "_"))
    tried = longest / f".{FRAME_NAME.format(0)}" if folder else longest
    try:
        if folder:
            longest.mkdir()
        tried.touch()
    except OSError as error:
        said = error.strerror or str(error)
        if not path.parent.is_dir():
            why = f"its folder does not exist; create {path.parent} first"
        elif isinstance(error, PermissionError):
            why = f"its folder is not writable ({said}); choose another place"
        elif error.errno in (errno.ENOENT, errno.EINVAL, errno.ENAMETOOLONG):
            size = len(str(tried.absolute()))
            why = f"its path is too long: a run needs {size} characters here ({said}); choose a shorter one"
        else:
            why = f"cannot be written ({said})"
        raise OSError(error.errno, why, str(path)) from error
    finally:
        clear(longest)


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
        mode = None
        if os.name != "nt":  # there a scanner might open the empty file
            temporary.touch()
            mode = temporary.stat().st_mode  # by the user's umask; safetensors 0.8 makes files for the owner only
        try:
            save_file(plain, temporary, metadata=dict(metadata or {}))
        except SafetensorError as error:
            raise _systems(error) from error
        if mode is not None:
            temporary.chmod(mode)


#: Windows' numbers of errors that other systems have too, and those systems' numbers.
_WINDOWS = {3: errno.ENOENT, 5: errno.EACCES, 32: errno.EACCES, 33: errno.EACCES, 39: errno.ENOSPC, 112: errno.ENOSPC,
            206: errno.ENAMETOOLONG}  # fmt: skip


def _systems(error: Exception) -> OSError:
    """Return the system's error that safetensors reports under its own name, in the system's words."""
    found = re.search(r"(?:.*: )?(.+?)\.? \(os error (\d+)\)", str(error))
    if found is None:
        return OSError(errno.EIO, str(error))
    number = int(found[2])
    return OSError(_WINDOWS.get(number, errno.EIO) if sys.platform == "win32" else number, found[1])
