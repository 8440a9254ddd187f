"""Zero-Waste VAE for WanVideo and for SeedVR2, with stand-ins of those packs: what runs, what is passed on, what is
left when a run ends badly."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from zerowaste_vae.adapters import SeedVR2VAE, WanVideoVAE
from zerowaste_vae.engine import load, read_checkpoint
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import seedvr2
from zerowaste_vae.engine.families.wan import WAN21, Config

from ..engine.families.small import small

PACKS = Path(__file__).resolve().parents[1] / "host" / "other_packs"


@pytest.fixture
def packs(monkeypatch):
    """The stand-ins, imported anew under the names that a host gives them: their paths."""
    monkeypatch.syspath_prepend(str(PACKS))
    yield SimpleNamespace(wan=importlib.import_module("wan_video"), seedvr2=importlib.import_module("seedvr2"))
    for name in [m for m in sys.modules if m.partition(".")[0] in ("wan_video", "seedvr2")]:
        del sys.modules[name]


# -- WanVideoWrapper --------------------------------------------------------------------------------


@pytest.fixture
def wan(packs):
    """A WANVAE as its loader gives it."""
    weights = random_checkpoint(Config((8, 8, 8, 8), (8, 8, 8, 8)), architecture=WAN21)
    return packs.wan.WanVideoVAE(load(weights, "fp32", "cpu").model)


def given(pack, wan, **wishes):
    return pack.foreign.ForWanVideo.execute(wan, **wishes).args


def test_wans_calls_run_on_the_engine(pack, wan, noise):
    ours, report = given(pack, wan)
    alike = WanVideoVAE(load(wan.model.state_dict(), device="cpu"), wan)
    z, x = 3 * noise(2, 16, 2, 4, 6), noise(1, 3, 5, 32, 48)
    device = torch.device("cpu")
    assert isinstance(ours, WanVideoVAE), report
    tiles = {"tiled": True, "tile_size": (2, 2), "tile_stride": (1, 1)}
    assert torch.equal(torch.stack(ours.decode(z, device=device, end_=False, **tiles)), torch.stack(alike.decode(z)))
    assert torch.equal(ours.encode(x, device=device, pbar=False), alike.encode(x))
    assert ours.to(device) is ours and (ours.dtype, ours.upsampling_factor) == (torch.float32, 8)
    assert report.splitlines()[0].startswith("wan2.1 (8, 8, 8, 8): wan2.1 in fp32 on cpu")
    assert report.splitlines()[-1] == pack.foreign.WHOLE


def test_its_limit_precision_and_progress_are_those_of_any_vae(pack, wan, noise, monkeypatch):
    ours, _ = given(pack, wan, precision="bf16", vram_gb=3.0)
    seen, bar = [], type("Bar", (), {"update_absolute": lambda self, done, total=None, preview=None: seen.append(done)})
    monkeypatch.setattr(pack.comfy.utils, "ProgressBar", lambda total: bar())
    plans = []
    decode = ours.vae.held.engine.decode
    monkeypatch.setattr(ours.vae.held.engine, "decode", lambda *a, **k: plans.append(k) or decode(*a, **k))
    ours.decode(noise(1, 16, 3, 4, 4))
    assert ours.vae.precision == "bf16" and plans[0]["vram_gb"] == 3.0 and plans[0]["range"] == "signed"
    assert seen[0] == 0 and seen[-1] > 0
    # A second node of ours behind it changes what it has.
    again, _ = given(pack, ours, precision="fp32", ram_gb=2.0)
    wishes = again.vae.held.settings
    assert again.vae.precision == "fp32" and (wishes.vram_gb, wishes.ram_gb) == (3, 2)


def test_multigpus_tuple_is_opened_and_closed(pack, wan):
    made, _ = given(pack, (wan,))
    assert isinstance(made, tuple) and isinstance(made[0], pack.foreign.WanVideo)


def test_a_compiled_decoder_gives_its_weights(pack, wan, noise):
    plain, _ = given(pack, wan)
    compiled = nn.Module()
    compiled._orig_mod, compiled.forward = wan.model.decoder, lambda *a: None
    wan.model.decoder = compiled
    ours, report = given(pack, wan)
    z = noise(1, 16, 1, 4, 4)
    assert torch.equal(ours.decode(z)[0], plain.decode(z)[0])
    assert report.endswith(pack.foreign.NO_COMPILE)


def unknown_layers(wan):
    wan.model.decoder = wan.model.encoder = nn.Linear(2, 2)


def other_arguments(wan):
    wan.__class__ = type("WanVideoVAE", (type(wan),), {"decode": lambda self, latents, device, new: None})


WRONG = {
    "no VAE of Wan's own kind": lambda wan: setattr(wan, "__class__", type("TCDecoder", (type(wan),), {})),
    "its VAE has no inv_std": lambda wan: delattr(wan, "inv_std"),
    "its VAE has no decoder": lambda wan: delattr(wan.model, "decoder"),
    "decode, missing a required argument: 'new'": other_arguments,
    "another node has changed decode of this VAE": lambda wan: setattr(wan, "decode", lambda *a, **k: None),
    "another node has changed encoder.": lambda wan: next(
        m for m in wan.model.encoder.modules() if isinstance(m, nn.Conv3d)).register_forward_hook(lambda *a: None),
    "is in no file that was loaded": lambda wan: wan.to("meta"),
    "not a VAE this pack knows": unknown_layers,
    "has 3 values, and latents of this VAE 16 channels": lambda wan: setattr(wan, "mean", torch.zeros(3)),
    "AttributeError: 'int' object has no": lambda wan: vars(wan.model)["_modules"].update(encoder=1),
}  # fmt: skip


@pytest.mark.parametrize("why", WRONG)
def test_what_is_not_as_known_is_passed_on_and_the_report_says_why(pack, wan, why):
    WRONG[why](wan)
    made, report = given(pack, wan)
    assert made is wan
    assert report.startswith(f"{pack.foreign.UNTOUCHED}: ") and why in report and "\n" not in report


def test_small_decoders_are_passed_on(pack, packs):
    tiny = packs.wan.TAEHV()
    made, report = given(pack, (tiny,))
    assert made[0] is tiny and report == f"{pack.foreign.UNTOUCHED}: TAEHV is no VAE of Wan's own kind"


def test_memory_that_runs_out_is_no_reason_to_pass_it_on(pack, wan, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pack.foreign, "network_of", full)
    with pytest.raises(torch.OutOfMemoryError):
        given(pack, wan)


class Stopped(BaseException):
    """As the stop button of newer hosts (April 2026) raises it: past what catches errors alone."""


@pytest.fixture
def freed(pack, monkeypatch):
    """What the host is asked to unload: the models that it may keep."""
    asked = []
    monkeypatch.setattr(pack.comfy.model_management, "free_memory",
                        lambda need, device, keep_loaded=(): asked.append(list(keep_loaded)))  # fmt: skip
    return asked


@pytest.mark.parametrize("error", [Stopped, RuntimeError])
def test_a_run_that_fails_leaves_nothing_on_the_device(pack, wan, noise, monkeypatch, freed, error):
    ours, _ = given(pack, wan)
    held = ours.vae.held
    other = SimpleNamespace(model=object())
    pack.comfy.model_management.current_loaded_models += [SimpleNamespace(model=held.patcher), other]
    released = []
    monkeypatch.setattr(held.engine, "release", lambda: released.append(1) or 0)
    monkeypatch.setattr(pack.comfy.model_management, "throw_exception_if_processing_interrupted",
                        lambda: (_ for _ in ()).throw(error("stop")))  # fmt: skip
    for call in (lambda: ours.decode(noise(1, 16, 2, 4, 4)), lambda: ours.encode(noise(1, 3, 5, 32, 32))):
        with pytest.raises(error):
            call()
    assert released == [1, 1] and freed == [[other], [other]]


def test_their_offload_call_releases_ours(pack, wan, monkeypatch, freed):
    ours, _ = given(pack, wan)
    monkeypatch.setattr(ours.vae.held.engine, "device", torch.device("meta"))
    released = []
    monkeypatch.setattr(ours.vae.held.engine, "release", lambda: released.append(1) or 0)
    ours.to("meta")
    assert released == []
    ours.model.to(torch.device("cpu"))
    assert released == [1] and len(freed) == 1


def test_the_device_of_a_call_is_followed_among_cuda_devices(pack, monkeypatch, freed):
    made = []
    monkeypatch.setattr(pack.foreign, "EngineVAE", lambda *args: made.append(args) or SimpleNamespace(device=args[-1]))
    engine = SimpleNamespace(asked="auto", release=lambda: 0)
    first = SimpleNamespace(source=1, engine=engine, settings=2, name="n", patcher=SimpleNamespace(load_device=0),
                            device=torch.device("cuda:0"))  # fmt: skip
    hosted = pack.foreign.Hosted(first)
    for device in (None, "cpu", "cuda", "cuda:0", torch.device("cuda:0")):
        hosted.follow(device)
    assert hosted.held is first
    hosted.follow("cuda:1")
    assert made == [(1, "auto", 2, "n", torch.device("cuda:1"))] and hosted.held.device.index == 1


# -- the SeedVR2 upscaler --------------------------------------------------------------------------------


@pytest.fixture
def upscaler(pack, packs, tmp_path, monkeypatch):
    """The upscaler's nodes in a host, with a VAE file: run(settings, **values) of the upscaler, and its cache."""
    sizes = seedvr2.Config((8, 16, 16, 16), (8, 16, 16, 16), norm_groups=4)
    stored = random_checkpoint(sizes, architecture=seedvr2.ARCHITECTURE)
    save_file(stored.tensors, tmp_path / "vae.safetensors", {"norm_num_groups": "4"})
    part = importlib.import_module
    part("seedvr2.src.utils.constants").FOLDERS[:] = [str(tmp_path)]
    nodes = ModuleType("nodes")
    nodes.NODE_CLASS_MAPPINGS = packs.seedvr2.NODE_CLASS_MAPPINGS
    monkeypatch.setitem(sys.modules, "nodes", nodes)
    monkeypatch.setattr(pack.services, "get_executing_context", lambda: SimpleNamespace(node_id="7"))
    video = 0.5 + 0.2 * torch.randn(9, 32, 32, 3, generator=torch.Generator().manual_seed(1))

    def settings(model="vae.safetensors", **values):
        return nodes.NODE_CLASS_MAPPINGS["SeedVR2LoadVAEModel"]().execute(model, "cpu", node="1", **values)[0]

    def run(vae, **values):
        return nodes.NODE_CLASS_MAPPINGS["SeedVR2VideoUpscaler"]().execute(video, vae, **values)[0]

    cache = part("seedvr2.src.core.model_cache").get_global_cache()
    return SimpleNamespace(settings=settings, run=run, cache=cache, folder=tmp_path, video=video, part=part)


