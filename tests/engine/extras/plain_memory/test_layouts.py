"""Layouts by our own rules are those that torch's rules on the meta device give, without its compiler."""

import itertools
import subprocess
import sys

import pytest
import torch
from zerowaste_vae.engine.extras.plain_memory.layouts import RULES, ByRules, Layout

aten = torch.ops.aten


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


#: In rows, with channels last, transposed, with gaps, with axes of one and of none.
TENSORS = [
    empty(1, 8, 3, 5, 7), empty(1, 8, 1, 5, 7), empty(1, 3, 5, 7, 8).permute(0, 4, 1, 2, 3), empty(1, 8, 3, 1, 1),
    empty(2, 3, 5, 7, 8, dtype=torch.float16).permute(0, 4, 1, 2, 3), empty(2, 8, 3, 5, 7).transpose(3, 4),
    empty(1, 8, 6, 5, 7)[:, :, 1:4], empty(1, 8, 0, 5, 7), empty(1, 1, 3, 5, 7), empty(2, 8, 5, 7),
    empty(2, 5, 7, 8).permute(0, 3, 1, 2), empty(8, 6), empty(2, 8, dtype=torch.int64), empty(3), empty(),
]  # fmt: skip
PAIRS = list(itertools.product(TENSORS, repeat=2))


def calls(name):
    if name in ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "eq.Tensor"):
        return [*PAIRS, *((x, 3.0) for x in TENSORS)]
    if name in ("cat.default", "stack.default"):
        return [([x, y], dim) for x, y in PAIRS for dim in (0, 1, 2)] + [([x], 1) for x in TENSORS]
    if name in ("mean.dim", "linalg_vector_norm.default"):
        order = (2,) if name.startswith("linalg") else ()
        return [(x, *order, dims, keep) for x in TENSORS for dims in ([1], [0, 2]) for keep in (False, True)]
    if name == "native_group_norm.default":
        return [(x, empty(8), empty(8), x.shape[0], 8, x[0, 0].numel(), 4, 1e-6) for x in TENSORS
                if x.dim() > 3 and x.shape[1] == 8]  # fmt: skip
    if name in ("clone.default", "empty_like.default", "zeros_like.default"):
        return [(x,) for x in TENSORS]
    if name == "full_like.default":
        return [(x, 3.0) for x in TENSORS]
    if name == "addcmul.default":
        return [(*pair, y) for pair in PAIRS for y in (TENSORS[0], TENSORS[-1])]
    if name == "sum.dim_IntList":
        return [(x, [1]) for x in TENSORS]
    if name == "repeat.default":
        return [(x, times) for x in TENSORS for times in ([2, 1], [3, 1, 2, 1, 2])]
    if name in ("replication_pad3d.default", "reflection_pad3d.default"):
        return [(x, [1, 0, 2, 1, 0, 1]) for x in TENSORS if x.dim() == 5]
    if name == "upsample_nearest3d.default":
        return [(x, [6, 10, 14], None, 2.0, 2.0) for x in TENSORS if x.dim() == 5 and x.numel()]
    if name == "avg_pool3d.default":
        return [(x, kernel) for x in TENSORS for kernel in ([1, 2, 2], [2, 1, 1]) if x.dim() == 5]
    if name == "convolution.default":
        how = [1, 2, 2], [0, 1, 1], [1, 1, 1], False, [0, 0, 0], 1
        return [(x, empty(4, 8, 1, 3, 3, dtype=x.dtype), None, *how) for x in TENSORS if x.dim() == 5]
    if name == "native_layer_norm.default":
        return [(x, x.shape[-1:], None, None, 1e-6) for x in TENSORS if x.dtype.is_floating_point and x.dim() > 1]
    if name == "index.Tensor":
        places = empty(4, dtype=torch.int64)
        return [(x, [*before, places]) for x in TENSORS for before in ([], [None])]
    if name == "_softmax.default":
        halves = [x for x in TENSORS if x.dtype == torch.float16]
        return [(x, -1, False) for x in TENSORS if x.dtype.is_floating_point] + [(x, 1, True) for x in halves]
    if name == "bmm.default":
        return [(empty(3, 5, 6), empty(3, 6, 7)), (empty(3, 5, 6), empty(3, 7, 6).transpose(1, 2))]
    if name == "mm.default":
        return [(empty(7, 6), empty(6, 5)), (empty(7, 6), empty(5, 6).t())]
    if name.startswith("arange"):
        return [(7,)] if name.endswith("default") else [(3, 9), (0, 1)]
    if name == "addmm.default":
        return [(empty(5), empty(7, 6), empty(6, 5)), (empty(5), empty(7, 6), empty(5, 6).t())]
    if name == "mv.default":
        return [(empty(5, 6), empty(6))]
    if name in ("zeros.default", "ones.default"):
        return [([3, 0, 2],), ([],)]
    if name == "eye.default":
        return [(4,)]
    if name == "pow.Scalar":
        return [(2.0, x) for x in TENSORS]
    more = (2,) if name in ("clamp_min.default", "mul.Scalar", "pow.Tensor_Scalar", "remainder.Scalar") else ()
    return [(x, *more, *([x] if name == "floor_divide.default" else [])) for x in TENSORS]


