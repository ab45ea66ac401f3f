import hypothesis
import numpy as np
from hypothesis import strategies as st

from tfdist.data.split import stratified


@hypothesis.given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=60), share=st.floats(0, 1))
@hypothesis.settings(derandomize=True)
def test_parts_are_disjoint_complete_and_stratified(labels, share):
    labels = np.array(labels)
    test_size = int(share * len(labels))
    train, test = stratified(labels, test_size)
    assert len(test) == test_size
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(len(labels)))
    for label in range(5):
        assert abs((labels[test] == label).sum() - (labels == label).sum() * test_size / len(labels)) < 1


def test_the_split_is_the_same_each_time_and_in_random_order():
    labels = np.repeat(np.arange(10), 50)
    train, test = stratified(labels, 100)
    again = stratified(labels, 100)
    np.testing.assert_array_equal(train, again[0])
    np.testing.assert_array_equal(test, again[1])
    assert len(np.unique(labels[train][:40])) > 5
    assert (stratified(labels, 100, seed=1)[1] != test).any()
