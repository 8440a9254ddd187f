"""The loop that takes clips through a component, chunk by chunk or tile by tile, for all kinds of passes."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..network.program import Program
from ..network.sectioned import Sectioned
from ..network.steps import UNKNOWN, Latents, chunk_end, frames_of
from ..planning.plan import Plan
from .guard import Guard, scoped
from .passes import Clips, Cut, Emit, Half, Part, Pass, Span
from .results import Results
from .staging import StagedWriter
from .video import Video


class Looped:
    """A component whose clips go chunk by chunk, or tile by tile, through its passes."""

    program: Program

    def through(
        self, data: Latents | Video, plan: Plan, results: Results, guard: Guard, wanted: range
    ) -> Iterator[int]:
        """Decode or encode clips. Args, Yields: as in `decode` and `encode`."""
        work = decode if self.program.half == "decoder" else encode
        return work(self, data, plan, results, guard, wanted)  # type: ignore[arg-type]


def decode(half: Half, z: Latents, plan: Plan, results: Results, guard: Guard, wanted: range) -> Iterator[int]:
    """Decode latents into the wanted frames of every clip.

    Args:
        half: the decoder.
        z: latents [B, C, T, h, w].
        plan: steps and tiles.
        results: destination of the frames.
        guard: keeps count of what is finished.
        wanted: frames to make, of each clip.

    Yields: before each chunk, the number of latents that it needs by then.
    """
    batch, _, latents, height, width = z.shape
    clips = Clips(half, batch, height, width, results.dtype, plan, guard, wanted.start, lambda: latents,
                  lambda: wanted.stop, results.signed)  # fmt: skip
    clips.begin(results)

    def cut(clip: int, _: int, first: int, end: int) -> Tensor:
        return z[clip, :, first:end]

    if not plan.tiled:
        whole = half.whole(clips)
        most = whole.at_once or plan.steps.frames or half.temporal * plan.steps.latents
        yield from scoped(whole.aside, _whole(half, whole, clips, cut, results, most))
        return
    low, tile = half.low(clips), half.tile(clips)
    for clip, index, first, end in clips.unfinished(results):
        part = Span(clip, *clips.window(first, end), index, low.begins(first) + tile.begins(first))
        features: dict[int, Tensor] = {}
        results.open(clip, first, end - first)
        with low.memory():
            yield from _features(half, low, clips, functools.partial(cut, clip, 0), first, part, features)
        with tile.memory():
            for number, where in enumerate(plan.grid.indices(), 1):
                own = part._replace(index=index + number)
                yield from _decode_tile(half, tile, clips, features, where, (first, end), own, results)
        results.close(clip, first)
        guard.finish(clip, first, end - first)


def encode(half: Half, video: Video, plan: Plan, results: Results, guard: Guard, wanted: range) -> Iterator[int]:
    """Encode frames into the wanted moments [n, h, w, 2C] of every clip; frames that fill no latent are not read.

    Args: those of `decode`, with the encoder and `video`, the frames.

    Yields: before each chunk, the number of latents whose frames must have arrived, unless the stream ends earlier.
    """

    def length() -> int:
        return UNKNOWN if video.count is None else half.program.encoded(video.count)

    clips = Clips(half, video.batch, video.height, video.width, results.dtype, plan, guard, wanted.start, length,
                  lambda: min(wanted.stop, length()))  # fmt: skip
    clips.begin(results)

    def cut(clip: int, origin: int, first: int, end: int) -> Tensor:
        return half.program.cut(functools.partial(video.frames, clip), first, end, origin, video.count)

    if not plan.tiled:
        whole = half.whole(clips)
        yield from scoped(whole.aside, _whole(half, whole, clips, cut, results, plan.steps.latents))
        return
    low, tile = half.low(clips), half.tile(clips)
    for clip, index, first, end in clips.unfinished(results):
        yield clips.window(first, end)[1]
        end = min(end, clips.end())
        if first < end:  # a stream of frames may have ended there
            part = Span(clip, *clips.window(first, end), index, tile.begins(first) + low.begins(first))
            features = []
            with tile.memory():
                cut_clip = functools.partial(cut, clip, 0 if half.program.staged else part.edges[0])
                yield from _blended(half, tile, clips, cut_clip, first, part, features)
            part = part._replace(index=index + len(plan.grid))
            yield from _low(half, low, clips, features[0], part, (first, end), results)


# -- whole frames -----------------------------------------------------------------------------------------------------


def _whole(
    half: Half, whole: Pass, clips: Clips, cut: Callable[[int, int, int, int], Tensor], results: Results, most: int
) -> Iterator[int]:
    """Take clips through a pass on whole frames, at most `most` results at once.

    cut(clip, origin, first, end): as Cut, of a clip that begins at `origin`."""
    guard = clips.guard
    writing = StagedWriter(results, most, guard.device, guard.finish, half.ahead, whole.gives)
    with whole.memory(), writing as writer:
        for clip in range(clips.batch):
            finished = guard.finished[clip]
            if finished < clips.end():
                left = guard.taken_over(clip)
                if left is None:
                    guard.origin, guard.chunks = finished, clips.plan.steps if guard.alone else None
                edges, (done, out) = whole.begins(guard.origin), whole.begin(clip, guard.origin, left)
                origin, place = _from(half, edges, done, out)
                if left is not None and place > finished:  # results in transit at that time have been lost
                    guard.origin, guard.chunks = finished, clips.plan.steps if guard.alone else None
                    edges, (done, out) = whole.begins(guard.origin), whole.begin(clip, guard.origin, None)
                    origin, place = _from(half, edges, done, out)
                left = None  # frees its histories where they could not be used
                done += origin
                emit = _unfinished(guard, clip, place, clips.end, functools.partial(writer.write, clip))
                if clips.plan.steps.pieces:
                    a, b = clips.window(guard.origin, clips.end())
                    emit = _counted(guard, clip, b - a, clips.plan.steps.frames, emit)
                part = Span(clip, done, None, clip, edges)
                yield from _through(whole, clips, functools.partial(cut, clip, origin), emit, part)


# -- blended tiles ----------------------------------------------------------------------------------------------------


def _features(
    half: Half, low: Pass, clips: Clips, cut: Cut, first: int, part: Span, features: dict[int, Tensor]
) -> Iterator[int]:
    """Make a decoder's features of whole frames, chunk by chunk, into host memory under the first latent of each chunk.

    A network that sees whole clips makes all of them in the first chunk."""
    at, waiting = low.begins(first)[-1], deque[int]()

    def noted(first: int, end: int) -> Tensor:
        waiting.append(first)
        return cut(first, end)

    def keep(some: Tensor, health: Tensor) -> None:
        nonlocal at
        clips.guard.confirm()
        features[at if low.gathers else waiting.popleft()] = some.to("cpu", copy=True)
        place, at = frames_of(at, half.temporal), at + len(some)
        clips.guard.inspect(part.clip, place, frames_of(at, half.temporal) - place, float(health))

    low.begin(part.clip, first, None)
    yield from _through(low, clips, noted, keep, part)


def _decode_tile(
    half: Half, tile: Pass, clips: Clips, features: dict[int, Tensor], where: tuple[int, int], block: tuple[int, int],
    part: Span, results: Results,
) -> Iterator[int]:
    """Decode the tile at `where` (row, column) into frames [a, b), the `block` of the clip."""
    guard, grid, s, name = clips.guard, clips.plan.grid, half.spatial, (part.clip, *where)
    (row, column), (start, end) = where, block
    if guard.finished[name] >= end:
        return
    (y0, y1), (x0, x1) = grid.rows.spans()[row], grid.cols.spans()[column]
    weight = (grid.rows.weights(row, s)[:, None] * grid.cols.weights(column, s)[None, :]).to(guard.device)

    def add(first: int, pixels: Tensor, health: Tensor) -> None:
        guard.inspect(name, first, len(pixels), float(health))
        results.add(part.clip, start, first, s * y0, s * x0, pixels, weight)
        guard.finish(name, first, len(pixels))

    def cut(first: int, _: int) -> Tensor:
        return features[first][:, y0:y1, x0:x1]

    edges = tile.begins(start)
    done, out = tile.begin(part.clip, start, None, (s * y0, s * x0))
    origin, place = _from(half, edges, done, out)
    part = part._replace(first=done + origin)
    emit = _unfinished(guard, name, place, lambda: end, add)
    yield from _through(tile, clips, cut, emit, part)


def _blended(
    half: Half, tile: Pass, clips: Clips, cut: Cut, first: int, part: Span, features: list[Tensor]
) -> Iterator[int]:
    """Make an encoder's features [n, h, w, C] of a part of a clip, blended in host memory.

    They become the only entry of `features`. The last tiles also take the pixels that fill no latent pixel, as whole
    frames do."""
    rows, cols, s = clips.plan.grid.rows, clips.plan.grid.cols, half.spatial
    for number, (i, j) in enumerate(clips.plan.grid.indices()):
        (y0, y1), (x0, x1) = rows.spans()[i], cols.spans()[j]
        bottom = clips.height if y1 == rows.length else s * y1
        right = clips.width if x1 == cols.length else s * x1
        weight = (rows.weights(i)[:, None] * cols.weights(j)[None, :])[..., None].to(clips.guard.device)
        at = tile.begins(first)[-1] - part.first

        def add(some: Tensor, health: Tensor) -> None:
            nonlocal at
            if not len(some):
                return
            if not features:
                size = some.shape[-1], part.last - part.first, rows.length, cols.length
                features.append(torch.zeros(size, dtype=torch.float32, device="cpu").permute(1, 2, 3, 0))
            features[0][at : at + len(some), y0:y1, x0:x1] += (some.float() * weight).cpu()  # noqa: B023
            at += len(some)

        def crop(first: int, end: int) -> Tensor:
            return cut(first, end)[:, s * y0 : bottom, s * x0 : right]  # noqa: B023

        tile.begin(part.clip, first, None)
        yield from _through(tile, clips, crop, add, part._replace(index=part.index + number))


def _low(
    half: Half, low: Pass, clips: Clips, features: Tensor, part: Span, block: tuple[int, int], results: Results
) -> Iterator[int]:
    """Run an encoder's last part on whole frames, into results [a, b), the `block`."""
    guard, size, origin, (first, end) = clips.guard, clips.plan.steps.latents, part.first, block

    def cut(first: int, last: int) -> Tensor:
        return features[first - origin : last - origin]

    with low.memory(), StagedWriter(results, size, guard.device, guard.finish, half.ahead) as writer:
        done, _ = low.begin(part.clip, first, None)
        part = part._replace(first=done if half.program.staged else part.first)
        write = functools.partial(writer.write, part.clip)
        emit = _unfinished(guard, part.clip, low.begins(first)[-1], lambda: end, write)
        yield from _through(low, clips, cut, emit, part)


