"""A latent knows its VAE: what decodes it refuses another one's, in Python and on the command line."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
import zerowaste_vae
from safetensors.torch import save_file
from zerowaste_vae.engine import InputError, load, log
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.media import latent_note
from zerowaste_vae.engine.extras.media.latents import LatentFile, latent_metadata, read_latent, write_latent
from zerowaste_vae.engine.extras.media.pngs import write_png_folder
from zerowaste_vae.engine.families import by_name

from ...families.small import SMALL, WHOLE

#: Of the families in which a layout alone does not say whose latents they are.
SEVERAL = {"seedvr2", "sd", "flux", "taesd", "taehv"}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(log, "_said", set())


def checkpoint(name, seed=0, config=None):
    return random_checkpoint(config or WHOLE.get(name) or SMALL[name], seed, by_name(name))


def made(name, seed=0, precision="fp32"):
    return load(checkpoint(name, seed), precision, "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of VAEs: wan, flux and sd3 (of one layout), cosmos, and a clip and a picture."""
    path = tmp_path_factory.mktemp("vaes")
    for file, name, seed in (("wan", "wan2.1", 0), ("flux", "flux", 0), ("sd3", "flux", 1), ("cosmos", "cosmos", 0)):
        given = checkpoint(name, seed)
        save_file(given.tensors, path / f"{file}.safetensors", {k: str(v) for k, v in given.metadata.items()})
    draw = torch.Generator().manual_seed(0)
    write_png_folder(path / "clip", torch.randint(0, 256, (5, 16, 16, 3), dtype=torch.uint8, generator=draw))
    return path


@pytest.fixture
def run(monkeypatch, tmp_path, capsys, folder, vae_file):
    """run(*args) -> (exit code, stderr, what the log warned of); names of `folder` and {seedvr2} become paths."""
    monkeypatch.chdir(tmp_path)
    warned = []
    monkeypatch.setattr(log.logger, "log", lambda level, form, *of: warned.append(form % of))
    files = {name: folder / f"{name}.safetensors" for name in ("wan", "flux", "sd3", "cosmos")}
    files |= {"clip": folder / "clip", "seedvr2": vae_file}

    def call(*args):
        warned.clear()
        code = main([str(files.get(arg, arg)) for arg in args])
        return code, capsys.readouterr().err, list(warned)

    return call


@pytest.mark.parametrize("name", SMALL)
def test_every_family_makes_a_note_that_it_takes_itself(name):
    vae = made(name)
    note = latent_note.note_of(vae)
    assert (note["family"], note["version"]) == (name, zerowaste_vae.__version__)
    assert float(note["scale"]) == vae.scale
    assert "decoder" in note and all(isinstance(text, str) for text in note.values())
    latent_note.check(note, vae)
    latent_note.check(note, made(name, precision="bf16"))


@pytest.mark.parametrize("name", SMALL)
def test_other_weights_of_a_layout(name, caplog):
    """Other weights are refused where they mean other latents; otherwise a line says so."""
    note, other = latent_note.note_of(made(name)), made(name, 1)
    if name in SEVERAL:
        with pytest.raises(InputError, match="was made by"):
            latent_note.check(note, other)
    else:
        latent_note.check(note, other)
        assert "has other weights" in caplog.text


def test_another_decoder_is_the_same_vae(caplog):
    """A VAE with the same encoder and another decoder counts as the same."""
    given, other = checkpoint("flux"), checkpoint("flux", 1)
    mixed = {k: (t if k.startswith("encoder") else other.tensors[k]) for k, t in given.tensors.items()}
    note = latent_note.note_of(load(given, device="cpu"))
    other.tensors.clear()
    other.tensors.update(mixed)
    latent_note.check(note, load(other, device="cpu"))
    assert not caplog.text


