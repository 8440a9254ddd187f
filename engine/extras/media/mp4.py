"""Write an MP4 frame by frame in a thread: unfinished it is NAME.part.mp4, which plays and can be continued."""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from fractions import Fraction
from numbers import Rational, Real
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ... import log
from ...errors import InputError
from ...request import FramesLike, as_frames, check_dense, check_range, iter_frames
from ...system.finite import all_finite
from ...system.hardware import cores
from ..output.locks import held
from ..output.patience import clear
from ..output.writing import part_of, replacing, sweep, try_names, unwritable
from .fragments import Appended, scan
from .mp4_finish import finish_file
from .mp4_format import CODECS, NO_ALPHA, PIXELS, Format
from .to_rgb import BT709, FULL, LIMITED, SWS_FLAGS

if TYPE_CHECKING:
    from av import Packet
    from av.container import OutputContainer


#: Seconds between two key frames. At most this, and the encoder's lookahead, is lost when a process is killed: 76 to
#: 108 frames at 24 a second.
GROUP = 2
#: Frames by which a part file delays all frames, so that none has a time before 0 in any order of storage.
LEAD = 32
#: Pixels per side of x265's largest block.
BLOCK = 64
#: Pieces of frames that wait for the encoder.
WAITING = 2


class Encoder:
    """Encodes frames to the packets of one video stream of a container."""

    def __init__(self, container: OutputContainer, form: Format, height: int, width: int, name: str) -> None:
        import av

        os.environ.setdefault("SVT_LOG", "1")  # the encoder would print every setting
        codec, (self._pixels, self._deep, halves) = CODECS[form.codec], PIXELS[form.pixels]
        self.size = height, width
        self._pad = (height % 2, width % 2) if halves else (0, 0)
        if any(self._pad):
            even = f"{width + width % 2}x{height + height % 2}"
            log.once(f"{name}: {form.pixels} needs even sizes, {width}x{height} is padded to {even}; PNG and yuv444p "
                     "keep the size")  # fmt: skip
        options = {**codec.options, "crf": str(codec.crf if form.crf is None else form.crf)}
        if codec.encoder == "libx265" and self._deep and min(height, width) < BLOCK:
            # Of frames smaller than one of its largest blocks its search writes past the end, and its vector code does
            # with smaller blocks, too: now and then that ended the process, and always under glibc's check of the heap.
            options["x265-params"] += ":ctu=16:no-asm=1"
        self._stream = stream = container.add_stream(codec.encoder, rate=form.fps, options=options)
        stream.height, stream.width = height + self._pad[0], width + self._pad[1]
        stream.pix_fmt = self._pixels
        context = stream.codec_context
        if codec.tag:
            context.codec_tag = codec.tag
        if codec.threads:
            context.thread_type, context.thread_count = "FRAME", min(cores(), codec.threads)
        context.gop_size = max(1, round(GROUP * form.fps))
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED
        self._reformatter = av.video.reformatter.VideoReformatter()

    def packets(self, frame: torch.Tensor, index: int) -> list[Packet]:
        """Return the packets that follow from frame `index`, [H, W, 3], floats in 0..1 or bytes."""
        import av

        pixels = to_integers(frame, index, self._deep)[..., :3]
        if pixels.shape[:2] != self.size:
            now, first = (f"{w}x{h}" for h, w in (pixels.shape[:2], self.size))
            raise InputError(f"frame {index} is {now}, the first one {first}")
        if any(self._pad):
            pixels = np.pad(pixels, ((0, self._pad[0]), (0, self._pad[1]), (0, 0)), mode="edge")
        picture = self._reformatter.reformat(
            av.VideoFrame.from_ndarray(pixels, format="rgb48le" if self._deep else "rgb24"),
            format=self._pixels,
            src_colorspace=BT709,
            dst_colorspace=BT709,
            src_color_range=FULL,
            dst_color_range=LIMITED,
            interpolation=SWS_FLAGS,
        )
        picture.pts = index
        return self._stream.encode(picture)

    def rest(self) -> list[Packet]:
        """Return the packets of the frames that it still holds."""
        return self._stream.encode(None)


