"""Writing a file so that it appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import InputError
from .files import one_line, os_failure


@contextmanager
def whole_file(target: Path, force: bool) -> Iterator[Path]:
    """A temporary path beside `target` to write to; it becomes `target` when the block ends without an error.

    Raises InputError if `target` exists and `force` is off, CheckpointError when the disk refuses. The temporary
    file is removed on every error, an interrupt included.
    """
    check_target(target, force)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise os_failure(target, error, "write the file") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_target(target: Path, force: bool) -> None:
    """Refuse a target that exists (without `force`), is a folder, or lies in a folder that does not exist."""
    name = one_line(str(target))
    if target.is_dir():
        raise InputError(f"{name}: is a folder; name the file to write")
    if target.exists() and not force:
        raise InputError(f"{name}: exists already; choose another name or pass --force (force=True)")
    if not target.parent.is_dir():
        raise InputError(f"{name}: the folder {one_line(str(target.parent))} does not exist")