def test_rounded_weights_are_the_same_ones():
    """As a file in 4 bit holds them at worst."""
    given = checkpoint("flux")
    note = latent_note.note_of(load(checkpoint("flux"), device="cpu"))
    for key, t in given.tensors.items():
        step = t.abs().max() / 7
        given.tensors[key] = (t / step).round() * step if t.ndim > 1 else t
    latent_note.check(note, load(given, device="cpu"))


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({}, False),
        ({"version": "9.9.9"}, False),
        ({"version": "x" * 5000}, False),
        ({"encoder": "", "decoder": "?"}, False),
        ({"encoder": "AAAA", "decoder": "\u00e9"}, False),
        ({"scale": "0.9152"}, True),
        ({"scale": "many"}, False),
        ({"family": "wan2.2"}, True),
        ({"family": "of the future"}, True),
        ({"family": ""}, False),
    ],
)
def test_what_of_a_note_matters(change, refused):
    vae = made("wan2.1")
    note = latent_note.note_of(vae) | change
    if not refused:
        return latent_note.check(note, vae)
    with pytest.raises(InputError, match=r"wan2\.1.*any_vae=True") as caught:
        latent_note.check(note, vae)
    assert note["family"] in str(caught.value) and "\n" not in str(caught.value)
    return latent_note.check(note, vae, any_vae=True)


def test_a_note_of_any_text_is_one_line():
    vae = made("wan2.1")
    for family in ("two\nlines", "x" * 100_000, "\x00"):
        with pytest.raises(InputError) as caught:
            latent_note.check({"family": family, "vae": family, "scale": family}, vae)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.skipif(sys.platform == "win32", reason="names are UTF-16 there")
def test_file_name_without_utf_8(tmp_path, vae_file, run):
    """A VAE whose file name is not UTF-8 makes files that can be read."""
    path = tmp_path / "bad\udcff.safetensors"
    path.write_bytes(vae_file.read_bytes())
    for out in ("l.safetensors", "l.latent"):
        assert run("encode", "clip", out, "--vae", str(path))[0] == 0
        assert latent_metadata(out)["vae"] == "bad?.safetensors"
    latent = load(path, device="cpu").encode(torch.rand(1, 16, 16, 3))
    write_latent(tmp_path / "m.safetensors", latent)
    assert torch.equal(read_latent(tmp_path / "m.safetensors"), latent)


def test_families_that_share_latents():
    """LTX-2.3 and both decoders of LTX-2.5 stand behind one encoder."""
    vae = made("ltx")
    latent_note.check({"family": "ltx-diffusion", "scale": "1"}, vae)
    with pytest.raises(InputError, match="mochi"):
        latent_note.check({"family": "mochi", "scale": "1"}, vae)


def test_python_keeps_the_note_through_files(tmp_path, vae):
    clip, wrong = torch.rand(1, 16, 16, 3), made("wan2.1")
    latent = vae.encode(clip)
    (part,) = vae.encode_stream([clip])
    for each, name in ((latent, "a.safetensors"), (part, "b.latent")):
        write_latent(tmp_path / name, each, {"fps": "25"})
        assert latent_metadata(tmp_path / name) == {**latent_note.note_of(vae), "fps": "25"}
        read = read_latent(tmp_path / name)
        assert torch.equal(vae.decode(read), vae.decode(latent))
        for call in (lambda z: wrong.decode(z), lambda z: list(wrong.stream(z))):
            for given in (each, read):
                with pytest.raises(InputError, match=r"made by seedvr2 \(.*scale 0\.9152\), and the VAE here is wan2"):
                    call(given)
        with pytest.raises(InputError, match="made by seedvr2"):
            list(wrong.stream(LatentFile(tmp_path / name)))
        assert wrong.decode(read, any_vae=True).shape == (1, 1, 16, 16, 3)
        assert next(wrong.stream(LatentFile(tmp_path / name), any_vae=True)).shape == (1, 1, 16, 16, 3)
    assert wrong.decode(latent + 0).shape == (1, 1, 16, 16, 3)  # what another step has made of it is not known


