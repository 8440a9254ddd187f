"""Load and launch compiled kernels through NVIDIA's driver (libcuda.so.1, nvcuda.dll), without a compiler.

One `Driver` serves all devices of the process in torch's own (primary) contexts. What it loads stays until the process
ends: a kernel is loaded once for each device.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from .errors import PrebuiltError

#: Bytes of a tensor map, and what its address is a multiple of.
MAP_BYTES, MAP_ALIGNMENT = 128, 64
#: Shared memory that a kernel may use without asking the driver for more.
_PLAIN_SHARED = 48 << 10
_LOG_BYTES = 8 << 10
#: Load, find a kernel, load its code for the current context, unload.
_LIBRARY = "cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuLibraryUnload"
#: Version of PTX -> the CUDA whose driver reads it first, as `Driver.version` counts, and the number of that driver.
READ_BY = {"8.5": (12050, 555), "8.6": (12070, 565), "8.7": (12080, 570), "8.8": (12090, 575), "9.0": (13000, 580)}
#: What the driver says of a call in a thread that has no context, or another library's.
_NO_CONTEXT, _WRONG_HANDLE, _DESTROYED = 201, 400, 709
_LAUNCH = (
    ctypes.c_void_p, *(ctypes.c_uint,) * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip


def library_name(platform: str = sys.platform) -> str | None:
    """Return the driver library's file name on a platform (as `sys.platform` has it); None: NVIDIA has none there."""
    if platform.startswith("linux"):
        return "libcuda.so.1"
    return "nvcuda.dll" if platform == "win32" else None


def too_old(cuda: int, ptx: str) -> str:
    """Return why a driver does not read PTX of a version ("8.5"), and which one does; "" if it does.

    cuda: the newest CUDA that the driver knows, as `Driver.version` returns it."""
    needed, branch = READ_BY.get(ptx, (0, 0))
    if cuda >= needed:
        return ""
    has, need = (f"{number // 1000}.{number % 1000 // 10}" for number in (cuda, needed))
    return f"prebuilt kernels for this need NVIDIA's driver {branch} or newer (CUDA {need}), this one has CUDA {has}"


def ptx_version(text: bytes) -> str:
    """Return the version that a text of PTX names, such as "8.5"."""
    return text.partition(b".version ")[2].partition(b"\n")[0].decode(errors="replace").strip()


@functools.cache
def driver() -> Driver:
    """Return the process' driver. Raises PrebuiltError where there is none."""
    name = library_name()
    if name is None:
        raise PrebuiltError(f"NVIDIA has no CUDA driver for {sys.platform}")
    try:
        library = ctypes.WinDLL(name) if sys.platform == "win32" else ctypes.CDLL(name)
    except OSError as error:
        raise PrebuiltError(f"NVIDIA's driver ({name}) cannot be opened: {error}") from error
    return Driver(library)


