"""Launches of prebuilt kernels: what reaches the driver, and what is refused. Devices are not needed."""

import ctypes
import struct
import threading
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine.kernels.descriptor import Descriptor
from zerowaste_vae.engine.kernels.launching import launcher, recording
from zerowaste_vae.engine.kernels.prebuilt import launch as module
from zerowaste_vae.engine.kernels.prebuilt.errors import PrebuiltError
from zerowaste_vae.engine.kernels.prebuilt.keys import key, takes
from zerowaste_vae.engine.kernels.prebuilt.launch import Prebuilt, preload, read_ahead
from zerowaste_vae.engine.kernels.prebuilt.library import Compiled, Entry, Map, SetError, Text
from zerowaste_vae.engine.kernels.targets import capabilities, prebuilt

KERNEL, FIXED = "conv3d.conv_kernel", {"C": 64, "num_warps": 8}


class Driver:
    """Reads what a kernel would read, at the time of the launch."""

    def __init__(self):
        self.loaded, self.launched, self.maps = [], [], []
        self.refuses = None

    def load(self, device, ptx, symbol, shared):
        if self.refuses:
            raise PrebuiltError(self.refuses)
        self.loaded.append((device, ptx, symbol, shared))
        return len(self.loaded)

    def in_context(self, device):
        import contextlib

        return contextlib.nullcontext()

    def tensor_map(self, place, *about):
        assert place % 64 == 0
        ctypes.memmove(place, struct.pack("Q", len(self.maps) + 1000), 8)
        self.maps.append(about)

    def launch(self, device, function, grid, threads, shared, stream, parameters):
        kinds = {"pointer": "Q", "scratch": "Q", "i32": "i", "i64": "q", "fp32": "f", "map": "Q"}
        letters = [kinds[kind] for kind in self.parameters]
        assert len(parameters) == len(letters)
        read = [struct.unpack(c, ctypes.string_at(at, struct.calcsize(c)))[0]
                for c, at in zip(letters, parameters, strict=True)]  # fmt: skip
        self.launched.append((device, function, grid, threads, shared, stream, read))


@pytest.fixture
def fake(monkeypatch):
    """A driver and a set that has every key which `has` names (all of them: None)."""
    here = Driver()
    here.has, here.origin = None, "A"

    class Library:
        def has(self, form, wanted):
            return here.has is None or wanted in here.has

        def origin(self, form, wanted):
            return here.origin

        def entry(self, form, wanted):
            here.parameters = takes(wanted)
            maps = [Map(3, 6, 2, (64, 32)) for one in wanted.types if one.startswith("map:")]
            return Entry("conv_kernel", 65536, 8, here.parameters, tuple(maps))

        def kernel(self, form, wanted):
            return Compiled(**vars(self.entry(form, wanted)), ptx=b"text")

    monkeypatch.setattr(module, "library", Library)
    monkeypatch.setattr(module, "driver", lambda: here)
    monkeypatch.setattr(module, "_loaded", {})
    monkeypatch.setattr(module, "_complete", set())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 2, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 40 + device, raising=False)
    return here


@pytest.fixture
def tensors():
    return torch.zeros(300, 64, dtype=torch.float16), torch.zeros(96, 64, dtype=torch.float32)


def test_arguments_reach_the_kernel_in_its_order(fake, tensors):
    x, out = tensors
    kernel = Prebuilt(KERNEL, "C")
    kernel[(5, 2)](Descriptor(x, (64, 32)), x, out, 7, 0.5, -3, **FIXED)
    (launched,) = fake.launched
    assert launched[:6] == (2, 1, (5, 2), 256, 65536, 42)
    assert launched[6] == [1000, 300, 64, 64, 1, x.data_ptr(), out.data_ptr(), 7, 0.5, -3, 0, 0]
    assert fake.maps == [(x.data_ptr(), 6, 2, x.shape, (64, 1), (64, 32), 3)]


def test_launch_parameters_are_reused(fake, tensors):
    """What stays is made once, and what changes is not mixed up."""
    x, out = tensors
    kernel, other = Prebuilt(KERNEL, "C"), torch.ones_like(x)
    for number, data in ((1, x), (2, x), (3, other), (4, x)):
        kernel[(1,)](Descriptor(data, (64, 32)), out, number, **FIXED)
    assert len(fake.loaded) == 1 and len(fake.maps) == 2
    assert [read[6] for *_, read in fake.launched] == [1, 2, 3, 4]
    assert [read[0] for *_, read in fake.launched] == [1000, 1000, 1001, 1000]