def test_encode_notes_and_decode_refuses(run):
    assert run("encode", "clip", "l.safetensors", "--vae", "wan")[0] == 0
    notes = latent_metadata("l.safetensors")
    assert notes["family"] == "wan2.1" and notes["scale"] == "1" and notes["version"] == zerowaste_vae.__version__
    for vae, family in (("flux", "flux"), ("cosmos", "cosmos"), ("seedvr2", "seedvr2")):
        code, err, _ = run("decode", "l.safetensors", "a.safetensors", "--vae", vae)
        assert code == 2 and re.fullmatch(r"zerowaste-vae: error: [^\n]+\n", err)
        for word in ("l.safetensors", "wan2.1 (wan.safetensors)", family, "with --vae", "--any-vae"):
            assert word in err, err
    code, err, warned = run("decode", "l.safetensors", "a.safetensors")
    assert code == 2 and "demo_vae.safetensors" in err
    assert "[BLACKWELL_ENGINE] no --vae: the small demo VAE" in warned[0]
    for more in ("--vae", "wan"), ("--vae", "cosmos", "--any-vae"), ("--any-vae",):
        assert run("decode", "l.safetensors", "a.safetensors", "--force", *more)[0] == 0
    code, err, _ = run("decode", "l.safetensors", "a.mp4", "--vae", "flux", "--force")
    assert code == 2 and "wan2.1" in err  # --force is of outputs


def test_flux_and_sd3_are_told_apart(run):
    assert run("encode", "clip", "l.latent", "--vae", "flux")[0] == 0
    code, err, _ = run("decode", "l.latent", "a.safetensors", "--vae", "sd3")
    assert code == 2 and "flux (flux.safetensors)" in err and "flux (sd3.safetensors)" in err
    assert run("decode", "l.latent", "a.safetensors", "--vae", "flux")[0] == 0
    assert run("decode", "l.latent", "b.safetensors", "--vae", "sd3", "--any-vae")[0] == 0


def test_a_demo_latent_is_not_the_published_vaes(run):
    """They are of one family and scale."""
    code, _, warned = run("encode", "clip", "l.safetensors", "--quiet")
    assert code == 0 and "no --vae" in warned[0]
    code, err, _ = run("decode", "l.safetensors", "a.safetensors", "--vae", "seedvr2")
    assert code == 2 and "demo_vae.safetensors" in err
    code, _, warned = run("decode", "l.safetensors", "a.safetensors")
    assert code == 0 and [line for line in warned if "no --vae" in line]


def test_files_without_a_note_get_one_line(run, noise):
    for name, notes in {"plain.safetensors": {}, "comfy.latent": {}, "empty.safetensors": {"family": ""}}.items():
        write_latent(name, noise(1, 16, 2, 2, 2), notes)
        code, _, warned = run("decode", name, "a.safetensors", "--vae", "wan", "--force")
        assert code == 0 and len([line for line in warned if f"{name}: does not say which VAE made it" in line]) == 1
    write_latent("four.safetensors", noise(1, 4, 2, 2, 2))
    for more in (), ("--any-vae",):
        code, err, _ = run("decode", "four.safetensors", "b.safetensors", "--vae", "wan", *more)
        assert code == 2 and "4 channels, not 16" in err


def test_calibrate_checks_the_latents_vae(run):
    """calibrate names the VAE and takes no other VAE's latent."""
    assert run("encode", "clip", "l.safetensors", "--vae", "wan")[0] == 0
    code, _, warned = run("calibrate", "--clip", "clip", "--ranges-only", "--quiet")
    assert code == 0 and "no VAE file: the small demo VAE" in warned[0]
    code, err, _ = run("calibrate", "seedvr2", "--latent", "l.safetensors", "--ranges-only", "--quiet")
    assert code == 2 and "made by wan2.1" in err


def test_on_a_console_the_lines_are_on_stderr(tmp_path, folder, noise):
    write_latent(tmp_path / "l.safetensors", noise(1, 16, 1, 2, 2))
    args = [sys.executable, "-m", "zerowaste_vae", "decode", "l.safetensors", "a.png", "--quiet"]
    done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "no --vae: the small demo VAE" in done.stderr and "does not say which VAE made it" in done.stderr