def replaced(pack, upscaler, **values):
    return pack.foreign.ForSeedVR2.execute(upscaler.settings(**values)).args


def expected(upscaler, dtype=torch.float32):
    """Its loop with the public stand-in, batches of five."""
    vae = SeedVR2VAE(load(read_checkpoint(upscaler.folder / "vae.safetensors"), device="cpu"), dtype=dtype)
    frames = []
    for batch, kept in ((upscaler.video[:5], 5), (torch.cat([upscaler.video[5:], upscaler.video[-1:]]), 4)):
        x = (batch * 2 - 1).permute(3, 0, 1, 2)[None].to(dtype)
        frames.append(vae.decode((vae.encode(x).latent * 0.9152) / 0.9152).sample[0, :, :kept].movedim(0, -1))
    return (torch.cat(frames).float().clamp(-1, 1) + 1) / 2


@pytest.mark.parametrize("kept", [False, True])
def test_the_upscaler_runs_its_loops_on_the_engine(pack, upscaler, kept):
    """As often as the host runs it with what it keeps of our node."""
    vae, report = replaced(pack, upscaler, decode_tiled=True, cache_model=kept)
    assert report.splitlines()[0].startswith("vae.safetensors: seedvr2 in fp32 on cpu")
    assert report.splitlines()[-1] == pack.foreign.WHOLE
    for _ in range(2):
        assert torch.equal(upscaler.run(vae), expected(upscaler))
        assert upscaler.cache._vae_models == {}
    assert dict(vae)["encode_tile_size"] == 1024 and isinstance(vae, dict)


