"""The kernels that a half is said to launch are those that any of its plans launches."""

import functools
import subprocess
import sys

import pytest
import torch
from zerowaste_vae.engine.families import by_name
from zerowaste_vae.engine.kernels.launching import recording
from zerowaste_vae.engine.kernels.targets import prebuilt
from zerowaste_vae.engine.options import DEFAULTS, Options
from zerowaste_vae.engine.planning import launches as found
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.runtime.parking import Parking

META, HALF = torch.device("meta"), torch.float16
HERE = prebuilt("RTX 50", 120, "C")
WINOGRAD = Options(winograd=True)


def needs(name, half, options=DEFAULTS, here=HERE, **more):
    one = by_name(name)
    return found.needs(one, one.published.config, half, HALF, options, here, **more)


def made(name, half, options, kind, work):
    """Return the launches of `work(network)`."""
    one = by_name(name)
    walk = FusedWalk(one, one.published.config, HALF, options)
    walk.use(half, found.uniform(one.program(half, one.published.config), kind))
    with recording(HERE) as calls, torch.inference_mode(False), torch.no_grad():
        work(walk.network(half))
    assert calls
    return found.keys_of(calls)


def latents(network, *sizes):
    """As they come: channels outermost."""
    return torch.empty(network.takes, *sizes, device=META).permute(1, 2, 3, 0)


def decoded(network, *, sizes=(5, 33, 41), chunk=1, frames=1, parking=None, output=torch.uint8):
    count, height, width = sizes
    run = network.plan(chunk, height, width, frames, output, META, parking)
    run.allocate()
    for first in range(0, count, chunk):
        z = latents(network, min(chunk, count - first), height, width)
        step = functools.partial(network.chunk, run, z, frames, output, lambda pixels: None, first + chunk >= count)
        run.scout(step)
        step()


def gathered(network, *, sizes=(5, 33, 41), frames=4):
    """The steps that see a whole clip take its latents as they come; then the rest of the network."""
    run = network.plan(*sizes, frames, torch.uint8, META, None, sizes[0])
    run.allocate()
    network.gather(run, latents(network, *sizes))
    step = functools.partial(network.chunk, run, run.gathered, frames, torch.uint8, lambda pixels: None, True)
    run.scout(step, True)
    step()


def in_tiles(network, *, sizes=(3, 40, 150), tile=(24, 30)):
    """Run the steps that see whole frames, then a tile of the rest."""
    count, height, width = sizes
    front = network.plan_front(count, height, width, META)
    front.allocate()
    network.front_chunk(front, latents(network, *sizes), lambda features: None)
    run = network.plan_tile(count, *tile, 2, META)
    run.allocate()
    features = torch.empty(count, *tile, network.features, dtype=HALF, device=META)
    network.tile_chunk(run, features, 2, lambda pixels: None)


def encoded(network, *, sizes=(9, 200, 136), chunk=1, frames=2, parking=None):
    count, height, width = sizes
    run = network.plan(chunk, height, width, frames, META, parking)
    run.allocate()
    for a, b in [(0, 1), *((i, i + 4) for i in range(1, count, 4))]:
        step = functools.partial(network.chunk, run, torch.empty(b - a, height, width, 3, device=META), frames)
        run.scout(step)
        step()


BANDS = Parking(None, 4 << 20, near=1 << 60)
SOME = Parking(frozenset(["up_blocks.2.resnets.0.conv1"]), 1 << 20, near=1 << 60)


