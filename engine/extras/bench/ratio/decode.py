"""Rows of `bench decode` and `encode` at a card's ratio, beside those with products as they are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..calls import settle
from ..measure import Bench, Case
from ..schema import OURS
from ..speed_limit import Rates, work
from .foreign import refuse_foreign
from .run import PLAIN, Ratio
from .text import RatioError

_KINDS = {"int8": "s32", "fp16_fast": "f16"}


def rows(bench: Bench, case: Case, ratio: Ratio) -> Iterator[dict[str, Any]]:
    """Measure this pack's kernels in the card's form, first with products as they are, then at its ratio, whose speed
    limit is that of its products.

    Args:
        bench: of the weights; it must keep digests of results.
        case: the clip.
        ratio: the card's.

    Raises: RatioError where both do not give the same bits.
    """
    digests, kind, own = [], _KINDS.get(case.precision, "f32"), bench.rates(case.precision)
    for factors, who in ((PLAIN, "products as they are"), (ratio.factors, f"at the ratio of {ratio.gpu.name}")):
        here = ratio.scaled(factors)
        bench.ceilings[case.precision] = Rates(f"mma.sync {kind}", here.tflops(kind), own.copy)
        with here.running():
            if factors is PLAIN:
                _refuse_foreign(bench, case)
            row = bench.ours(case)
        row |= {"who": f"{OURS}, {who}", "ratio": {"card": ratio.gpu.name, "factors": dict(factors)}}
        yield row
        digests.append(row.get("digest"))
    if digests[0] != digests[1]:
        raise RatioError(f"at the ratio of {ratio.gpu.name} a {case.half} gives other bits than with products as they "
                         "are: its time says nothing")  # fmt: skip


def _refuse_foreign(bench: Bench, case: Case) -> None:
    """Run a case once. Raises RatioError where torch's own libraries make its products."""
    settle(bench.device)
    vae = bench.load(case.precision)
    inputs, run = case.input(vae), vae.decode if case.half == "decoder" else vae.encode
    size = vae.architecture.latents(case.frames), case.height // vae.spatial, case.width // vae.spatial
    whole = work(vae.architecture, vae.model.config, case.half, *size).flop
    refuse_foreign(partial(run, inputs, **case.options), whole)
