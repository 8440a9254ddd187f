"""8 bit through the VAE object on a CPU: real bits, a floor that holds, second starts that measure nothing."""

import json
import math
from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine import InputError, load
from zerowaste_vae.engine.execution import call, core
from zerowaste_vae.engine.extras.bench import calibrate as calibration
from zerowaste_vae.engine.extras.eight_bit import mixed, sampling, store
from zerowaste_vae.engine.extras.eight_bit.sampling import Saturation
from zerowaste_vae.engine.extras.eight_bit.table import Table
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.precision import policy
from zerowaste_vae.engine.precision.modes import Mode
from zerowaste_vae.engine.precision.policy import eligible


def db(a, b):
    return 10 * math.log10(1 / (a - b).double().square().mean().item())


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_eight_bit(wide_file, cache, noise, precision, monkeypatch):
    """Decode and encode in 8 bit."""
    z, video = noise(1, 16, 3, 4, 5), noise(5, 32, 24, 3).clamp(-1, 1) * 0.5 + 0.5
    exact = load(wide_file, device="cpu")
    vae = load(wide_file, precision=precision, device="cpu")
    assert vae.precision == precision
    out, latent = vae.decode(z), vae.encode(video)
    assert 25 < db(out, exact.decode(z)) < 70
    assert not torch.equal(latent, exact.encode(video))
    assert vae.last_report.operands.startswith("12 of 12 convolutions")
    assert vae.last_report.precision == precision
    # What was measured and packed is found again, and gives the same bits.
    monkeypatch.setattr(sampling.Trials, "__init__", lambda *_: pytest.fail("measured again"))
    again = load(wide_file, precision=precision, device="cpu")
    path, pack = again.fused(), again.fused()._pack

    def plans_only(half, model):
        assert next(model.parameters()).is_meta, "packed again"
        return pack(half, model)

    path._pack = plans_only
    assert torch.equal(again.decode(z), out)
    assert torch.equal(again.encode(video), latent)
    assert len(list(cache.rglob("*.safetensors"))) == 2


def test_floor(wide_file, noise):
    """A floor leaves out what costs most."""
    z = noise(1, 16, 2, 4, 4)
    exact = load(wide_file, precision="fp8", device="cpu", min_db=200.0)
    best = exact.decode(z)
    assert exact.last_report.operands.startswith("0 of")
    loose = load(wide_file, precision="fp8", device="cpu", min_db=20.0)
    loose.decode(z)
    everything = loose.last_report.db
    floor = everything + 3
    vae = load(wide_file, precision="fp8", device="cpu", min_db=floor)
    out = vae.decode(z)
    report = vae.last_report
    assert report.db >= floor
    assert 0 < int(report.operands.split()[0]) < int(report.operands.split()[2])
    assert db(out, best) > everything
    assert "dB against the exact path" in report.text()
    assert report.operands in report.text()


def test_refused(wide_file, noise):
    """A precision that cannot run as asked says so."""
    with pytest.raises(InputError, match="fp4"):
        load(wide_file, precision="fp4", device="cpu")
    fast = load(wide_file, precision="fp16_fast", device="cpu")
    assert fast.precision == "fp16"
    vae = load(wide_file, precision="int8", device="cpu")
    vae.options = vae.options.switched(off=["triton_fusion"])
    assert vae.precision == "fp16"
    vae.options = vae.options.switched(on=["triton_fusion"])
    assert vae.precision == "int8"
    plan = vae.plan_decode(2, 8, 8)
    assert plan.fused
    fp16 = load(wide_file, precision="fp16", device="cpu")
    assert not fp16.plan_decode(2, 8, 8).fused
    # The toggle is there for speed, which a CPU has none of.
    fp16.options = fp16.options.switched(on=["fp8"])
    assert fp16.precision == "fp16"


def test_a_report_says_what_the_plan_says(wide_file, noise):
    """On a CPU nothing is fused: in 8 bit its reference operators run, else plain torch."""
    for precision, runs in (("int8", "reference operators"), ("fp32", "plain torch")):
        vae = load(wide_file, precision=precision, device="cpu")
        vae.decode(noise(1, 16, 1, 2, 2))
        report = vae.last_report
        assert report.mode.startswith(runs) and report.plan.startswith(f"{runs}, untiled, 1 latent per chunk")
        assert "fused" not in report.mode + report.plan and "(s)" not in report.text()


