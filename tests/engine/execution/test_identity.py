"""Weights that change under a loaded VAE: what runs is what they are, and nothing is kept under another one's name."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from zerowaste_vae import load
from zerowaste_vae.engine.errors import NonFiniteError
from zerowaste_vae.engine.execution.core import Core
from zerowaste_vae.engine.execution.guard import Guard
from zerowaste_vae.engine.execution.identity import Identity
from zerowaste_vae.engine.extras.distributed.consistency import of_network
from zerowaste_vae.engine.extras.graphs import graphs
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.precision.digest import of_network as digest_of

KEYS = ("decoder.up_blocks.1.resnets.0.conv1", "encoder.down_blocks.1.resnets.0.conv1")


@pytest.fixture(scope="module")
def files(make_vae_file, tmp_path_factory):
    """(a VAE, the same with other weights in one layer of each half)"""
    plain = make_vae_file((16, 16, 32, 32), (16, 16, 32, 32), 4, 6)
    weights, other = load_file(plain), tmp_path_factory.mktemp("other") / "other.safetensors"
    for key in KEYS:
        weights[f"{key}.conv.weight" if f"{key}.conv.weight" in weights else f"{key}.weight"] *= -1
    save_file(weights, other, {"norm_num_groups": "4"})
    return plain, other


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def make(monkeypatch):
    """make(path, precision) -> VAE whose 16 bit runs on the fused operators here, too."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    return lambda path, precision: load(path, precision, "cpu")


def layers(vae):
    for key in KEYS:
        layer = vae.model.get_submodule(key)
        yield layer if hasattr(layer, "weight") else layer.conv


def replaced(vae):
    for layer in layers(vae):
        layer.weight = nn.Parameter(-layer.weight, requires_grad=False)


def in_place(vae):
    with torch.no_grad():
        for layer in layers(vae):
            layer.weight.neg_()


def loaded(vae):
    negated = {id(layer.weight) for layer in layers(vae)}
    vae.model.load_state_dict({k: -t if id(t) in negated else t.clone()
                               for k, t in vae.model.state_dict(keep_vars=True).items()})  # fmt: skip


def patched(vae):
    """As ComfyUI does, which torch does not count."""
    for layer in layers(vae):
        layer.weight.data.copy_(-layer.weight.data)
    vae.patches = None if vae.patches else "a patch"


def uncounted(vae):
    """As a script does that goes around torch's count of writes."""
    for layer in layers(vae):
        layer.weight.data.neg_()


def made(vae, noise):
    video = noise(1, 24, 24, 3).clamp(-1, 1) * 0.5 + 0.5
    return vae.decode(noise(1, 16, 1, 3, 3)), vae.encode(video)


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def in_inference_mode(vae):
    """As any node of ComfyUI writes to weights that a node has loaded."""
    for layer in layers(vae):
        with torch.inference_mode():
            layer.weight.data = layer.weight.data.clone()
            layer.weight[...] *= -1


