"""What a caller has set in torch's process changes no call: bits, types and devices of results are those of a plain
process, and the caller finds its settings as they were, also between two frames of a stream."""

import ast
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from zerowaste_vae import load, read_video, write_mp4
from zerowaste_vae.engine.extras.media.latents import read_latent, write_latent
from zerowaste_vae.engine.loader import demo_vae_path

ROOT = Path(__file__).resolve().parent.parent.parent


def process():
    """All that a call may leave changed."""
    return (torch.get_default_dtype(), torch.empty(0).device, torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"), torch.is_inference_mode_enabled(), torch.is_grad_enabled(),
            torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision())  # fmt: skip


@contextmanager
def default_type(kind):
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic():
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


@contextmanager
def medium_products():
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


SETTINGS = {
    "float64": lambda: default_type(torch.float64),
    "fp16": lambda: default_type(torch.float16),
    "bf16": lambda: default_type(torch.bfloat16),
    # "meta" stands for "cuda": numpy sees tensors of neither.
    "device": default_device,
    "with device": lambda: torch.device("meta"),
    "autocast to bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "deterministic": deterministic,
    "medium products": medium_products,
}


def everything(folder, precision, settings=nullcontext, device="cpu"):
    """Load the demo VAE, run it in every way, read and write, each call inside `settings`; return the results."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(1, 16, 3, 2, 2, generator=generator, dtype=torch.float32, device="cpu")
    frames = torch.rand(9, 16, 16, 3, generator=generator, dtype=torch.float32, device="cpu")
    made = {}

    def given():
        """The caller's code: it finds the device of the caller's, for all that it makes besides frames."""
        for frame in frames:
            assert torch.empty(0).device == here
            yield frame

    def call(name, work):
        with settings():
            before = process()
            made[name] = work()
            assert process() == before, name
        return made[name]

    vae = call("load", lambda: load(demo_vae_path(), precision, device))
    made["load"] = dict(vae.model.state_dict())
    call("plan", lambda: vae.plan_decode(3, 2, 2).describe())
    call("decode", lambda: vae.decode(z))
    call("decode bytes in tiles", lambda: vae.decode(z, output="uint8", tiling="blended", tile=16, overlap=0))
    call("encode", lambda: vae.encode(frames[None]))
    call("encode bytes", lambda: vae.encode((255 * frames).byte(), seed=3))
    call("decode_raw", lambda: vae.decode_raw(z))
    call("encode_raw", lambda: vae.encode_raw(frames[None].movedim(-1, 1)))
    if find_spec("av") is not None:
        call("write_mp4", lambda: write_mp4(folder / "clip.mp4", frames, 24))
        call("read_video", lambda: read_video(folder / "clip.mp4")[0])
    for name in ("latent.safetensors", "latent.latent"):
        call(f"write {name}", lambda name=name: write_latent(folder / name, z))
        call(f"read {name}", lambda name=name: read_latent(folder / name, 16))
    for name, stream in (("stream", lambda: vae.stream(z, chunk=1)),
                         ("encode_stream", lambda: vae.encode_stream(given(), count=9, seed=2))):  # fmt: skip
        with settings():
            before, parts, here = process(), [], torch.empty(0).device
            for part in stream():
                assert process() == before, name
                parts.append(part)
            assert process() == before, name
            made[name] = torch.cat(parts, 1 if name == "stream" else 2)
    return made


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """expected(precision): the results in a plain process."""
    found = {}

    def results(precision, device="cpu"):
        if (precision, device) not in found:
            found[precision, device] = everything(tmp_path_factory.mktemp("plain"), precision, device=device)
        return found[precision, device]

    return results


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
    return a == b


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
def test_every_call_under_every_setting(expected, tmp_path, monkeypatch, precision, setting):
    """16 bit under autocast to the other one, which joins no tensors of both; the cache on disk is new each time."""
    if precision == "int8" and setting not in ("fp16", "device", "autocast to bf16", "inference mode"):
        pytest.skip("calibration and packing are the same code under these")
    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path / "cache"))
    wanted = expected(precision)
    made = everything(tmp_path, precision, SETTINGS[setting])
    assert [name for name in wanted if not equal(made[name], wanted[name])] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("setting", [*SETTINGS, "device cuda", "autocast on the GPU"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
def test_every_call_on_a_gpu(expected, tmp_path, monkeypatch, precision, setting):
    """Deterministic mode refuses cuBLAS's products, unless an environment variable is set."""
    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path / "cache"))
    more = {"device cuda": lambda: torch.device("cuda"), "autocast on the GPU": lambda: torch.autocast("cuda")}
    wanted = expected(precision, "cuda")
    made = everything(tmp_path, precision, (SETTINGS | more)[setting], "cuda")
    assert [name for name in wanted if not equal(made[name], wanted[name])] == []


# -- no call makes a tensor of the process' type or device -------------------------------------------------------------

FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def unnamed(source, types=True):
    """(line, what it does not name) of each call that makes a tensor and leaves its type or device to the process.

    Parameters are exempt: networks are built on the meta device, inside `as_usual`. The type of `arange` is that of its
    arguments. types: a type must be named, too."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {id(c): c.func.attr if isinstance(c.func, ast.Attribute) else getattr(c.func, "id", "") for c in calls}
    exempt = {id(inner) for c in calls if names[id(c)] in ("Parameter", "register_buffer") for inner in ast.walk(c)}
    for call in calls:
        of_torch = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "torch"
        if not of_torch or names[id(call)] not in FACTORIES or id(call) in exempt:
            continue
        given = {k.arg for k in call.keywords}
        floats = any(isinstance(n, ast.Constant) and isinstance(n.value, float) for n in ast.walk(call))
        wanted = {"device", "dtype"} if types and (names[id(call)] != "arange" or floats) else {"device"}
        if None not in given and wanted - given:
            yield call.lineno, sorted(wanted - given)


def test_tensors_name_their_type_and_device():
    """engine/extras/bench runs in processes of its own."""
    found = {}
    for path in sorted(p for room in ("engine", "nodes") for p in (ROOT / room).rglob("*.py")):
        lines = list(unnamed(path.read_text("utf-8"), types="bench" not in path.parts))
        if lines:
            found[path.relative_to(ROOT).as_posix()] = lines
    assert found == {}


@pytest.mark.parametrize(("source", "missing"), [
    ("torch.empty(3)", ["device", "dtype"]), ("torch.zeros(3, device=d)", ["dtype"]),
    ("torch.arange(3)", ["device"]), ("torch.arange(3.0, device=d)", ["dtype"]),
    ("f(torch.ones(1, dtype=t))", ["device"]),
])  # fmt: skip
def test_an_unnamed_one_is_found(source, missing):
    assert list(unnamed(source)) == [(1, missing)]


@pytest.mark.parametrize("source", [
    "torch.empty(3, dtype=t, device=d)", "nn.Parameter(torch.ones(3))", "torch.zeros(3, **CPU)", "torch.empty_like(x)",
    "torch.arange(3, device=d)",
])  # fmt: skip
def test_a_named_one_passes(source):
    assert list(unnamed(source)) == []
