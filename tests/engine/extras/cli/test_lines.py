"""A table of command lines, right ones and wrong ones as people write them, each with its exit code and first line."""

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.cli.completion import script, words
from zerowaste_vae.engine.extras.media.latents import write_latent
from zerowaste_vae.engine.extras.media.mp4 import write_mp4

ROWS = [line.split(" |") for line in Path(__file__).with_name("lines.txt").read_text("utf-8").splitlines()[1:]]


@pytest.fixture
def line(tmp_path, monkeypatch, capsys, vae_file):
    """line(text) -> (exit code, stdout, stderr), in a folder with v.safetensors (a VAE), l.safetensors (its latent),
    c.mp4 and lora.safetensors."""
    monkeypatch.chdir(tmp_path)
    for name in ("COMFYUI_DIR", "NO_COLOR", "ZEROWASTE_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "v.safetensors").write_bytes(vae_file.read_bytes())
    write_latent("l.safetensors", torch.zeros(1, 16, 2, 2, 2))
    if find_spec("av") is not None:
        write_mp4("c.mp4", torch.rand(5, 16, 16, 3), 24)
    save_file({f"lora_unet_down.lora_{x}.weight": torch.zeros(4, 4) for x in "AB"}, "lora.safetensors")

    def run(text):
        try:
            code = main(shlex.split(text))
        except SystemExit as ended:  # of --help and --version alone
            code = ended.code
        return (code, *capsys.readouterr())

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="its lines are those of a machine without a GPU")
def test_every_line(line):
    wrong = []
    for code, text, first in ROWS:
        found, out, err = line(text)
        said = (err if err.startswith("zerowaste-vae: error") else out).partition("\n")[0]
        begins = re.escape(first.strip()).replace(r"\*", r"[\d.]+").replace(r"\\e", re.escape("\x1b"))
        ended = (found, bool(re.match(begins, said)), err.count("\n") <= 2, "Traceback" in out + err)
        if ended != (int(code), True, True, False) or (found and err.startswith("zerowaste") and out):
            wrong.append((text, found, said, err))
    assert wrong == []
    assert len(ROWS) >= 150 and sum(row[0] == "2" for row in ROWS) >= 40


def test_usage_is_shown_on_help_alone():
    assert [row[1] for row in ROWS if row[2].strip().startswith("usage")] and all(
        "--help" in row[1] for row in ROWS if row[2].strip().startswith("usage"))  # fmt: skip


def test_colours_of_errors(line, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    red = "\x1b[31;1mzerowaste-vae: error:\x1b[0m "
    assert line("plan --size 1")[2].startswith(red)
    assert line("plan --size 1 --color never")[2].startswith("zerowaste-vae: error: ")
    monkeypatch.setenv("NO_COLOR", "1")
    assert line("plan --size 1")[2].startswith("zerowaste-vae: error: ")
    assert line("plan --size 1 --color always")[2].startswith(red)


def test_completion_knows_every_option():
    known = words()
    assert {"decode", "bench", "fits"} <= set(known[""]) and "--vram-gb" in known["decode"]
    assert "--weights" not in known["plan"] and {"load", "report"} <= set(known["bench"])
    for shell in ("bash", "zsh", "powershell"):
        text = script(shell)
        assert all(f"{name} " in text or f"'{name}'" in text for name in known[""] if not name.startswith("-"))
        # The words after `bench decode` come before those after `bench`: the first line that fits is taken.
        assert text.index("bench decode ") < text.index("bench *" if shell == "powershell" else '"bench "')


def test_json_goes_to_a_file_or_alone_to_standard_output(line):
    import json

    for text in ("plan --size 64x64 --vram-gb 8", "info", "fits flux --card 4090", "compare c.mp4 c.mp4",
                 "decode l.safetensors a.safetensors --force --vae v.safetensors"):  # fmt: skip
        code, out, err = line(f"{text} --json -")
        alone = json.loads(out)
        assert (code, err) == (0, ""), text
        assert line(f"{text} --json o.json --force")[0] == 0
        written = json.loads(Path("o.json").read_text())
        assert type(written) is type(alone) and len(written) == len(alone), text


def test_a_folder_is_no_file(line, tmp_path):
    """Folders are often called after a family."""
    (tmp_path / "flux").mkdir()
    assert line("fits flux --card 4090")[0] == 0 and line("plan --size 64x64 --vram-gb 8 --vae flux")[0] == 0


def test_a_family_is_found_in_models_vae(line, tmp_path):
    """A decode needs weights: a family's name means the user's file of it, if there is one."""
    decode = "decode l.safetensors a.mp4 --vae seedvr2"
    assert "no file of the family seedvr2" in line(decode)[2]
    folder = tmp_path / "models" / "vae"
    folder.mkdir(parents=True)
    (tmp_path / "v.safetensors").rename(folder / "ema_vae_fp16.safetensors")
    assert line(decode)[0] == 0
    code, out, _ = line("fits --card 4090 --size 64x64 --frames 5")
    assert code == 0 and "ema_vae_fp16.safetensors" in out and "flux" not in out
    (folder / "seedvr2_vae.safetensors").write_bytes((folder / "ema_vae_fp16.safetensors").read_bytes())
    assert "there are ema_vae_fp16.safetensors, seedvr2_vae.safetensors" in line(f"{decode} --force")[2]


@pytest.mark.parametrize(("vae", "precision", "plain", "timed"), [
    ("wan2.1", "auto", False, True), ("wan2.1", "fp16_fast", False, False), ("taesd", "auto", True, False),
    ("ltx-diffusion", "fp16_fast", False, False),
])  # fmt: skip
def test_a_table_says_what_plan_says(line, vae, precision, plain, timed):
    """The time of the form that layers have on the card, and plain torch only where it runs."""
    size = "--card 5070ti --size 1280x720"
    rows = json.loads(line(f"fits {vae} {size} --precision {precision} --json -")[1])["rows"]
    assert [("plain torch" in row["decode"], row["expected"] != "not timed") for row in rows] == [(plain, timed)]
    if timed:
        seconds = rows[0]["expected"].split(" to ")
        assert f"expected {seconds[0]} to {seconds[1]} (" in line(f"plan --vae {vae} {size}")[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_card_that_is_here(line):
    """Its memory and name come from CUDA; plans name it, its kernels and what the target is."""
    name = torch.cuda.get_device_name()
    code, out, err = line("fits flux")
    assert (code, err) == (0, "") and out.startswith(f"{name}, sm_") and "(here)" in out and "whole frames" in out
    code, out, _ = line("plan --size 1024x1024 --vae flux --frames 1")
    assert code == 0 and f"on {name} (" in out and "within what is free now" in out
