"""The VAE object: what users call, with what they get wrong."""

import copy
import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae import Cancelled, InputError, PlanError, load
from zerowaste_vae.engine.encoding import alone
from zerowaste_vae.engine.extras.bench.metrics import compare, tile_edges
from zerowaste_vae.engine.families import ARCHITECTURES
from zerowaste_vae.engine.planning.budget import Machine


def pixels(raw):
    return (raw.float().clamp(-1, 1) * 0.5 + 0.5).permute(0, 2, 3, 4, 1)


def test_decode_is_the_scaled_network(vae, noise, atol):
    z = noise(2, 16, 3, 4, 5)
    out = vae.decode(z * 0.9152)
    assert out.shape == (2, 9, 32, 40, 3)
    assert (out.dtype, out.device.type, out.is_contiguous()) == (torch.float32, "cpu", True)
    torch.testing.assert_close(out, pixels(vae.model.decoder(z)), rtol=0, atol=atol)
    torch.testing.assert_close(vae.decode(z[0] * 0.9152), out[:1], rtol=0, atol=atol)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunk_is_memory_only(vae, noise, chunk, atol):
    z = noise(1, 16, 5, 3, 3)
    torch.testing.assert_close(vae.decode(z, chunk=chunk), vae.decode(z, chunk=5), rtol=0, atol=atol)


@pytest.mark.parametrize("options", [{}, {"tiling": "blended", "tile": 32, "overlap": 16}])
def test_outputs(vae, noise, options):
    z = noise(1, 16, 2, 6, 7)
    full = vae.decode(z, **options)
    assert full.min() >= 0
    assert full.max() <= 1
    half, byte = (vae.decode(z, output=o, **options) for o in ("float16", "uint8"))
    assert (half.dtype, byte.dtype) == (torch.float16, torch.uint8)
    assert (half.float() - full).abs().max() < 2e-3
    assert (byte.float() - full * 255).abs().max() <= 0.75


@pytest.mark.parametrize("seed", [None, 3])
def test_another_default_type_of_the_caller(vae, noise, seed):
    """Latents and their noise stay float32."""
    video = pixels(noise(1, 3, 5, 16, 16).clamp(-1, 1))
    expected = vae.encode(video, seed=seed)
    torch.set_default_dtype(torch.float16)
    try:
        made = vae.encode(video, seed=seed), torch.cat(list(vae.encode_stream(video[0], count=5, seed=seed)), 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(each, expected) for each in made)


def test_encode_is_the_scaled_mean(vae, noise, atol):
    x = noise(1, 3, 9, 19, 26).clamp(-1, 1)
    video = pixels(x)
    z = vae.encode(video)
    assert z.shape == (1, 16, 3, 2, 3)
    torch.testing.assert_close(z, vae.model.encoder(x)[:, :16] * 0.9152, rtol=0, atol=atol)
    assert torch.equal(vae.encode(video[0]), z)
    assert torch.equal(vae.encode(torch.cat((video, video[:, :3]), 1)), z)
    sampled = vae.encode(video, seed=3)
    assert torch.equal(sampled, vae.encode(video, seed=3))
    assert not torch.equal(sampled, z)


def test_encode_takes_bytes(vae, noise):
    byte = (noise(5, 16, 16, 3) * 60 + 128).clamp(0, 255).to(torch.uint8)
    torch.testing.assert_close(vae.encode(byte), vae.encode(byte.float() / 255), rtol=0, atol=1e-5)


