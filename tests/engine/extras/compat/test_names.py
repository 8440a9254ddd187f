"""The documented names: every one with its documented arguments, and no log line that is not true."""

import inspect
import json
import logging
import subprocess
import sys

import pytest
import torch
from torch import nn
from zerowaste_vae import InputError, PlanError, load
from zerowaste_vae.engine import compat
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.compat import modules, names
from zerowaste_vae.engine.options import DEFAULTS, TOGGLES
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.system.memory import GIB
from zerowaste_vae.engine.vae import VideoVAE

DOCUMENTED = {
    compat.BlackwellIntegratedVAE: "vae, vram_gb=16.0, target_vram_usage=0.8125",
    compat.BlackwellIntegratedVAE.decode: "self, latent, use_tiling=True",
    compat.BlackwellIntegratedVAE.benchmark: "self, num_runs=10, warmup_runs=3",
    compat.optimize_vae_for_blackwell_sm120: "vae, vram_gb=16.0, target_vram_usage=0.8125",
    compat.BlackwellSM120Optimizer: "enable_fp8=True, enable_cuda_graphs=True, enable_triton_fusion=True, "
    "use_temporal_slicing=True",
    compat.create_tiled_decoder: "decoder, tile_size=1536, temporal_chunk_size=12",
    compat.optimize_vae_for_inference: "vae, device='cuda', enable_channels_last_3d=True, "
    "enable_flash_attention=True, enable_tf32=True, enable_cudnn_benchmark=True",
    compat.optimize_vae_for_training: "vae, device='cuda'",
    compat.get_optimization_info: "",
    compat.optimize_3d_vae_for_blackwell: "model, enable_channels_last_3d=True, enable_flash_attention=True, "
    "enable_tf32=True, device='cuda'",
    compat.apply_channels_last_3d: "model, verbose=True",
    compat.enable_flash_attention_for_attention_blocks: "model, verbose=True",
    compat.enable_tf32_for_blackwell: "",
    compat.enable_cudnn_benchmark: "",
    compat.optimize_for_windows_blackwell: "vae, enable_channels_last=True, enable_fp8=False, enable_amp=True, "
    "device='cuda'",
    compat.configure_amp_context: "enabled=True, dtype=torch.float16",
    compat.create_optimized_dataloader: "dataset, batch_size=1, shuffle=False, num_workers=None, pin_memory=None",
    VideoVAE.enable_3d_blackwell_optimizations: "self, enable_channels_last_3d=True, enable_flash_attention=True, "
    "enable_tf32=True, verbose=True",
    VideoVAE.enable_windows_blackwell_optimizations: "self, enable_channels_last=True",
    VideoVAE.enable_slicing: "self",
}


@pytest.mark.parametrize("name", DOCUMENTED, ids=lambda f: f.__qualname__)
def test_arguments_as_documented(name):
    have = [p.replace(annotation=p.empty) for p in inspect.signature(name).parameters.values()]
    expected = DOCUMENTED[name].split(", ") if DOCUMENTED[name] else []
    assert [str(p) for p in have][: len(expected)] == expected
    extra = have[len(expected) :]
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in extra)


@pytest.fixture
def tiny(vae):
    """The tiny VAE under options of its own."""
    return vae.with_options(DEFAULTS)


@pytest.fixture
def lines(caplog):
    """The log's lines so far, without their prefix."""
    caplog.set_level(logging.INFO, "zerowaste_vae")
    return lambda: [r.getMessage().removeprefix("[BLACKWELL_ENGINE] ") for r in caplog.records]


