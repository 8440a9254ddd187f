"""A run has the weights of the VAE at hand, whatever became of its file, and unrounded in a wider type."""

import os
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine import load, log, read_checkpoint
from zerowaste_vae.engine.execution import fused_pass
from zerowaste_vae.engine.execution.staging import StagedReader
from zerowaste_vae.engine.extras.eight_bit import store
from zerowaste_vae.engine.extras.output.writing import replacing, write_text
from zerowaste_vae.engine.runtime.context import ExecutionContext

from ..execution.faults import fail_calls

PRECISIONS = ["fp8", "int8"]


@pytest.fixture
def file(wide_file, tmp_path):
    """A copy that may be changed."""
    return shutil.copy(wide_file, tmp_path / "vae.safetensors")


def changed(path):
    """The file's tensors with one weight doubled."""
    tensors = load_file(path)
    tensors["decoder.mid_block.resnets.0.conv1.weight"] *= 2
    return tensors


METADATA = {"norm_num_groups": "4"}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_replaced_file(file, noise, precision, cache):
    """A file replaced by one of equal size and time is noticed."""
    z = noise(1, 16, 1, 2, 2)
    old = load(file, precision=precision, device="cpu").decode(z)
    state = os.stat(file)
    save_file(changed(file), file, METADATA)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert os.stat(file).st_size == state.st_size
    new = load(file, precision=precision, device="cpu").decode(z)
    shutil.rmtree(cache)
    assert torch.equal(new, load(file, precision=precision, device="cpu").decode(z))
    assert not torch.equal(new, old)


def test_replaced_after_load(file, noise, cache):
    """A file replaced between load and first use is noticed."""
    z = noise(1, 16, 1, 2, 2)
    expected = load(file, precision="int8", device="cpu").decode(z)
    shutil.rmtree(cache)
    vae = load(file, precision="int8", device="cpu")
    save_file(changed(file), file, METADATA)
    vae.decode(z)  # files what it measures and packs
    fresh = load(file, precision="int8", device="cpu").decode(z)
    assert torch.equal(vae.decode(z), expected)
    assert not torch.equal(fresh, expected)


def test_changed_checkpoint(file, noise, cache):
    """A checkpoint whose tensors were changed is noticed."""
    z = noise(1, 16, 1, 2, 2)
    old = load(read_checkpoint(file), precision="int8", device="cpu").decode(z)
    checkpoint = read_checkpoint(file)
    checkpoint.tensors["decoder.mid_block.resnets.0.conv1.weight"] *= 2
    new = load(checkpoint, precision="int8", device="cpu").decode(z)
    save_file(changed(file), file, METADATA)
    shutil.rmtree(cache)
    assert torch.equal(new, load(file, precision="int8", device="cpu").decode(z))
    assert not torch.equal(new, old)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("trouble", ["gone", "elsewhere", "no home"])
def test_without_file_or_cache(file, noise, precision, trouble, tmp_path, monkeypatch):
    """8 bit goes on without its file or a cache."""
    z = noise(1, 16, 1, 2, 2)
    expected = load(file, precision=precision, device="cpu").decode(z)
    monkeypatch.chdir(tmp_path)
    vae = load("vae.safetensors", precision=precision, device="cpu")
    if trouble == "gone":
        os.remove(file)
    elif trouble == "elsewhere":
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
    else:
        monkeypatch.setattr(store, "cache_folder", lambda: None)
    assert torch.equal(vae.decode(z), expected)
    assert vae.precision == vae.last_report.precision == precision


def test_damaged_packed(file, noise, caplog, monkeypatch):
    """Damaged packed weights are packed anew."""
    monkeypatch.setattr(log, "_said", set())
    z = noise(1, 16, 1, 2, 2)
    vae = load(file, precision="int8", device="cpu")
    good = vae.decode(z)
    packed = vae.store.prepared("decoder")
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 0x40
    packed.write_bytes(content)
    assert torch.equal(load(file, precision="int8", device="cpu").decode(z), good)
    assert sum("not what was written" in r.message for r in caplog.records) == 1
    assert torch.equal(load(file, precision="int8", device="cpu").decode(z), good)
    assert sum("packed anew" in r.message for r in caplog.records) == 1


