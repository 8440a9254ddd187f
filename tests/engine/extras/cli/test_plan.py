"""`zerowaste-vae plan`: what it prints, and what it refuses."""

import json

import pytest
import torch
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.media.latents import read_latent
from zerowaste_vae.engine.extras.media.pngs import write_png_folder


def test_a_plan_for_a_card_that_is_not_here(capsys):
    assert main(["plan", "--size", "1280x720", "--frames", "21", "--vram-gb", "13"]) == 0
    head, plan = capsys.readouterr().out.splitlines()
    assert head.startswith("1280x720, 21 frames, fp16: decode to float32")
    assert plan.startswith(" 13.00 GB: fused kernels, untiled, ")


@pytest.mark.parametrize("asked, bare", [
    (("--weights", "hunyuanvideo"), True), (("--weights", "wan2.1", "--encode"), True),
    (("--weights", "wan2.1"), False),
])  # fmt: skip
def test_blended_tiles_without_kernels_are_said(capsys, asked, bare):
    """Not kernels and their speed, and then plain torch."""
    tiles = ["--tiling", "blended", "--tile", "256", "--vram-gb", "12", "--card", "RTX 4090"]
    assert main(["plan", "--size", "512x320", "--frames", "9", *asked, *tiles]) == 0
    _, card, plan = capsys.readouterr().out.splitlines()
    assert (": plain torch, " in plan) == bare and ("fused kernels" in plan) != bare
    assert card.endswith("plain torch runs blended tiles of this component") == bare
    assert ("ms a frame" in card) != bare


