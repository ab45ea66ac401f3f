import os

import pytest

from tfdist.storage import Url


def test_a_url_is_composed_as_a_path_is():
    url = Url("s3", "bucket//runs/first/")
    assert str(url) == "s3://bucket/runs/first"
    assert (url.name, str(url.parent), str(url / "a")) == ("first", "s3://bucket/runs", "s3://bucket/runs/first/a")
    assert str(url.with_name("second")) == "s3://bucket/runs/second"
    assert url / "a" / "b" == url / "a/b"
    assert sorted([url / "b", url / "a"]) == [url / "a", url / "b"]
    assert len({url, Url("s3", "bucket/runs/first")}) == 1
    assert Url("s3", "bucket").parent == Url("s3", "") == Url("s3", "").parent


def test_a_url_is_never_opened_as_a_file_of_this_machine():
    with pytest.raises(TypeError):
        os.fspath(Url("s3", "bucket"))
