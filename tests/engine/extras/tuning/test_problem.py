"""A layer's call is checked against the reference, and one that computes something else is found."""

from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.extras.tuning import problem as module
from zerowaste_vae.engine.extras.tuning.candidates import candidates
from zerowaste_vae.engine.extras.tuning.layers import Layer, layers
from zerowaste_vae.engine.extras.tuning.problem import checked, problem, sized, wrong
from zerowaste_vae.engine.families import ARCHITECTURES, DEFAULT
from zerowaste_vae.engine.kernels.conv3d.schedules import ROW_BLOCK, Schedule
from zerowaste_vae.engine.kernels.conv3d.tuned import Kind
from zerowaste_vae.engine.kernels.targets import capabilities, interpreted, triton_version
from zerowaste_vae.engine.loader import PRECISIONS
from zerowaste_vae.engine.options import Options
from zerowaste_vae.engine.planning.fused_walk import FusedWalk

CPU = torch.device("cpu")
runs = pytest.mark.skipif(torch.cuda.is_available() or triton_version() is None, reason="needs Triton's interpreter")


def narrow(layer, channels=16, outputs=16, frame=(3, 5)):
    """As few products as the interpreter can bear."""
    kind = layer.kind._replace(channels=channels if layer.kind.dtype.itemsize == 2 else 32, outputs=outputs)
    return replace(layer, kind=kind, frames=1, frame=frame, groups=4 if layer.groups else 0)


@pytest.fixture(scope="module")
def some():
    """One layer of each form and window."""
    found, here = {}, capabilities("sm_90", 90, (3, 7))
    for architecture in ARCHITECTURES[:2]:
        walk = FusedWalk(architecture, architecture.published.config, PRECISIONS["fp16"], Options())
        for layer in layers(walk, here):
            kind = layer.kind
            found.setdefault((kind.phases, layer.kernel, layer.stride, kind.sums), layer)
    return list(found.values())


@runs
def test_forms(some):
    """Every form of call is right."""
    assert interpreted()
    here = capabilities("interpreter", 90, triton_version())
    assert {layer.kind.phases for layer in some} >= {1, 4, 8}
    for layer in some:
        layer = narrow(layer)
        made = problem(layer, CPU, torch.Generator().manual_seed(0))
        want = torch.empty_like(made.out)
        made.reference(want)
        assert wrong(layer, here, candidates(here, layer.kind)[0], made, want) is None, layer
    worse = want + want.float().std().half() / 16 * torch.ones_like(want)
    assert "against the reference" in wrong(layer, here, candidates(here, layer.kind)[0], made, worse)


@pytest.fixture
def plain():
    kind = Kind("float16", "f32", 16, 16, True, 1, 3, False, True)
    return Layer(kind, 0.5, (3, 3, 3), (1, 1, 1), 0, False, (1, 1, 1), (0, 0), 1, (3, 5), 4, True, False, 1,
                 "float16")  # fmt: skip


def test_sums_and_repeat(plain, monkeypatch):
    """Wrong sums, and other bits the second time, are found."""
    made, here = problem(plain, CPU, torch.Generator().manual_seed(0)), capabilities("interpreter", 90, (3, 7))
    want = torch.empty_like(made.out)
    sums, runs = made.reference(want), []

    def launch(*args, out=want, off=0.0, drift=0.0):
        runs.append(1)
        made.out.copy_(out)
        made.out[0, 0, 0, 0] += drift * len(runs)
        return replace(sums, data=sums.data + off)

    tile = Schedule(64, 16, 16, 4, 2)
    for options, word in (({}, None), ({"off": 1.0}, "of its sums"), ({"drift": 0.002}, "other bits")):
        runs.clear()
        monkeypatch.setattr(type(made), "launch", lambda self, *a, options=options: launch(*a, **options))
        why = wrong(plain, here, tile, made, want)
        assert why is None if word is None else word in why
    monkeypatch.setattr(type(made), "launch", lambda self, *a: launch(out=torch.full_like(want, torch.nan)))
    assert "nan" in wrong(plain, here, tile, made, want)


def test_size():
    """Calls fit small cards."""
    for layer in layers(FusedWalk(DEFAULT, DEFAULT.published.config, torch.float16, Options()),
                        capabilities("sm_90", 90, (3, 7))):  # fmt: skip
        small = sized(layer)
        assert module._bytes(small) <= module.MOST_BYTES and small.frames >= 1
        assert small.frame == layer.frame or small.frame[0] % ROW_BLOCK == 0
        run, small = problem(checked(layer), torch.device("meta")), checked(layer)
        assert run.out.shape[0] == small.frames * small.phases[0] and run.out.is_meta