def layout(x):
    """Steps between elements of an axis that has one do not matter."""
    return x.shape, [by for n, by in zip(x.shape, x.stride(), strict=True) if n > 1], x.dtype


@pytest.mark.parametrize("func", RULES, ids=str)
def test_they_are_torchs(func):
    makes = func in (aten.eye.default, aten.zeros.default, aten.ones.default, aten.arange.default, aten.arange.start)
    ruled, options = 0, {"device": torch.device("meta")} if makes else {}
    for args in calls(str(func).removeprefix("aten.")):
        try:
            expected = func(*args, **options)
        except (RuntimeError, IndexError, ValueError, AssertionError):  # of shapes that do not go together
            continue
        found = RULES[func](*args, **options)
        if found is None:
            continue
        ruled += 1
        made = [each.made() for each in ([found] if isinstance(found, Layout) else found)]
        assert list(map(layout, made)) == list(map(layout, expected if isinstance(expected, tuple) else [expected]))
    assert ruled


def test_what_has_values_is_left_to_torch():
    with ByRules():
        assert (torch.ones(2) + torch.ones(2)).tolist() == [2.0, 2.0]
        assert torch.cat([torch.ones(1), torch.zeros(1)]).tolist() == [1.0, 0.0]
        assert torch.eye(2).tolist() == [[1.0, 0.0], [0.0, 1.0]]
        assert (empty(2, 3) + empty(3)).is_meta


SCRIPT = """
import contextlib
import sys
from zerowaste_vae.engine.families import ARCHITECTURES
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.planning.make import make_planner
from zerowaste_vae.engine.planning.plain_walk import Torch
from zerowaste_vae.engine.precision.modes import Mode
import torch
for a in ARCHITECTURES:
    for dtype, off in ((torch.float16, []), (torch.float16, ["flash_attention"]), (torch.float32, [])):
        products = dtype == torch.float32
        config, options = a.published.config, DEFAULTS.switched(off=off)
        planner = make_planner(a, config, dtype, options, Mode(), lambda: not products, lambda: Torch(products, True))
        for half in ("encoder", "decoder"):
            if a.program(half, config) is not None:
                size, tile = (3 if a.temporal > 1 else 1, 16, 16), 8 * a.spatial
                planner.plan(half, size)
                if not off and not products:  # tiles have the same operators
                    with contextlib.suppress(InputError):  # of those that cut tiles of their own
                        planner.plan(half, size, Request(tiling="blended", tile=tile, overlap=tile // 2))
                assert not {"torch._dynamo", "sympy"} & sys.modules.keys(), (a.name, half, dtype, off)
print("planned")
"""


def test_no_plan_imports_torchs_compiler():
    """In a process of its own: others may have it."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout == "planned\n", done.stderr