@pytest.mark.parametrize(("precision", "change"), [
    ("fp32", in_place), ("fp32", uncounted), ("bf16", replaced), ("bf16", uncounted), ("fp16", loaded),
    ("fp16", patched), ("fp16", in_inference_mode), ("fp8", replaced), ("fp8", uncounted), ("int8", in_place),
    ("int8", patched), ("int8", uncounted), ("int8", in_inference_mode),
])  # fmt: skip
def test_runs_follow_the_weights(files, make, cache, monkeypatch, noise, precision, change):
    """There and back, as ComfyUI's SUPIR node does around an encode."""
    expected = []
    for name, path in zip(("plain", "other"), files, strict=True):
        monkeypatch.setenv("ZEROWASTE_CACHE", str(cache / name))
        expected.append(made(make(path, precision), noise))
    assert not same(*expected)
    monkeypatch.setenv("ZEROWASTE_CACHE", str(cache / "mine"))
    vae = make(files[0], precision)
    for turn in (0, 1, 0, 1):
        assert same(made(vae, noise), expected[turn]), turn
        change(vae)
    # In a process of their own, both ways.
    monkeypatch.setenv("ZEROWASTE_CACHE", str(cache / "mine"))
    for path, wanted in zip(files, expected, strict=True):
        assert same(made(make(path, precision), noise), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("change", [replaced, in_place, patched, uncounted, in_inference_mode])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8", "int8"])
def test_runs_on_a_gpu_follow_the_weights(files, cache, monkeypatch, noise, precision, change):
    """With what stays on the device between two runs, and chunks that are replayed."""
    monkeypatch.setattr(graphs, "pays", lambda *_: True)
    z, video = noise(1, 16, 6, 4, 4), noise(9, 32, 32, 3).clamp(-1, 1) * 0.5 + 0.5

    def run(vae):
        return [vae.decode(z, chunk=1), vae.decode(z, chunk=1), vae.encode(video)]

    expected = []
    for name, path in zip(("plain", "other"), files, strict=True):
        monkeypatch.setenv("ZEROWASTE_CACHE", str(cache / name))
        vae = load(path, precision, "cuda")
        if vae.precision != precision:
            pytest.skip(vae.unused().get(precision, "not here"))
        expected.append(run(vae))
        vae.release()
    assert not same(*expected)
    monkeypatch.setenv("ZEROWASTE_CACHE", str(cache / "mine"))
    vae = load(files[0], precision, "cuda")
    for turn in (0, 1, 0, 1):
        assert same(run(vae), expected[turn]), turn
        assert vae.last_report.mode.startswith("fused")
        change(vae)
    vae.release()
    for path, wanted in zip(files, expected, strict=True):
        again = load(path, precision, "cuda")
        assert same(run(again), wanted)
        again.release()


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("first", ["plain", "patched"])
def test_nothing_is_kept_of_patched_weights(files, make, cache, noise, precision, first):
    vae = make(files[0], precision)
    if first == "plain":
        made(vae, noise)
    before = sorted(cache.rglob("*.*"))
    patched(vae)
    made(vae, noise)
    assert sorted(cache.rglob("*.*")) == before and bool(before) == (first == "plain")
    patched(vae)
    made(vae, noise)
    assert len({path.parent for path in cache.rglob("*.safetensors")}) == 1


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_changed_before_packing(files, make, cache, noise, precision):
    """A change that neither torch nor the host reports, between the digest and the packing, is noticed."""
    vae = make(files[0], precision)
    assert vae.store.digest
    vae.store.table("decoder")
    pack = vae._fused._pack

    def late(half, model):
        for layer in layers(vae):
            layer.weight.data.neg_()
        return pack(half, model)

    vae._fused._pack = late
    vae.decode(noise(1, 16, 1, 3, 3))
    assert not list(cache.rglob("*.safetensors"))


@pytest.mark.parametrize("asked", [True, False])
def test_changed_before_the_first_call(files, make, cache, monkeypatch, noise, asked):
    """Uncounted, between loading and the first call, also when the digest of the weights as loaded is known: nothing is
    filed under that."""
    monkeypatch.setenv("ZEROWASTE_CACHE", str(cache / "other"))
    expected = made(make(files[1], "int8"), noise)
    monkeypatch.setenv("ZEROWASTE_CACHE", str(cache / "mine"))
    plain = made(make(files[0], "int8"), noise)  # what is filed then
    vae = make(files[0], "int8")
    if asked:
        assert vae.store.digest
    uncounted(vae)
    assert same(made(vae, noise), expected)
    uncounted(vae)
    assert same(made(vae, noise), plain)


def test_copies_of_a_vae_follow(files, make, noise):
    """Under other options, for two threads, on two devices, and plain torch."""
    vae, (_, other) = make(files[0], "fp16"), files
    sibling, z = vae.with_options(DEFAULTS.switched(off=["composed_upsample"])), noise(1, 16, 1, 3, 3)
    twins = {"devices": ["cpu", "cpu"]}
    for each in (vae, sibling):
        each.decode(z), each.decode(z, **twins), each.decode_raw(z)
    in_place(vae)
    fresh = make(other, "fp16")
    assert torch.equal(vae.decode(z), fresh.decode(z))
    assert torch.equal(vae.decode(z, **twins), fresh.decode(z))
    assert torch.equal(vae.decode_raw(z), fresh.decode_raw(z))
    assert torch.equal(sibling.decode(z), fresh.with_options(sibling.options).decode(z))
    assert torch.equal(copy.deepcopy(vae).decode(z), fresh.decode(z))
    with vae._claimed("decoder"):
        replaced(vae)
        with vae._claimed("decoder") as second:  # another call, while one is under way
            assert second.store is not vae.store


def test_ranks_compare_the_weights_as_they_are(files, make):
    vae, other = (make(path, "fp32") for path in files)
    assert of_network(vae) != of_network(other)
    in_place(vae)
    assert of_network(vae) == of_network(other)


def test_identity(files):
    """Other groups of norms are another network, with the same weights."""
    four, eight = (load(files[0], "int8", "cpu", norm_groups=groups) for groups in (4, 8))
    assert four.store.digest != eight.store.digest
    assert digest_of(four.model, "one") != digest_of(four.model, "another")


def test_other_norm_groups_do_not_share_ranges(files, cache, noise):
    z = noise(1, 16, 1, 3, 3)
    expected = load(files[0], "int8", "cpu", norm_groups=8).decode(z)
    for path in sorted(cache.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    load(files[0], "int8", "cpu", norm_groups=4).decode(0.1 * z)
    vae = load(files[0], "int8", "cpu", norm_groups=8)
    assert vae.store.table("decoder") is None
    assert torch.equal(vae.decode(z), expected)


@pytest.mark.parametrize("tiling", ["untiled", "blended"])
@pytest.mark.parametrize("change", [replaced, uncounted])
def test_values_are_compared_while_the_first_chunk_runs(files, make, cache, noise, monkeypatch, change, tiling):
    """What is packed runs at once; nothing of it comes out if the weights turn out to be others."""
    z, options = noise(1, 16, 5, 6, 6), {"chunk": 1, "tiling": tiling, "tile": 32, "overlap": 16}
    expected = [make(path, "bf16").decode(z, **options) for path in files]
    vae, runs, finished = make(files[0], "bf16"), [], []
    half, finish = Core._half, Guard.finish
    monkeypatch.setattr(Core, "_half", lambda self, *a: runs.append(len(finished)) or half(self, *a))
    monkeypatch.setattr(Guard, "finish", lambda self, *a: finished.append(a) or finish(self, *a))
    for turn, changed in ((0, False), (0, False), (1, True), (1, False), (0, True)):
        if changed:
            change(vae)
        runs.clear(), finished.clear()
        assert torch.equal(vae.decode(z, **options), expected[turn])
        assert runs == [0] * (2 if changed and change is uncounted else 1)
        assert len(set(finished)) == len(finished)


def test_a_comparison_without_memory_is_made_again(files, make, cache, noise, monkeypatch):
    """It is part of the run by then, whose next attempt must not go without it."""
    z = noise(1, 16, 5, 6, 6)
    expected = make(files[1], "bf16").decode(z)
    vae, holds, calls = make(files[0], "bf16"), Identity.holds, []
    vae.decode(z)
    uncounted(vae)

    def short(*args):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("none left")
        return holds(*args)

    monkeypatch.setattr(Identity, "holds", short)
    assert torch.equal(vae.decode(z), expected)
    assert len(calls) > 2


def test_repaired_weights_run_again_in_tiles(files, make, cache, noise):
    """NaN of what was packed before is none of the weights."""
    z, tiles = noise(1, 16, 2, 6, 6), {"tiling": "blended", "tile": 32, "overlap": 16}
    vae = make(files[0], "fp32")
    expected, (weight, *_) = vae.decode(z, **tiles), (layer.weight for layer in layers(vae))
    kept = weight.detach().clone()
    weight.data[0] = torch.nan
    with pytest.raises(NonFiniteError):
        vae.decode(z, **tiles)
    weight.data.copy_(kept)
    assert torch.equal(vae.decode(z, **tiles), expected)


@pytest.mark.parametrize("change", [replaced, uncounted])
def test_a_given_plan_runs_on_changed_weights(files, make, cache, noise, change):
    z = noise(1, 16, 5, 6, 6)
    vae = make(files[0], "bf16")
    plan = vae.plan_decode(5, 6, 6, chunk=1)
    vae.decode(z, plan=plan)
    assert "1 latent per chunk" in vae.last_report.plan
    change(vae)
    frames = vae.decode(z, plan=plan)
    assert "1 latent per chunk" in vae.last_report.plan
    assert torch.equal(frames, make(files[1], "bf16").decode(z))


def test_copies_beside_a_call_follow_the_weights(files, make, cache):
    """A running call has not looked at the weights yet, and copies on other devices are not its own."""
    vae = make(files[0], "bf16")
    vae._copies["another device", 0] = object()
    with vae._busy:
        vae.follow()
        assert vae._copies
        uncounted(vae)
        vae.follow()
        assert not vae._copies