def test_round_trip_shapes(vae, noise):
    for count, height, width in ((1, 8, 8), (5, 23, 40), (13, 16, 9)):
        z = vae.encode(torch.rand(count, height, width, 3))
        assert vae.decode(z).shape == (1, count, height // 8 * 8, width // 8 * 8, 3)


# -- blended tiles --------------------------------------------------------------------------------------------------


def test_one_tile_is_the_untiled_result(vae, noise):
    z = noise(1, 16, 2, 5, 6)
    assert torch.equal(vae.decode(z, tiling="blended", tile=512, overlap=64), vae.decode(z))
    assert torch.equal(vae.decode(z, tiling="exact"), vae.decode(z))
    assert torch.equal(vae.decode(z, tiling="untiled"), vae.decode(z))
    video = torch.rand(1, 5, 40, 48, 3)
    assert torch.equal(vae.encode(video, tiling="blended", tile=512), vae.encode(video))


def varied_latent(seed, frames, height, width):
    """Amplitude and offset change across the frame: what makes per-tile statistics differ."""
    g = torch.Generator().manual_seed(seed)
    resize = torch.nn.functional.interpolate
    offset = resize(torch.randn(frames, 16, 4, 5, generator=g), (height, width), mode="bicubic").transpose(0, 1)
    amplitude = resize(torch.rand(1, 1, 3, 4, generator=g), (height, width), mode="bilinear")[:, :, None] * 1.5 + 0.2
    return (offset[None] + 0.6 * torch.randn(1, 16, frames, height, width, generator=g)) * amplitude


@pytest.fixture(scope="module")
def varied(vae):
    """Latents, and the frames they are without tiles."""
    latents = [varied_latent(seed, 1, 20, 24) for seed in range(3)]
    return latents, [vae.decode(z)[0, 0] for z in latents]


def seam_ratio(vae, varied, tile, overlap):
    """The largest step of tiled - untiled at a tile edge, over the median step elsewhere; clips count as frames."""
    latents, whole = varied
    tiled = [vae.decode(z, tiling="blended", tile=tile, overlap=overlap)[0, 0] for z in latents]
    for frame in tiled:
        assert (frame.amax((0, 2)) > 0).all()
        assert (frame.amax((1, 2)) > 0).all()
    found = compare(tiled, whole, *tile_edges(*whole[0].shape[:2], tile, overlap))
    return max(found.seam_rows.ratio, found.seam_columns.ratio)


@pytest.mark.parametrize(("tile", "overlap"), [(128, 64), (100, 20), (64, 16)])
def test_tiles_leave_no_seam(vae, varied, tile, overlap):
    assert seam_ratio(vae, varied, tile, overlap) <= 2.0


def test_the_seam_measure_sees_a_hard_cut(vae, varied):
    assert seam_ratio(vae, varied, 96, 0) > 2.0


@pytest.mark.parametrize(("height", "width"), [(3, 11), (11, 3), (5, 5), (7, 9)])
def test_tiles_of_odd_frames(vae, noise, height, width):
    z = noise(1, 16, 2, height, width)
    assert vae.decode(z, tiling="blended", tile=32, overlap=9, chunk=1).shape == (1, 5, 8 * height, 8 * width, 3)


def test_tiled_encode_matches_the_untiled_grid(vae):
    video = torch.rand(1, 6, 75, 101, 3, generator=torch.Generator().manual_seed(0))
    whole, tiled = vae.encode(video), vae.encode(video, tiling="blended", tile=64, overlap=32)
    assert tiled.shape == whole.shape == (1, 16, 2, 9, 12)
    assert (tiled.abs().amax((0, 1, 2, 4)) > 0).all()
    assert (tiled - whole).square().mean() < 0.1 * whole.square().mean()


# -- progress, cancel, precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"tiling": "blended", "tile": 32, "overlap": 16}])
def test_progress_counts_up_to_the_total(vae, noise, options):
    seen = []
    vae.decode(noise(1, 16, 5, 6, 6), chunk=2, progress=lambda done, total: seen.append((done, total)), **options)
    assert [done for done, _ in seen] == list(range(1, seen[-1][1] + 1))
    assert len(seen) >= 3
    seen.clear()
    vae.encode(torch.rand(9, 48, 48, 3), progress=lambda done, total: seen.append((done, total)), **options)
    assert seen[-1][0] == seen[-1][1] == len(seen)


@pytest.mark.parametrize("options", [{}, {"tiling": "blended", "tile": 32, "overlap": 16}])
def test_cancel_stops_within_a_chunk(vae, noise, options):
    z, done = noise(1, 16, 6, 6, 6), []
    expected = vae.decode(z, chunk=1, **options)
    with pytest.raises(Cancelled):
        vae.decode(z, chunk=1, progress=lambda n, _: done.append(n), cancel=lambda: len(done) >= 2, **options)
    assert len(done) == 2
    with pytest.raises(Cancelled):
        vae.encode(torch.rand(9, 48, 48, 3), cancel=lambda: True, **options)
    assert torch.equal(vae.decode(z, chunk=1, **options), expected)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.15), ("fp16", 0.02)])
def test_half_precisions_stay_close(vae, vae_file, noise, precision, bound):
    low = load(vae_file, precision=precision, device="cpu")
    assert (low.precision, low.dtype.itemsize) == (precision, 2)
    z = noise(1, 16, 2, 4, 4)
    difference = (low.decode(z) - vae.decode(z)).square().mean().sqrt()
    assert 0 < difference < bound
    assert low.decode(z).dtype == torch.float32


def test_nothing_global_changes(vae, noise):
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    vae.decode(noise(1, 16, 1, 2, 2))
    assert (torch.is_grad_enabled(), torch.get_num_threads()) == (grad, threads)
    assert not any(p.requires_grad for p in vae.model.parameters())


