"""On real GPUs: the device, the host memory, the compiler and the threads of a run, each of them in trouble."""

import gc
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine import log
from zerowaste_vae.engine.extras.graphs import graphs
from zerowaste_vae.engine.kernels import targets
from zerowaste_vae.engine.kernels.probe import op
from zerowaste_vae.engine.planning import budget as memory
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.runtime import context as run_module
from zerowaste_vae.engine.runtime import pinned
from zerowaste_vae.engine.runtime.kept import KEPT
from zerowaste_vae.engine.runtime.pinned import POOL, PinnedPool

from ..runtime.test_scope import settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("seedvr2-small",)
GIB = 1 << 30
#: 512 x 384 pixels, 21 frames; and what is small enough for graphs.
SIZE, SMALL = (1, 16, 6, 48, 64), (1, 16, 5, 8, 8)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@pytest.fixture(scope="module")
def file(make_vae_file):
    return make_vae_file((32, 64, 128, 128), (32, 64, 128, 128), 8, 5)


@pytest.fixture
def vae(file):
    """A fresh one; nothing stays behind."""
    vae = load(file, precision="fp16", device="cuda")
    yield vae
    vae.release()
    del vae
    gc.collect()
    torch.cuda.empty_cache()


def parked(vae, z, **options):
    """The target, in GB, of the first plan that parks histories in host memory."""
    plan = vae.plan_decode(*z.shape[2:], **options)
    while not plan.host_bytes:
        plan = vae._plan("decoder", z.shape[2:], Request(**options), below=plan.peak_bytes)
    foreign = max(0, torch.cuda.memory_allocated(vae.device) - vae._held("decoder"))
    return (plan.peak_bytes + foreign + (1 << 20)) / GIB


# -- the second GPU of a host ------------------------------------------------------------------------------------------


@two_gpus
def test_the_second_gpu_gives_the_firsts_bits(file, noise, monkeypatch):
    """While the first one is the current device: decode in every mode, encode, graphs, and in a thread."""
    monkeypatch.setattr(graphs, "pays", lambda *_: True)
    first, second = (load(file, precision="fp16", device=f"cuda:{i}") for i in range(2))
    z, small, video = noise(*SIZE), noise(*SMALL), noise(13, 384, 512, 3).sigmoid()
    blended = {"tiling": "blended", "tile": 256, "overlap": 64}
    expected = first.decode(z), first.decode(z, **blended), first.encode(video), first.decode(small, chunk=1)
    raw = first.decode_raw(small).float().cpu()
    first.release()  # what a run of the second one took by mistake would otherwise fit into what this one had kept
    torch.cuda.synchronize(0)
    torch.cuda.set_device(0)
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    for _ in range(3):
        assert torch.equal(second.decode(z), expected[0])
        assert torch.equal(second.decode(z, chunk=1), expected[0])
        assert torch.equal(second.decode(z, **blended), expected[1])
        assert torch.equal(second.encode(video), expected[2])
    second.release()  # graphs go with the next run: the target counts what else is there
    gb = parked(second, z)
    for _ in range(3):
        assert torch.equal(second.decode(z, vram_gb=gb), expected[0])
        assert second.last_report.parked_gb > 0
    for _ in range(3):
        assert torch.equal(second.decode(small, chunk=1), expected[3])
    assert second._fused.runs.replayed[0] > 0
    torch.testing.assert_close(second.decode_raw(small).float().cpu(), raw, rtol=0, atol=0.02 * float(raw.std()))

    def elsewhere():
        torch.cuda.set_device(0)
        frames = second.decode(z)
        return frames, torch.cuda.current_device()

    with ThreadPoolExecutor(1) as pool:
        frames, device = pool.submit(elsewhere).result()
    assert torch.equal(frames, expected[0]) and device == 0
    second.release()
    assert torch.cuda.current_device() == 0
    assert torch.cuda.max_memory_allocated(0) == before


# -- host memory that is not locked ------------------------------------------------------------------------------------


