"""Measured timelines: labels of Chrome traces become spans; a computation's span begins after what it waits for."""

from lightning_holmes.plan.measured import make_measured_timeline, spans_of_trace


def trace(*events: tuple[str, float, float], cat: str = "user_annotation") -> dict:
    """A Chrome trace that began at second 100 of the clock; events: name, and begin and end in seconds since then."""
    rows = [
        {"ph": "X", "cat": cat, "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6}
        for name, start, end in events
    ]
    return {
        "baseTimeNanoseconds": 100 * 10**9,
        "traceEvents": [*rows, {"ph": "f", "name": "holmes: wait for x", "ts": 0}],
    }


FIRST = trace(
    ("holmes: wait for the ranks to agree on the batch", 0, 1),
    ("holmes: forward of stage 0, microbatch 0 (layers.0)", 1, 3),
    ("holmes: send activation of stage 0, microbatch 0 (layers.0)", 3, 3.5),
    ("holmes: backward of stage 0, microbatch 0 (layers.0)", 4, 9),
    ("holmes: wait for tensors of another stage", 4, 7),
    ("holmes: bucket reduce of layers.0", 8, 10),
    ("holmes: wait for the sums of gradients", 9, 10),
    ("Optimizer.step#AdamW.step", 0.5, 12),
    ("aten::mm", 1, 2),
)
SECOND = trace(
    ("holmes: forward of stage 1, microbatch 0 (layers.1)", 2, 6),
    ("holmes: wait for tensors of another stage", 2, 3),
    ("holmes: backward input of stage 1, microbatch 0 (layers.1)", 6, 7),
)


def test_labels_become_spans_that_begin_after_what_they_wait_for() -> None:
    timeline = make_measured_timeline([spans_of_trace(FIRST), spans_of_trace(SECOND)])
    assert [tuple(span) for span in timeline.spans[0]] == [
        *(("wait", 0, 1, -1, -1), ("forward", 1, 3, 0, 0), ("wait", 4, 7, -1, -1), ("backward", 7, 9, 0, 0)),
        *(("bucket_reduce", 8, 10, -1, -1), ("reduce", 9, 10, -1, -1), ("update", 10, 12, -1, -1)),
    ]
    assert [tuple(span) for span in timeline.spans[1]] == [
        ("wait", 2, 3, -1, -1),
        ("forward", 3, 6, 1, 0),
        ("backward_input", 6, 7, 1, 0),
    ]
    assert timeline.step_s == 12 and timeline.source == "measured"
    assert timeline.bubble_share == (24 - (2 + 2 + 2) - (3 + 1) - 1) / 24


def test_on_a_gpu_the_spans_are_those_of_the_device() -> None:
    on_host = ("holmes: forward of stage 0, microbatch 0 (layers.0)", 0, 1)
    on_device = trace(("holmes: forward of stage 0, microbatch 0 (layers.0)", 2, 5), cat="gpu_user_annotation")
    both = {**on_device, "traceEvents": [*trace(on_host)["traceEvents"], *on_device["traceEvents"]]}
    assert [tuple(span) for span in spans_of_trace(both)] == [("forward", 102, 105, 0, 0)]
