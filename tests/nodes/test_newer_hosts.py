"""The pack's VAE in a ComfyUI newer than any that can be installed here, by the signatures that were read in its files
(docs/comfyui.md): the real ones, patched from 0.33.0, are in tests/host/test_newer.py."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine import demo_vae_path, load, log, read_checkpoint
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import by_name

from ..engine.families.small import SMALL
from .fake_host import host_vae

PIXELS = torch.rand(5, 32, 48, 3, generator=torch.Generator().manual_seed(0))
CHOICES = [("Auto", None), ("Video Frames", False), ("Individual Images", True)]


@pytest.fixture(scope="module")
def network():
    """A network as hosts hold it."""
    return load(random_checkpoint(SMALL["wan2.1"], architecture=by_name("wan2.1")), "fp32", "cpu").model


@pytest.fixture
def vae(pack):
    return pack.conversion.from_file(demo_vae_path(), "auto", None, pack.settings.Settings())


@pytest.fixture
def said(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(log, "once", lambda text, say=None: lines.append(text) if text not in lines else None)
    return lines


def apart(vae) -> torch.Tensor:
    return torch.cat([vae.encode(image) for image in PIXELS.split(1)])


@pytest.mark.parametrize("choice, not_video", CHOICES)
def test_stock_encodes_say_what_images_are(vae, choice, not_video):
    """Their choice is always passed on, to both calls; pictures are those that are encoded one by one."""
    made, tiled = vae.encode(PIXELS, not_video=not_video), vae.encode_tiled(
        PIXELS, tile_x=512, tile_y=512, overlap=64, tile_t=64, overlap_t=8, not_video=not_video
    )  # fmt: skip
    assert torch.equal(made, tiled)
    assert made.shape == ((5, 16, 1, 4, 6) if not_video else (1, 16, 2, 4, 6))
    assert torch.equal(made, apart(vae)) == bool(not_video)
    assert vae.encode(PIXELS[None], not_video=not_video).shape == (1, 16, 2, 4, 6)  # clips stay what they are


def test_what_a_model_wants_stays_with_its_vae(vae, pack):
    """Hosts write it on a VAE after they have made it, and so may nodes: copies keep it."""
    vae.not_video = True
    settings = pack.settings.Settings(chunk=1)
    copies = [vae, copy.copy(vae), copy.deepcopy(vae), vae.with_wishes(settings),
              pack.conversion.with_precision(vae, "fp32"), pack.conversion.with_precision(vae, "int8")]  # fmt: skip
    assert [one.encode(PIXELS).shape[0] for one in copies] == [5] * len(copies)
    assert vae.encode(PIXELS, not_video=False).shape[0] == 1


def test_a_conversion_has_what_the_hosts_vae_has(pack, network):
    """Also if it is set later; the weights are not read again for it."""
    stock = host_vae(pack, network)
    stock.not_video = True
    ours = pack.conversion.engine_vae(stock)
    assert ours.not_video and pack.conversion.from_host_vae(stock, "fp32").not_video
    stock.not_video = False
    assert pack.conversion.engine_vae(stock) is ours and not ours.not_video


@pytest.mark.parametrize("choice, not_video", CHOICES)
def test_our_encode_has_the_choice(pack, vae, choice, not_video):
    latent = pack.encode.Encode.execute(PIXELS, vae, encode_as=choice).args[0]
    assert torch.equal(latent["samples"], vae.encode(PIXELS[:, None] if not_video else PIXELS))
    vae.not_video = True
    assert pack.encode.Encode.execute(PIXELS, vae).args[0]["samples"].shape[0] == 5


def test_a_choice_that_does_not_exist_is_refused(pack, vae):
    with pytest.raises(ValueError, match="encode_as='Both' is not known: use one of Auto, Video Frames"):
        pack.encode.Encode.execute(PIXELS, vae, encode_as="Both")


@pytest.mark.parametrize("choice, not_video", CHOICES)
@pytest.mark.parametrize("told", [True, False])
def test_the_choice_for_a_vae_of_the_hosts(pack, choice, not_video, told):
    """told: the host's encode takes it; pictures go one by one where it does not."""
    stock = host_vae(pack, torch.nn.Linear(2, 2))
    calls = []
    encode = type(stock).encode
    def with_it(self, x, not_video=None):
        return calls.append((len(x), not_video)) or encode(self, x, not_video)

    def without(self, x):
        return calls.append((len(x), None)) or encode(self, x)

    type(stock).encode = with_it if told else without
    latent = pack.encode.Encode.execute(PIXELS, stock, encode_as=choice).args[0]["samples"]
    assert latent.shape == ((5, 3, 1, 4, 6) if not_video else (1, 3, 5, 4, 6))
    assert calls == ([(1, None)] * 5 if not_video and not told else [(5, not_video if told else None)])