class Foreign(nn.Module):
    """A network the engine does not know."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv3d(8, 3, 1))
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.block(x)


# -- whole VAEs -----------------------------------------------------------------------------------------------------


def test_integrated_vae_target(tiny, noise, lines):
    wrapped = compat.BlackwellIntegratedVAE(tiny, vram_gb=1.0, target_vram_usage=0.5)
    z = noise(1, 16, 2, 4, 5)
    for tiling in (True, False):
        assert torch.equal(wrapped.decode(z, use_tiling=tiling), tiny.decode(z))
    assert wrapped.target_gb == 0.5
    assert "Target RAM usage: 50.0% (0.5GB)" in lines()


def test_integrated_vae_tiles_only_when_it_may(tiny, noise, lines):
    z = noise(1, 16, 1, 24, 24)  # one frame: no leaner steps than all at once
    whole = tiny.planner.plan("decoder", (1, 24, 24), Request("untiled")).peak_bytes
    small = compat.BlackwellIntegratedVAE(tiny, vram_gb=(whole - 1) / GIB, target_vram_usage=1.0)
    with pytest.raises(PlanError):
        small.decode(z, use_tiling=False)
    assert small.decode(z).shape == (1, 1, 192, 192, 3)
    assert "blended tiles" in tiny.last_report.plan
    assert any("blended tiles are approximate" in line for line in lines())


def test_integrated_vae_sources(vae, vae_file, noise):
    z = noise(1, 16, 1, 2, 2)
    for source in (vae_file, str(vae_file), vae.model):
        wrapped = compat.BlackwellIntegratedVAE(source)
        assert torch.equal(wrapped.decode(z), vae.decode(z))
    assert not any(p.requires_grad for p in vae.model.parameters())


@pytest.mark.parametrize("bad", [object(), Foreign(), None])
def test_unknown_vaes_are_refused(bad):
    for use in (compat.BlackwellIntegratedVAE, compat.create_tiled_decoder, compat.optimize_vae_for_blackwell_sm120,
                compat.BlackwellSM120Optimizer().optimize):  # fmt: skip
        with pytest.raises(InputError, match=type(bad).__name__):
            use(bad)


@pytest.mark.parametrize("bad", [{"vram_gb": 0}, {"vram_gb": float("nan")}, {"target_vram_usage": 1.5}])
def test_bad_targets(tiny, bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        compat.BlackwellIntegratedVAE(tiny, **bad)


def test_benchmark_prints_what_it_returns(tiny, noise, capsys):
    wrapped = compat.BlackwellIntegratedVAE(tiny)
    result = wrapped.benchmark(num_runs=2, warmup_runs=1, latent=noise(2, 16, 2, 2, 3))
    out = capsys.readouterr().out
    assert "10 frames of 24x16, fp32 on cpu, 2 runs" in out
    assert f"Average decode time: {result['ms_per_frame']:.2f} ms per frame" in out
    assert f"Throughput: {result['frames_per_second']:.2f} frames/sec" in out
    assert len(result["seconds"]) == 2
    assert result["ms_per_frame"] == pytest.approx(1e3 * sum(result["seconds"]) / 20)
    assert json.loads(json.dumps(result))["report"]["complete"]
    with pytest.raises(InputError, match="num_runs=0"):
        wrapped.benchmark(num_runs=0)


def test_tile_size_is_the_largest_that_fits(tiny, lines):
    gb = 1.2 * tiny.planner.plan("decoder", (8, 24, 24), Request("untiled")).peak_bytes / GIB
    same, tile = compat.optimize_vae_for_blackwell_sm120(tiny, vram_gb=gb, target_vram_usage=1.0)
    assert same is tiny and tile % 64 == 0

    def needs(side):
        size = 8, side // 8, side // 8
        return tiny.planner.plan("decoder", size, Request("untiled", chunk=1), Limits(int(gb * GIB))).peak_bytes

    assert needs(tile) <= gb * GIB
    with pytest.raises(PlanError):
        needs(tile + 64)
    assert f"Optimized Tile Size: {tile}x{tile} based on {gb:g}GB RAM." in lines()
    with pytest.raises(PlanError):
        compat.optimize_vae_for_blackwell_sm120(tiny, vram_gb=0.001)


def test_optimizer_flags_are_options(tiny, noise, lines, atol):
    optimizer = compat.BlackwellSM120Optimizer(enable_fp8=False, enable_cuda_graphs=False, use_temporal_slicing=False)
    assert optimizer.optimize(tiny) is tiny
    assert tiny.options == DEFAULTS.switched(off=["fp8", "cuda_graphs"])
    z = noise(1, 16, 3, 2, 2)
    torch.testing.assert_close(optimizer.decode(tiny, z), tiny.decode(z, chunk=1), rtol=0, atol=atol)
    optimizer.decode(tiny, z)
    assert "3 latents per chunk" in tiny.last_report.plan
    # Asked for, but not here: said so, and no line claims it.
    compat.BlackwellSM120Optimizer().optimize(tiny)
    assert any(line.startswith("fp8 off: ") for line in lines())
    assert not any("FP8 Path Activated" in line or "CUDA Graph Captured" in line for line in lines())


def test_tiled_decoder(tiny, noise):
    z = noise(1, 16, 3, 6, 9)
    for size in (32, 1536):
        decode = compat.create_tiled_decoder(tiny, tile_size=size, temporal_chunk_size=2)
        assert torch.equal(decode(z), tiny.decode(z, chunk=2))
    blended = compat.create_tiled_decoder(tiny, tile_size=32).decode(z, tiling="blended", overlap=16)
    assert torch.equal(blended, tiny.decode(z, tiling="blended", tile=32, overlap=16, chunk=12))
    with pytest.raises(InputError, match="tile_size=-1"):
        compat.create_tiled_decoder(tiny, tile_size=-1)


# -- functions on VAEs and modules ----------------------------------------------------------------------------------


def test_optimising_a_vae_is_scoped(tiny, noise, monkeypatch):
    flags = torch.backends.cudnn.benchmark
    assert compat.optimize_vae_for_inference(tiny, "cpu", enable_channels_last_3d=False) is tiny
    assert tiny.options == DEFAULTS.switched(["tf32", "cudnn_benchmark"], ["channels_last_3d"])
    assert torch.backends.cudnn.benchmark is flags and not modules._restore
    assert compat.optimize_3d_vae_for_blackwell(tiny, enable_tf32=False, device="cpu") is tiny
    assert (tiny.options.tf32, tiny.options.cudnn_benchmark) == (False, False)
    assert compat.optimize_for_windows_blackwell(tiny, enable_fp8=True, device="cpu") is tiny
    assert tiny.options.fp8
    tiny.decode(noise(1, 16, 1, 2, 2))
    assert ("fp8", "switched off") not in tiny.last_report.off and "fp8" in dict(tiny.last_report.off)


def test_without_a_gpu_the_cpu_is_used(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compat.optimize_vae_for_inference(tiny).device.type == "cpu"


def test_a_foreign_module_keeps_its_result(lines):
    torch.manual_seed(0)
    module, x = Foreign(), torch.randn(1, 3, 4, 8, 8)
    expected = module(x)
    out = compat.optimize_vae_for_inference(module, "cpu")
    assert out is module and not module.training
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-5)
    assert module.block[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert "Converted 2 Conv3d layers to channels_last_3d." in lines()
    assert not modules._restore  # no GPU: TF32 and cuDNN were left alone
    compat.optimize_for_windows_blackwell(module, enable_fp8=True, device="cpu")
    assert any(line.startswith("fp8 is off: Foreign") for line in lines())
    assert any(line.startswith("AMP is off") for line in lines())
    with pytest.raises(InputError, match="int"):
        compat.optimize_vae_for_inference(3, "cpu")


def test_a_hosts_vae_keeps_its_type(tiny):
    class HostVae:
        engine = tiny

    host = HostVae()
    assert compat.optimize_vae_for_inference(host, "cpu", enable_flash_attention=False) is host
    assert not tiny.options.flash_attention
    assert compat.apply_channels_last_3d(host) > 50 and tiny.options.channels_last_3d is True


def test_amp_of_foreign_modules(monkeypatch, lines):
    module = Foreign()
    monkeypatch.setattr(names, "_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(module, "to", lambda _: module)
    monkeypatch.setattr(modules, "configure_amp_context", lambda: torch.autocast("cpu", torch.bfloat16))
    assert compat.optimize_for_windows_blackwell(module) is module
    assert module(torch.ones(1, 3, 2, 4, 4)).dtype == torch.bfloat16
    assert any("autocast" in line for line in lines())


def test_channels_last(tiny, noise, lines):
    """Lines and counts are true."""
    z = noise(1, 16, 1, 3, 3)
    expected = tiny.decode(z)
    convolutions = sum(isinstance(m, nn.Conv3d) for m in tiny.model.modules())
    assert compat.apply_channels_last_3d(tiny) == convolutions > 50
    assert "Channels_Last_3D Memory Format Applied." in lines()
    torch.testing.assert_close(tiny.decode(z), expected, rtol=0, atol=1.5e-5)
    assert "NDHWC" in tiny.last_report.mode
    tiny.options = DEFAULTS
    assert torch.equal(tiny.decode(z), expected)
    seen = len(lines())
    assert compat.apply_channels_last_3d(nn.Linear(2, 2)) == 0
    assert lines()[seen:] == ["Converted 0 Conv3d layers to channels_last_3d."]
    assert compat.apply_channels_last_3d(Foreign(), verbose=False) == 2
    assert len(lines()) == seen + 1


def test_flash_attention_counts_what_it_serves(tiny, lines):
    tiny.options = DEFAULTS.switched(off=["flash_attention"])
    assert compat.enable_flash_attention_for_attention_blocks(tiny) == 2
    assert tiny.options.flash_attention

    class OtherAttention(nn.Module):
        pass

    module = nn.Sequential(Foreign(), OtherAttention())
    assert compat.enable_flash_attention_for_attention_blocks(module) == 1
    assert any("OtherAttention" in line for line in lines())
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        compat.enable_flash_attention_for_attention_blocks(module)
        assert torch.backends.cuda.flash_sdp_enabled()
        compat.restore_settings()
        assert not torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


# -- the whole process ----------------------------------------------------------------------------------------------


def test_process_switches(monkeypatch, lines):
    """Switches are made once and undone once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    product, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    name = "fp32_precision" if hasattr(product, "fp32_precision") else "allow_tf32"
    before = getattr(product, name), cudnn.benchmark
    undo = compat.enable_tf32_for_blackwell()
    again = compat.enable_tf32_for_blackwell()
    compat.enable_cudnn_benchmark()
    assert getattr(product, name) in ("tf32", True) and cudnn.benchmark
    assert sum(line.startswith("tf32 is on") for line in lines()) == 1
    undo()
    assert getattr(product, name) == before[0]
    again()
    compat.restore_settings()
    assert (getattr(product, name), cudnn.benchmark) == before