def test_another_upscaler_at_the_same_loader_keeps_its_own(pack, upscaler):
    loader = upscaler.settings()
    vae = pack.foreign.ForSeedVR2.execute(loader).args[0]
    assert torch.equal(upscaler.run(loader), torch.full((9, 32, 32, 3), 0.5))
    assert torch.equal(upscaler.run(vae), expected(upscaler))
    assert loader["cache_model"] is False and loader["node_id"] == "1"


def test_in_the_type_that_the_upscaler_computes_in(pack, upscaler):
    types = upscaler.part("seedvr2.src.optimization.compatibility")
    types.COMPUTE_DTYPE = upscaler.part("seedvr2.src.interfaces.video_upscaler").COMPUTE_DTYPE = torch.bfloat16
    assert torch.equal(upscaler.run(replaced(pack, upscaler)[0]), expected(upscaler, torch.bfloat16))


@pytest.mark.parametrize("fails", ["before", "between"])
def test_an_exception_in_its_loop_leaves_nothing_in_its_cache(pack, upscaler, fails):
    vae, _ = replaced(pack, upscaler)
    with pytest.raises(RuntimeError, match=fails):
        upscaler.run(vae, fails=fails)
    assert upscaler.cache._vae_models == {}
    assert torch.equal(upscaler.run(vae), expected(upscaler))