def test_ranges_widen(wide_file, noise, monkeypatch):
    """One odd clip does not spoil a file: 8-bit operands made from it alone saturate on the next one."""
    dull, real, more = noise(1, 16, 1, 4, 4) * 0.02, noise(1, 16, 2, 4, 4), noise(1, 16, 2, 4, 4, seed=1)
    exact = load(wide_file, device="cpu").decode(real)
    vae = load(wide_file, precision="int8", device="cpu")
    vae.decode(dull)
    first = vae.store.table("decoder")
    with monkeypatch.context() as patch:
        patch.setattr(mixed, "CLIPS", 1)
        patch.setattr(Table, "beyond", lambda *_: False)
        narrow = db(load(wide_file, precision="int8", device="cpu").decode(real), exact)
    wide = vae.decode(real)
    assert db(wide, exact) > narrow + 5
    assert "first 2 clips" in vae.last_report.operands
    # A clip that was seen changes nothing.
    known = vae.store.table("decoder")
    assert torch.equal(vae.decode(real), wide)
    assert vae.store.table("decoder") == known
    vae.decode(more)
    known = vae.store.table("decoder")
    for key, found in known.ranges.items():
        assert all(a >= b for a, b in zip(found.largest, first.ranges[key].largest, strict=True))
    assert known.ranges != first.ranges
    # Nor does any clip after the first few, nor one of a calibrated file.
    for i in range(3, mixed.CLIPS):
        vae.decode(noise(1, 16, 2, 4, 4, seed=i))
    monkeypatch.setattr(sampling.Trials, "__init__", lambda *_: pytest.fail("measured again"))
    settled = vae.store.table("decoder")
    assert len(settled.seen) == mixed.CLIPS
    looked, take = [], call.decoder_samples
    monkeypatch.setattr(call, "decoder_samples", lambda z, vae, *there: looked.append(there) or take(z, vae, *there))
    vae.decode(real * 1.5)
    assert looked == [(sampling.latent_samples, torch.device("cpu"))]  # in no memory of a GPU, which no plan counts
    assert vae.store.table("decoder") == settled
    vae.store.calibrate("decoder", replace(known, seen={}))
    load(wide_file, precision="int8", device="cpu").decode(real * 1.5)


@pytest.mark.parametrize(("precision", "at"), [("int8", 0), ("int8", 1), ("int8", 4), ("int8", "calibrated"),
                                               ("fp8", 1)])  # fmt: skip
def test_odd_clip(wide_file, cache, noise, monkeypatch, precision, at):
    """Whenever it comes. Later clips have what they would have had without it, and it does not saturate itself: not
    when it comes again either, which measures nothing."""
    clips = [noise(1, 16, 1, 3, 3, seed=seed) for seed in range(5)]
    bright, later = 10 * noise(1, 16, 1, 3, 3, seed=7), noise(1, 16, 1, 3, 3, seed=8)
    plain = load(wide_file, device="cpu")
    exact, exact_bright = plain.decode(later), plain.decode(bright)

    def run(name, clips):
        monkeypatch.setenv("ZEROWASTE_CACHE", str(cache / name))
        vae = load(wide_file, precision=precision, device="cpu")
        if at == "calibrated":
            list(calibration.calibrate(vae, "clip", None, clips[0], False, lambda: None))
        made = [vae.decode(z) for z in clips]
        return vae, made, db(vae.decode(later), exact)

    place = 1 if at == "calibrated" else at
    _, _, alone = run("without", clips)
    vae, made, beside = run("with", [*clips[:place], bright, *clips[place:]])
    kept = vae.store.table("decoder")
    own = load(wide_file, precision=precision, device="cpu")
    own._made_of.store = store.Store(None)
    own._use(own.options)
    assert beside > alone - 1
    best = db(own.decode(bright), exact_bright)
    again = vae.decode(bright)
    assert db(made[place], exact_bright) > best - 1 and db(again, exact_bright) > best - 1
    monkeypatch.setattr(sampling.Trials, "__init__", lambda *_: pytest.fail("measured again"))
    assert torch.equal(vae.decode(bright), again)
    assert vae.store.table("decoder") == kept
    assert vae.last_report.operands.endswith("the clip's own")


