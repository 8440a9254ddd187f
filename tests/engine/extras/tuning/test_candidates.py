"""Candidates are a handful for each kind of layer of every family, and plans count on all of them."""

from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.extras.tuning.candidates import candidates, table
from zerowaste_vae.engine.extras.tuning.layers import LEAST, Layer, layers
from zerowaste_vae.engine.families import ARCHITECTURES, DEFAULT
from zerowaste_vae.engine.kernels.conv3d import schedules
from zerowaste_vae.engine.kernels.conv3d.schedules import Schedule
from zerowaste_vae.engine.kernels.conv3d.tuned import Kind
from zerowaste_vae.engine.kernels.conv3d.types import HALF_DEPTH
from zerowaste_vae.engine.kernels.targets import FP8, capabilities
from zerowaste_vae.engine.loader import PRECISIONS
from zerowaste_vae.engine.options import Options
from zerowaste_vae.engine.planning.fused_walk import FusedWalk

TARGETS = (80, 86, 89, 90, 100, 120)


def walk(architecture, **options):
    return FusedWalk(architecture, architecture.published.config, PRECISIONS[architecture.native], Options(**options))


@pytest.fixture(scope="module")
def kinds():
    """Return the kinds of the families with most of them, in all types."""
    found = {}
    for architecture in ARCHITECTURES[:3]:
        for layer in layers(walk(architecture), capabilities("sm_90", 90, (3, 7))):
            found[layer.kind] = layer
    for kind in list(found):
        types = [(torch.int8, "i32"), (FP8, "f32"), (FP8, "f16"), (torch.float16, "f16")]
        for dtype, accumulate in types:
            name = str(dtype).removeprefix("torch.")
            found[kind._replace(operands=name, accumulate=accumulate)] = None
    return list(found)


@pytest.mark.parametrize("sm", TARGETS)
def test_candidates(kinds, sm):
    """Candidates are few, and keep what plans count on."""
    here = capabilities(f"sm_{sm}", sm, (3, 7))
    most = 0
    for kind in kinds:
        if not here.supports(kind.dtype):
            continue
        found = candidates(here, kind)
        most = max(most, len(found))
        assert found[0] == table(here, kind) and len(set(found)) == len(found) <= 8, kind
        for s in found[1:]:
            assert s.positions >= (64 if kind.small else 128), (kind, s)
            assert min(s.columns // s.slices, s.tail or s.columns) >= min(16, kind.outputs // 4), (kind, s)
            if kind.dtype == FP8 and kind.accumulate == "f16":
                assert s.depth <= HALF_DEPTH, (kind, s)
            whole = kind.channels if not s.rest and kind.channels % s.depth == 0 else kind.channels * kind.row
            assert (whole - s.rest * ((whole % s.depth) // s.rest if s.rest else 0)) % s.depth == 0, (kind, s)
    assert most > 2


def plain(schedule, kind):
    """The same order of tiles has one name: groups are of tiles beside each other."""
    return replace(schedule, group=1) if kind.phases == 1 and kind.outputs <= schedule.columns else schedule


def test_measured_tiles_are_tried(monkeypatch):
    """Started from another generation's table, its fp16 tiles for SeedVR2 are still found."""
    here, own = capabilities("sm_90", 90, (3, 7)), {}
    all_layers = layers(walk(DEFAULT), here)
    for layer in all_layers:
        own[layer.kind] = plain(table(here, layer.kind), layer.kind)
    monkeypatch.setitem(schedules.SCHEDULES, 90, schedules.SCHEDULES[80])
    tried = {layer.kind: [plain(s, layer.kind) for s in candidates(here, layer.kind)] for layer in all_layers}
    missing = [str(kind) for kind, schedules in tried.items() if own[kind] not in schedules]
    covered = sum(layer.share for layer in all_layers if str(layer.kind) not in missing)
    assert covered > 0.95 * sum(layer.share for layer in all_layers), missing


def test_layers():
    """A VAE has its kinds of layers, those with most work first."""
    here = capabilities("sm_90", 90, (3, 7))
    found = layers(walk(DEFAULT), here)
    assert found == sorted(found, key=lambda layer: -layer.share)
    assert len({layer.kind for layer in found}) == len(found) > 10
    assert all(layer.kind.row > 1 and layer.share >= LEAST and layer.flop > 0 for layer in found)
    assert {layer.kind.phases for layer in found} == {1, 4, 8}
    assert any(layer.kind.small for layer in found) and any(layer.kind.strided for layer in found)
    assert [Layer.from_dict(layer.as_dict()) for layer in found] == found


def test_kind_text():
    """A kind of layer reads as text."""
    kind = Kind("float8_e4m3fn", "f16", 128, 256, True, 8, 2, True, True)
    assert str(kind) == ("float8_e4m3fn summed in f16 128->256 upsampling time and space strided with sums small "
                         "planes")  # fmt: skip
    assert str(Kind("float16", "f32", 128, 256, False, 1, 3, False, False)) == "float16 128->256"
    assert Schedule(**vars(Schedule(1, 2, 3, 4, 5))) == Schedule(1, 2, 3, 4, 5)