class Refusing:
    """The CUDA runtime, but behind the first `grants` it is asked to lock everything twice, and so really refuses."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.refused = self.granted = self.grants = 0

    def cudaHostRegister(self, address, size, flags):
        if self.granted < self.grants:
            self.granted += 1
            return self.runtime.cudaHostRegister(address, size, flags)
        assert int(self.runtime.cudaHostRegister(address, size, flags)) == 0
        error = self.runtime.cudaHostRegister(address, size, flags)
        assert int(error) != 0
        assert int(self.runtime.cudaHostUnregister(address)) == 0
        self.refused += 1
        return error

    def __getattr__(self, name):
        return getattr(self.runtime, name)


@pytest.fixture
def refusing(monkeypatch):
    runtime = Refusing(torch.cuda.cudart())
    POOL.release()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(log, "_said", set())
    yield runtime
    monkeypatch.undo()
    POOL.release()


def test_refused_lock(refusing):
    """A refused lock is not the next launchs error."""
    pool = PinnedPool()
    block = pool.take(1 << 20)
    assert refusing.refused == 1
    assert float((torch.ones(3, device="cuda") + 1).sum()) == 6
    torch.cuda.synchronize()
    pool.give(block)
    pool.release()


def test_parked_histories_in_ordinary_memory(vae, noise, refusing, caplog):
    z = noise(*SIZE)
    expected, gb = vae.decode(z), parked(vae, z)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert torch.equal(vae.decode(z, vram_gb=gb), expected)
            assert vae.last_report.parked_gb > 0 and not vae.last_report.events["oom_step_downs"]
    assert refusing.refused >= 1
    assert sum("page-lock" in line.getMessage() for line in caplog.records) == 1


@pytest.mark.parametrize("grants", [3, 1 << 30])
def test_locked_pieces(vae, noise, refusing, monkeypatch, grants):
    """All of them, or the first ones: copies begin in one piece and end in the next."""
    monkeypatch.setattr(pinned, "PIECE", 1 << 18)
    z = noise(*SIZE)
    expected, gb = vae.decode(z), parked(vae, z)
    refusing.grants = grants
    for _ in range(2):
        assert torch.equal(vae.decode(z, vram_gb=gb), expected)
        assert vae.last_report.parked_gb > 0
    assert refusing.granted == 3 if grants == 3 else refusing.granted > 10
    POOL.release()
    assert not POOL._locked


def test_staging_in_ordinary_memory(vae, noise, refusing, monkeypatch):
    z, video = noise(*SIZE), noise(5, 384, 512, 3).sigmoid()
    expected, latent = vae.decode(z), vae.encode(video)
    empty = torch.empty

    def refuse(*_, **__):
        block = empty(1 << 20, dtype=torch.uint8)
        refusing.cudaHostRegister(block.data_ptr(), block.numel(), 0)
        raise RuntimeError("CUDA error: out of memory")

    def make(*size, pin_memory=False, **options):
        return refuse() if pin_memory else empty(*size, **options)

    monkeypatch.setattr(pinned.torch, "empty", make)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    assert torch.equal(vae.decode(z), expected) and torch.equal(vae.encode(video), latent)
    assert refusing.refused >= 2


def test_the_same_parked_call_is_planned_again(vae, noise, monkeypatch):
    z = noise(*SIZE)
    expected, gb = vae.decode(z), parked(vae, z)
    POOL.release()
    need = vae.plan_decode(*SIZE[2:], vram_gb=gb, ram_gb=64).host_bytes
    monkeypatch.setattr(memory, "available_ram", lambda: int(2.2 * need) + (64 << 20) - POOL.nbytes)
    plans = []
    for _ in range(3):
        assert torch.equal(vae.decode(z, vram_gb=gb), expected)
        plans.append(vae.last_report.plan)
    assert plans[0] == plans[1] == plans[2] and POOL.idle_bytes > 0
    POOL.release()


# -- Triton that does not work -----------------------------------------------------------------------------------------


@pytest.mark.skipif(targets.triton_version() is None, reason="Triton's compiler is what fails here")
@pytest.mark.skipif(shutil.which("false") is None, reason="there is no program that always fails")
def test_without_a_compiler_torch_runs(own_process):
    ran = own_process()
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = [line for line in ran.stdout.splitlines() if "Triton fails here" in line]
    assert len(said) == 1 and "CC=" in said[0], ran.stdout
    assert "mode plain torch" in ran.stdout
    assert float(ran.stdout.split("error ")[1].split()[0]) < 0.05


def test_failing_kernel(vae, noise, monkeypatch, lacking):
    """A kernel that fails in the middle of a run, Triton's or a prebuilt one."""
    z = noise(*SIZE)
    expected, lacked = vae.decode(z, chunk=1), list(lacking)
    monkeypatch.setattr(targets, "_off", {})
    monkeypatch.setattr(op, "_tried", set(op._tried))
    space, original, calls = {"__name__": "triton.compiler.fake"}, run_module.to_pixels, []
    exec("def fail():\n    raise RuntimeError('PassManager::run failed')", space)

    def counted(*args, **options):
        calls.append(1)
        return space["fail"]() if len(calls) == 2 else original(*args, **options)

    monkeypatch.setattr(run_module, "to_pixels", counted)
    try:
        out = vae.decode(z, chunk=1)
        assert vae.last_report.mode.startswith("plain torch")
        assert "PassManager" in dict(vae.last_report.off)["triton_fusion"]
        lacking[:] = lacked  # the sets after the failed one have no kernels of this model, which is why torch runs
    finally:
        targets._off.clear()
        targets._ways.cache_clear()
    assert torch.isfinite(out).all()
    assert float((out - expected).abs().max()) < 0.05


