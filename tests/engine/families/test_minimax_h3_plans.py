"""Plans of self-tiling networks count what runs them: kernels between products, or torch's own operators."""

import pytest
import torch
from zerowaste_vae.engine.families import minimax_h3
from zerowaste_vae.engine.families.minimax_h3.running.plans import torch_bytes
from zerowaste_vae.engine.families.minimax_h3.running.transformer import tiles_together, tokens_of
from zerowaste_vae.engine.families.minimax_h3.tokens import Tokens, turns
from zerowaste_vae.engine.kernels.tokens import gated, normalised, rotated, rounded
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.planning.dryrun import PeakMemory
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.planning.planner import Planner

SIZE = 7, 16, 16
CONFIG = minimax_h3.ARCHITECTURE.published.config
STEP = next(s for s in minimax_h3.ARCHITECTURE.program("decoder", CONFIG).steps if isinstance(s, Tokens))


def taken(work, *shapes, dtype):
    """Bytes that work takes at its peak beside its operands of these shapes."""
    with PeakMemory() as memory:
        operands = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
        work(*operands)
    return memory.live - sum(t.nbytes for t in operands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_torchs_operators_stay_within_what_is_counted(dtype):
    how = {"backend": "reference"}
    tokens, head, w, g = tokens_of(STEP, *SIZE), STEP.head, STEP.width, STEP.gates
    rows = 2 * tokens
    table = turns(*SIZE, head, STEP.behind, torch.device("meta"))
    passes = {
        "gated": taken(lambda x, out: gated(x, out, **how), (rows, 2 * g), (rows, g), dtype=dtype),
        "rotated": taken(lambda x: rotated(x, table, head, 1e-6, **how), (rows, 3 * w), dtype=dtype),
        "normalised": taken(lambda x, y, weight, out: normalised(x, weight, 1e-6, out, y=y, scale=weight, **how),
                            (rows, w), (rows, w), (w,), (rows, w), dtype=dtype),
        "rounded": taken(lambda x, out: rounded(x, out, zeroed=True, **how), (rows, w), (rows, w), dtype=dtype),
    }  # fmt: skip
    most = torch_bytes(STEP, rows, dtype)
    assert 0.9 * most < max(passes.values()) <= most, passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_plans_without_kernels_count_torchs_operators(dtype):
    """As in fp32 with the compiled sets, which have kernels for types of 16 bit alone."""
    planners = [Planner(FusedWalk(minimax_h3.ARCHITECTURE, CONFIG, dtype, DEFAULTS), lambda: True) for _ in range(2)]
    planners[1].walk.lacks = lambda half: "no kernels here"
    kernels, operators = (one.plan("decoder", (13, 20, 24), limits=Limits(host=None)) for one in planners)
    tokens = tokens_of(STEP, *SIZE)
    rows = tiles_together(tokens, 4, torch.device("cuda")) * tokens
    assert operators.peak_bytes - kernels.peak_bytes == torch_bytes(STEP, rows, dtype) > 0
