"""Launches of kernels that Triton compiled: which go through the driver. Devices are not needed."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine.kernels import by_triton as module
from zerowaste_vae.engine.kernels.by_triton import ByTriton
from zerowaste_vae.engine.kernels.prebuilt.errors import PrebuiltError

KERNEL, FIXED = "norm_act.norm_act_kernel", {"C": 64, "num_warps": 8}


def text(parameters):
    declared = ",\n".join(f"\t.param .u64 .ptr .global one_{i}" for i in range(parameters))
    return f".version 8.7\n.visible .entry one(\n{declared}\n)\n.reqntid 256\n{{ ret; }}"


def compiled(parameters=6, function=77, texts=True, **meta):
    meta = {"name": "one", "shared": 1024, "num_warps": 8, "global_scratch_size": 0, **meta}
    asm = {"cubin": b"", "ptx": text(parameters)} if texts else {"cubin": b""}
    return SimpleNamespace(metadata=SimpleNamespace(**meta), asm=asm, function=function)


class Function:
    """Stands in for Triton's: two tensors and two numbers."""

    def __init__(self, made, specialised=()):
        self.made, self.launched, self.device_caches = made, [], {}
        self.params = [SimpleNamespace(do_not_specialize=i not in specialised) for i in range(4)]

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.launched.append((grid, arguments))
            return self.made

        return launch


@pytest.fixture
def driver(monkeypatch):
    """Launches that reached the driver: (device, function, grid, threads, shared)."""
    seen = []
    here = SimpleNamespace(launch=lambda *a: seen.append(a[:5]), in_context=lambda device: nullcontext(),
                           parameters={77: 6, 78: 5, 79: 0}.get)  # fmt: skip
    monkeypatch.setattr(module, "driver", lambda: here)
    monkeypatch.setattr(module, "_described", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 2, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 40 + device, raising=False)
    return seen


@pytest.fixture
def tensors():
    return torch.zeros(64, dtype=torch.float16), torch.zeros(64)


def test_later_launches_go_through_the_driver(driver, tensors):
    function = Function(compiled())
    kernel = ByTriton(KERNEL, function)
    for number in (16, 1, 5):
        kernel[(number, 2)](*tensors, number, 0.5, **FIXED)
    assert len(function.launched) == 1 and driver == [(2, 77, (n, 2), 256, 1024) for n in (1, 5)]


def test_a_cache_without_texts(driver, tensors):
    """As Triton's is under TRITON_STORE_BINARY_ONLY: the driver says what a kernel takes."""
    function = Function(compiled(texts=False))
    kernel = ByTriton(KERNEL, function)
    for number in (16, 1, 5):
        kernel[(number,)](*tensors, number, 0.5, **FIXED)
    assert len(function.launched) == 1 and driver == [(2, 77, (n,), 256, 1024) for n in (1, 5)]


def test_other_kernels_are_launched_by_triton_first(driver, tensors, monkeypatch):
    """Other types, constants and devices are other kernels."""
    function, (x, out) = Function(compiled()), tensors
    kernel = ByTriton(KERNEL, function)
    kernel[(1,)](x, out, 1, 0.5, **FIXED)
    kernel[(1,)](x.bfloat16(), out, 1, 0.5, **FIXED)
    kernel[(1,)](x, out, 1, 0.5, **FIXED | {"C": 128})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)
    kernel[(1,)](x, out, 1, 0.5, **FIXED)
    assert len(function.launched) == 4 and not driver


@pytest.mark.parametrize("why, function", {
    "numbers that kernels differ by": Function(compiled(), specialised={2}),
    "nothing was launched, as while kernels are compiled ahead": Function(compiled(function=None)),
    "other parameters than ours": Function(compiled(parameters=5)),
    "no text, and other parameters than ours": Function(compiled(texts=False, function=78)),
    "no text, and a driver that does not tell": Function(compiled(texts=False, function=79)),
    "scratch memory": Function(compiled(global_scratch_size=128)),
    "clusters": Function(compiled(num_ctas=2)),
    "descriptors that nobody described": Function(compiled(tensordesc_meta=[None])),
}.items(), ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_triton_alone_launches(driver, tensors, monkeypatch, why, function):
    monkeypatch.setattr(module, "_map", lambda described: None)
    kernel = ByTriton(KERNEL, function)
    for _ in range(3):
        kernel[(1,)](*tensors, 3, 0.5, **FIXED)
    assert len(function.launched) == 3 and not driver


def test_addresses_and_numbers_of_other_kernels(driver, tensors):
    """An address that is no multiple of 16 and a number beyond 32 bits ask for another kernel than the one bound."""
    function, (x, out) = Function(compiled()), tensors
    kernel = ByTriton(KERNEL, function)
    kernel[(1,)](x, out, 1, 0.5, **FIXED)
    kernel[(1,)](x[1:], out, 1, 0.5, **FIXED)
    kernel[(1,)](x, out, 1 << 40, 0.5, **FIXED)
    assert len(function.launched) == 3 and not driver
    kernel[(1,)](x, out, 2, 0.5, **FIXED)
    assert len(function.launched) == 3 and len(driver) == 1


def test_a_kernel_for_any_address_serves_no_other(driver, tensors):
    """A first launch at another address is not what later ones are bound to."""
    function, (x, out) = Function(compiled()), tensors
    kernel = ByTriton(KERNEL, function)
    kernel[(1,)](x[1:], out, 1, 0.5, **FIXED)
    kernel[(1,)](x, out, 1, 0.5, **FIXED)
    assert len(function.launched) == 2 and not driver


def test_meta_tensors(driver, monkeypatch):
    """Kernels of meta tensors are compiled by Triton, and no GPU is asked for."""
    monkeypatch.delattr(torch._C, "_cuda_getDevice")
    function, (x, out) = Function(compiled(function=None)), (torch.empty(64, device="meta"),) * 2
    kernel = ByTriton(KERNEL, function)
    for _ in range(2):
        kernel[(1,)](x, out, 3, 0.5, **FIXED)
    assert len(function.launched) == 2 and not driver


@pytest.mark.parametrize("texts", [True, False])
def test_no_driver(tensors, driver, monkeypatch, texts):
    def none():
        raise PrebuiltError("NVIDIA has no CUDA driver for sunos")

    monkeypatch.setattr(module, "driver", none)
    function = Function(compiled(texts=texts))
    kernel = ByTriton(KERNEL, function)
    for _ in range(2):
        kernel[(1,)](*tensors, 3, 0.5, **FIXED)
    assert len(function.launched) == 2
