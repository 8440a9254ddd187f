"""The driver's calls, against a library that only remembers them; a GPU test has the real one."""

import ctypes
import threading
import time

import pytest
from zerowaste_vae.engine.kernels.prebuilt import driver as module
from zerowaste_vae.engine.kernels.prebuilt.driver import Driver, driver, library_name, ptx_version, too_old
from zerowaste_vae.engine.kernels.prebuilt.errors import PrebuiltError


class Function:
    """One function of the library: records its calls, and gives the answer that it was made with."""

    def __init__(self, answer=lambda *_: 0):
        self.answer, self.calls, self.argtypes = answer, [], None

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.answer(*arguments)


def filled(number):
    """Writes a handle where the first argument points."""
    def answer(place, *_):
        place._obj.value = number
        return 0

    return answer


def worded(code, place):
    place._obj.value = {1: b"invalid argument", 218: b"a PTX JIT compilation failed", 222: b"too new"}.get(code)
    return 0 if place._obj.value else 1


class Library:
    """All that a driver has. answers: name -> what a function answers in place of success."""

    NAMES = (
        "cuInit", "cuDriverGetVersion", "cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncSetCacheConfig",
        "cuFuncSetAttribute", "cuLaunchKernel", "cuTensorMapEncodeTiled", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
        "cuGetErrorString", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuThreadExchangeStreamCaptureMode",
        "cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuLibraryUnload", "cuFuncLoad",
    )  # fmt: skip

    def __init__(self, lacks=(), **answers):
        usual = {"cuModuleLoadDataEx": filled(70), "cuModuleGetFunction": filled(7), "cuGetErrorString": worded,
                 "cuDevicePrimaryCtxRetain": filled(90), "cuDriverGetVersion": filled(12060),
                 "cuLibraryLoadData": filled(60)}  # fmt: skip
        for name in self.NAMES:
            if name not in lacks:
                setattr(self, name, Function(answers.get(name, usual.get(name, lambda *_: 0))))


def refuse(code, log=b""):
    def answer(*arguments):
        if log:  # where the options say that it goes
            ctypes.memmove(arguments[4][0], log, len(log))
        return code

    return answer


def test_a_kernel_is_loaded_in_its_devices_context():
    library = Library()
    here = Driver(library)
    assert here.load(1, b"// ptx", "kernel", 1024) == 7 and here.load(1, b"// ptx", "other", 99 << 10) == 7
    assert [call[1] for call in library.cuDeviceGet.calls] == [1]  # retained once
    pushed = [call[0].value for call in library.cuCtxPushCurrent_v2.calls]
    assert pushed == [90, 90] and len(library.cuCtxPopCurrent_v2.calls) == 2
    assert library.cuModuleLoadDataEx.calls[0][1].value == b"// ptx"
    assert [call[1:] for call in library.cuFuncSetAttribute.calls] == [(8, 99 << 10)]  # above 48 KiB alone
    modes = [call[0]._obj.value for call in library.cuThreadExchangeStreamCaptureMode.calls]
    assert len(modes) == 4  # what is captured meanwhile goes on


def test_a_launch_hands_on_what_it_was_given():
    library = Library()
    here, parameters = Driver(library), (ctypes.c_void_p * 1)(5)
    here.launch(0, 7, (3, 2), 128, 4096, 33, parameters)
    here.launch(0, 7, (0,), 128, 0, 33, parameters)  # nothing to do
    (call,) = library.cuLaunchKernel.calls
    assert call[:9] == (7, 3, 2, 1, 128, 1, 1, 4096, 33) and call[9] is parameters and call[10] is None


@pytest.mark.parametrize("code", [201, 400, 709])
def test_thread_gets_the_context(code):
    """A thread without the context gets it for the launch."""
    answers = iter([code, 0])
    library = Library(cuLaunchKernel=lambda *_: next(answers))
    Driver(library).launch(0, 7, (1,), 32, 0, 0, (ctypes.c_void_p * 1)())
    assert len(library.cuLaunchKernel.calls) == 2
    assert len(library.cuCtxPushCurrent_v2.calls) == len(library.cuCtxPopCurrent_v2.calls) == 1


