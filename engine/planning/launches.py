"""Find every kernel that a component launches, whatever its plan, with dry runs of the launch code itself.

The compiled code depends on the layer, on its plane being small or not, and for attention on the number of tokens; not
on chunks, bands or steps. So a few dry runs of a chunk show all of it, each in some 20 ms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from ..families import own
from ..kernels.attention import FLASH_HEAD, attention
from ..kernels.conv3d.schedules import SMALL_PLANE, Schedule
from ..kernels.conv3d.tuned import Kind, offer
from ..kernels.launching import Call, recording
from ..kernels.prebuilt.keys import Key, key
from ..kernels.prebuilt.library import library
from ..kernels.targets import Target
from ..network.architecture import Architecture
from ..network.fused import FusedDecoder, FusedEncoder
from ..network.program import Program
from ..options import Options
from ..precision.policy import EXACT, MIN_CHANNELS, Policy, Range
from ..runtime.context import ExecutionContext
from .fused_walk import FusedWalk
from .meta import meta_model

META = torch.device("meta")
#: Side of latents that are large enough that no plane of the network is small.
LARGE = int(SMALL_PLANE**0.5)
#: Numbers of tokens with which attention takes more tiles, and more parts, than with few.
TOKENS = (160 * 160, 200 * 200)
Schedules = Mapping[Kind, Schedule]
_TABLES: Schedules = {}
_OUTPUTS = (torch.float32, torch.float16, torch.uint8)


def launches(
    architecture: Architecture, config: Any, half: str, dtype: torch.dtype, options: Options, policy: Policy = EXACT,
    *, here: Target, kind: str | None = None, schedules: Schedules = _TABLES,
) -> frozenset[Key]:  # fmt: skip
    """Return the kernels that a component launches, in any plan.

    Args:
        architecture, config: of the model.
        half: "encoder" or "decoder".
        dtype: of activations.
        options: `composed_upsample`, `flash_attention` and `winograd` (None: off) count.
        policy: which convolutions are in 8 bit, and how 16-bit ones are summed.
        here: the GPU and the source of its kernels.
        kind: type of a transformer's products, "fp8" or "int8"; None: the type of activations.
        schedules: used in place of the tables', as if they had been measured on the GPU.

    Returns:
        Keys of the kernels; empty where the component has no fused kernels.
    """
    walk = FusedWalk(architecture, config, dtype, options)
    with recording(here) as calls, measured(schedules, here), torch.inference_mode(False), torch.no_grad():
        if half in walk.halves:
            walk.use(half, policy)
            for work in _walks(walk, half):
                work()
        elif (found := getattr(meta_model(architecture, config), half)) is None:
            pass
        elif (module := own(found.program, "launches")) is not None:
            module.launch(found, dtype, kind)
    return keys_of(calls)


def use_id(
    architecture: Architecture, config: Any, half: str, dtype: torch.dtype, options: Options, kind: str | None,
    half_accumulate: bool,
) -> str:  # fmt: skip
    """Return the name of a use in a set's index: a hash of all arguments of `needs` except the set.

    Args:
        architecture, config: of the model.
        half: "encoder" or "decoder".
        dtype: of activations.
        options: `composed_upsample` and `flash_attention` count.
        kind: type of 8-bit operands, None: none.
        half_accumulate: 16-bit convolutions sum in fp16.
    """
    toggles = options.composed_upsample, options.flash_attention
    use = architecture.name, config, half, dtype, toggles, kind, half_accumulate
    return blake2b(repr(use).encode(), digest_size=8).hexdigest()


@functools.lru_cache(maxsize=64)
def needs(
    architecture: Architecture, config: Any, half: str, dtype: torch.dtype, options: Options, here: Target,
    kind: str | None = None, half_accumulate: bool = False,
) -> frozenset[Key]:  # fmt: skip
    """Return the kernels that `launches` finds, for every choice of 8-bit convolutions.

    Args:
        architecture, config, half, dtype, options, here: as for `launches`.
        kind: type of 8-bit operands, "fp8" or "int8"; None: none.
        half_accumulate: 16-bit convolutions sum in fp16.
    """
    known = functools.partial(launches, architecture, config, half, dtype, options, here=here)
    program = architecture.program(half, config)
    if program is None or program.scales:
        return known(kind=kind)
    found = known(uniform(program, kind, half_accumulate))
    return found | known(uniform(program, None, half_accumulate)) if kind else found


def missing(form: str, found: Iterable[Key]) -> str | None:
    """Return a message that names the kernels which the prebuilt form ("A" to "D") lacks; None: it has all.

    Raises:
        SetError: the prebuilt set is unusable.
    """
    there = library()
    lacks = sorted({one.kernel for one in found if not there.has(form, one)})
    return f"set {form} lacks kernels of this model ({', '.join(lacks)})" if lacks else None


def uniform(program: Program, kind: str | None, half_accumulate: bool = False) -> Policy:
    """Return the policy with every eligible convolution in 8 bit (kind: "fp8", "int8"; None: none)."""
    keys = program.eligible(MIN_CHANNELS) if kind else []
    ranges = dict.fromkeys(keys, Range((1.0,), (1.0,))) if kind == "int8" else {}
    return Policy(dict.fromkeys(keys, kind), ranges, half_accumulate)


@contextmanager
def measured(schedules: Schedules, here: Target) -> Iterator[None]:
    """Use these schedules in dry runs inside."""
    if not schedules:
        yield
        return
    offer(META, schedules, here.way)
    try:
        yield
    finally:
        offer(META, _TABLES, here.way)


def keys_of(calls: list[Call]) -> frozenset[Key]:
    """Return the keys of the kernels that these calls launch."""
    return frozenset(key(one.kernel, one.arguments, one.constants) for one in calls)


def _walks(walk: FusedWalk, half: str) -> Iterator[Callable[[], None]]:
    network, small = walk.network(half), (LARGE - 1) // walk.architecture.spatial
    one = functools.partial(_walk, walk, half)
    for output in _OUTPUTS if half == "decoder" else _OUTPUTS[:1]:
        yield functools.partial(one, small, output)
    yield functools.partial(one, LARGE)
    if network.attends > FLASH_HEAD and walk.options.flash_attention:
        for count in TOKENS:
            tokens = torch.empty(1, count, network.attends, dtype=walk.dtype, device=META)
            yield functools.partial(attention, tokens, tokens, tokens, clip=network.gathers)


def _walk(walk: FusedWalk, half: str, side: int, output: torch.dtype = torch.float32) -> None:
    """Run a clip of two chunks, its first and its last one, without values."""
    network, a = walk.network(half), walk.architecture
    latents = 2 * walk.chunk(half)
    clip = 2 * latents if network.gathers else 0
    if isinstance(network, FusedDecoder):
        run = network.plan(latents, side, side, a.temporal * latents, output, META, None, clip)
        _decode(network, run, [_latents(network.takes, n, side) for n in (latents, latents)], output)
    else:
        size = a.spatial * side
        run = network.plan(latents, size, size, a.temporal * latents, META, None, clip)
        _encode(network, run, [_frames(network, n, size) for n in (a.frames(latents), network.every * latents)])


def _decode(network: FusedDecoder, run: ExecutionContext, parts: list[Tensor], output: torch.dtype) -> None:
    run.allocate()
    if network.piece:
        parts = parts[:1]
    if network.gathers:
        count, side, _, channels = parts[0].shape
        network.gather(run, _latents(channels, len(parts) * count, side))  # not torch.cat, which orders them anew
        parts = list(run.gathered.chunk(len(parts)))
    for i, part in enumerate(parts):
        ends = i == len(parts) - 1
        step = functools.partial(network.chunk, run, part, 0, output, _nothing, ends)
        run.scout(step, ends)
        step()


def _encode(network: FusedEncoder, run: ExecutionContext, parts: list[Tensor]) -> None:
    run.allocate()
    for part in parts:
        step = functools.partial(network.chunk, run, part, 0)
        run.scout(step)
        step()
    if network.gathers:
        network.gather(run, _nothing)


def _latents(channels: int, count: int, side: int) -> Tensor:
    """Return latents as they arrive, [count, side, side, channels] with channels outermost in memory, in fp32."""
    return torch.empty(channels, count, side, side, device=META, dtype=torch.float32).permute(1, 2, 3, 0)


def _frames(network: FusedEncoder, count: int, size: int) -> Tensor:
    return torch.empty(count, size, size, network.takes, device=META, dtype=torch.float32)


def _nothing(_: Any) -> None:
    """Ignore a result, which has no values."""
