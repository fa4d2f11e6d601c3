import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.conventions import TOKEN_BYTES_MAX, check_name, check_token, default_address


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a b", "ä", "a\n", "x" * 129, "x" * 300, "a\0"]
)
def test_names_that_could_leave_their_folder_are_refused(name):
    with pytest.raises(ValueError, match="not a valid name"):
        check_name("job", name)


@pytest.mark.parametrize("name", ["gpt", "a.b-c_D9", "...", "x" * 128, ".hidden"])
def test_names(name):
    assert check_name("job", name) == name


@given(st.text(max_size=200))
def test_a_name_that_passes_is_one_path_component(name):
    try:
        check_name("job", name)
    except ValueError as error:
        assert len(str(error)) < 300
    else:
        assert "/" not in name and "\0" not in name and name not in {"", ".", ".."}


def test_the_default_address_is_a_unix_socket():
    assert default_address().startswith("unix:///") and default_address().endswith("fastcheckd.sock")


@given(st.text(max_size=200))
def test_what_passes_for_a_token_can_stand_in_metadata(token):
    try:
        check_token(token)
    except ValueError as error:
        assert len(token) < 8 or token not in str(error)
    else:
        assert token.isascii() and token.isprintable() and token.count(".") == 2 and " " not in token


def test_a_token_is_bounded():
    longest = "a.b." + "c" * (TOKEN_BYTES_MAX - 4)
    assert check_token(longest) == longest
    with pytest.raises(ValueError, match="at most"):
        check_token(longest + "c")
