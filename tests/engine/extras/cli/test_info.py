"""What `info` says of a file."""

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from zerowaste_vae import demo_vae_path
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import by_name

from ...families.small import WHOLE, small
from .said import one_error


def test_info_describes_a_file(run, make_vae_file):
    code, out, _ = run("info", "{vae}")
    assert code == 0
    shown = {line[:16].strip(): line[16:] for line in out.splitlines()}
    assert shown["torch"] == torch.__version__
    assert shown["architecture"].startswith("seedvr2")
    assert shown["encoder"] == shown["decoder"] == "widths 8, 16, 16, 16"
    assert shown["norm groups"] == "4 (named in the file)"
    assert shown["weights"].endswith("246 tensors, read as 246 float32")
    code, out, _ = run("info", make_vae_file(encoder=None))
    assert code == 0 and "encoder         not in this file" in out and "half a VAE      it decodes" in out
    one_error(run("info", "gone.safetensors"), "gone.safetensors")


def checkpoints(vae_file):
    """A file of each of some families, with both halves."""
    yield "seedvr2", load_file(vae_file), {"norm_num_groups": "4"}
    for name in ("wan2.1", "flux"):
        given = random_checkpoint(WHOLE[name], 0, by_name(name))
        yield name, given.tensors, given.metadata


def test_info_describes_half_a_vae(run, vae_file):
    """Describe a file with one component, and one that lacks a part of it."""
    for name, tensors, notes in checkpoints(vae_file):
        encoder = {key: t for key, t in tensors.items() if not key.startswith("decoder.")}
        save_file(encoder, "encoder.safetensors", notes)
        code, out, err = run("info", "encoder.safetensors")
        shown = {line[:16].strip(): line[16:] for line in out.splitlines()}
        assert code == 0, err
        assert shown["architecture"].startswith(name) and shown["encoder"].startswith("widths ")
        assert shown["decoder"] == "not in this file" and "without its decoder" in shown["half a VAE"]
        assert shown["latents"].startswith("16 channels") and f" in {len(encoder)} tensors" in shown["weights"]
        Image.new("RGB", (16, 16)).save("a.png")
        one_error(run("encode", "a.png", "l.safetensors", "--vae", "encoder.safetensors"), "encoder.safetensors")
        inside = next(key for key in encoder if key.startswith("encoder."))
        save_file({key: t for key, t in tensors.items() if key != inside}, "cut.safetensors", notes)
        code, out, _ = run("info", "cut.safetensors")
        assert code == 0 and "encoder         incomplete" in out and "half a VAE      it decodes" in out
        save_file({key: t for key, t in encoder.items() if key != inside}, "bad.safetensors", notes)
        one_error(run("info", "bad.safetensors"), "bad.safetensors", "decoder")


def test_info_knows_where_there_is_no_8_bit(run):
    given = small("ltx")
    save_file(given.tensors, "a.safetensors", given.metadata)
    code, out, err = run("info", "a.safetensors")
    assert code == 0, err
    assert "there is no 8 bit for it" in out and "measure the first clips" not in out
    code, out, err = run("info", demo_vae_path())
    assert code == 0 and "there is no 8 bit for it" not in out
