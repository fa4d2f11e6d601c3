"""Whatever an operator writes into a config, from wherever it comes: a config, or an error that names what is wrong."""

import dataclasses
import string

import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzzing import examples

from fastcheckd.config import Config
from fastcheckd.config_sources import load_config
from fastcheckd.errors import ConfigError

KEYS = [field.name for field in dataclasses.fields(Config)]

words = st.text(string.printable, max_size=20) | st.sampled_from(
    ["", "on", "off", "auto", "1GiB", "-1", "1e400", ".nan", ".inf", "0x10", "~", "..", "/", "\0", "é", "a" * 5000,
     "127.0.0.1:1", "host:99999", "[::1]:0", "never", "adaptive", "rack=a,zone"]
)  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), words, st.dates(), st.binary(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(scalars.filter(lambda key: key == key), inner, max_size=4),  # noqa: PLR0124  no NaN
        st.fixed_dictionaries({"node_id": inner, "registry_address": inner, "raft_address": inner}),
    ),
    max_leaves=8,
)


def loads_or_says_why(path, **how):
    try:
        made = load_config(path, **how)
    except ConfigError as error:
        assert str(error)
    else:
        assert isinstance(made, Config)


@examples(500)
@given(st.dictionaries(st.sampled_from(KEYS) | words, values, max_size=4))
def test_any_value_of_any_key_of_the_file(tmp_path_factory, given_values):
    path = tmp_path_factory.mktemp("fuzz") / "node.yaml"
    path.write_text(yaml.safe_dump(given_values, allow_unicode=True))
    loads_or_says_why(path)


@examples(300)
@given(st.sampled_from(KEYS), words)
def test_any_text_of_any_key_of_the_environment_and_of_a_flag(key, text):
    loads_or_says_why(None, environment={f"FASTCHECK_{key.upper()}": text})
    loads_or_says_why(None, overrides=[f"{key}={text}"])


@examples(300)
@given(st.binary(max_size=200) | words.map(str.encode))
def test_any_bytes_of_a_file(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "node.yaml"
    path.write_bytes(data)
    loads_or_says_why(path)