# -- what users get wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latent", "says"),
    [
        (torch.zeros(1, 8, 1, 4, 4), r"\[1, 8, 1, 4, 4\]"),
        (torch.zeros(16, 4, 4), r"\[16, 4, 4\]"),
        (torch.zeros(1, 16, 0, 4, 4), "empty"),
        (torch.zeros(1, 16, 1, 0, 4), "empty"),
        (torch.full((1, 16, 1, 4, 4), float("nan")), "NaN"),
        (torch.full((1, 16, 1, 4, 4), float("inf")), "NaN or Inf"),
    ],
)
def test_bad_latents(vae, latent, says):
    with pytest.raises(InputError, match=says):
        vae.decode(latent)
    with pytest.raises(InputError, match=says):
        vae.decode_raw(latent)


@pytest.mark.parametrize(
    ("video", "says"),
    [
        (torch.zeros(0, 16, 16, 3), "no frames"),
        (torch.zeros(5, 16, 16, 4), r"\[5, 16, 16, 4\]"),
        (torch.zeros(3, 16, 16), r"\[3, 16, 16\]: give movedim\(-3, -1\) of them"),
        (torch.zeros(5, 7, 16, 3), "16x7 are too small"),
        (torch.full((1, 8, 8, 3), float("nan")), "NaN"),
    ],
)
def test_bad_videos(vae, video, says):
    with pytest.raises(InputError, match=says):
        vae.encode(video)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tiling": "blended", "tile": 8}, InputError, "tile=8 is too small"),
        ({"tiling": "blended", "tile": 64, "overlap": 64}, InputError, "overlap=64 must be smaller"),
        ({"tiling": "best"}, InputError, "tiling='best'"),
        ({"chunk": -2}, InputError, "chunk=-2"),
        ({"vram_gb": -1.0}, InputError, "vram_gb=-1.0"),
        ({"vram_gb": 0.001}, PlanError, "32x32 needs .* even in the smallest tiles and the target is 0.00 GB"),
        ({"vram_gb": 0.001, "tiling": "untiled"}, PlanError, "32x32 untiled needs"),
    ],
)
def test_bad_options(vae, noise, options, error, says):
    with pytest.raises(error, match=says):
        vae.decode(noise(1, 16, 1, 4, 4), **options)
    if "chunk" not in options:
        with pytest.raises(error, match=says):
            vae.encode(torch.rand(1, 32, 32, 3), **options)


def test_bad_output_name(vae, noise):
    with pytest.raises(InputError, match="output='int8'"):
        vae.decode(noise(1, 16, 1, 4, 4), output="int8")


# -- fused operators, here through their references ----------------------------------------------------------------


@pytest.fixture
def fused_vae(vae_file, monkeypatch):
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    return load(vae_file, device="cpu")


@pytest.mark.parametrize("options", [{}, {"chunk": 1}, {"chunk": 3}])
def test_fused_decode_equals_plain(vae, fused_vae, noise, atol, options):
    z = noise(2, 16, 3, 3, 4)
    assert fused_vae.plan_decode(3, 3, 4, **options).fused
    torch.testing.assert_close(fused_vae.decode(z, **options), vae.decode(z), rtol=0, atol=atol)
    byte = fused_vae.decode(z, output="uint8", **options)
    assert (byte.float() - vae.decode(z) * 255).abs().max() <= 0.51


def test_fused_tiles_equal_plain_tiles(vae, fused_vae, noise, atol):
    z, seen = noise(2, 16, 3, 4, 5), []
    options = {"tiling": "blended", "tile": 24, "overlap": 8, "chunk": 2}
    assert fused_vae.plan_decode(3, 4, 5, **options).fused
    tiled = fused_vae.decode(z, progress=lambda done, total: seen.append((done, total)), **options)
    torch.testing.assert_close(tiled, vae.decode(z, **options), rtol=0, atol=atol)
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]
    half = fused_vae.decode(z[:1], output="float16", **options)
    assert (half.float() - tiled[:1]).abs().max() < 2e-3


def test_fused_encode_equals_plain(vae, fused_vae, atol):
    video = torch.rand(2, 6, 19, 26, 3, generator=torch.Generator().manual_seed(1))
    assert fused_vae.plan_encode(2, 2, 3).fused
    torch.testing.assert_close(fused_vae.encode(video), vae.encode(video), rtol=0, atol=atol)