def test_process_wide_switches_need_a_gpu(monkeypatch, lines):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.backends.cudnn.benchmark
    compat.enable_tf32_for_blackwell()()
    compat.enable_cudnn_benchmark()()
    assert torch.backends.cudnn.benchmark is before and not modules._restore
    assert sum("left as it is" in line for line in lines()) == 2


def test_amp_context():
    with compat.configure_amp_context(dtype=torch.bfloat16):
        assert nn.Linear(4, 4)(torch.ones(1, 4)).dtype == torch.bfloat16
    with compat.configure_amp_context(enabled=False):
        assert nn.Linear(4, 4)(torch.ones(1, 4)).dtype == torch.float32


def test_info_is_complete_and_json():
    info = json.loads(json.dumps(compat.get_optimization_info()))
    assert set(info["optimizations"]) == set(TOGGLES)
    assert info["torch"] == torch.__version__
    for entry in info["optimizations"].values():
        assert entry["available"] == (entry["reason"] is None)


def test_methods_of_the_vae(tiny, lines):
    tiny.enable_3d_blackwell_optimizations(enable_channels_last_3d=False, enable_flash_attention=False)
    assert tiny.options == DEFAULTS.switched(["tf32"], ["channels_last_3d", "flash_attention"])
    assert any(line.startswith("tf32 off: ") for line in lines())
    seen = len(lines())
    tiny.enable_3d_blackwell_optimizations(enable_tf32=False, verbose=False)
    assert len(lines()) == seen and not tiny.options.tf32
    tiny.enable_windows_blackwell_optimizations(enable_channels_last=True)
    tiny.enable_slicing()
    assert "always on" in lines()[-1]


