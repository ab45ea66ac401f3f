import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import TextSource
from tfdist.data import text as text_module
from tfdist.errors import InputError


def test_windows_follow_each_other_and_y_is_x_shifted_by_one():
    source = TextSource(np.arange(11, dtype=np.uint8), 3)
    assert source.size == 3
    assert source.element_spec == (tf.TensorSpec([3], tf.int32),) * 2
    x, y = source.fetch(tf.range(3, dtype=tf.int64))
    np.testing.assert_array_equal(x, [[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    np.testing.assert_array_equal(y, x + 1)


@pytest.mark.parametrize(("length_of_text", "windows"), [(4, 1), (6, 1), (7, 2)])
def test_a_window_needs_one_byte_more_for_y(length_of_text, windows):
    assert TextSource(np.zeros(length_of_text, np.uint8), 3).size == windows


@pytest.mark.parametrize(("length_of_text", "length"), [(3, 3), (0, 1), (10, 0), (10, -1)])
def test_a_text_must_hold_a_window(length_of_text, length):
    with pytest.raises(InputError, match="longer than a window"):
        TextSource(np.zeros(length_of_text, np.uint8), length)


def test_the_standard_library_is_source_text():
    found = text_module.text(length=16, max_bytes=400_000)
    assert (found.input_shape, found.classes) == ((16,), 256)
    assert isinstance(found.train, TextSource) and isinstance(found.test, TextSource)
    assert (found.train.size, found.test.size) == ((380_000 - 1) // 16, (20_000 - 1) // 16)
    x, _ = found.train.fetch(tf.range(found.train.size, dtype=tf.int64))
    assert b"import" in bytes(x.numpy().astype(np.uint8).ravel())


def test_files_come_in_sorted_order_without_installed_packages(tmp_path, monkeypatch):
    for name in ["b.py", "a.py", "c.txt", "z/y.py", "site-packages/x.py", "test/t.py", "k/__pycache__/q.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(text_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert text_module._standard_library(1000) == b"a.pyb.pyz/y.py"
    assert text_module._standard_library(6) == b"a.pyb."
    assert text_module._standard_library(-1) == b""
