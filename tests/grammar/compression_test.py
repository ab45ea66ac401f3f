"""What flags ask of `--compression` without TensorFlow, also of rules for some variables."""

import pytest

from tfdist.errors import InputError
from tfdist.grammar.compression import is_chosen, is_for_gradients


@pytest.mark.parametrize(
    ("text", "chosen", "for_gradients"),
    [
        ("none", False, False),
        ("auto", True, False),
        ("auto(after=3, allow='fp16; powersgd(rank=4)')", True, False),
        ("signsgd", False, True),
        ("topk(ratio=0.1)|fp16", False, False),
        ("path=.*kernel: dgc(ratio=0.1); *: int8", False, True),
        ("size>=1000: int8; *: bf16", False, False),
        ("package.module:dgc", False, False),
    ],
)
def test_methods(text, chosen, for_gradients):
    assert (is_chosen(text), is_for_gradients(text)) == (chosen, for_gradients)


def test_what_is_no_method():
    with pytest.raises(InputError, match="names no method"):
        is_for_gradients(";")
