"""Execute clips or tiles of one size on a component packed for the fused kernels, in the memory of one
ExecutionContext."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.conv3d.tuned import version
from ..network.architecture import Architecture
from ..network.fused import Emit, Fused, FusedDecoder, FusedEncoder
from ..network.program import Program
from ..network.steps import Steps
from ..options import Options
from ..planning.plan import why_none
from ..runtime.context import ExecutionContext
from ..runtime.handover import Handover, take_over
from ..runtime.pixels import to_unit
from .clip import Looped
from .passes import Clips, Part, Pass
from .passes import Emit as EmitResults
from .reuse import Replay, Runs, allocated, chunks_left
from .staging import StagedReader


class FusedPass(Pass):
    """A Pass in the memory of one ExecutionContext."""

    def __init__(
        self, network: Fused, clips: Clips, memory: Callable[[], AbstractContextManager[tuple[ExecutionContext,
        Replay | None]]],
        load: Callable[[Tensor], Tensor], step: Callable[[ExecutionContext, Tensor, Emit, bool], None],
        replay: Callable[[ExecutionContext, Tensor], Tensor] | None = None,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext, steps: slice = slice(None), *,
        before: Callable[[ExecutionContext, Tensor, Part], Tensor] | None = None,
        after: Callable[[ExecutionContext, Tensor, Part, Emit], None] | None = None,
    ) -> None:  # fmt: skip
        """Bind the callables of one pass.

        Args:
            load: moves a part's data to the device in the form that `step` takes.
            step: step(run, data, emit, ends) executes a chunk; `ends` says that the clip ends with it.
            replay: the same for graphs, for chunks whose results are one tensor and either do not end the clip or
                belong to a network that does not look ahead; None: no later attempt can continue where this one stops.
            aside: as in Pass.
            steps: the steps of the network that this pass executes.
            before: before(run, data, part) returns the data that `step` takes of the part, for networks that see a
                whole clip with its first part.
            after: after(run, results, part, emit) handles results that are not emitted at once.
        """
        super().__init__(clips.half.program, steps, clips.guard)
        self.gathers = "" if before is after else "first" if after is None else "last"
        self._before, self._after = before, after
        self._network, self._clips = network, clips
        self._memory = memory
        self._load = load
        self._step = step
        self._replay = replay
        self.aside = aside

    @contextmanager
    def memory(self) -> Iterator[None]:
        with self._memory() as (self._run, self._graphs):
            self._whole = None if self._graphs is None else functools.partial(self._replay, self._run)
            yield

    def begin(self, clip: int, first: int, left: Handover | None, corner: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        self._later = self._clips.batch - clip - 1
        if left is None:
            self._network.start(self._run, self._begins(first), self._steps)
        else:
            take_over(self._run, left)
        done = self._run.done
        if self.gathers == "last":
            return done["latents"], 0
        return done["latents"], done["frames" if self._program.half == "decoder" else "latents"]

    def chunks(self, parts: Iterable[Part], emit: EmitResults) -> Iterator[None]:
        run, graphs, guard, resumes = self._run, self._graphs, self._guard, self._replay is not None

        def deliver(results: Tensor) -> None:
            emit(results, run.health)

        def give(results: Tensor) -> None:
            if self._after is None:
                deliver(results)
            else:
                self._after(run, results, part, deliver)

        for part in parts:
            data = run.attempt(self._load, part.data)
            if self._before is not None:
                data = self._before(run, data, part)
            ends = part.end == self._clips.latents
            step = functools.partial(self._step, run, data, give, ends)
            run.scout(step, ends)
            with run.chunk() if resumes else nullcontext():
                if graphs is None or (ends and run.after) or not self._network.whole(run):
                    step()
                else:
                    left = chunks_left(self._later, self._clips.latents, part.first, part.end - part.first)
                    alone = ends and part.first == 0 and self._clips.batch == 1
                    give(graphs.chunk(self._whole, data, left, alone))
            data = step = None  # before the next part needs as much
            yield
            if resumes and run.pressed:
                guard.settle(run.recover)


class FusedComponent(Looped):
    """A packed component as clips go through it (execution/clip.py)."""

    def __init__(
        self, network: FusedDecoder | FusedEncoder, program: Program, runs: Runs, architecture: Architecture,
        options: Options, scale: float, device: torch.device,
    ) -> None:  # fmt: skip
        self.program = program
        self.spatial, self.temporal = architecture.spatial, architecture.temporal
        self.ahead = options.overlap
        self._network = network
        self._runs = runs
        self._graphs = options.cuda_graphs
        self._scale = scale
        self._device = device
        self._reader = StagedReader(device, self.ahead)

    def whole(self, clips: Clips) -> FusedPass:
        """Return the pass over clips in whole frames."""
        network, plan, steps = self._network, clips.plan, clips.plan.steps
        parking = plan.parking and replace(plan.parking, prefetch=self.ahead)
        size, ends = (steps.latents, clips.height, clips.width, steps.frames), {}
        clip = clips.latents if network.gathers else 0
        if isinstance(network, FusedDecoder):
            size = *size, clips.dtype, self._device
            if network.gathers:
                ends["before"] = functools.partial(_spread, network)

            def step(run: ExecutionContext, z: Tensor, emit: Emit, ends: bool) -> None:
                network.chunk(run, z, steps.frames, clips.dtype, emit, ends, clips.signed)

            def replay(run: ExecutionContext, z: Tensor) -> Tensor:
                return network.whole_chunk(run, steps.frames, clips.dtype, z, clips.signed)
        else:
            size = *size, self._device
            if network.gathers:
                ends["after"] = functools.partial(_collect, network, clips)

            def step(run: ExecutionContext, video: Tensor, emit: Emit, ends: bool) -> None:
                moments = network.chunk(run, video, steps.frames)
                if not run.dry and moments is not None:
                    emit(moments)

            def replay(run: ExecutionContext, video: Tensor) -> Tensor:
                return network.chunk(run, video, steps.frames)

        load = self._latents if isinstance(network, FusedDecoder) else self._video
        return FusedPass(
            network, clips,
            lambda: self._runs.run(
                lambda: network.plan(*size, parking, clip), network,
                (*size, clip, clips.signed, version(self._device)),
                plan, clips.guard,
            ),
            load, step, replay, lambda: self._runs.aside(plan, self._device), **ends,
        )  # fmt: skip

    def low(self, clips: Clips) -> FusedPass:
        """Return the pass through a decoder's first part, before its tiles, in whole frames and without graphs."""
        self._runs.no_graphs = why_none(self._graphs, clips.plan, self._runs.rate)
        network, steps = self._network, clips.plan.steps
        whole = clips.latents if network.gathers else steps.latents
        run = network.plan_front(whole, clips.height, clips.width, self._device)
        front, alone = slice(network.front), self._alone(run, clips)

        def step(run: ExecutionContext, z: Tensor, emit: Emit, ends: bool) -> None:
            if not network.gathers:
                network.front_chunk(run, z, emit)
            elif z.shape[0] == clips.latents:  # the first part is the whole clip
                network.front_chunk(run, z, functools.partial(_in_parts, steps, emit))

        before = (lambda run, z, part: z) if network.gathers else None
        return FusedPass(network, clips, alone, self._latents, step, steps=front, before=before)

    def tile(self, clips: Clips) -> FusedPass:
        """Return the pass through a decoder's part in blended tiles, without graphs."""
        grid, steps, network = clips.plan.grid, clips.plan.steps, self._network
        run = network.plan_tile(steps.latents, grid.rows.size, grid.cols.size, steps.frames, self._device)

        def step(run: ExecutionContext, x: Tensor, emit: Emit, ends: bool) -> None:
            network.tile_chunk(run, x, steps.frames, emit)

        behind = slice(network.front, None)
        return FusedPass(network, clips, self._alone(run, clips), self._features, step, steps=behind)

    def _alone(
        self, run: ExecutionContext, clips: Clips
    ) -> Callable[[], AbstractContextManager[tuple[ExecutionContext, None]]]:
        """Return the memory of a run without graphs."""

        @contextmanager
        def memory() -> Iterator[tuple[ExecutionContext, None]]:
            with allocated(run, clips.guard):
                yield run, None

        return memory

    def _latents(self, part: Tensor) -> Tensor:
        """Read latents [C, n, h, w] as [n, h, w, C] float32 on the device, unscaled."""
        return self._reader.read(part).permute(1, 2, 3, 0).float() / self._scale

    def _video(self, part: Tensor) -> Tensor:
        """Read frames [F, H, W, 3] as -1..1 on the device."""
        return to_unit(self._reader.read(part))

    def _features(self, part: Tensor) -> Tensor:
        """Copy the part, because `tile_chunk` overwrites it."""
        return torch.empty(part.shape, dtype=part.dtype, device=self._device).copy_(part)


def _spread(network: FusedDecoder, run: ExecutionContext, z: Tensor, part: Part) -> Tensor:
    """Return the features of a part. z: its latents, or with the first part those of the whole clip."""
    if part.first == 0:
        network.gather(run, z)
    return run.gathered[part.first : part.end]


def _collect(
    network: FusedEncoder, clips: Clips, run: ExecutionContext, features: Tensor, part: Part, emit: Emit
) -> None:
    """Store a part's features with those of the clip; with the last part emit all moments of the clip."""
    run.gathered[part.first : part.end].copy_(features)
    if part.end == clips.latents:
        network.gather(run, functools.partial(_in_parts, clips.plan.steps, emit))


def _in_parts(steps: Steps, emit: Emit, results: Tensor) -> None:
    """Emit a clip's results chunk by chunk."""
    for first, end in steps.spans(len(results)):
        emit(results[first:end])