def test_maps_of_weights_are_reused(fake, tensors):
    """Where one tensor is another at each launch, the other's map is still made once."""
    weight, _ = tensors
    kernel, frames = Prebuilt(KERNEL, "C"), [torch.zeros(96, 64, dtype=torch.float16) for _ in range(300)]
    for x in frames:
        kernel[(1,)](Descriptor(x, (64, 32)), Descriptor(weight, (64, 32)), **FIXED)
    made = [address for address, *_ in fake.maps]
    assert made.count(weight.data_ptr()) == 2 and len(made) == 302  # all are forgotten once there are 256


def test_other_types_and_constants_are_other_kernels(fake, tensors):
    x, out = tensors
    kernel = Prebuilt(KERNEL, "C")
    kernel[(1,)](x, out, 1, **FIXED)
    kernel[(1,)](x.bfloat16(), out, 1, **FIXED)
    kernel[(1,)](x, out, 1, **FIXED | {"C": 128})
    kernel[(1,)](x, out, 1 << 40, **FIXED)
    kernel[(1,)](x, out, 2, **FIXED)
    assert len(fake.loaded) == 4 and [function for _, function, *_ in fake.launched] == [1, 2, 3, 4, 1]
    assert fake.launched[3][6][2] == 1 << 40


def test_kernel_is_loaded_on_each_device(fake, tensors, monkeypatch):
    """The same kernel for two devices is loaded on both."""
    kernel = Prebuilt(KERNEL, "C")
    kernel[(1,)](*tensors, 1, **FIXED)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)
    kernel[(1,)](*tensors, 1, **FIXED)
    assert [device for device, *_ in fake.loaded] == [2, 0] == [device for device, *_ in fake.launched]


def test_maps_that_another_thread_forgets(fake, tensors):
    """They may be gone as soon as they are stored."""

    class Forgetful(dict):
        def __setitem__(self, name, value):
            super().__setitem__(name, value)
            self.clear()

    x, out = tensors
    kernel, other = Prebuilt(KERNEL, "C"), torch.ones_like(x)
    kernel[(1,)](Descriptor(x, (64, 32)), out, **FIXED)
    (bound,) = kernel._bound.values()
    bound._known = Forgetful()
    kernel[(1,)](Descriptor(other, (64, 32)), out, **FIXED)
    assert len(fake.launched) == len(fake.maps) == 2