def test_a_stop_in_our_run_leaves_nothing_anywhere(pack, upscaler, monkeypatch, freed):
    vae, _ = replaced(pack, upscaler)
    released = []
    monkeypatch.setattr(vae.stand_in.vae.held.engine, "release", lambda: released.append(1) or 0)
    monkeypatch.setattr(pack.comfy.model_management, "throw_exception_if_processing_interrupted",
                        lambda: (_ for _ in ()).throw(Stopped()))  # fmt: skip
    with pytest.raises(Stopped):
        upscaler.run(vae)
    assert upscaler.cache._vae_models == {} and released and freed


def test_what_nobody_holds_any_more_leaves_the_cache(pack, upscaler):
    """Settings that were read and not used; and a runner that the upscaler keeps has no weights."""
    vae, _ = replaced(pack, upscaler)
    upscaler.run(vae)
    (runner,) = upscaler.cache._runner_templates.values()
    vae["model"]
    assert list(upscaler.cache._vae_models) == ["zerowaste 7"]
    del vae
    gc.collect()
    assert upscaler.cache._vae_models == {} and runner.vae.vae is None


def test_a_file_that_the_pack_downloads_later(pack, upscaler):
    path = upscaler.folder / "vae.safetensors"
    path.rename(upscaler.folder / "away")
    vae, report = replaced(pack, upscaler)
    assert report == "vae.safetensors is not there yet: the pack's own VAE runs until the upscaler has downloaded it"
    assert upscaler.run(vae).std() == 0  # its own
    (upscaler.folder / "away").rename(path)
    assert torch.equal(upscaler.run(vae), expected(upscaler))