# -- one part, chunk by chunk -----------------------------------------------------------------------------------------


def _through(run: Pass, clips: Clips, cut: Cut, emit: Emit, part: Span) -> Iterator[int]:
    """Take a part of a clip or tile through a pass.

    Yields: before each chunk, how many latents of the clip it needs by then.
    """
    guard, steps, done = clips.guard, clips.plan.steps, part.first
    ahead = steps.latents if clips.half.program.late else 0

    def last() -> int:
        return clips.window(clips.first, clips.end())[1] if part.last is None else part.last

    def parts() -> Iterator[Part]:
        first = part.first
        while first < last():
            guard.tick.check()
            end = chunk_end(first, last(), steps.at(first), part.edges)
            yield Part(cut(first, last() if run.gathers == "first" and first == 0 else end), first, end)
            first = end

    chunks = run.chunks(parts(), emit)
    while done < last():
        size = steps.at(done)
        yield last() if clips.half.program.gathers else done + size + ahead
        if next(chunks, chunks) is chunks:  # the stream of frames has ended
            break
        done = chunk_end(done, last(), size, part.edges)
        guard.reach(part.index, done, last() - done)
    next(chunks, None)  # runs the code after the last yield


def _unfinished(
    guard: Guard, part: object, first: int, end: Callable[[], int], deliver: Callable[[int, Tensor, Tensor], None]
) -> Emit:
    """Return an Emit that delivers a part's results before `end` that are not finished yet.

    It counts them from `first` on."""

    def emit(results: Tensor, health: Tensor) -> None:
        nonlocal first
        guard.confirm()
        at, count = first, results.shape[0]
        first += count
        done, wanted = guard.skip(part, at, count), min(count, end() - at)
        if done < wanted:
            deliver(at + done, results[done:wanted], health)
        guard.tick.check()

    return emit


def _counted(guard: Guard, index: int, latents: int, piece: int, deliver: Emit) -> Emit:
    """Return an Emit that also notes all pieces of a clip's results but the last, as many as it has latents."""
    made = noted = 0

    def emit(results: Tensor, health: Tensor) -> None:
        nonlocal made, noted
        deliver(results, health)
        made += results.shape[0]
        done = -(-made // piece)
        if noted < done < latents:  # results may come in smaller parts than a piece
            noted = done
            guard.reach(index, done, latents - done)

    return emit


def _from(half: Half, begins: tuple[int, ...], done: int, out: int) -> tuple[int, int]:
    """Return (the latent that stands for one frame, place of the next result within the clip).

    `done` latents are through and `out` results are out, as `Pass.begin` returns them: counted from the clip's first
    latent, or from where steps begin as with a clip of their own."""
    decodes = half.program.half == "decoder"
    if not half.program.staged:
        if decodes and isinstance(half.program, Sectioned):
            return begins[0], half.program.sections.at(begins[0]) + out
        return begins[0], (half.temporal * begins[0] if decodes else begins[0]) + out
    at = max(done, begins[-1])
    return 0, frames_of(at, half.temporal) if decodes else at