# -- command line ---------------------------------------------------------------------------------------------------


def test_documented_flags(vae_file, capsys):
    assert main(["--info"]) == 0
    assert "torch" in capsys.readouterr().out
    assert main(["--model", str(vae_file), "--info"]) == 0
    assert "architecture" in capsys.readouterr().out
    assert main(["--model", str(vae_file), "--benchmark", "--num-runs", "1", "--warmup-runs", "0"]) == 0
    assert "Throughput: " in capsys.readouterr().out
    assert main(["--model", "gone.safetensors", "--benchmark"]) == 2
    assert "gone.safetensors" in capsys.readouterr().err
    assert main(["--benchmark"]) == 2
    assert "--model" in capsys.readouterr().err


def test_info_flag_of_the_module():
    done = subprocess.run([sys.executable, "-m", "zerowaste_vae", "--info"], capture_output=True, text=True)
    assert done.returncode == 0 and "optimisation" in done.stdout, done.stderr


def test_load_and_optimise_from_a_path(vae_file, noise):
    vae = compat.optimize_vae_for_inference(vae_file, "cpu", enable_tf32=False, enable_cudnn_benchmark=False)
    z = noise(1, 16, 1, 2, 2)
    assert torch.equal(vae.decode(z), load(vae_file, device="cpu").decode(z))


def test_impossible_arguments(vae):
    scalar = torch.ones(())
    for call in (
        lambda: compat.optimize_vae_for_inference(vae, "nonsense"),
        lambda: compat.optimize_vae_for_training(vae, "nonsense"),
        lambda: compat.optimize_vae_for_blackwell_sm120(vae, float("inf")),
        lambda: compat.create_tiled_decoder(vae).decode(scalar),
        lambda: compat.BlackwellSM120Optimizer(use_temporal_slicing=False).decode(vae, scalar),
    ):
        with pytest.raises(InputError) as error:
            call()
        assert len(str(error.value).splitlines()) == 1