def no_context(upscaler):
    del upscaler.part("seedvr2.src.core.model_configuration")._initialize_cache_context


def other_cache(upscaler):
    upscaler.cache.get_vae = lambda config, debug=None: None


def no_type(upscaler):
    upscaler.part("seedvr2.src.optimization.compatibility").COMPUTE_DTYPE = "bfloat16"


def other_call(upscaler):
    upscaler.part("seedvr2.src.core.model_configuration")._initialize_cache_context = lambda config: {}


VERSION = "this version of the SeedVR2 upscaler is not known here ("
ODD = {
    "has no attribute '_initialize_cache_context'": no_context,
    "its cache is another one": other_cache,
    "its cache is another one)": no_type,
    "unexpected keyword argument 'dit_cache'": other_call,
    "the SeedVR2 upscaler is not installed": lambda upscaler: sys.modules["nodes"].NODE_CLASS_MAPPINGS.pop(
        "SeedVR2VideoUpscaler"),
}  # fmt: skip


@pytest.mark.parametrize("why", ODD)
def test_an_upscaler_that_is_not_as_known_keeps_its_vae(pack, upscaler, monkeypatch, why):
    settings, mapping = upscaler.settings(), sys.modules["nodes"].NODE_CLASS_MAPPINGS
    monkeypatch.setattr(sys.modules["nodes"], "NODE_CLASS_MAPPINGS", dict(mapping))
    ODD[why](upscaler)
    made, report = pack.foreign.ForSeedVR2.execute(settings).args
    assert made is settings and type(made) is dict
    assert report.startswith(pack.foreign.UNTOUCHED) and why in report


@pytest.mark.parametrize("change, why", [
    ({"device": "mps"}, "the engine does not run on mps"), ({"model": None}, "its VAE has other settings"),
])  # fmt: skip
def test_settings_that_are_not_as_known_are_passed_on(pack, upscaler, change, why):
    settings = {k: v for k, v in (upscaler.settings() | change).items() if v is not None or k != "model"}
    made, report = pack.foreign.ForSeedVR2.execute(settings).args
    assert made is settings and why in report


def test_a_file_that_cannot_be_read_is_passed_on_without_its_folder(pack, upscaler):
    (upscaler.folder / "broken.safetensors").write_bytes(b"none")
    settings = upscaler.settings("broken.safetensors")
    made, report = pack.foreign.ForSeedVR2.execute(settings).args
    assert made is settings and "broken.safetensors" in report and str(upscaler.folder) not in report


def test_a_file_of_another_vae_is_passed_on(pack, upscaler):
    save_file(small("wan2.1").tensors, upscaler.folder / "w.safetensors")
    settings = upscaler.settings("w.safetensors")
    made, report = pack.foreign.ForSeedVR2.execute(settings).args
    assert made is settings and "stands in for SeedVR2's VAE, and this one is wan2.1" in report


def test_stand_ins_have_the_signatures_that_were_seen(packs):
    """Of WanVideoWrapper at 19bcee67 and the upscaler at 4490bd1f, whose code is not here."""
    calls = {
        packs.wan.WanVideoVAE.decode: "hidden_states device tiled end_ tile_size tile_stride pbar",
        packs.wan.WanVideoVAE.encode: "videos device tiled end_ tile_size tile_stride pbar sample",
    }
    context = importlib.import_module("seedvr2.src.core.model_configuration")._initialize_cache_context
    calls[context] = "dit_cache vae_cache dit_id vae_id dit_model vae_model debug"
    for call, names in calls.items():
        assert [name for name in inspect.signature(call).parameters if name != "self"] == names.split()


def test_a_copy_of_the_settings_is_no_more_than_a_dict(pack, upscaler):
    vae, _ = replaced(pack, upscaler)
    assert copy.copy(dict(vae)) == dict(vae) and upscaler.cache._vae_models == {}
