"""Processes under torchrun on a CPU: the output of one process, and a clear end where one of them is killed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.extras import cli

ROOT = str(Path(cli.__file__).resolve().parents[4])


def start(folder, *command, module="zerowaste_vae"):
    paths = os.pathsep.join([ROOT, str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*torchrun, "-m", module, *command],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture
def latent(tmp_path, make_vae_file):
    """Whose second half is worth a lead."""
    z = torch.randn(1, 16, 44, 1, 2, generator=torch.Generator().manual_seed(1))
    save_file({"latent": z}, tmp_path / "z.safetensors")
    return str(make_vae_file((8, 8, 8, 8), (8, 8, 8, 8), 2, 3))


def test_two_ranks_write_what_one_does(tmp_path, latent, monkeypatch):
    common = ["--vae", latent, "--device", "cpu", "--chunk", "1", "--start", "1", "--frames", "170", "--report"]
    process = start(tmp_path, "--", "decode", "z.safetensors", "two/", *common, "two.json")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["decode", "z.safetensors", "one/", *common, "one.json", "--quiet"]) == 0
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert len(one) == 170 and one == two
    assert said.count("170 frames 16x8") == 1
    parts = json.loads((tmp_path / "two.json").read_text())["parts"]
    assert parts[0]["first"] == 1 and parts[0]["end"] == parts[1]["first"] and parts[1]["end"] == 171


def test_ranks_stream_fail_and_stop(tmp_path, make_vae_file):
    """A segment each in turn; one that fails hands over; a cancel and a dropped stream end on all of them."""
    file = make_vae_file((8, 8, 8, 8), (8, 8, 8, 8), 2, 3)
    process = start(Path(__file__).parent, str(file), module="rank_cases")
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    same, parts, complete = found["stream"]
    assert same and parts > 4 and complete
    assert found["failed"] == [True, 1]
    assert found["cancelled"] and found["decode"] and found["encode"] and found["encode_stream"]
    same, more = found["unequal"]
    assert same and 2 < more < 4  # of one that is three times as fast
    assert found["threads"] == []
    assert "CUDA error: lost; the rest of its part goes to" in said


def test_a_killed_rank_ends_the_others(tmp_path, latent):
    """Long before they are done: 2000 latents."""
    save_file({"latent": torch.zeros(1, 16, 2000, 4, 4)}, tmp_path / "long.safetensors")
    options = ["--vae", latent, "--device", "cpu", "--verbose"]
    process = start(tmp_path, "decode", "long.safetensors", "out.mp4", *options)
    try:
        joined = next(line for line in process.stdout if "rank 1 of 2: process" in line)
        os.kill(int(joined.split()[-1]), signal.SIGKILL)
        said = process.communicate(timeout=200)[0]
    finally:
        process.kill()
    assert process.returncode
    assert re.search("rank 0: (rank 1 has ended|stopped by torchrun)", said), said
    assert not (tmp_path / "out.mp4").exists()


@pytest.mark.parametrize("how, says", [("stopped", "rank 1 has said nothing for 3 s"),
                                       ("stuck", "rank 1 has not come to the end of a chunk for 10 s")])  # fmt: skip
def test_a_rank_that_hangs_ends_the_others(tmp_path, latent, how, says):
    """Finished frames stay, and a line says how to go on."""
    save_file({"latent": torch.zeros(1, 16, 400, 1, 2)}, tmp_path / "long.safetensors")
    process = start(tmp_path, how, latent, "long.safetensors", module="rank_hangs")
    said = ""
    try:
        hangs = next(line for line in process.stdout if "rank 1 hangs" in line)
        for line in process.stdout:
            said += line
            if "rank 0: " in line:  # torchrun would wait for half a minute
                os.kill(int(hangs.split()[-1]), signal.SIGKILL)
    finally:
        process.kill()
    assert f"rank 0: {says}, so this one stops too" in said, said
    assert "the same command with --resume goes on from there" in said
    assert not (tmp_path / "out.mp4").exists()


@pytest.mark.parametrize("length", [44, 12])
def test_ranks_with_another_latent_are_refused(tmp_path, latent, length):
    """Half copied, or of another clip: their parts would be mixed in, and some be missing."""
    other = torch.randn(1, 16, length, 1, 2, generator=torch.Generator().manual_seed(2))
    save_file({"latent": other}, tmp_path / "z1.safetensors")
    (tmp_path / "z.safetensors").rename(tmp_path / "z0.safetensors")
    common = ["--vae", latent, "--device", "cpu", "--chunk", "1"]
    process = start(tmp_path, "decode", "z{rank}.safetensors", "out/", *common, module="rank_files")
    said = process.communicate(timeout=120)[0]
    assert process.returncode and "rank 1 has another latent than rank 0; give all ranks the same" in said, said
    assert not list(tmp_path.glob("out*"))


def test_ranks_of_a_python_program_must_be_alike(make_vae_file):
    """As those of a command: what each reads, makes and computes with, by its contents and not by its size."""
    files = [str(make_vae_file((8, 8, 8, 8), (8, 8, 8, 8), 2, seed)) for seed in (3, 4)]
    process = start(Path(__file__).parent, *files, module="rank_alike")
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    names = {"stream's latent": "latent", "VAE, mixed": "VAE"}
    for name in ("latent", "stream's latent", "part", "output", "VAE", "VAE, mixed", "options", "video"):
        for rank in (0, 1):
            refused = f"{rank} {name}: rank 1 has another {names.get(name, name)} than rank 0; give all ranks the same"
            assert refused in said, said
    assert "0 nothing: made" in said and "1 nothing: made" in said, said