def test_temporaries(tmp_path):
    """Writers of one file have temporaries of their own."""
    target, names = tmp_path / "t.json", []
    with replacing(target) as one, replacing(target) as other:
        names += [one, other]
        one.write_text("1")
        other.write_text("2")
    assert names[0] != names[1]
    assert target.read_text() == "1"
    threads = [threading.Thread(target=write_text, args=(target, str(i) * 100_000)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(target.read_text()) in [{str(i)} for i in range(8)]
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


# -- a wider type ---------------------------------------------------------------------------------------------------


def fp32_rerun(vae, z):
    """Return the results of two reruns in wider types."""
    return vae._safer("here")._safer("here again").decode(z)


def test_rerun_weights(file, noise):
    """A rerun has the weights of the file."""
    z = noise(1, 16, 2, 2, 2)
    expected = load(file, precision="fp32", device="cpu").decode(z)
    for precision in ("fp16", "bf16"):
        vae = load(file, precision=precision, device="cpu")
        safer = fp32_rerun(vae, z) if precision == "fp16" else vae._safer("here").decode(z)
        assert torch.equal(safer, expected)


def test_no_rounding(file, noise):
    """Weights stored in one 16-bit type are not rounded to another on the way."""
    z = noise(1, 16, 2, 2, 2)
    tensors = {name: t.half() for name, t in load_file(file).items()}
    save_file(tensors, file, METADATA)
    vae = load(file, precision="fp16", device="cpu")
    os.remove(file)  # not needed: all there was of them is here
    save_file({name: t.float() for name, t in tensors.items()}, file, METADATA)
    assert torch.equal(fp32_rerun(vae, z), load(file, precision="fp32", device="cpu").decode(z))


@pytest.mark.parametrize("trouble", ["gone", "changed", "used up", "trained"])
def test_missing_source(file, noise, trouble, caplog):
    """A missing source is reported, and done without."""
    z = noise(1, 16, 2, 2, 2)
    tensors = {name: t.half().float() for name, t in load_file(file).items()}
    source = read_checkpoint(file) if trouble == "used up" else file
    if trouble == "used up":
        source.path = None
    vae = load(source, precision="fp16", device="cpu")
    name = "decoder.mid_block.resnets.0.conv1.weight"
    if trouble == "gone":
        os.remove(file)
    elif trouble == "changed":
        save_file(changed(file), file, METADATA)
    elif trouble == "trained":
        vae.model.decoder.mid_block.resnets[0].conv1.weight.mul_(2)
        tensors[name] = tensors[name] * 2
    out = fp32_rerun(vae, z)
    save_file(tensors, file, METADATA)
    assert torch.equal(out, load(file, precision="fp32", device="cpu").decode(z))  # rounded once, to fp16
    said = [r.message for r in caplog.records if "rounded to torch.float16" in r.message]
    assert len(said) == 2
    assert ("used up" if trouble == "used up" else str(file)) in said[0]


# -- out of memory, then not finite ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_wider_type(file, noise, monkeypatch, precision):
    """Memory runs out between the second chunk and the third, and the fourth overflows."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    z = noise(1, 16, 5, 2, 2)
    vae = load(file, precision=precision, device="cpu")
    good, safer = vae.decode(z, chunk=1), load(file, precision="fp16", device="cpu").decode(z, chunk=1)
    monkeypatch.setattr("zerowaste_vae.engine.execution.call._leaner", lambda *args: args[-1])
    calls, taken = fail_calls(monkeypatch, StagedReader, "read", {3, 4}), []
    conv, take, made = ExecutionContext.conv, fused_pass.take_over, []

    def overflowing(run, up, x, out, *given, **rest):
        sums = conv(run, up, x, out, *given, **rest)
        if not run.dry and up.key.endswith("up_blocks.2.upsamplers.0.conv"):
            made.append(up.key)
            if len(made) == 4:
                out[-1, 1, 2, 3] = torch.nan
        return sums

    monkeypatch.setattr(ExecutionContext, "conv", overflowing)
    monkeypatch.setattr(fused_pass, "take_over", lambda run, clip: taken.append(clip) or take(run, clip))
    out = vae.decode(z, chunk=1)
    assert len(calls) > 4
    assert len(taken) == 1  # by the leaner 8-bit run, not by the wider one
    assert vae.last_report.events["nan_reruns"] == 1
    assert torch.equal(out[:, :9], good[:, :9])
    assert torch.equal(out[:, 9:], safer[:, 9:])
