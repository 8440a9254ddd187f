import torch
from zerowaste_vae.engine.extras.bench.calls import POINTS, Watch, time_calls

CPU = torch.device("cpu")


def test_time_calls():
    """Count every call, and return the last result."""
    count = []

    def call():
        count.append(None)
        return torch.tensor(len(count))

    figures, result = time_calls(call, 3, CPU)
    assert len(count) == 5 and result == 5  # the first one, three steady ones, and the watched one
    assert figures["runs"] == 3 and figures["low_s"] <= figures["median_s"] <= figures["high_s"]
    assert figures["first_s"] > 0 and figures["allocated_gb"] is None and figures["reserved_gb"] is None


def test_trace_keeps_peak():
    """A long trace is thinned without losing its peak."""
    watch = Watch(CPU)
    watch._points = [(i / 100, float(i == 777), 2.0) for i in range(1000)]
    trace = watch.trace()
    assert len(trace) <= POINTS and max(point[1] for point in trace) == 1.0
    assert [point[0] for point in trace] == sorted(point[0] for point in trace)
    watch._points = []
    assert watch.trace() == [] and watch.process_peak is None
