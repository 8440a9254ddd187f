"""What an answer of the planner says."""

from __future__ import annotations

import builtins
import os
from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine import InputError, loader
from zerowaste_vae.engine.families import ARCHITECTURES, minimax_h3, wan
from zerowaste_vae.engine.families.seedvr2 import Config
from zerowaste_vae.engine.kernels.targets import capabilities
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning import make
from zerowaste_vae.engine.planning.budget import Machine
from zerowaste_vae.engine.precision import modes
from zerowaste_vae.nodes.panel import KNOWN, Known, Question, answer, expected_facts, network_of

GIB = 1 << 30
CPU = Machine(torch.device("cpu"), None, 4 * GIB)


@pytest.fixture
def tiny():
    """A small VAE that a loader has seen."""
    KNOWN.learn("tiny", ARCHITECTURES[0], Config((8, 16, 16, 16), (8, 16, 16, 16), norm_groups=4))
    return {"model": "tiny"}


def test_options_that_contradict_each_other_are_refused(tiny):
    question = Question.parse({**tiny, "width": "64", "height": "64", "tiling": "blended", "tile": "8"})
    with pytest.raises(InputError, match="tile=8"):
        answer(question, CPU)


def test_answer_for_odd_sizes(tiny):
    """13 frames of 50x45 become 4 latents of 7x6 latent pixels."""
    found = answer(Question.parse({**tiny, "width": "50", "height": "45", "frames": "13"}), CPU)
    assert found["fits"]
    assert (found["width"], found["height"], found["frames"]) == (56, 48, 13)
    assert found["assumed"] is False
    assert found["mode"] == "untiled"
    assert found["chunks"] * found["chunk_latents"] >= 4
    assert 0 < found["predicted_gb"] <= found["target_gb"] == 4
    assert found["result_gb"] == 13 * 48 * 56 * 3 * 4 / GIB


