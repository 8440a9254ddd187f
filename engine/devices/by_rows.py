"""One decode of which each rank of torchrun makes rows of every frame, bit by bit those that one device makes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import log
from ..core import Core
from ..errors import Cancelled, PlanError
from ..kernels.probe import from_triton
from ..network.program import Program, Size
from ..network.rows import row_stages, why_no_rows
from ..operands.policy import Policy
from ..options import Options
from ..planning import shares
from ..planning.budget import Limits, Machine
from ..planning.planner import Planner
from ..report import Report
from ..request import Request
from ..run.plan import Plan
from ..run.progress import Ticker
from ..run.results import Finished, HandedOn, Results, Target
from ..run.rows import Planned, Rows
from .chunks import LATENTS_OF_ROWS
from .kinds import of_a_device
from .ranks import UNLIMITED, RankLost, Ranks, told
from .spread import Operation, Told

#: What an exchange among ranks takes, in operations: at 650 TFLOP/s, as in fp16. Between two H200s borders of rows take
#: as much as 105 us with the copies to and from where they lie, of which NCCL gathers for 50 to 80.
EXCHANGE = 105e-6 * 650e12
#: And how many more there are meanwhile in 8 bit: SeedVR2 at 1280x720 takes an H200 31.2 ms a frame and 18.9.
IN_8_BIT = 1.65
#: What a rank's host launches for a step, in operations at 540 TFLOP/s: SeedVR2's hosts took 13 ms a frame (two H200s)
#: and 18.5 (four: most of them exchange with two others), whatever the precision.
LAUNCH = {1: 1.6e-3 * 540e12, 2: 2.3e-3 * 540e12}
#: Threads of rank 0, which launches, too, that write frames to host memory: an H200's host takes 6.3 ms for a fresh one
#: of 1280x720 in float32 with one of them, 0.9 with eight, and a GPU makes it in 16.
HOST_THREADS = 8

#: Its name since torch 2.13; the old one, of the same function, has warned since.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Among a VAE's copies, the number of the one that makes rows.
BY_ROWS = -1


@dataclass(eq=False)
class RankPeers:
    """All ranks, from top to bottom. talk: connections between their hosts, that nothing else uses. group: those
    between their devices, or the same."""

    ranks: Ranks
    talk: Any
    group: Any

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def count(self) -> int:
        return self.ranks.count

    def exchange(self, given: Sequence[tuple[int, Tensor]], wanted: Sequence[tuple[int, Tensor]]) -> None:
        ops = [dist.P2POp(dist.isend, tensor, peer, self.group) for peer, tensor in given]
        ops += [dist.P2POp(dist.irecv, tensor, peer, self.group) for peer, tensor in wanted]
        try:
            with told():
                for work in dist.batch_isend_irecv(ops) if ops else ():
                    work.wait()
        finally:
            ops.clear()  # an error's traceback would keep the connections open

    def stacked(self, own: Tensor) -> Tensor:
        out = own.new_empty(self.count, *own.shape)
        with told():
            _all_gather(out.view(-1), own.view(-1), group=self.group)
        return out

    def broadcast(self, value: Any = None) -> Any:
        return self.ranks.broadcast(value, self.talk)

    def gather(self, value: Any) -> list[Any]:
        return self.ranks.gather(value, self.talk)

    def close(self) -> None:
        """Whoever waits for this rank hears of it, and this one of whoever has closed before."""
        dist.destroy_process_group(self.talk)
        self.talk = self.group = None
        connected.cache_clear()

    def abort(self) -> None:
        """This rank has failed: others end, and here nothing waits for them any more. Work on a device that waits for
        another's would go on for good, and closing its connections waits for that."""
        if self.ranks.watch is not None:
            self.ranks.watch.failed = True
        backend = None if self.group is self.talk else self.group._get_backend(torch.device("cuda"))
        if hasattr(backend, "abort"):  # gloo has none, and needs none
            backend.abort()

    def agreed(self, limits: Limits, plan: Callable[[Limits], Plan]) -> Plan:
        targets = [t for t in self.gather(limits.target) if t is not None]
        answer: Plan | PlanError | None = None
        if self.rank == 0:
            try:
                answer = plan(Limits(min(targets, default=None), host=0))
            except PlanError as error:
                answer = error
        answer = self.broadcast(answer)
        if isinstance(answer, PlanError):
            raise answer
        return answer