def test_table_and_json(capsys):
    assert main(["plan", "--size", "640x360", "--table", "--ram-gb", "4", "--json", "--output", "uint8"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["size"] == [640, 360]
    assert answer["frames"] == 81
    assert answer["result_gb"] == pytest.approx(81 * 640 * 360 * 3 / 2**30)
    fitting = [row for row in answer["plans"] if row["fits"]]
    assert fitting
    for row in fitting:
        assert row["peak_gb"] <= row["target_gb"]
        assert row["parked"] == (row["host_gb"] > 0)


def test_a_link_of_another_speed(capsys):
    def moved(*more):
        assert main(["plan", "--size", "1280x720", "--vram-gb", "8", "--ram-gb", "62", "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["plans"][0]

    usual, slow = moved(), moved("--link", "12")
    assert 0 < slow["moved_gb"] < usual["moved_gb"]
    assert "of histories per frame come and go" in usual["text"] and slow["text"].endswith("ms at 12 GB/s")
    assert main(["plan", "--size", "1280x720", "--vram-gb", "8", "--link", "-1"]) == 2
    assert "--link -1" in capsys.readouterr().err


def test_a_file_of_its_own_and_plain_torch(capsys, vae_file):
    small = ["plan", "--size", "96x64", "--vae", str(vae_file), "--vram-gb", "1", "--plain", "--precision", "fp32"]
    assert main([*small, "--encode"]) == 0
    assert "plain torch" in capsys.readouterr().out


def test_a_family_by_its_name(capsys):
    asked = ["plan", "--size", "640x384", "--frames", "9", "--vram-gb", "13", "--ram-gb", "8"]
    assert main([*asked, "--weights", "wan2.1"]) == 0
    named = capsys.readouterr().out
    assert named.startswith("640x384, 9 frames, bf16: decode") and "fused kernels, untiled" in named
    assert main([*asked, "--weights", "wan2.2"]) == 0
    assert capsys.readouterr().out != named
    assert main([*asked, "--weights", "flux", "--encode"]) == 0
    assert main([*asked, "--weights", "ltx", "--encode"]) == 2
    assert "encoder's sizes are not known here" in capsys.readouterr().err


def peak(capsys, *args):
    assert main(["plan", "--size", "1280x720", "--frames", "21", "--vram-gb", "40", "--json", *args]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["note"] == ""
    return answer["precision"], answer["plans"][0]["peak_gb"]


def test_every_precision_has_a_plan(capsys):
    """8-bit histories take half: 3.1 of 6.3 GB at 1280x720."""
    fp16 = peak(capsys, "--precision", "fp16")
    assert peak(capsys) == fp16
    assert peak(capsys, "--precision", "fp16_fast") == ("fp16_fast", fp16[1])
    for kind in ("fp8", "int8"):
        assert 3.0 < fp16[1] - peak(capsys, "--precision", kind)[1] < 4.5
        assert peak(capsys, "--precision", kind, "--encode")[1] < peak(capsys, "--encode")[1] - 1.5


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_unfusable_widths_planned_plain(capsys, make_vae_file, precision):
    """Widths that the kernels refuse are planned for plain torch."""
    odd = str(make_vae_file((16, 24, 24, 24), (16, 24, 24, 24), 4, 1))
    assert main(["plan", "--size", "96x64", "--vae", odd, "--vram-gb", "2", "--precision", precision]) == 0
    _, note, plan = capsys.readouterr().out.splitlines()
    assert "widths [24" in note
    assert ("this is a plan for fp16" in note) == (precision == "int8")
    assert "plain torch" in plan


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--size", "1280"], "--size 1280: write width x height"),
        (["--size", "4x4", "--vram-gb", "1"], "at least 8x8"),
        (["--size", "64x64", "--frames", "0", "--vram-gb", "1"], "--frames 0"),
        (["--size", "64x64", "--precision", "half", "--vram-gb", "1"], "--precision half"),
        (["--size", "64x64", "--output", "int8", "--vram-gb", "1"], "--output int8 is not one of"),
        (["--size", "64x64", "--vram-gb", "-1"], "--vram-gb -1.0 is below 0"),
        (["--size", "64x64", "--vram-gb", "1", "--ram-gb", "nan"], "--ram-gb nan is not a size"),
        (["--size", "64x64", "--weights", "none", "--vram-gb", "1"], "--vae none is no file here, and no family"),
        (["--size", "64x64", "--weights", "flux", "--vae", "a.gguf", "--vram-gb", "1"], "--weights flux is named too"),
    ],
)
def test_refusals_are_one_line(capsys, args, words):
    assert main(["plan", *args]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_target_that_holds_nothing(capsys):
    assert main(["plan", "--size", "1280x720", "--vram-gb", "1"]) == 2
    assert "raise vram_gb" in capsys.readouterr().out


def test_several_gpus_are_computed(capsys):
    asked = ["plan", "--size", "1280x720", "--frames", "597", "--vram-gb", "24", "--devices", "8"]
    assert main([*asked, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["devices"]
    assert [row["devices"] for row in rows] == [2, 4, 8]
    assert 1.8 < rows[0]["computed_speedup"] < 2 and 5 < rows[2]["computed_speedup"] < 8
    assert rows[0]["parts"][0]["first"] == 0 and rows[0]["parts"][-1]["end"] == 597
    assert main([*asked, "--encode"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("8 GPUs, computed, not measured: ") and "of warm-up" in said
    assert main(["plan", "--size", "64x64", "--vram-gb", "4", "--devices", "-1"]) == 2


@pytest.mark.parametrize(
    ("args", "whole"),
    [
        (["--size", "213x121", "--frames", "7"], "216x128, 9 frames"),
        (["--size", "1281x721", "--frames", "81"], "1288x728, 81 frames"),
        (["--size", "1280x720", "--frames", "82", "--encode"], "1280x720, 85 frames"),
    ],
)
def test_plan_pads_like_encode(capsys, args, whole):
    """The plan is that of whole latents: of the same frames as when they are asked for."""
    main(["plan", *args, "--vram-gb", "8"])
    head, note, plan = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{whole}, fp16: ") and f"filled up to {whole}" in note
    size, frames, _ = whole.replace(",", "").split()
    exact = [size if a == args[1] else frames if a == args[3] else a for a in args]
    main(["plan", *exact, "--vram-gb", "8"])
    assert capsys.readouterr().out.splitlines() == [head, plan]


def test_planned_size_is_encodes(capsys, tmp_path, make_vae_file):
    """`plan` and `encode` pad frames to the same size."""
    write_png_folder(tmp_path / "clip", torch.zeros(6, 17, 27, 3))
    vae = str(make_vae_file())
    assert main(["encode", str(tmp_path / "clip"), str(tmp_path / "l.safetensors"), "--vae", vae]) == 0
    latents, height, width = read_latent(tmp_path / "l.safetensors").shape[2:]
    capsys.readouterr()
    main(["plan", "--vae", vae, "--size", "27x17", "--frames", "6", "--vram-gb", "8", "--json"])
    planned = json.loads(capsys.readouterr().out)
    assert planned["size"] == [8 * width, 8 * height] and planned["frames"] == 4 * (latents - 1) + 1


@pytest.mark.parametrize("halves", [True, False])
def test_an_encode_needs_an_encoder(capsys, make_vae_file, halves):
    path = make_vae_file((16, 16, 16, 16) if halves else None, (16, 16, 16, 16), 4, 6)
    code = main(["plan", "--size", "96x64", "--vae", str(path), "--vram-gb", "1", "--encode"])
    said = capsys.readouterr()
    if halves:
        assert code == 0
    else:
        assert code == 2 and said.err.count("\n") == 1 and "holds a decoder only" in said.err
