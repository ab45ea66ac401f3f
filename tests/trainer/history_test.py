"""The records of a run."""

import pytest

from tfdist.trainer.records import History


def test_the_last_record_of_a_kind():
    history = History()
    with pytest.raises(KeyError, match="No record of kind 'train'"):
        history.last("train")
    history.records += [{"kind": "train", "step": 1}, {"kind": "train", "step": 2}, {"kind": "eval", "step": 1}]
    assert history.last("train")["step"] == 2
    with pytest.raises(KeyError, match=r"Received kinds: \['eval', 'train'\]"):
        history.last("nope")
