"""A snapshot turned into what a lossy coding can say, as the owner does it before anything is hashed or sent."""

from __future__ import annotations

from dataclasses import replace

from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheckd.codec.chunk_plan import parse_layout
from fastcheckd.codec.lossy import quantise

from .sequences import Snapshot


def quantised(snapshot: Snapshot, base: Snapshot | None, precision: pb.Precision) -> Snapshot:
    """The snapshot with what `precision` allows lost; `base` is the lossy snapshot that holders have, if any."""
    layout = pb.StateLayout()
    layout.CopyFrom(snapshot.layout)
    layout.precision.CopyFrom(precision)
    data, start = snapshot.bytes.copy(), 0
    for plan in parse_layout(layout, len(data)):
        place = slice(start, start + plan.bytes)
        quantise(data.data[place], None if base is None else base.bytes.data[place], plan)
        start += plan.bytes
    return replace(snapshot, bytes=data, layout=layout)
