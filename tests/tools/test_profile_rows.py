"""What a rank's GPU did in its time, of a trace made by hand."""

import pytest


@pytest.fixture
def tool(load_tool):
    return load_tool("profile_rows")


def on_gpu(name, begins, takes, number, stream=7, kind="kernel"):
    return {"ph": "X", "cat": kind, "name": name, "ts": begins, "dur": takes,
            "args": {"stream": stream, "correlation": number}}  # fmt: skip


def call(ends, number):
    return {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": ends - 2, "dur": 2,
            "args": {"correlation": number}}  # fmt: skip


TRACE = [
    call(5, 1), on_gpu("conv", 10, 100, 1),
    call(20, 2), on_gpu("ncclDevKernel_AllGather", 112, 40, 2, stream=9),
    call(30, 3), on_gpu("norm", 155, 50, 3),  # launched long before, behind the exchange
    call(225, 4), on_gpu("conv", 230, 100, 4),  # launched late
    call(40, 5), on_gpu("Memcpy", 0, 60, 5, stream=11, kind="gpu_memcpy"),
    {"ph": "i", "name": "a mark"},
]  # fmt: skip


def test_what_the_time_between_kernels_was_for(tool):
    found = tool.account(TRACE)
    assert (found.kernels, found.work, found.exchanges) == (3, 250, (40,))
    # 110 to 155: 40 of an exchange, and 2 + 3 around it. 205 to 230: 20 until the launch, 5 behind it.
    assert (found.launch, found.others, found.rest) == (20, 40, 10)


def test_an_exchange_waits_for_the_rank_that_comes_last(tool):
    first = tool.account(TRACE)
    other = tool.account([{**e, "dur": 15} if "nccl" in e["name"] else e for e in TRACE])
    one, two = tool.lines([first, other], [0.5, 0.5])
    assert one.endswith("1 exchanges: 0.0 ms at their quickest, 0.0 for another rank") and "3 kernels" in two
    one, two = tool.lines([a._replace(exchanges=(4e3, d)) for a, d in ((first, 6e3), (other, 1e3))], [0.5, 0.5])
    assert one.endswith("5.0 ms at their quickest, 5.0 for another rank")
    assert two.endswith("5.0 ms at their quickest, 0.0 for another rank")
    (alone, _) = tool.lines([first, other._replace(exchanges=())], [0.5, 0.5])
    assert alone.endswith("1 exchanges, 0.0 ms")


def test_without_gpus_it_says_what_it_needs(tool):
    with pytest.raises(tool.InputError, match="torchrun"):
        tool.main([])


def test_nothing_traced_is_nothing(tool):
    assert tool.account([]) == tool.Account(0, 0, 0, 0, 0, ())