@pytest.mark.parametrize("switched", [(True, False, True), (False, True, False)])
def test_other_convolutions(wide_file, cache, noise, switched):
    """A composed upsampler has one where it else has two; what all have in common counts."""
    exact, vae = load(wide_file, device="cpu"), load(wide_file, precision="int8", device="cpu")
    for seed, on in enumerate(switched):
        vae.options = DEFAULTS.switched(off=[] if on else ["composed_upsample"])
        z = noise(1, 16, 2, 4, 4, seed=seed)
        frames = vae.decode(z)
        assert vae.last_report.operands.startswith("18 of 18 convolutions in int8")
        assert db(frames, exact.decode(z)) > 30
    assert len(vae.store.table("decoder").seen) == len(switched)


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_overflow(wide_file, cache, noise, half, monkeypatch, caplog):
    """Alone, and between others: in memory and on the disk all ranges stay finite, and later clips run in 8 bit."""
    good = noise(1, 16, 1, 2, 2) if half == "decoder" else noise(1, 16, 16, 3).clamp(-1, 1) * 0.5 + 0.5
    work = half[:-1]
    expected = getattr(load(wide_file, precision="int8", device="cpu"), work)(good)
    for first in (True, False):
        monkeypatch.setenv("ZEROWASTE_CACHE", str(cache / str(first)))
        vae = load(wide_file, precision="int8", device="cpu")
        if not first:
            getattr(vae, work)(good)
        read = sampling.Reader.__call__

        def overflowing(reader, conv, frames, read=read):
            frames[0, 0, 0, 0] = math.inf
            read(reader, conv, frames)

        with monkeypatch.context() as patch:
            patch.setattr(sampling.Reader, "__call__", overflowing)
            assert getattr(vae, work)(good * 0.9).isfinite().all()
        known = vae.store.table(half)
        assert (known is None) == first
        assert caplog.records[-1].message.count("overflow") == 1
        assert not [p for p in cache.rglob("*.json") if "Infinity" in p.read_text() or "NaN" in p.read_text()]
        for each in (vae, load(wide_file, precision="int8", device="cpu")):
            assert torch.equal(getattr(each, work)(good), expected)
            assert "convolutions in int8" in each.last_report.operands
        assert policy.finite(vae.store.table(half).ranges)


@pytest.mark.parametrize(("asked", "kind"), [("fp8", "fp8"), ("int8", "int8"), ("auto", "fp8")])
def test_floor_measured(wide_file, noise, monkeypatch, asked, kind):
    """Whatever a table claims: here convolutions cost nothing by themselves, so the choice begins with all of them, and
    only the measurement on the clip can step up."""
    z = noise(1, 16, 2, 4, 4)
    exact = load(wide_file, device="cpu").decode(z)
    monkeypatch.setattr(core, "mode_here", lambda *_: Mode(kind))
    monkeypatch.setattr(sampling.Trials, "errors", lambda self, *_: {k: 1e-12 * (1 + i) for i, k in enumerate(keys)})
    tried, quality = [], sampling.Trials.quality
    noted = lambda self, p: tried.append((p, *quality(self, p))) or tried[-1][1:]  # noqa: E731
    monkeypatch.setattr(sampling.Trials, "quality", noted)
    vae = load(wide_file, precision=asked, device="cpu", min_db=45.0)
    keys = eligible(vae.model.decoder)
    out = vae.decode(z)
    assert len(tried[0][0].kinds) == len(keys)
    assert tried[0][1] < 45.0 <= tried[-1][1] == vae.last_report.db
    assert all(found < 45.0 for _, found, _ in tried[:-1])
    counts = [len(policy.kinds) for policy, *_ in tried]
    assert counts == sorted(set(counts), reverse=True)
    assert vae.last_report.operands.startswith(f"{counts[-1]} of {len(keys)}")
    assert db(out, exact) > 44.0


