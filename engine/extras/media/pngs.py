"""Write folders of PNG frames in threads: an unfinished NAME is NAME.part, which can be continued."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import torch

from ...errors import InputError
from ...request import check_dense, check_range
from ..output.locks import held
from ..output.patience import clear, remove, replace
from ..output.writing import FRAME_NAME, IDENTITY, naming, put, refuse_foreign_files, replacing, try_names, unwritable
from .clips import Frames
from .mp4 import check_count, check_free, check_identity, part_of, to_integers

#: Frames that are compressed at the same time; as many wait.
THREADS = 4


class PngWriter:
    """Writes frames as frame_000000.png, ... to the folder `path`, like Mp4Writer, with a folder as `part`. first:
    number of the first frame."""

    def __init__(
        self, path: str | Path, first: int = 0, identity: str = "", resume: bool = False, force: bool = True
    ) -> None:
        self.path, self._first, self._force = Path(path), first, force
        self.part = part_of(self.path)
        self.done = 0
        if self.path.is_dir():
            refuse_foreign_files(self.path)
        try_names(self.path, folder=True)
        self.part.mkdir(exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(held(self.part))
            if resume and any(self.part.glob("frame_*.png")):
                check_identity(self.part, _read(self.part / IDENTITY) == identity)
                self.done = self._there()
            else:
                refuse_foreign_files(self.part)
                for file in self.part.iterdir():
                    remove(file)
                with naming(self.part):
                    (self.part / IDENTITY).write_text(identity, encoding="utf-8")
            self._held = stack.pop_all()
        self._given = self.done
        self._pool = ThreadPoolExecutor(THREADS)
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> PngWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        try:
            self._pool.shutdown(wait=True)
            with suppress(OSError) if error is not None else nullcontext():
                self._settle(0)
        except BaseException as second:  # another Ctrl-C, too
            error = second
            raise
        finally:
            self.done = self._there()
            if error is not None:
                if self.done:
                    self._held.close()
                else:
                    self.discard()

    def write(self, frames: torch.Tensor) -> None:
        """Queue frames [f, H, W, 3], floats in 0..1 or bytes."""
        for frame in frames:
            pixels = to_integers(frame, self._first + self._given)
            self._settle(2 * THREADS)
            self._waiting.append(self._pool.submit(self._save, pixels, FRAME_NAME.format(self._first + self._given)))
            self._given += 1

    def finish(self) -> None:
        """Rename the finished folder to `path`."""
        with self._held:
            check_count(self.part, sum(1 for _ in self.part.glob("frame_*.png")), self._given)
            check_free(self.path, self._force)
            try:
                put(self.part, self.path)
            except OSError as error:  # all frames are in the part folder
                raise unwritable(error, self.path) from error
            clear(self.path / IDENTITY)

    def discard(self) -> None:
        """Remove the part folder."""
        with self._held:
            clear(self.part)

    def _settle(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft().result()

    def _there(self) -> int:
        """Count the frames of the part folder, up to the first missing one."""
        count = 0
        while (self.part / FRAME_NAME.format(self._first + count)).exists():
            count += 1
        return count

    def _save(self, pixels: object, name: str) -> None:
        from PIL import Image

        own = self.part / f".{name}"
        try:
            Image.fromarray(pixels).save(own, format="PNG")
            replace(own, self.part / name)
        except OSError as error:
            clear(own)
            raise unwritable(error, self.part) from error


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def write_png(path: str | Path, frame: torch.Tensor) -> None:
    """Write one frame [H, W, 3] (float 0..1 or uint8) as an 8-bit PNG, replacing `path`."""
    from PIL import Image

    check_dense(frame, "a frame")
    check_range(frame)
    with replacing(Path(path)) as temporary:
        Image.fromarray(to_integers(frame, 0)).save(temporary, format="png")


def write_png_folder(path: str | Path, frames: Frames) -> None:
    """Write frames (as for `write_mp4`) as 8-bit frame_000000.png, ... in the folder `path`, replacing earlier ones.

    A folder that holds anything but such frames is refused with InputError, never emptied.
    """
    path = Path(path)
    if path.is_file():
        raise InputError(f"{path}: is a file; a folder name is needed")
    if path.is_dir():
        refuse_foreign_files(path)
    from PIL import Image

    with replacing(path) as temporary:
        temporary.mkdir()
        count = 0
        for count, frame in enumerate(frames, start=1):
            check_dense(frame, "a frame")
            check_range(frame)
            Image.fromarray(to_integers(frame, count - 1)).save(temporary / FRAME_NAME.format(count - 1))
        if not count:
            raise InputError(f"{path}: no frames to write")