@pytest.mark.parametrize(
    ("name", "half", "options", "kind", "work"),
    [
        ("seedvr2", "decoder", DEFAULTS, None, decoded),
        ("seedvr2", "decoder", DEFAULTS, None, functools.partial(decoded, chunk=3, frames=0, sizes=(6, 90, 160))),
        ("seedvr2", "decoder", DEFAULTS, None, functools.partial(decoded, parking=BANDS, output=torch.float16)),
        ("seedvr2", "decoder", WINOGRAD, "fp8", functools.partial(decoded, parking=SOME, sizes=(5, 90, 160))),
        ("seedvr2", "decoder", WINOGRAD, "int8", functools.partial(decoded, parking=BANDS)),
        ("seedvr2", "decoder", DEFAULTS, "fp8", in_tiles),
        ("seedvr2", "encoder", DEFAULTS, None, encoded),
        ("seedvr2", "encoder", WINOGRAD, None, functools.partial(encoded, parking=BANDS, sizes=(9, 720, 1280))),
        ("wan2.1", "decoder", DEFAULTS, None, functools.partial(decoded, sizes=(5, 90, 160), frames=3)),
        ("wan2.1", "encoder", DEFAULTS, "int8", encoded),
        ("flux", "decoder", DEFAULTS, None, functools.partial(decoded, sizes=(1, 128, 128))),
        ("flux", "decoder", DEFAULTS, None,
         functools.partial(decoded, sizes=(1, 96, 200), parking=Parking(None, 1 << 20, streams=1))),
        ("mochi", "decoder", DEFAULTS, None, functools.partial(decoded, sizes=(5, 60, 106))),
        ("hunyuanvideo1.5", "decoder", DEFAULTS, None, gathered),
    ],
)  # fmt: skip
def test_no_plan_launches_others(name, half, options, kind, work):
    extra = made(name, half, options, kind, work) - needs(name, half, options, kind=kind)
    assert sorted(map(str, extra)) == []


def test_what_attention_takes_of_any_frame():
    """A small picture, some thousand pixels a side, and the largest."""
    here = needs("flux", "decoder")
    for side in (40, 100, 150, 190, 260):
        assert made("flux", "decoder", DEFAULTS, None, functools.partial(decoded, sizes=(1, side, side))) <= here


def test_policies_forms_and_toggles_show():
    """None of them launches the kernels of another."""
    plain = needs("seedvr2", "decoder")
    others = [
        needs("seedvr2", "decoder", DEFAULTS.switched(off=["composed_upsample"])),
        needs("seedvr2", "decoder", kind="fp8"), needs("seedvr2", "decoder", half_accumulate=True),
        needs("seedvr2", "decoder", here=prebuilt("RTX 30", 86, "A")), needs("seedvr2", "encoder"),
    ]  # fmt: skip
    assert all(other - plain for other in others)
    # The Winograd form is in no set: what runs beside it is among the direct form's kernels.
    for half in ("decoder", "encoder"):
        assert needs("seedvr2", half, WINOGRAD) < needs("seedvr2", half)
    assert plain < needs("seedvr2", "decoder", kind="fp8")  # any convolution may stay in 16 bit


@pytest.mark.parametrize(("name", "half"), [("hunyuanimage", "decoder"), ("wan2.2", "encoder"), ("ltx", "decoder")])
def test_sets_hold_what_runs_beside_written_kernels(name, half):
    """Norms over wide groups, ends of another type."""
    assert found.missing("C", needs(name, half, WINOGRAD)) is None


def test_transformer():
    """A transformer launches what lies between its products."""
    kernels = {one.kernel for one in needs("minimaxh3", "decoder", kind="int8")}
    assert {f"tokens.{word}_kernel" for word in ("normalised", "rotated", "rounded", "summed")} == kernels


def test_halves_without_fused_kernels_need_none():
    assert needs("cosmos", "decoder") == frozenset()


def test_triton_need_not_be_there():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from zerowaste_vae.engine.families import DEFAULT\n"
        "from zerowaste_vae.engine.kernels.targets import prebuilt\n"
        "from zerowaste_vae.engine.options import DEFAULTS\n"
        "from zerowaste_vae.engine.planning.launches import needs\n"
        "here = prebuilt('RTX 50', 120, 'C')\n"
        "assert needs(DEFAULT, DEFAULT.published.config, 'decoder', torch.float16, DEFAULTS, here)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