def test_floor_fp16_fast(wide_file, noise, monkeypatch):
    """A CPU has none, so what they cost is made up; what follows from it is not."""
    model = load(wide_file, precision="fp16", device="cpu").model
    fast = mixed.Mixed(
        Mode(half_accumulate=True), model, torch.float16, replace(DEFAULTS, min_db=60.0), store.Store(None)
    )
    samples = [noise(1, 4, 4, 16)]
    for db, kept in ((61.0, True), (59.0, False)):
        made_up = lambda _, policy, db=db: (db if policy.half_accumulate else math.inf, Saturation())  # noqa: E731
        monkeypatch.setattr(sampling.Trials, "quality", made_up)
        assert fast.settle("decoder", lambda _: samples).half_accumulate == kept


def test_no_memory(wide_file, noise, monkeypatch):
    """Measuring that finds no memory is tried again."""
    table, calls, asked = sampling.Trials.table, [], []

    def scarce(self, *rest):
        calls.append(rest)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return table(self, *rest)

    monkeypatch.setattr(sampling.Trials, "table", scarce)
    vae = load(wide_file, precision="fp8", device="cpu")
    vae.on_pressure = lambda: asked.append(1)
    vae.decode(noise(1, 16, 1, 2, 2))
    assert len(calls) == 2
    assert asked
    assert vae.last_report.events["oom_retries"] == 1


def test_saturated(wide_file, noise):
    """Saturated operands are counted once."""
    vae, z = load(wide_file, precision="int8", device="cpu", min_db=5.0), noise(1, 16, 2, 2, 2)
    list(calibration.calibrate(vae, "quiet", None, 0.05 * z, True, lambda: None))
    # A table that does not say how large its clip's values were.
    vae.store.calibrate("decoder", replace(vae.store.table("decoder"), levels={}))
    vae.decode(3 * z)
    assert vae.last_report.events["saturated"] == vae._mixed._quality["decoder"].saturated > 0


def test_failed_kernels(wide_file, noise, monkeypatch):
    """A VAE that was loaded before does without 8 bit, and measures no ranges for it."""
    why = []
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: why[0] if why else None)
    vae, z = load(wide_file, precision="int8", device="cpu"), noise(1, 16, 2, 2, 2)
    why.append("Triton fails here")
    monkeypatch.setattr(sampling.Trials, "__init__", lambda *_: pytest.fail("measured"))
    out = vae.decode(z)
    assert vae.precision == vae.last_report.precision == "fp16" and not vae.last_report.operands
    assert "int8" in dict(vae.last_report.off)
    assert torch.equal(out, load(wide_file, precision="fp16", device="cpu").decode(z))


@pytest.mark.parametrize("errors", [False, True])
def test_overflow_under_floor(wide_file, noise, errors):
    """It runs without 8 bit; later clips have what the others had."""
    z = noise(1, 16, 2, 4, 4)
    list(calibration.calibrate(load(wide_file, "int8", device="cpu"), "x", None, z, errors, lambda: None))
    vae = load(wide_file, "int8", device="cpu", min_db=20.0)
    if errors:
        vae.decode(z)
    assert vae.decode(3e5 * z).isfinite().all()
    json.dumps(vae.last_report.as_dict(), allow_nan=False)
    vae.decode(z)
    assert vae.last_report.operands.startswith("18 of 18") and vae.last_report.db > 20


def test_floor_before_overflow(wide_file, noise):
    """The ranges of a clip with such frames cannot be measured, nor what 8 bit costs there."""
    load(wide_file, "int8", device="cpu").decode(noise(1, 16, 2, 4, 4))
    vae = load(wide_file, "int8", device="cpu", min_db=200.0)
    vae.decode(torch.cat([noise(1, 16, 6, 4, 4), torch.full((1, 16, 2, 4, 4), 3e5)], 2))
    assert vae.last_report.operands.startswith("0 of")


def test_report_json(wide_file, noise):
    """Reports are JSON where nothing runs in 8 bit."""
    vae = load(wide_file, "int8", device="cpu", min_db=200.0)
    vae.decode(noise(1, 16, 2, 4, 4))
    assert vae.last_report.db == math.inf and json.loads(json.dumps(vae.last_report.as_dict(), allow_nan=False))
