"""Addresses as people write them."""

from __future__ import annotations

import pytest

from prorl_gym.backends.address import normalise_address
from prorl_gym.errors import RequestError


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("http://n1:8000", "http://n1:8000"),
        (" http://n1:8000/ ", "http://n1:8000"),
        ("http://n1:8000/v1", "http://n1:8000"),
        ("http://n1:8000/v1/", "http://n1:8000"),
        ("HTTP://N1:8000/V", "http://n1:8000/V"),
        ("https://router.example/engine/3/v1", "https://router.example/engine/3"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://10.0.0.7", "http://10.0.0.7"),
    ],
)
def test_one_spelling(written: str, normal: str) -> None:
    assert normalise_address(written) == normal


@pytest.mark.parametrize(
    "written",
    [
        "",
        "n1:8000",
        "ftp://n1",
        "http://",
        "http://n1:99999",
        "http://n1:0",
        "http://n1:abc",
        "http://user:secret@n1",
        "http://n1/v1?key=secret",
        "http://n1#x",
        "http://n 1",
        "http://n1\n",
        "http://n\x001",
        "http://\ud800",
        "http://" + "a" * 3000,
    ],
)
def test_what_is_no_address_is_refused_by_field_and_not_quoted(written: str) -> None:
    if written == "http://n1\n":  # surrounding blanks are forgiven
        assert normalise_address(written) == "http://n1"
        return
    with pytest.raises(RequestError) as caught:
        normalise_address(written)
    assert caught.value.field == "address"
    assert "secret" not in str(caught.value)
