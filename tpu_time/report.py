"""A prediction as a table, and as a trace that Perfetto opens."""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tables.hardware import Chip
from tpu_time.clock import Event, Prediction

TRACKS = {  # a trace's thread, its number and its name, by the track of an event
    "compute": (1, "chip: computes, or waits"),
    "wait": (1, "chip: computes, or waits"),
    "links": (2, "links: collectives"),
    "copies": (3, "memory: copies meanwhile"),
}


@dataclass
class _Sum:
    """Events of one row of the profile, added up."""

    seconds: float = 0.0
    bound: float = 0.0
    count: int = 0
    flops: float = 0.0


def at_peak(event: Event, spec: Chip) -> float:
    """Seconds of an event if it ran at its own limit: products at the peak, bytes at HBM speed."""
    int8_speed = spec.int8 or spec.flops
    in_bfloat16 = (event.flops - event.int8) / spec.flops
    in_int8 = event.int8 / int8_speed
    products = in_bfloat16 + in_int8
    return max(products, event.bytes / spec.bandwidth)


def what_of(event: Event) -> str:
    """compute, or for a wait what was waited for: all-gather, reduce-scatter, copy, ..."""
    if event.track == "compute":
        return "compute"
    return event.opcode


def profile(prediction: Prediction, spec: Chip) -> list[dict]:
    """The time by what, part of the model and pass.

    Returns:
      [{"what", "part", "direction", "seconds", "at_peak", "count", "flops"}], the longest first.
      `at_peak`: seconds at the peak of the matrix units or of the HBM, whichever is more, summed
      over the instructions; None for waits.
    """
    sums: dict[tuple[str, str, str], _Sum] = defaultdict(_Sum)
    for event in prediction.events:
        if event.track not in ("compute", "wait"):
            continue
        what = what_of(event)
        total = sums[what, event.part, event.direction]
        total.seconds += event.seconds * event.count
        total.count += event.count
        total.flops += event.flops * event.count
        if event.track == "compute":
            total.bound += at_peak(event, spec) * event.count

    table = []
    for (what, part, direction), total in sums.items():
        row = {
            "what": what,
            "part": part,
            "direction": direction,
            "seconds": total.seconds,
            "at_peak": total.bound if what == "compute" else None,
            "count": total.count,
            "flops": total.flops,
        }
        table.append(row)
    return sorted(table, key=lambda row: -row["seconds"])


def _trace_event(event: Event) -> dict:
    """A complete event of the Trace Event Format."""
    label = event.part
    if event.track != "compute":
        label = f"{event.track}: {event.opcode}"
    thread, _ = TRACKS[event.track]
    return {
        "ph": "X",
        "name": label,
        "cat": event.direction,
        "pid": 1,
        "tid": thread,
        "ts": event.start * 1e6,
        "dur": event.seconds * 1e6,
        "args": {
            "instruction": event.name,
            "source": event.line,
            "FLOP": event.flops,
            "bytes": event.bytes,
            "executions": event.count,
        },
    }


def _trace_name(what: str, name: str, **thread: int) -> dict:
    """What the viewer writes beside a process or a thread (a metadata event of the same format)."""
    return {"ph": "M", "name": what, "pid": 1, **thread, "args": {"name": name}}


def write_trace(prediction: Prediction, path: str | Path, title: str = "one chip") -> None:
    """Write a prediction as a Chrome trace, gzipped JSON, for https://ui.perfetto.dev.

    The format is Google's Trace Event Format: complete events ("ph": "X") with microseconds, named
    threads. A loop's body is drawn once; `executions` among an event's arguments says how often it
    runs.

    Args:
      prediction: from `predict`.
      path: the file to write, `*.json.gz`.
      title: the process's name in the viewer.
    """
    events = [_trace_name("process_name", title)]
    for number, name in sorted(set(TRACKS.values())):
        events.append(_trace_name("thread_name", name, tid=number))
    for event in prediction.events:
        events.append(_trace_event(event))
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    content = json.dumps(trace).encode()

    beside = Path(f"{path}.part")
    with open(beside, "wb") as file, gzip.GzipFile("", "wb", mtime=0, fileobj=file) as packed:
        packed.write(content)
    beside.rename(path)
