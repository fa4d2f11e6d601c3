import pickle
import tracemalloc
import zlib
from pathlib import Path

import pysyncobj.tcp_connection
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.registry.raft import messages
from fastcheckd.registry.raft.messages import Seal, derive_key
from fastcheckd.registry.raft.transport import MESSAGE_BYTES_MAX

KEY = derive_key(b"s" * 32, "test")


def ends(key=KEY, other=KEY):
    return Seal(key).fresh(accepting=False), Seal(other).fresh(accepting=True)


def test_messages_pass_in_both_directions():
    connecting, accepting = ends()
    for text in (b"", b"one", b"two" * 1000):
        assert accepting.decrypt(connecting.encrypt_at_time(text, 0)) == text
        assert connecting.decrypt(accepting.encrypt_at_time(text, 0)) == text


def test_forged_changed_repeated_reordered_and_reflected_messages_are_refused():
    connecting, accepting = ends()
    first, second = connecting.encrypt_at_time(b"first", 0), connecting.encrypt_at_time(b"second", 0)
    for bad in (b"", b"x" * 10, second, first[:-1] + b"T", bytes([first[0] ^ 1]) + first[1:]):
        with pytest.raises(ValueError, match="authentication"):
            accepting.decrypt(bad)
    with pytest.raises(ValueError, match="authentication"):
        connecting.decrypt(first)  # sent back to where it came from
    assert accepting.decrypt(first) == b"first"
    with pytest.raises(ValueError, match="authentication"):
        accepting.decrypt(first)
    assert accepting.decrypt(second) == b"second"


def test_another_key_or_another_cluster_is_refused():
    for other in (derive_key(b"t" * 32, "test"), derive_key(b"s" * 32, "other")):
        connecting, accepting = ends(KEY, other)
        with pytest.raises(ValueError, match="authentication"):
            accepting.decrypt(connecting.encrypt_at_time(b"hello", 0))


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_runs_nothing(tmp_path, protocol):
    path = tmp_path / "owned"
    attack = pickle.dumps({"type": "append_entries", "entries": [Malicious(path)]}, protocol)
    with pytest.raises(pickle.UnpicklingError, match="no business"):
        messages.loads(attack)
    assert not path.exists()
    pickle.loads(attack)
    assert path.exists(), "the attack itself works"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=15,
)


@given(plain)
def test_plain_values_pass_unchanged(value):
    again = messages.loads(messages.dumps(value))
    assert again == value and type(again) is type(value)


def test_what_a_voter_sends_inflates_to_no_more_than_a_message():
    inflate = pysyncobj.tcp_connection.zlib.decompress
    assert inflate(zlib.compress(bytes(MESSAGE_BYTES_MAX))) == bytes(MESSAGE_BYTES_MAX)
    bomb = zlib.compress(bytes(8 * MESSAGE_BYTES_MAX))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="inflates"):
            inflate(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * MESSAGE_BYTES_MAX
    finally:
        tracemalloc.stop()
    with pytest.raises(ValueError, match="cut off"):
        inflate(zlib.compress(b"x" * 1000)[:-5])