def test_a_failed_launch_says_so_in_the_drivers_words():
    with pytest.raises(PrebuiltError, match=r"a launch of 6 blocks failed: invalid argument \(CUDA error 1\)"):
        Driver(Library(cuLaunchKernel=lambda *_: 1)).launch(0, 7, (3, 2), 32, 0, 0, (ctypes.c_void_p * 1)())


@pytest.mark.parametrize(("code", "log", "words"), [
    (218, b"ptxas fatal   : Unsupported .version 8.5;\n current version is '8.2'\n",
     "the driver refuses kernel: a PTX JIT compilation failed (CUDA error 218); ptxas fatal : Unsupported .version "
     "8.5; current version is '8.2'"),
    (222, b"", "the driver refuses kernel: too new (CUDA error 222)"),
    (999, b"", "the driver refuses kernel: unknown error (CUDA error 999)"),
])  # fmt: skip
def test_refused_text_is_one_line(code, log, words):
    """It has the compiler's log."""
    library = Library(cuModuleLoadDataEx=refuse(code, log))
    with pytest.raises(PrebuiltError) as caught:
        Driver(library).load(0, b"text", "kernel", 0)
    assert str(caught.value) == words
    assert len(library.cuCtxPopCurrent_v2.calls) == 1  # the thread's own context is back


@pytest.mark.parametrize("taken", [0, 1, 6])
def test_parameters_are_counted(taken):
    """The driver refuses the first one that a kernel does not have."""
    library = Library()
    library.cuFuncGetParamInfo = Function(lambda handle, place, *_: int(handle.value != 7 or place.value >= taken))
    assert Driver(library).parameters(7) == taken and Driver(library).parameters(8) == 0


def test_a_driver_that_counts_no_parameters():
    assert Driver(Library()).parameters(7) == 0


@pytest.mark.parametrize("name", ["cuTensorMapEncodeTiled", "cuModuleLoadDataEx", "cuLaunchKernel", "cuInit"])
def test_a_driver_without_a_function_is_named(name):
    with pytest.raises(PrebuiltError, match=f"NVIDIA's driver has no {name}: a newer driver has it"):
        here = Driver(Library(lacks=[name]))
        here.tensor_map(0, 0, 6, 2, (8, 8), (8, 1), (8, 8), 0)
        here.load(0, b"text", "kernel", 0)


def test_a_driver_that_does_not_start_says_so():
    with pytest.raises(PrebuiltError, match="cuInit: unknown error"):
        Driver(Library(cuInit=lambda *_: 100))


def test_strides_of_a_tensor_map():
    """A tensor map counts from the last dimension, in bytes."""
    library = Library()
    Driver(library).tensor_map(1 << 20, 1 << 30, 6, 2, (300, 64), (128, 1), (32, 16), 3)
    (call,) = library.cuTensorMapEncodeTiled.calls
    place, kind, rank, address, sizes, strides, box, ones, interleave, swizzle, promotion, fill = call
    assert (place.value, address.value, kind, rank) == (1 << 20, 1 << 30, 6, 2)
    assert (list(sizes), list(strides), list(box), list(ones)) == ([64, 300], [256], [16, 32], [1, 1])
    assert (interleave, swizzle, promotion, fill) == (0, 3, 2, 0)


def slowly(seconds):
    def answer(place, *_):
        time.sleep(seconds)
        place._obj.value = 70
        return 0

    return answer


KERNELS = [(b"%d" % i, f"kernel_{i}", 99 << 10 if i == 3 else 0) for i in range(7)]


def handle(place, kernel):
    place._obj.value = 100
    return 0


