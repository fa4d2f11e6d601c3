"""What a handle says the codec did, from what the daemon reported."""

import pytest

from fastcheck.handle import SaveHandle
from fastcheck_proto.v1 import common_pb2
from fastcheck_proto.v1 import trainer_pb2 as pb


def test_before_anything_is_sent_there_is_no_ratio():
    stats = SaveHandle(1, state_bytes=100).stats
    assert (stats["bytes"], stats["encoded_bytes"], stats["ratio"]) == (100, 0, None)
    assert (stats["codecs"], stats["lossy"], stats["encode_s"]) == ({}, False, 0.0)


def test_ratio_and_codecs_are_those_of_the_last_report():
    handle = SaveHandle(1, state_bytes=100)
    uses = [
        common_pb2.CodecUse(codec="adam", raw_bytes=80, encoded_bytes=20),
        common_pb2.CodecUse(codec="raw", raw_bytes=20, encoded_bytes=20),
    ]
    update = pb.SaveProgress(encoded_bytes=40, codecs=uses, encode_s=0.5, lossy=True)
    handle._absorb(update)
    handle._absorb(update)
    stats = handle.stats
    assert stats["ratio"] == pytest.approx(2.5)
    assert stats["codecs"] == {
        "adam": {"raw_bytes": 80, "encoded_bytes": 20},
        "raw": {"raw_bytes": 20, "encoded_bytes": 20},
    }
    assert stats["lossy"] and stats["encode_s"] == 0.5


def test_what_a_caller_does_to_the_stats_is_its_own_matter():
    handle = SaveHandle(1, state_bytes=1)
    with pytest.raises(TypeError):
        handle.stats["ratio"] = 3