def test_threads_share_no_packed_block(fake, tensors):
    """Each launch waits until another thread has packed its own."""
    x, out = tensors
    kernel, met = Prebuilt(KERNEL, "C"), threading.Barrier(2, timeout=10)
    kernel[(1,)](x, out, 0, **FIXED)
    fake.launched.clear()
    read = fake.launch

    def launch(*arguments):
        met.wait()
        read(*arguments)

    fake.launch = launch
    threads = [threading.Thread(target=lambda n=n: kernel[(1,)](x, out, n, **FIXED)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read[2] for *_, read in fake.launched) == [1, 2]


@pytest.mark.parametrize(("cached", "together"), [(3, []), (0, ["conv_kernel", "two"]), (1, ["conv_kernel"])])
def test_kernels_of_a_use_are_loaded_once(fake, tensors, monkeypatch, cached, together):
    """After the first that the driver's cache lacks, the rest is compiled together, the longest first, and not again
    by itself: a cache may keep nothing. A launch then finds its own and asks for no text; so does another form."""
    x, out = tensors
    wanted = key(KERNEL, [x, out, 1], FIXED)
    texts = [Text("C", "b", b"short", "one", 0), Text("A", wanted.digest, b"a long text", "conv_kernel", 65536),
             Text("A", "c", b"middle", "two", 0)]  # fmt: skip
    monkeypatch.setattr(module, "library", lambda known=module.library: SimpleNamespace(
        has=known().has, entry=known().entry, origin=known().origin, kernel=known().kernel,
        texts=lambda form, use: texts, forget=lambda *use: None))  # fmt: skip
    clock, load = [0.0], fake.load

    def slowly(*of):
        clock[0] += 0.0004 if len(fake.loaded) < cached else 0.03
        return load(*of)

    def load_all(device, kernels, threads):
        fake.calls.append((device, [symbol for _, symbol, _ in kernels], threads))
        return [load(device, *kernel) for kernel in kernels]

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(fake, "load", slowly)
    fake.load_all, fake.calls = load_all, []
    preload(2, "C", "a use", 3)
    loads = [(2, b"short", "one", 0), (2, b"middle", "two", 0), (2, b"a long text", "conv_kernel", 65536)]
    assert fake.loaded[0] == loads[0] and sorted(fake.loaded) == sorted(loads)
    assert fake.calls == ([(2, together, 3)] if together else [])
    Prebuilt(KERNEL, "C")[(1,)](x, out, 1, **FIXED)
    preload(2, "B", "a use", 3)
    Prebuilt(KERNEL, "B")[(1,)](x, out, 1, **FIXED)
    number = 1 + fake.loaded.index(loads[2])
    assert len(fake.loaded) == 3 and [launched[1] for launched in fake.launched] == [number] * 2
    fake.origin = "B"  # another kernel of the same name
    Prebuilt(KERNEL, "D")[(1,)](x, out, 1, **FIXED)
    assert len(fake.loaded) == 4


def test_what_is_refused_together_is_said_alone(fake, monkeypatch):
    texts = [Text("C", name, name.encode(), name, 0) for name in ("a", "bb", "ccc")]
    monkeypatch.setattr(module, "library", lambda: SimpleNamespace(texts=lambda *_: texts, forget=lambda *_: None))
    monkeypatch.setattr(module, "_CACHED_SECONDS", -1.0)
    fake.load_all = lambda device, kernels, threads: [7, 0]
    preload(2, "C", "a use", 3)
    assert [symbol for _, _, symbol, _ in fake.loaded] == ["a", "bb"] and module._loaded[2, "C", "ccc"] == 7
    module._loaded.clear()
    module._complete.clear()
    load = fake.load

    def refuse(device, ptx, symbol, shared):
        if symbol == "bb":
            raise PrebuiltError("the driver refuses bb")
        return load(device, ptx, symbol, shared)

    monkeypatch.setattr(fake, "load", refuse)
    with pytest.raises(PrebuiltError, match="refuses bb"):
        preload(2, "C", "a use", 3)


def test_texts_are_given_back_whatever_happens(fake, monkeypatch):
    """A use is read once for each device, and again where that failed."""
    calls, fails = [], [SetError("A.x.xz is damaged"), None, None]

    def texts(form, use):
        calls.append(("texts", form, use))
        if (error := fails.pop(0)) is not None:
            raise error
        return [Text("A", "a", b"text", "one", 0)]

    monkeypatch.setattr(module, "library", lambda: SimpleNamespace(
        texts=texts, forget=lambda *use: calls.append(("forget", *use)),
        read_ahead=lambda form, uses: calls.append(("ahead", form, *uses))))  # fmt: skip
    once = [("texts", "C", "one"), ("forget", "C", "one")]
    with pytest.raises(SetError, match="damaged"):
        preload(2, "C", "one", 3)
    fake.refuses = "the driver refuses it"
    with pytest.raises(PrebuiltError, match="refuses it"):
        preload(2, "C", "one", 3)
    assert calls == 2 * once
    fake.refuses, fails[:] = None, [None, None]
    preload(2, "C", "one", 3)
    preload(2, "C", "one", 3)
    assert calls == 3 * once
    read_ahead(2, "C", ["one", "two"])
    read_ahead(0, "C", ["one"])
    assert calls[6:] == [("ahead", "C", "two"), ("ahead", "C", "one")]
    preload(0, "C", "one", 3)
    assert calls[8:] == once and [device for device, *_ in fake.loaded] == [2, 0]


def test_a_kernel_that_the_set_lacks_is_named(fake, tensors):
    fake.has = ()
    with pytest.raises(PrebuiltError, match=r"set C lacks a kernel that this run needs \(conv3d.conv_kernel\(\*fp16"):
        Prebuilt(KERNEL, "C")[(1,)](*tensors, 1, **FIXED)


def test_a_tensor_that_begins_anywhere_is_refused(fake, tensors):
    out = tensors[1]
    kernel, odd = Prebuilt(KERNEL, "C"), torch.zeros(8, dtype=torch.float16)[1:]
    with pytest.raises(PrebuiltError, match="no multiple of 16"):
        kernel[(1,)](odd, out, 1, **FIXED)
    assert fake.launched == []


def test_a_refused_kernel_says_so_and_nothing_is_launched(fake, tensors):
    fake.refuses = "the driver refuses it"
    with pytest.raises(PrebuiltError, match="refuses it"):
        Prebuilt(KERNEL, "C")[(1,)](*tensors, 1, **FIXED)
    assert fake.launched == []


def test_a_target_says_who_launches():
    pytest.importorskip("triton")
    assert isinstance(launcher("probe.doubling_kernel", prebuilt("a GPU", 86, "A")), Prebuilt)
    by_triton = launcher("probe.doubling_kernel", capabilities("a GPU", 86, (3, 6)))
    assert not isinstance(by_triton, Prebuilt) and launcher("probe.doubling_kernel", capabilities("b", 90, (3, 6))) is (
        by_triton)  # fmt: skip


def test_recording_launches_nothing(tensors):
    with recording(prebuilt("a GPU", 86, "A")) as calls:
        launcher(KERNEL, prebuilt("a GPU", 86, "A"))[(4,)](*tensors, 3, C=64)
    assert [(c.kernel, c.grid, c.arguments[2], c.constants) for c in calls] == [(KERNEL, (4,), 3, {"C": 64})]