@pytest.mark.parametrize("threads", [1, 3, 20])
def test_kernels_are_compiled_as_libraries(threads):
    """Each once, in several threads with torch's context. The libraries stay: what is launched lies in them."""
    owners = set()

    def load(place, *_):
        owners.add(threading.get_ident())
        return slowly(0.02)(place)

    library = Library(cuLibraryLoadData=load, cuKernelGetFunction=handle)
    assert Driver(library).load_all(0, KERNELS, threads) == [100] * 7
    assert sorted(call[1].value for call in library.cuLibraryLoadData.calls) == [text for text, *_ in KERNELS]
    assert library.cuLibraryLoadData.calls[0][1].value == KERNELS[0][0]
    assert sorted(call[2] for call in library.cuLibraryGetKernel.calls) == [name.encode() for _, name, _ in KERNELS]
    assert len(library.cuKernelGetFunction.calls) == 7 and not library.cuLibraryUnload.calls
    assert [call[1:] for call in library.cuFuncSetAttribute.calls] == [(8, 99 << 10)]
    assert not library.cuModuleLoadDataEx.calls and len(library.cuFuncLoad.calls) == 7
    older = Library(lacks=["cuFuncLoad"], cuKernelGetFunction=handle)
    assert Driver(older).load_all(0, KERNELS, threads) == [100] * 7
    assert len(library.cuCtxPushCurrent_v2.calls) == min(threads, 7) and (len(owners) > 1) is (threads > 1)
    assert threading.get_ident() not in owners


def test_refused_texts_and_no_kernels():
    """What is refused ends nothing: it is said when it is loaded alone."""
    library = Library(cuLibraryLoadData=lambda *_: 222)
    assert Driver(library).load_all(0, KERNELS, 2) == [0] * 7
    assert len(library.cuLibraryLoadData.calls) == 7 and not library.cuLibraryUnload.calls
    library = Library(cuLibraryGetKernel=lambda *_: 500)
    assert Driver(library).load_all(0, KERNELS, 2) == [0] * 7
    assert not library.cuKernelGetFunction.calls and len(library.cuLibraryUnload.calls) == 7
    library = Library(cuFuncSetAttribute=lambda *_: 1, cuKernelGetFunction=handle)
    assert Driver(library).load_all(0, KERNELS, 2) == [100, 100, 100, 0, 100, 100, 100]
    assert Driver(Library(cuCtxPushCurrent_v2=lambda *_: 1)).load_all(0, KERNELS, 2) == [0] * 7
    assert Driver(Library()).load_all(0, [], 2) == []


def test_driver_without_libraries():
    with pytest.raises(PrebuiltError, match="no cuLibraryLoadData: a newer driver has it"):
        Driver(Library(lacks=["cuLibraryLoadData"])).load_all(0, KERNELS, 2)


@pytest.mark.parametrize(("ptx", "cuda", "needs"), [
    ("8.5", 12020, "555 or newer (CUDA 12.5), this one has CUDA 12.2"), ("8.5", 12050, ""),
    ("8.7", 12060, "570 or newer (CUDA 12.8), this one has CUDA 12.6"), ("8.7", 12080, ""), ("8.7", 13000, ""),
    ("", 12020, ""), ("7.8", 12020, ""),
])  # fmt: skip
def test_which_driver_reads_a_version_of_ptx(ptx, cuda, needs):
    said = too_old(cuda, ptx)
    assert said == (needs and f"prebuilt kernels for this need NVIDIA's driver {needs}")
    text = f"// made\n.version {ptx}\n.target sm_89\n".encode() if ptx else b"no text"
    assert ptx_version(text) == ptx

    def version(place):
        place._obj.value = cuda
        return 0

    with pytest.raises(PrebuiltError) as caught:
        Driver(Library(cuModuleLoadDataEx=refuse(222), cuDriverGetVersion=version)).load(0, text, "kernel", 0)
    assert str(caught.value) == f"the driver refuses kernel{f' ({said})' if said else ''}: too new (CUDA error 222)"


def test_the_drivers_file_on_each_system(monkeypatch):
    assert [library_name(name) for name in ("linux", "win32", "darwin")] == ["libcuda.so.1", "nvcuda.dll", None]
    driver.cache_clear()
    monkeypatch.setattr(module, "library_name", lambda: None)
    with pytest.raises(PrebuiltError, match="NVIDIA has no CUDA driver for"):
        driver()
    monkeypatch.setattr(module, "library_name", lambda: "libno-such-driver.so.9")
    with pytest.raises(PrebuiltError, match=r"NVIDIA's driver \(libno-such-driver.so.9\) cannot be opened"):
        driver()
    driver.cache_clear()