# -- threads and modes -------------------------------------------------------------------------------------------------


def test_in_and_out_of_inference_mode(vae, noise, monkeypatch):
    monkeypatch.setattr(graphs, "pays", lambda *_: True)
    z, video = noise(*SMALL), noise(17, 64, 64, 3).sigmoid()
    for call in (lambda: vae.decode(z, chunk=1), lambda: vae.encode(video, chunk=1)):
        expected = call()
        for mode in (True, False, True, True, False):
            with torch.inference_mode(mode):
                assert torch.equal(call(), expected)
            assert vae._fused.runs.replayed[0] > 0, vae.last_report.text()
        vae.release()


@pytest.mark.parametrize("shared", [True, False])
def test_threads(file, vae, noise, monkeypatch, shared):
    """Decodes of one VAE or of two, with graphs, under a target and without, at the same time."""
    monkeypatch.setattr(graphs, "pays", lambda *_: True)
    other = vae if shared else load(file, precision="fp16", device="cuda")
    clips = noise(*SIZE), noise(*SMALL, seed=1)
    expected = vae.decode(clips[0]), other.decode(clips[1], chunk=1)
    gb = parked(vae, clips[0]) + 1.0  # what the other thread holds counts as well
    torch.backends.cudnn.benchmark = True
    before, start = settings(), threading.Barrier(2)

    def large():
        start.wait(60)
        for i in range(4):
            assert torch.equal(vae.decode(clips[0], **({"vram_gb": gb} if i % 2 else {})), expected[0])
            assert vae.last_report.clip == (1, 21, 384, 512)

    def small():
        start.wait(60)
        for _ in range(12):
            assert torch.equal(other.decode(clips[1], chunk=1), expected[1])
            assert other.last_report.clip == (1, 17, 64, 64)

    try:
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(large), pool.submit(small)]:
                future.result(timeout=240)
        assert settings() == before
    finally:
        torch.backends.cudnn.benchmark = False
        vae.release()
        other.release()
    assert KEPT.nbytes(vae.device) == 0


def test_release(vae, noise):
    """Release gives torchs page locked memory back."""
    def held():
        # In use or kept. What is in use alone ("active_bytes") is no measure: torch 2.11 does not count it down.
        stats = torch.cuda.host_memory_stats()
        return next(stats[key] for key in ("reserved_bytes.current", "allocated_bytes.current") if key in stats)

    if not hasattr(torch.cuda, "host_memory_stats") or not hasattr(torch._C, "_host_emptyCache"):
        pytest.skip("this torch does not tell")
    vae.release()
    least = held()
    vae.decode(noise(*SIZE))
    before = held()
    vae.release()
    print(f"{before >> 20} MiB page-locked by torch, then {held() >> 20}")
    assert before > least and held() <= least