def test_exact_tiles_equal_whole_frames(fused_vae, noise, monkeypatch):
    """Bands of 64 rows, with every history in host memory; without room for those the planner's choice runs."""
    monkeypatch.setattr(Machine, "host", lambda _, gb: int((gb or 1) * 2**30))
    z, tiles = noise(1, 16, 3, 17, 2), {"tiling": "exact", "tile": 64}
    plan = fused_vae.plan_decode(*z.shape[2:], **tiles)
    assert (plan.parking.keys, plan.parking.rows) == (None, 64)
    assert plan.host_bytes > 0
    whole, bands = fused_vae.decode(z), fused_vae.decode(z, **tiles)
    assert fused_vae.last_report.parked_gb == plan.host_bytes / 2**30
    video = (noise(9, 136, 16, 3) * 50 + 128).clamp(0, 255).byte()
    # Torch's convolutions on a CPU round by their shapes; on a GPU the bits are equal.
    torch.testing.assert_close(bands, whole, rtol=0, atol=1.5e-5)
    torch.testing.assert_close(fused_vae.encode(video, **tiles), fused_vae.encode(video), rtol=0, atol=1.5e-5)
    assert torch.equal(fused_vae.decode(z, vram_gb=4, ram_gb=1e-6, **tiles), whole)
    assert fused_vae.last_report.parked_gb == 0
    assert fused_vae.plan_encode(3, 17, 2, vram_gb=4, ram_gb=1e-6, **tiles).parking is None


def test_fused_progress_cancel_and_switch(fused_vae, noise):
    z, seen = noise(1, 16, 4, 3, 3), []
    whole = fused_vae.decode(z, chunk=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 4) for i in (1, 2, 3, 4)]
    with pytest.raises(Cancelled):
        fused_vae.decode(z, chunk=1, cancel=lambda: True)
    assert torch.equal(fused_vae.decode(z, chunk=1), whole)
    fused_vae.release()
    assert torch.equal(fused_vae.decode(z, chunk=1), whole)
    fused_vae.triton_fusion = False
    assert not fused_vae.plan_decode(4, 3, 3).fused
    assert not torch.equal(fused_vae.decode(z), whole)


def test_smaller_steps(fused_vae):
    """Fused shrinks its steps before it refuses."""
    roomy = fused_vae.plan_decode(8, 32, 32)
    tight = fused_vae.plan_decode(8, 32, 32, vram_gb=(roomy.peak_bytes - 1) / 2**30)
    assert tight.fused
    assert tight.steps.frames < roomy.steps.frames
    assert tight.peak_bytes < roomy.peak_bytes
    with pytest.raises(PlanError, match=r"256x256 needs .* even in the smallest tiles"):
        fused_vae.plan_decode(8, 32, 32, vram_gb=0.05)


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_vae_nobody_has_is_gone_at_once(vae_file, noise, precision, no_collector):
    """With its weights, and not when the garbage collector comes."""
    vae, z = load(vae_file, precision, device="cpu"), noise(1, 16, 3, 4, 4)
    vae.encode(vae.decode(z))
    next(vae.stream(z, chunk=1))
    vae.plan_decode(3, 40, 60)
    with pytest.raises(Cancelled):
        vae.decode(z, cancel=lambda: True)
    here = [*map(weakref.ref, (vae, vae.planner, vae.model, *vae.model.parameters()))]
    del vae
    if sys.version_info < (3, 11):  # its context managers keep a stream's end, and that its frames
        gc.collect()
    assert [ref() for ref in here if ref() is not None] == []


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_no_garbage(architecture, no_collector):
    """Also where the halves share what lies beside them in the file."""
    with torch.device("meta"):
        network = architecture.build(architecture.published.config)
    other, was = copy.deepcopy(network), weakref.ref(network)
    del network
    assert was() is None
    beside = {name for half in (other.encoder, other.decoder) if half is not None for name in half.beside()}
    for name in beside:
        own = getattr(other, name)
        assert all(half.part("/" + name) is own for half in (other.encoder, other.decoder)
                   if half is not None and name in half.beside())  # fmt: skip
    was = weakref.ref(other)
    own = None
    del other
    assert was() is None


def test_a_deep_copy_has_weights_of_its_own(vae_file, noise):
    vae, z = load(vae_file, device="cpu"), noise(1, 16, 3, 4, 4)
    frames, other = vae.decode(z), copy.deepcopy(vae)
    assert other.options == vae.options
    with torch.no_grad():
        for p in vae.model.parameters():
            p.zero_()
    assert torch.equal(other.decode(z), frames)
    assert not torch.equal(vae.decode(z), frames)


@pytest.mark.parametrize("count, device, one", [(1, "cuda", True), (2, "cuda", False), (2, "cpu", True)])
def test_all_devices_may_be_one(monkeypatch, count, device, one):
    """Then `devices="all"` is the call on one device: it needs no count of frames, and imports no distributed/."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert alone(SimpleNamespace(device=torch.device(device, 0)), "all") is one