def test_frames_that_host_memory_cannot_hold_are_told(tiny):
    """With the way out, which pictures do not have."""
    wish = {**tiny, "width": "64", "height": "48"}
    found = answer(Question.parse({**wish, "frames": "100000"}), Machine(CPU.device, None, GIB // 2))
    why = found["crowded"]
    assert found["fits"] and "GB of host memory and 1.00 GB are free: use Zero-Waste Decode to Video" in why
    assert answer(Question.parse({**wish, "frames": "100"}), Machine(CPU.device, None, GIB // 2))["crowded"] == ""
    assert answer(Question.parse({**wish, "frames": "100000"}), Machine(CPU.device, None, None))["crowded"] == ""
    pictures = {"model": "flux/ae.safetensors", "width": "640", "height": "480", "frames": "1", "batch": "4096"}
    why = answer(Question.parse(pictures), CPU)["crowded"]
    assert why == "4096 images take 14.06 GB of host memory and 8.00 GB are free: decode fewer at a time"


def test_transparency_counts_as_a_colour():
    widths = (16, 16, 32, 32)
    question = {"model": "colours", "width": "64", "height": "64", "frames": "5"}
    KNOWN.learn("colours", wan.WAN21, wan.Config(widths, widths))
    three = answer(Question.parse(question), CPU)
    KNOWN.learn("colours", wan.WAN21, wan.Config(widths, widths, 16, 1, 4, 4))
    assert answer(Question.parse(question), CPU)["result_gb"] == pytest.approx(4 / 3 * three["result_gb"])


def test_tiles_cover_the_frame(tiny):
    query = {**tiny, "width": "200", "height": "96", "tiling": "blended", "tile": "64", "overlap": "16"}
    found = answer(Question.parse(query), CPU)
    assert found["mode"] == "blended"
    assert found["tiles"] == len(found["rows"]) * len(found["columns"])
    assert found["columns"][-1] + found["tile_width"] == 200
    assert found["rows"][-1] + found["tile_height"] == 96
    assert all(b - a <= 64 - 16 for a, b in zip(found["columns"], found["columns"][1:], strict=False))


def test_what_does_not_fit_says_what_would(tiny):
    found = answer(Question.parse({**tiny, "width": "640", "height": "640", "vram_gb": "0.01"}), CPU)
    assert not found["fits"]
    assert "vram_gb" in found["text"]
    assert found["target_gb"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("ema_vae_fp16.safetensors", "SeedVR2"), ("seedvr2_ema_vae_fp16.safetensors", "SeedVR2"),
        ("wan_2.1_vae.safetensors", "Wan 2.1"), ("Wan2_1_VAE_bf16.safetensors", "Wan 2.1"),
        ("qwen_image_vae.safetensors", "Wan 2.1"), ("wan2.2_vae.safetensors", "Wan 2.2"),
        ("Wan2_2_VAE_bf16.safetensors", "Wan 2.2"), ("qwen_image_2512_vae.safetensors", "Wan 2.1"),
        ("ming_image_vae_bf16.safetensors", "Wan 2.1"), ("marigold_v2_albedo_vae.safetensors", "Wan 2.1"),
        ("ltx-2.3-22b-dev-fp8.safetensors", "LTX-2.3"), ("ltx-video-2b-v0.9.5.safetensors", "LTX-2.3"),
        ("ltx-2.5-video-vae-conv-bf16.safetensors", "LTX-2.3"),
        ("full_encoder_small_decoder.safetensors", "Flux.2"), ("flux2-vae_small.safetensors", "Flux.2"),
        ("NetaYumev35_pretrained_all_in_one.safetensors", "Flux"), ("mage_flow_vae_bf16.safetensors", "Mage-VAE"),
        ("qwen_image_2.1_vae_bf16.safetensors", "Qwen-Image 2.1"), ("Qwen-Image-2.1-VAE.safetensors", "Qwen-Image 2.1"),
        ("svd_xt.safetensors", "Stable Video Diffusion"), ("cogvideox_vae.safetensors", "CogVideoX"),
    ],
)  # fmt: skip
def test_unread_files_are_planned_as_published(name, title):
    """A file that was not read yet is planned as the published one of its name."""
    found = answer(Question(model=name, width=64, height=64, frames=1), CPU)
    assert (found["assumed"], found["assumed_as"]) == (True, title)
    assert found["fits"]


def test_published_files_of_other_sizes():
    """They are planned with their own sizes."""
    assert network_of("qwen_image_vae.safetensors")[1].decoder_colours == 3
    for name in ("qwen_image_layered_vae.safetensors", "ming_image_vae_bf16.safetensors"):
        sizes = network_of(name)[1]
        assert (sizes.encoder_colours, sizes.decoder_colours) == (4, 4), name
    assert network_of("flux2-vae.safetensors")[1].decoder_widths == (128, 256, 512, 512)
    for name in ("full_encoder_small_decoder.safetensors", "flux2-vae_small.safetensors"):
        sizes = network_of(name)[1]
        assert (sizes.encoder_widths, sizes.decoder_widths) == ((128, 256, 512, 512), (96, 192, 384, 384)), name


@pytest.mark.parametrize(("name", "title", "variant"), [
    ("minimax_h3_lynnreal_light_vae_int8_convrot.safetensors", "MiniMax H3", "LynnReal (26 of 36 layers)"),
    ("lightvaew2_1.safetensors", "Wan 2.1", "LightVAE with 1/4 of the channels"),
    ("MG-LightVAE_v2.safetensors", "Wan 2.2", "LightVAE with 1/4 of the channels"),
    ("wan_2.1_vae.safetensors", "Wan 2.1", ""), ("taesdxl_decoder.safetensors", "TAESD", ""),
    ("taew2_1.safetensors", "TAEHV", ""), ("lighttaew2_2.pth", "TAEHV", "of Wan 2.2"),
    ("taehv1_5_super.safetensors", "TAEHV", "of HunyuanVideo 1.5, super"),
    ("taeh3.safetensors", "TAEHV", "of MiniMax H3"),
])  # fmt: skip
def test_reduced_vaes_are_named(name, title, variant):
    found = answer(Question(model=name, width=64, height=64, frames=1), CPU)
    assert (found["assumed_as"], found["variant"]) == (title, variant)


# The last ones are named after a family that runs, but hold another network.
@pytest.mark.parametrize(
    "name",
    [
        "", "never loaded", "stage_a.safetensors", "taecvx.safetensors",
        "LTX2.5_audio_vae_conv.safetensors", "ltx-2.3-audio-vae.safetensors", "minimax_h3_audio_vae.safetensors",
    ],
)  # fmt: skip
def test_there_is_no_plan_for_what_nobody_knows(name):
    assert answer(Question(model=name, width=64, height=64, frames=1), CPU) == {
        "unknown": True, "host": False, "model": name,
    }  # fmt: skip


def test_foreign_vae_has_no_plan():
    """A VAE of another pack has no plan, whatever its name."""
    KNOWN.learn("wan_like.safetensors", None, None)
    found = answer(Question(model="wan_like.safetensors", width=64, height=64, frames=1), CPU)
    assert found == {"unknown": True, "host": True, "model": "wan_like.safetensors"}


def test_auto_multiplies_int8_codes_on_a_gpu(monkeypatch):
    """As a file of MiniMax H3 in int8 runs behind any loader; on a CPU its float values do."""
    monkeypatch.setattr(make, "why_off", lambda *_: None)
    monkeypatch.setattr(loader, "auto_precision", lambda device, _: "fp16" if device.type == "cuda" else "fp32")
    monkeypatch.setattr(modes, "target", lambda *_: capabilities("any", 80, (3, 6)))
    monkeypatch.setattr(modes, "why_no_products", lambda *_: None)
    KNOWN.learn("h3", minimax_h3.ARCHITECTURE, minimax_h3.Config(None, 128, 1, 512))
    query = {"model": "h3", "width": "512", "height": "512", "frames": "22"}
    card = Machine(torch.device("cuda", 0), 16 * GIB, GIB)
    assert (plain := answer(Question.parse(query), card))["precision"] == "fp16"
    KNOWN.learn_quantised("h3", True)
    eight = answer(Question.parse(query), card)
    assert (eight["precision"], answer(Question.parse(query), CPU)["precision"]) == ("int8", "fp32")
    assert answer(Question.parse(query | {"precision": "fp16"}), card)["predicted_gb"] == plain["predicted_gb"]
    assert "(separate blend)" in answer(Question.parse(query), CPU, lambda _: "separate")["text"]


def test_a_latent_of_other_channels_is_noticed(tiny):
    """By its number of channels, or by the VAE that made it; what is not known is no reason."""
    query = tiny | {"width": "64", "height": "64", "frames": "1"}
    assert "needs_channels" not in answer(Question.parse(query | {"channels": "16"}), CPU)
    for given, has in (({"channels": "4"}, 4), ({"encoded_by": "vae-ft-mse-840000-ema-pruned.safetensors"}, 4)):
        found = answer(Question.parse(query | given), CPU)
        assert (found["channels"], found["needs_channels"]) == (has, 16)
    for unknown in ({"encoded_by": "nobody knows.safetensors"}, {"encoded_by": "wan_2.1_vae.safetensors"}, {}):
        assert "needs_channels" not in answer(Question.parse(query | unknown), CPU)
    # Flux.2's are packed: 128 outside, 32 within.
    packed = {"model": "flux2-vae.safetensors", "width": "64", "height": "64", "frames": "1", "channels": "128"}
    assert "needs_channels" not in answer(Question.parse(packed), CPU)


def test_batches_take_more():
    one, three = (answer(Question(model="wan_2.1_vae", width=64, height=64, frames=5, batch=b), CPU) for b in (1, 3))
    assert (one["batch"], three["batch"]) == (1, 3)
    assert three["result_gb"] == pytest.approx(3 * one["result_gb"])


def test_a_full_card_parks_histories(monkeypatch):
    """1080p in whole frames under 13 GB on a GPU with kernels: some histories wait in host memory, the plan says so."""
    monkeypatch.setattr(make, "why_off", lambda *_: None)
    monkeypatch.setattr(loader, "auto_precision", lambda *_: "fp16")
    gpu = Machine(torch.device("cuda", 0), 16 * GIB, 64 * GIB)
    found = answer(Question(model="seedvr2_ema_vae", width=1920, height=1080, frames=21), gpu)
    assert found["mode"] == "parked"
    assert found["fused"]
    assert found["predicted_gb"] <= found["target_gb"] == 13
    assert 0 < found["parked_gb"] < 64
    plain = answer(Question.parse({"model": "seedvr2", "width": "64", "height": "64", "off": "triton_fusion"}), gpu)
    assert plain["kernels_off"] == "switched off"
    assert not plain["fused"]


def test_passes_of_a_clip(monkeypatch):
    """LTX-2.5's diffusion decoder on a small GPU: whole frames, of which some wait in host memory beside the noise."""
    monkeypatch.setattr(make, "why_off", lambda *_: "off")
    monkeypatch.setattr(loader, "auto_precision", lambda *_: "bf16")
    found = [answer(Question(model="ltx-2.5-video-vae-bf16", width=1280, height=704, frames=121),
                    Machine(torch.device("cuda", 0), card * GIB, 64 * GIB)) for card in (24, 10)]  # fmt: skip
    assert [(f["mode"], f["passes"]) for f in found] == [("untiled", 1), ("untiled", 3)]
    assert found[1]["predicted_gb"] < 8 and 1 == found[0]["waiting_gb"] < found[1]["waiting_gb"] < 7


@pytest.mark.parametrize(("card", "mode"), [(24, "untiled"), (13.5, "untiled"), (8, "rolled"), (5, "blended")])
def test_a_small_card_computes_parts_of_large_pictures_again(monkeypatch, card, mode):
    monkeypatch.setattr(make, "why_off", lambda *_: None)
    monkeypatch.setattr(loader, "auto_precision", lambda *_: "bf16")
    gpu = Machine(torch.device("cuda", 0), int(card * GIB), 64 * GIB)
    found = answer(Question(model="flux_vae", width=4096, height=4096, frames=1), gpu)
    assert found["mode"] == mode
    assert ("recomputed band by band" in found["text"]) == (mode == "rolled")
    assert not found.get("parked_gb") and found["predicted_gb"] <= found["target_gb"]


@pytest.mark.parametrize("version", ["wan2.1", "wan2.2"])
def test_wan_in_8_bit_takes_less(monkeypatch, version):
    """On a GPU with kernels and fp8 instructions; without those, fp8 is planned as the int8 that runs instead."""
    here = capabilities("any", 90, (3, 6))
    config = {
        "wan2.1": wan.Config((96, 192, 384, 384), (96, 192, 384, 384)),
        "wan2.2": wan.Config((160, 320, 640, 640), (256, 512, 1024, 1024), 48, 2),
    }[version]
    monkeypatch.setattr(make, "why_off", lambda *_: None)
    monkeypatch.setattr(modes, "target", lambda *_: here)
    KNOWN.learn(version, wan.WAN21 if version == "wan2.1" else wan.WAN22, config)
    gpu = Machine(torch.device("cuda", 1), 64 * GIB, 64 * GIB)

    def plan(precision):
        found = answer(Question(model=version, width=1280, height=720, frames=33, precision=precision, chunk=1), gpu)
        assert (found["precision"], found["fused"], found["assumed"]) == (precision, True, False)
        return found["predicted_gb"]

    exact, fp8, int8 = (plan(p) for p in ("bf16", "fp8", "int8"))
    assert max(fp8, int8) < 0.9 * exact
    assert fp8 == pytest.approx(int8, abs=1e-3)  # int8 has gains
    make.without_weights.cache_clear()
    here = capabilities("any", 80, (3, 6))
    assert plan("fp8") == int8
    make.without_weights.cache_clear()


def test_answers_open_no_files_and_ask_no_gpu(tiny, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("touched")

    question = Question.parse({**tiny, "width": "72", "height": "40", "frames": "9"})
    for module, name in ((builtins, "open"), (os, "stat"), (os, "listdir"), (torch.cuda, "mem_get_info")):
        monkeypatch.setattr(module, name, refuse)
    assert answer(question, CPU)["fits"]


def test_only_so_many_models_are_remembered():
    known = Known(2)
    for name in "abc":
        known.learn(name, ARCHITECTURES[0], name)
    assert known.find("a") is None
    assert known.find("c") == (ARCHITECTURES[0], "c")


def test_what_auto_gives_up_is_in_the_answer(tiny, monkeypatch):
    """A default target is raised to what the card has; the user's own is not, then tiles are blended."""
    monkeypatch.setattr(make, "why_off", lambda *_: "no kernels here")
    wish = {**tiny, "width": 640, "height": 640, "frames": 9, "precision": "fp32"}
    big = Machine(torch.device("cuda", 0), 1024 * GIB, 0)
    found = answer(Question(**wish), big)
    while found["fits"]:
        least = found["predicted_gb"]
        found = answer(Question(**wish, tiling="untiled", vram_gb=least - 1e-6), big)
    small = Machine(big.device, int(least / 0.9 * GIB), 0)
    raised = answer(Question(**wish), small)
    assert (raised["mode"], raised["target_source"]) == ("untiled", "free")
    assert 13 / 16 / 0.9 * least < raised["predicted_gb"] <= raised["target_gb"]
    assert "is raised to" in raised["note"]
    own = answer(Question(**wish, vram_gb=0.99 * least), small)
    assert (own["mode"], own["target_source"]) == ("blended", "vram_gb")
    assert "approximate" in own["note"]
    assert own["note"] in own["text"]
    assert not answer(Question(**wish, tiling="untiled"), small)["fits"]
    assert answer(Question(**wish), big)["note"] == ""


def test_pictures_are_beside_each_other():
    """Four pictures of an image VAE are no clip of four frames, and as many as the host allows may be asked."""
    one, four = (answer(Question(model="ae.safetensors", width=64, height=64, frames=1, batch=b), CPU) for b in (1, 4))
    assert four["still"] and (four["frames"], four["batch"], four["latents"]) == (1, 4, 4)
    assert four["result_gb"] == pytest.approx(4 * one["result_gb"])
    many = answer(Question.parse({"model": "ae.safetensors", "width": "64", "height": "64", "frames": "1",
                                  "batch": "4096"}), CPU)  # fmt: skip
    assert many["batch"] == many["latents"] == 4096


@pytest.mark.parametrize(("file", "frames", "latents"), [("ltx_vae", 97, 13), ("mochi_vae", 25, 5), ("wan_2.1", 33, 9)])
def test_latents_are_the_familys(file, frames, latents):
    found = answer(Question(model=file, width=64, height=64, frames=frames), CPU)
    assert (found["latents"], found["frames"]) == (latents, frames)


def test_several_gpus(monkeypatch, tiny):
    """The plan of each; one that is not there, or a list without the VAE's own, is an error that says so."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(make, "why_off", lambda *_: "no kernels here")
    monkeypatch.setattr(loader, "auto_precision", lambda *_: "fp16")
    gpu, wish = Machine(torch.device("cuda", 0), 16 * GIB, 64 * GIB), {**tiny, "width": "64", "height": "64"}
    assert answer(Question.parse(wish), gpu)["gpus"] == 1
    assert answer(Question.parse(wish | {"gpus": "all"}), gpu)["gpus"] == 2
    with pytest.raises(InputError, match=r"^GPUs \(gpus\): cuda:5 is not there"):
        answer(Question.parse(wish | {"gpus": "cuda:0,cuda:5"}), gpu)
    with pytest.raises(InputError, match="cuda:0"):
        answer(Question.parse(wish | {"gpus": "cuda:1"}), gpu)


@pytest.mark.parametrize("precision", ["auto", "int8", "fp8"])
def test_nothing_is_fused_on_a_cpu(precision):
    """In 8 bit its reference operators run, in words that the panel has."""
    found = answer(Question(model="seedvr2_ema_vae", width=64, height=64, frames=5, precision=precision), CPU)
    assert not found["fused"] and "fused" not in found["text"] + found["kernels"]
    in_8_bit = precision != "auto"
    assert found["text"].startswith("reference operators, untiled, " if in_8_bit else "plain torch, untiled, ")
    assert (found["kernels"], found["kernels_off"] == "") == ("reference operators" if in_8_bit else "", in_8_bit)


def test_winograd_takes_more(monkeypatch):
    """Switched on, weights have its form; the panel asks with `on`."""
    monkeypatch.setattr(make, "why_off", lambda *_: None)
    monkeypatch.setattr(loader, "auto_precision", lambda *_: "fp16")
    gpu = Machine(torch.device("cuda", 0), 64 * GIB, 64 * GIB)
    wish = {"model": "seedvr2_ema_vae", "width": "1280", "height": "720", "frames": "21", "chunk": "1"}
    plain, on = (answer(Question.parse(wish | more), gpu)["predicted_gb"] for more in ({}, {"on": "winograd"}))
    assert on > plain
    names = "winograd", "direct", "winograd,direct", "tf32"
    asked = [Question.parse({"on": name}).options.winograd for name in names]
    assert asked == [True, False, False, None]


@pytest.mark.parametrize(("card", "model", "batch", "timed"), [
    ("NVIDIA GeForce RTX 5070 Ti", "seedvr2_vae", 1, True), ("NVIDIA GeForce RTX 5070 Ti", "seedvr2_vae", 2, True),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "seedvr2_vae", 1, False), ("NVIDIA H200", "seedvr2_vae", 1, False),
    ("A GPU that nobody knows", "seedvr2_vae", 1, False), ("NVIDIA GeForce RTX 5070 Ti", "mochi_vae", 1, False),
])  # fmt: skip
def test_expected_seconds_of_cards_whose_time_can_be_computed(monkeypatch, card, model, batch, timed):
    """81 frames of 720p on an RTX 5070 Ti; nothing where operators or the card's figures are not known."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: card)
    architecture, config = network_of(model)
    size = architecture.latents(architecture.filled(81)), 90, 160
    found = expected_facts(torch.device("cuda", 0), architecture, config, "fp16", size, batch, DEFAULTS)
    if not timed:
        assert found == {}
        return
    assert 10 * batch < found["expected_low_s"] < found["expected_high_s"] < 25 * batch
    form = replace(DEFAULTS, winograd=True)
    on = expected_facts(torch.device("cuda", 0), architecture, config, "fp16", size, batch, form)
    assert 7 * batch < on["expected_low_s"] < 0.7 * found["expected_low_s"]
    assert expected_facts(torch.device("cpu"), architecture, config, "fp16", size, batch, DEFAULTS) == {}