class Driver:
    """The driver's functions that launches need. Its methods may be called in any thread."""

    def __init__(self, library: Any) -> None:
        """library: of ctypes, or what stands in for it in tests. Raises PrebuiltError where it cannot be started."""
        self._library = library
        self._lock = threading.Lock()
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.check(self._call("cuInit", 0), "cuInit")
        self._launch = self._function("cuLaunchKernel")
        self._launch.argtypes = _LAUNCH

    def version(self) -> int:
        """Return the newest CUDA that the driver knows, as 1000 * major + 10 * minor."""
        number = ctypes.c_int()
        self.check(self._call("cuDriverGetVersion", ctypes.byref(number)), "cuDriverGetVersion")
        return number.value

    def load(self, device: int, ptx: bytes, symbol: str, shared: int) -> int:
        """Compile (or take from the driver's cache) a kernel for a device.

        Args:
            device: its number, as torch counts.
            ptx: the text.
            symbol: the entry's name.
            shared: bytes of dynamic shared memory that its launches ask for.

        Returns: the driver's handle for `launch`.
        Raises: PrebuiltError with the compiler's log in one line.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with self.in_context(device), self._uncaptured():
            log = ctypes.create_string_buffer(_LOG_BYTES)
            options = (ctypes.c_int * 2)(5, 6)  # the error log's buffer and its size
            values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
            text = ctypes.c_char_p(ptx)
            code = self._call("cuModuleLoadDataEx", ctypes.byref(module), text, 2, options, values)
            old = code and too_old(self.version(), ptx_version(ptx))
            self.check(code, f"the driver refuses {symbol}" + (f" ({old})" if old else ""), log.value)
            code = self._call("cuModuleGetFunction", ctypes.byref(function), module, symbol.encode())
            self.check(code, f"{symbol} is not in its own module")
            self._grant(function, symbol, shared)
        return function.value or 0

    def _grant(self, function: ctypes.c_void_p, symbol: str, shared: int) -> None:
        if shared > _PLAIN_SHARED:
            self.check(self._call("cuFuncSetCacheConfig", function, 1), f"{symbol} (cache for shared memory)")
            code = self._call("cuFuncSetAttribute", function, 8, shared)
            self.check(code, f"{symbol} needs {shared >> 10} KiB of shared memory")

    def load_all(self, device: int, kernels: Sequence[tuple[bytes, str, int]], threads: int) -> list[int]:
        """Compile (or take from the driver's cache) kernels several at a time: it compiles the modules of a context one
        after the other, but not libraries (80 kernels, 8 threads, an H200's host: 4.4 s, and 6.8 with 8 contexts).

        Args:
            device: as torch counts.
            kernels: PTX, symbol and dynamic shared memory of each, in the order in which they are compiled.
            threads: how many compile.

        Returns: handles for `launch`; 0 for a kernel that is refused, and `load` says why.
        Raises: PrebuiltError where the driver has no libraries.
        """
        for name in _LIBRARY:
            self._function(name)
        found, left = [0] * len(kernels), list(reversed([*enumerate(kernels)]))
        helpers = [
            threading.Thread(target=self._help, args=(device, left, found), daemon=True) for _ in kernels[:threads]
        ]
        for helper in helpers:
            helper.start()
        for helper in helpers:
            helper.join()
        return found

    def _help(self, device: int, left: list[tuple[int, tuple[bytes, str, int]]], found: list[int]) -> None:
        with suppress(PrebuiltError, IndexError), self.in_context(device), self._uncaptured():
            while True:
                number, kernel = left.pop()
                with suppress(PrebuiltError):
                    found[number] = self._compile(*kernel)

    def _compile(self, text: bytes, symbol: str, shared: int) -> int:
        """Return the handle of a kernel in a library of its own, which stays; 0 or a PrebuiltError if it is refused."""
        load, kernel_of, function_of, unload = map(self._function, _LIBRARY)
        library, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        if load(ctypes.byref(library), ctypes.c_char_p(text), None, None, 0, None, None, 0):
            return 0
        # A library may wait with its code until a kernel's function is asked for.
        if kernel_of(ctypes.byref(kernel), library, symbol.encode()) or function_of(ctypes.byref(function), kernel):
            unload(library)
            return 0
        self._grant(function, symbol, shared)
        if (now := getattr(self._library, "cuFuncLoad", None)) is not None:  # since CUDA 12.4
            now(function)  # else its code would be loaded by its first launch, which may be recorded
        return function.value or 0

    def parameters(self, function: int) -> int:
        """Return how many parameters a kernel takes; 0 where the driver does not tell (before CUDA 12.4)."""
        ask = getattr(self._library, "cuFuncGetParamInfo", None)
        handle, offset, size = ctypes.c_void_p(function), ctypes.c_size_t(), ctypes.c_size_t()
        count = 0
        while ask is not None and not ask(handle, ctypes.c_size_t(count), ctypes.byref(offset), ctypes.byref(size)):
            count += 1
        return count

    def launch(
        self, device: int, function: int, grid: Sequence[int], threads: int, shared: int, stream: int, parameters: Any
    ) -> None:
        """Queue one kernel.

        Args:
            device: the current one, as torch counts.
            function: from `load`.
            grid: blocks, one to three numbers. Nothing is launched where one of them is 0.
            threads: of a block.
            shared: bytes of dynamic shared memory.
            stream: the CUDA stream's handle; a stream that is captured takes the kernel into its graph.
            parameters: an array of the addresses of all parameters, which are copied before this returns.

        Raises: PrebuiltError in the driver's words.
        """
        x, y, z = (*grid, 1, 1)[:3]
        if not x * y * z:
            return
        code = self._launch(function, x, y, z, threads, 1, 1, shared, stream, parameters, None)
        if code in (_NO_CONTEXT, _WRONG_HANDLE, _DESTROYED):
            with self.in_context(device):
                code = self._launch(function, x, y, z, threads, 1, 1, shared, stream, parameters, None)
        if code:
            self.check(code, f"a launch of {x * y * z} blocks failed")

    def tensor_map(
        self, place: int, address: int, kind: int, itemsize: int, shape: Sequence[int], strides: Sequence[int],
        box: Sequence[int], swizzle: int,
    ) -> None:  # fmt: skip
        """Write the tensor map of a tensor, MAP_BYTES at a multiple of MAP_ALIGNMENT, for bulk copies of tiles.

        Args:
            place: where to.
            address: of the tensor's first element.
            kind: its CUtensorMapDataType. itemsize: bytes of an element.
            shape, strides: of the tensor, in elements, as torch has them (the last stride is 1).
            box: of a tile. swizzle: CUtensorMapSwizzle, as the kernel expects it.

        Raises: PrebuiltError where the driver has no such function or refuses.
        """
        rank = len(shape)
        sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
        steps = (ctypes.c_uint64 * max(rank - 1, 1))(*(itemsize * s for s in reversed(strides[:-1])))
        tile, ones = (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*[1] * rank)
        code = self._call(
            "cuTensorMapEncodeTiled", ctypes.c_void_p(place), kind, rank, ctypes.c_void_p(address), sizes, steps, tile,
            ones, 0, swizzle, 2, 0,
        )  # fmt: skip
        self.check(code, f"no tensor map of {list(shape)} in tiles of {list(box)}")

    @contextmanager
    def in_context(self, device: int) -> Iterator[None]:
        """Make torch's context of a device the thread's own inside."""
        context = self._context(device)
        self.check(self._call("cuCtxPushCurrent_v2", context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def call(self, name: str, what: str, *arguments: Any) -> None:
        """Call one of the driver's functions in the current context. Raises PrebuiltError: `what`, and why not."""
        self.check(self._call(name, *arguments), what)

    def check(self, code: int, what: str, log: bytes = b"") -> None:
        """Raise PrebuiltError for a code that is no success: `what`, the driver's words and its log, in one line."""
        if code == 0:
            return
        words = ctypes.c_char_p()
        known = self._call("cuGetErrorString", code, ctypes.byref(words)) == 0 and words.value
        said = (words.value or b"").decode(errors="replace") if known else "unknown error"
        text = " ".join(log.decode(errors="replace").split())[:400]
        raise PrebuiltError(f"{what}: {said} (CUDA error {code})" + (f"; {text}" if text else ""))

    def _context(self, device: int) -> ctypes.c_void_p:
        with self._lock:
            if device not in self._contexts:
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self.check(self._call("cuDeviceGet", ctypes.byref(number), device), f"GPU {device}")
                code = self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
                self.check(code, f"the context of GPU {device}")
                self._contexts[device] = context
            return self._contexts[device]

    @contextmanager
    def _uncaptured(self) -> Iterator[None]:
        """Keep loads inside out of a graph that this stream, or another one, is being captured into."""
        mode = ctypes.c_int(2)  # relaxed
        self.check(self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode)), "the capture mode")
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def _call(self, name: str, *arguments: Any) -> int:
        return self._function(name)(*arguments)

    def _function(self, name: str) -> Callable[..., int]:
        try:
            return getattr(self._library, name)
        except AttributeError as error:
            raise PrebuiltError(f"NVIDIA's driver has no {name}: a newer driver has it") from error