@functools.lru_cache(maxsize=1)
def connected(ranks: Ranks, device: torch.device) -> RankPeers:
    """Called by all ranks."""
    talk = dist.new_group(backend="gloo", timeout=UNLIMITED)
    if device.type != "cuda":
        return RankPeers(ranks, talk, talk)
    torch.cuda.set_device(device)
    if torch.get_num_threads() == 1:  # which torchrun sets; a GPU's bits do not depend on it
        torch.set_num_threads(max(1, min(HOST_THREADS, (os.cpu_count() or 1) // ranks.neighbours)))
    return RankPeers(ranks, talk, dist.new_group(backend="nccl"))


class _Agreed:
    """A planner whose plans all ranks follow."""

    def __init__(self, planner: Planner, peers: RankPeers) -> None:
        self.walk, self._plan, self._peers = planner.walk, planner.plan, peers

    def plan(
        self, half: str, size: tuple[int, int, int], request: Request, limits: Limits, *rest: Any
    ) -> Plan:  # fmt: skip
        whole = replace(request, tiling="untiled", tile=0)

        def plan(least: Limits) -> Plan:
            if half == "decoder" and not whole.chunk:
                with suppress(PlanError):
                    return self._plan(half, size, replace(whole, chunk=LATENTS_OF_ROWS), least, *rest)
            return self._plan(half, size, whole, least, *rest)

        return self._peers.agreed(limits, plan)


class RowCore(Core):
    """A VAE that makes its rows of every frame; its calls are all ranks' calls."""

    @classmethod
    def of(cls, vae: Core, peers: RankPeers) -> RowCore:
        """The weights are shared."""
        other = cls.__new__(cls)
        other.__dict__.update(vae.__dict__)
        other._separate()
        other.peers = peers
        other._use(_unrecorded(vae))
        return other

    def _use(self, options: Options) -> None:
        super()._use(options)
        self.planner.walk.share(self.peers)
        self.planner = _Agreed(self.planner, self.peers)  # type: ignore[assignment]

    def _without_kernels(self, error: Exception) -> bool:
        """Nothing else makes rows."""
        return False


def _unrecorded(vae: Core) -> Options:
    """What ranks tell each other cannot be recorded."""
    return vae.options.switched(off=["cuda_graphs"])


def core_of(vae: Core, peers: RankPeers) -> RowCore:
    """It stays until the release of `vae`, whose own packed weights go."""
    vae.release_packed()
    place = vae.device, BY_ROWS
    other = vae._copies.get(place)
    if not isinstance(other, RowCore) or other.peers != peers or other.model is not vae.model:
        other = vae._copies[place] = RowCore.of(vae, peers)
    other.options = _unrecorded(vae)
    return other


def why_not(vae: Core, half: str, request: Request, height: int, count: int) -> str | None:
    """Why a call cannot be made row by row, or None. height: of what goes in."""
    if vae.fused() is None or vae.planner.walk.why_not(half) is not None:
        return "only the fused kernels make rows of a frame"
    if half == "decoder" and not vae.options.composed_upsample:
        return "composed_upsample is switched off, and nothing else doubles some rows of a frame"
    if request.tiling in ("exact", "blended"):
        return f"tiling {request.tiling!r} has rows of its own"
    return why_no_rows(getattr(vae.model, half).program, height, count)


def fits(
    vae: Core, half: str, size: tuple[int, int, int], request: Request, count: int, check: Callable[[], None]
) -> bool:
    """Whether rows of whole frames keep below the memory target, with nothing parked. size: latents, rows, columns.
    check: called between dry walks, may raise."""
    limits = Limits(Machine.now(vae.device, vae._held(half)).limits(request).target, host=0)
    vae.planner.walk.share(Planned(0, count))
    try:
        vae.planner.plan(half, size, replace(request, tiling="untiled", tile=0), limits, check=check)
    except PlanError:
        return False
    finally:
        vae.planner.walk.share(None)
    return True


def run(
    vae: Core, peers: RankPeers, half: str, operation: Operation, into: Target, wanted: range, height: int,
    policy: Policy, request: Request, told: Told, report: Report,
) -> Generator[Finished, None, int]:  # fmt: skip
    """Results on rank 0, for one clip; nothing on the others. height: of what goes in. Returns the end of the wanted
    ones, or the first that is not made, where a rank has failed at what segments may do with less. Raises Cancelled and
    RankLost."""
    core, whole = core_of(vae, peers), into.part(0, wanted.start)
    try:
        yield from _made(vae, core, peers, half, operation, into, whole, wanted, height, policy, request, told, report)
        return wanted.stop
    except (Cancelled, GeneratorExit):
        raise
    except BaseException as error:
        if not (isinstance(error, RankLost) or of_a_device(error) or from_triton(error)):
            peers.abort()
            raise
        failed = error
    yield from whole.ready()
    return _stopped(vae, peers, failed, report, whole)


def _stopped(vae: Core, peers: RankPeers, failed: BaseException, report: Report, whole: Results) -> int:
    """All ranks come here within a chunk. Returns the first result that is not made, on all of them."""
    ranks = peers.ranks
    if peers.group is not peers.talk:
        peers.abort()  # nothing else tells another rank's device that waits for this one's
        raise failed
    peers.close()
    vae._copies.pop((vae.device, BY_ROWS)).release_packed()
    said = [text for text in ranks.gather(None if isinstance(failed, RankLost) else str(failed)) if text]
    if not said:
        raise failed
    log.warn(f"{said[0]}; the rest of the clip is shared by segments")
    report.events["handed_over"] += 1
    return ranks.broadcast(whole.done)


def _made(
    vae: Core, core: RowCore, peers: RankPeers, half: str, operation: Operation, into: Target, whole: Results,
    wanted: range, height: int, policy: Policy, request: Request, told: Told, report: Report,
) -> Generator[Finished, None, None]:  # fmt: skip
    """As `run`; `whole` gets the results, on rank 0."""
    rank, own = peers.rank, core.planner.walk.rows(half, height)
    rows = [b - a for a, b in _shares(own, half, peers.count, into.shape[0])]
    results = HandedOn((0, *into.shape[1:]), into.dtype, wanted.start, 0) if rank else whole
    tick = _Together(peers, told, vae.device)
    with closing(operation(core, slice(None), tick, results, wanted, told.on_plan, policy, request)) as done:
        try:
            for finished in done:
                tick.idle()  # whoever takes the frames may take its time
                if rank == 0:
                    yield finished
            peers.gather(None)  # none has failed behind its last results
        except GeneratorExit:  # nobody takes more: all stop before the next chunk
            tick.over = True
            with suppress(Cancelled):
                for _ in done:
                    pass
                peers.gather(None)
            raise
        except Cancelled:
            if rank == 0:
                raise
        finally:
            _told_of(report, vae, core, half, rows)


def _shares(own: Rows, half: str, count: int, rows: int) -> list[tuple[int, int]]:
    """Rows of frames that each rank makes, or reads of those that go in. rows: of a result."""
    ranks = map(own.of, range(count))
    return [of.made(rows) if half == "decoder" else of.read() for of in ranks]


class _Together(Ticker):
    """All ranks stop before the same chunk: where one is told to that runs rank 0's, or nobody takes its results."""

    def __init__(self, peers: RankPeers, told: Told, device: torch.device) -> None:
        super().__init__(told.progress if peers.rank == 0 else None, None)
        self._peers, self._asked, self._device, self._behind = peers, told.cancel, device, False
        self.over = False

    def reach(self, index: int, latents: int, left: int) -> bool:
        self._behind = True
        return super().reach(index, latents, left)

    def check(self) -> None:
        """Asks once behind each chunk: before the first one, ranks do not all come here as often."""
        if self._behind:
            self._behind = False
            self.idle()
            if self._peers.broadcast(self.over or (self._asked is not None and self._asked())):
                raise Cancelled("cancelled")
        if self._peers.ranks.watch is not None:
            self._peers.ranks.watch.at_work(self._device)

    def idle(self) -> None:
        """This rank waits for another one, or for who takes the results."""
        if self._peers.ranks.watch is not None:
            self._peers.ranks.watch.idle()


def _told_of(report: Report, vae: Core, core: Core, half: str, rows: list[int]) -> None:
    """vae: whose operands were settled for all. rows: of each rank."""
    own = core.last_report
    if own is None:
        return
    report.operands = vae._mixed.describe(half)
    for name in ("mode", "off", "precision", "predicted_gb", "reserved_gb", "allocated_gb", "before_gb",
                 "complete", "seconds", "events"):  # fmt: skip
        setattr(report, name, getattr(own, name))
    report.plan = f"{len(rows)} ranks with {', '.join(map(str, rows))} rows of every frame; {own.plan}"


# -- time -------------------------------------------------------------------------------------------------------------


def duration(
    program: Program, height: int, width: int, count: int, eight_bit: bool = False, frames: int = 1
) -> float:  # fmt: skip
    """Of a latent by rows on so many devices, relative to one: by the steps' operations, and an exchange for every
    convolution, in a decoder for each frame that goes into a stage; no less than hosts launch for. height, width: of
    what goes in. frames: that a decoder makes at once."""
    more = IN_8_BIT if eight_bit else 1.0
    exchange, launch, launched = EXCHANGE * more, LAUNCH[min(count - 1, 2)] * more, 0.0
    size, total, spent = Size(program.rates[0] * _MIDDLE, height, width, program.takes), 0.0, 0.0
    for stage, split in row_stages(program, height, count):
        own, blocks = (max(b - a for a, b in map(of, range(1 if split.whole else count))) / split.rows
                       for of in (split.of_rank, split.blocks))  # fmt: skip
        times = size.frames if program.half == "decoder" else 1
        for step in stage:
            flop = step.work(size, program.style).composed_flop
            share = blocks if split.wide and step is stage[0] and not split.whole else own
            total, spent = total + flop, spent + share * flop
            if not split.whole:
                spent += times * 2 * exchange  # two convolutions' rows, and with them their norms' sums
                launched += max(times / frames, 1) * launch
            size = step.size(size, False)
    return max(spent, launched) / max(total, 1.0)


def sooner(
    program: Program, height: int, width: int, count: int, latents: int, span: tuple[int, int] | None = None,
    eight_bit: bool = False, frames: int = 1,
) -> bool:  # fmt: skip
    """Whether so many devices of one kind are computed to make a clip's latents [a, b) (None: all) by rows before they
    make them by segments; height, width: of what goes in."""
    leads, rates, (first, end) = shares.Leads(program, height, width), [1.0] * count, span or (0, latents)
    segments = shares.duration(shares.split(leads, latents, rates, bounds=(first, end)), rates)
    return duration(program, height, width, count, eight_bit, frames) * (end - first + leads(first)) < segments


#: Latents that the work of a step is taken from.
_MIDDLE = 1
