"""The command line in an empty folder."""

import pytest
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.media.latents import write_latent


@pytest.fixture
def run(monkeypatch, tmp_path, capsys, vae_file):
    """run(*args) -> (exit code, stdout, stderr), in an empty folder; {vae} becomes the tiny VAE's path."""
    monkeypatch.chdir(tmp_path)

    def call(*args):
        code = main([str(arg).replace("{vae}", str(vae_file)) for arg in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def place(tmp_path, monkeypatch, vae_file, noise):
    """A folder with a latent of 21 frames of 32x16, and the command line."""
    monkeypatch.chdir(tmp_path)
    write_latent("l.safetensors", noise(1, 16, 6, 2, 4), {"fps": "12", "frames": "19", "height": "15", "width": "30"})

    def run(*args):
        return main([args[0], "--vae", str(vae_file), "--device", "cpu", *map(str, args[1:])])

    return run