@pytest.mark.parametrize("records", [True, False])
def test_nothing_is_recorded_while_it_runs(pack, vae, records, monkeypatch):
    """Packed weights and graphs outlive a recording; hosts before 0.38 record nothing, the oldest lack the module."""
    recording, decode, seen = pack.comfy.model_prefetch.recording, type(vae.engine).decode, []
    monkeypatch.setattr(type(vae.engine), "decode",
                        lambda *a, **k: seen.append(recording.paused) or decode(*a, **k))  # fmt: skip
    if not records:
        monkeypatch.delattr(pack.comfy.model_prefetch, "pause_malloc_graph")
    vae.decode(torch.randn(1, 16, 1, 4, 4))
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", None)
    vae.decode(torch.randn(1, 16, 1, 4, 4))
    assert seen == [int(records), 0] and recording.paused == 0


def test_the_hosts_cache_can_count_it(vae):
    """By its weights, which wait in host memory."""
    counted = vae._comfy_cache_tensors()
    size = sum(t.nbytes for t in read_checkpoint(demo_vae_path()).tensors.values())
    assert {t.device.type for t in counted} == {"cpu"} and sum(t.nbytes for t in counted) >= size


def test_patchers_are_cloned_with_their_new_argument(vae):
    vae.patcher.fast_disk = True
    assert vae.patcher.clone().fast_disk and type(vae.patcher.clone()) is type(vae.patcher)


def test_weights_that_a_host_has_laid_out_anew(pack, network):
    """In place, as networks with fused kernels do; decodes and saved weights are those of the file."""
    stock = host_vae(pack, network)
    z = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    expected = pack.conversion.from_host_vae(stock, "fp32").decode(z)
    for layer in stock.first_stage_model.modules():
        if isinstance(layer, torch.nn.Conv3d):
            layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last_3d)
    assert not all(p.is_contiguous() for p in stock.first_stage_model.parameters())
    ours = pack.conversion.from_host_vae(stock, "fp32")
    assert torch.equal(ours.decode(z), expected)
    assert all(t.is_contiguous() for t in ours.source().tensors.values())


def test_weights_that_are_not_there_are_left_to_the_host(pack, network, said):
    """Dynamic hosts may leave what a file lacks on the meta device."""
    stock = host_vae(pack, network)
    name, layer = next((n, m) for n, m in stock.first_stage_model.named_modules() if isinstance(m, torch.nn.Conv3d))
    layer.bias = torch.nn.Parameter(layer.bias.to("meta"), requires_grad=False)
    assert pack.conversion.engine_vae(stock) is None
    assert [f"{name}.bias is in no file that was loaded" in line for line in said] == [True]


def test_a_host_without_pixel_space_has_another_small_vae(pack):
    pack.comfy.sd.VAE.refuses = ("pixel_space_vae",)
    vae = pack.conversion.from_file(demo_vae_path(), "auto", None, pack.settings.Settings())
    assert vae.encode(PIXELS).shape == (1, 16, 2, 4, 6) and vae.latent_dim == 3


def renamed(comfy):
    del comfy.model_management.free_memory


def no_device(comfy):
    del comfy.model_management.vae_device


def other_arguments(comfy):
    comfy.model_management.load_models_gpu = lambda models, budget=None: None


def no_vae(comfy):
    comfy.sd.VAE.refuses = ("pixel_space_vae", "taesd_decoder.1.weight")


@pytest.mark.parametrize("change, why", [
    (renamed, "free_memory"), (no_device, "vae_device"), (other_arguments, "unexpected keyword argument"),
    (no_vae, "ValueError: pixel_space is selected wrongly"),
])  # fmt: skip
def test_an_unknown_host_runs_its_own_vae_and_says_so_once(pack, network, said, change, why):
    """By whichever node a VAE comes; no node fails for it."""
    change(pack.comfy)
    stock = host_vae(pack, network)
    for _ in range(2):
        assert pack.conversion.engine_vae(stock) is None
    latent, report = pack.encode.Encode.execute(PIXELS, stock).args
    assert latent["samples"].shape == (1, 3, 5, 4, 6)
    assert "this pack does not know this version of ComfyUI" in report
    passed, report = pack.loader.Optimize.execute(stock).args
    assert passed is stock and why in report
    assert pack.services.machine().device.type == "cpu" and pack.widgets.options_from() is not None
    question = pack.panel.Question(model="seedvr2_ema_vae", width=64, height=64)
    assert pack.extension._answer(question) == {"unknown": True, "host": True, "model": question.model}
    with pytest.raises(pack.extension.InputError, match="No draft: ComfyUI's own code"):
        pack.extension._answer(replace(question, draft=1))
    loaded, report = pack.loader.Loader.execute("demo (small)").args
    assert type(loaded) is pack.comfy.sd.VAE and why in report and "ComfyUI's own code runs all VAEs" in report
    assert [why in line for line in said] == [True]