class Mp4Writer:
    """Writes frames to `path`, encoded in a separate thread.

    `with Mp4Writer(...) as w: w.write(frames)` for each piece; then `w.finish()`. Until then complete fragments, if
    any, are in `w.part` and stay there whatever happens. The part file is locked against other runs. Raises InputError
    and OSError, possibly in a later call.
    """

    def __init__(
        self, path: str | Path, form: Format, identity: str = "", resume: bool = False, name: str = "",
        force: bool = True,
    ) -> None:  # fmt: skip
        """Open or resume the part file. identity: of the frames' content; resume: continue after the frames of a run
        with the same identity. name: for messages, if not the path's. force: replace an existing `path` at the end."""
        self.path, self._form, self._identity = Path(path), form, identity
        self._name, self._force = name or self.path.name, force
        self.part = part_of(self.path)
        try_names(self.path)
        self.part.open("ab").close()
        self._before = None
        #: Number of frames in complete fragments.
        self.done = 0
        with ExitStack() as stack:
            stack.enter_context(held(self.part))
            if resume and self.part.stat().st_size:
                before = scan(self.part)
                check_identity(self.part, before.header != b"" and identity.encode() in before.header)
                if before.samples:
                    self._before, self.done = before, before.samples
            self._held = stack.pop_all()
        self._count = self.done
        #: A fourth channel of the frames was left out.
        self.transparent = False
        self._queue: queue.Queue[torch.Tensor | None] = queue.Queue(WAITING)
        self._ended = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Mp4Writer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        try:
            if self._thread is not None:
                self._queue.put(None)
                self._thread.join()
        except BaseException as second:  # another Ctrl-C
            error = second
            raise
        finally:
            if self._thread is not None:
                self._look()
            if error is not None or self._error is not None:
                if self.done:
                    self._held.close()
                else:
                    self.discard()
        if error is None and self._error is not None:
            raise self._error

    def write(self, frames: torch.Tensor) -> None:
        """Queue frames [f, H, W, 3], floats in 0..1 or bytes, which must not be changed afterwards. A fourth channel is
        left out, with a warning. Waits if the encoder is slower."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"encodes {self._name}", daemon=True)
            self._thread.start()
        if self._error is not None:
            raise self._error
        self._count += len(frames)
        self._queue.put(frames)

    def finish(self, audio: str | Path | None = None, start: Fraction = Fraction(0)) -> None:
        """Replace `path` by the finished part file. audio: a file whose sound from second `start` on is added."""
        with self._held:
            check_count(self.part, scan(self.part).samples, self._count)
            sweep(self.path)
            with replacing(self.path) as temporary:
                finish_file(self.part, temporary, audio, start, Fraction(self._count) / self._form.fps)
                check_free(self.path, self._force)
            if left := clear(self.part):
                log.warn(f"{self.part}: is not needed any more and could not be removed ({left})")

    def discard(self) -> None:
        """Remove the part file."""
        with self._held:
            clear(self.part)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        sink = _Sink()
        try:
            file = Appended(self.part, self._before)
            sink.put = file.write
            try:
                self._encode(sink)
            finally:
                file.close()
        except BaseException as error:
            self._error = _worded(sink.error or error, self.part)
            for _ in self._given():
                pass
        self._look()

    def _look(self) -> None:
        with suppress(OSError):
            self.done = scan(self.part).samples

    def _given(self) -> Iterator[torch.Tensor]:
        """Yield the frames of the queue, up to its end."""
        while not self._ended:
            frames = self._queue.get()
            self._ended = frames is None
            if frames is not None:
                yield frames

    def _encode(self, sink: _Sink) -> None:
        import av

        options = {"movflags": "+frag_keyframe+empty_moov+default_base_moof+skip_trailer+frag_discont",
                   "avoid_negative_ts": "disabled"}  # fmt: skip
        if self._before is not None:
            options["fragment_index"] = str(self._before.fragments + 1)
        container = av.open(sink, "w", format="mp4", options=options)
        container.metadata["comment"] = self._identity
        encoder, index = None, self.done

        def mux(packets: list[Packet]) -> None:
            for packet in packets:
                packet.pts, packet.dts = packet.pts + LEAD, packet.dts + LEAD
                container.mux(packet)

        try:
            for frames in self._given():
                for frame in frames:
                    if frame.shape[-1] > 3 and not self.transparent:
                        self.transparent = True
                        log.once(f"{self._name}: {NO_ALPHA}; write a PNG folder, which has it")
                    encoder = encoder or Encoder(container, self._form, *frame.shape[:2], self._name)
                    mux(encoder.packets(frame, index))
                    index += 1
            mux(encoder.rest())
        finally:
            container.close()


class _Sink:
    """The file object that PyAV writes to; it has no `seek`, so that PyAV never goes back.

    error: the first error of `put`. PyAV raises it, or one of its own without the reason.
    """

    put: Callable[[bytes], int]
    error: OSError | InputError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self.put(data)
        except (OSError, InputError) as error:
            self.error = self.error or error
            raise


def _worded(error: BaseException, path: Path) -> BaseException:
    import av

    if isinstance(error, OSError):
        return unwritable(error, path)
    if isinstance(error, av.FFmpegError):
        return InputError(f"{path}: the encoder refused the clip ({error.strerror}); write a PNG folder")
    return error


def check_identity(part: Path, same: bool) -> None:
    """Raise InputError if an unfinished file has another identity."""
    if not same:
        raise InputError(f"{part}: is of another clip or was made with other settings; give --force to start over")


def check_count(part: Path, there: int, count: int) -> None:
    """Raise InputError if an unfinished file holds another number of frames than were written to it."""
    if there != count:
        raise InputError(f"{part}: holds {there} frames, not {count}: another run has written to it; give --force to "
                         "start over")  # fmt: skip


def check_free(path: Path, force: bool) -> None:
    """Raise InputError if another run has put its result in place meanwhile (unless `force`)."""
    if not force and path.exists():
        raise InputError(f"{path}: another run has made it meanwhile; give --resume --force to replace it by "
                         f"{part_of(path)}")  # fmt: skip


def to_integers(frame: torch.Tensor, index: int, deep: bool = False) -> np.ndarray:
    """Convert a frame [H, W, 3 or 4], in 0..1 or bytes, to uint8, or uint16 if `deep`. Raises InputError."""
    check_dense(frame, f"frame {index}")
    if frame.ndim != 3 or frame.shape[-1] not in (3, 4):
        raise InputError(f"frame {index} has shape {tuple(frame.shape)}; [height, width, 3 or 4] is needed")
    if frame.dtype == torch.uint8:
        pixels = np.ascontiguousarray(frame.cpu().numpy())
        return pixels.astype(np.uint16) * 257 if deep else pixels
    frame = frame.float()
    if not all_finite(frame):
        raise InputError(f"frame {index} holds NaN or infinite values")
    if deep:
        return frame.mul(65535).round_().clamp_(0, 65535).cpu().numpy().astype(np.uint16)
    return frame.mul(255).round_().clamp_(0, 255).to(torch.uint8).cpu().contiguous().numpy()


def write_mp4(
    path: str | Path, frames: FramesLike | Iterable[FramesLike], fps: Fraction | float, crf: int = 12, *,
    overwrite: bool = True,
) -> None:  # fmt: skip
    """Write frames as H.264 in an MP4. An existing file at `path` is replaced, unless overwrite is false.

    The format is yuv420p, BT.709. yuv420p needs even sizes: an odd width or height is padded by repeating the last
    column or row, with one warning.

    Args:
        path: the file, ending in .mp4 or .m4v; it is complete when it gets this name.
        frames: a tensor or numpy array [F, H, W, 3] or an iterable of [H, W, 3] or PIL pictures, float in 0..1 or
            uint8.
        fps: frames per second.
        crf: constant quality, 0 (best) to 51.
        overwrite: replace an existing file (the default); false refuses it, before any frame is taken.

    Raises:
        InputError: no frames, frames of another shape or range, a path or rate of another kind, or an existing file
            with overwrite=False.
        OSError: the file cannot be written.
    """
    if Path(path).suffix.lower() not in (".mp4", ".m4v"):
        raise InputError(f"{path}: write_mp4 writes an MP4 and nothing else: let the name end in .mp4")
    if not isinstance(fps, Real) or isinstance(fps, bool) or not math.isfinite(fps):
        raise InputError(f"fps={fps!r} is no frame rate: give frames a second, such as 24 or Fraction(30000, 1001)")
    exact = fps if isinstance(fps, Rational) else float(fps)  # numpy's floats are none that Fraction takes
    form, given = Format(Fraction(exact), crf=crf), iter_frames(frames)
    if not overwrite and Path(path).exists():
        raise InputError(f"{path}: exists already; choose another name, or give overwrite=True to replace it")
    with replacing(Path(path)) as temporary:
        writer = Mp4Writer(temporary, form, name=Path(path).name)
        try:
            with writer:
                for each in given:
                    frame = as_frames(each, what="a frame")
                    check_dense(frame, "a frame")
                    check_range(frame)
                    # Frames wait for the encoder, and an iterable may fill one buffer again and again.
                    writer.write(frame[None] if isinstance(frames, torch.Tensor) else frame[None].clone())
            if not writer.done:
                raise InputError(f"{path}: no frames to write")
            writer.finish()
        finally:
            writer.discard()
