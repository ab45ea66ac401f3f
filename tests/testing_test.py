"""The API for authors of plugins: cases, outcomes, and their comparison."""

import numpy as np
import pytest

from tfdist import testing

CASE = testing.Case(model="mlp", optimizer="sgd", steps=2)


def test_public_names():
    assert testing.__all__ == ["CASES", "Case", "Outcome", "compare", "run_case"]


def test_cases_name_what_there_is():
    assert {case.model for case in testing.CASES} <= set(testing.MODELS)
    assert {case.optimizer for case in testing.CASES} == set(testing.OPTIMIZERS)
    assert len({str(case) for case in testing.CASES}) == len(testing.CASES)
    assert any(case.weighted for case in testing.CASES)
    assert any(case.batch_size % 2 for case in testing.CASES)


def test_a_case_depends_on_nothing_else(single, float64):
    np.random.seed(1)
    first = testing.run_case(single, CASE)
    np.random.seed(2)
    second = testing.run_case(single, CASE)
    assert first.digests == second.digests
    assert first.losses == second.losses
    assert first.evaluation == second.evaluation
    assert {v.dtype for v in first.variables.values()} == {np.dtype("float64")}
    assert max(d.absolute for d in testing.compare(first.variables, second.variables, "mlp")) == 0


def test_an_outcome_has_a_digest_for_each_replica(mirrored2):
    outcome = testing.run_case(mirrored2, CASE)
    assert len(outcome.digests) == 2
    assert len(set(outcome.digests)) == 1
    broken = testing.run_case(mirrored2, CASE, compression=testing.NoReduction())
    assert len(set(broken.digests)) == 2


def test_differences_are_sorted_with_noise_last():
    reference = {"kernel": np.array([3.0, 4.0]), "bias": np.array([1.0]), "x_attention/key/bias": np.array([1.0])}
    outcome = {"kernel": np.array([3.0, 4.5]), "bias": np.array([1.2]), "x_attention/key/bias": np.array([9.0])}
    found = testing.compare(outcome, reference, "transformer")
    assert [(d.path, d.noise) for d in found] == [("bias", False), ("kernel", False), ("x_attention/key/bias", True)]
    assert [d.relative for d in found] == pytest.approx([0.2, 0.1, 8.0])
    assert [d.absolute for d in found] == pytest.approx([0.2, 0.5, 8.0])


def test_other_variables_are_no_difference_but_an_error():
    with pytest.raises(KeyError, match="Both must have the same variables.*'b'"):
        testing.compare({"a": np.zeros(1)}, {"a": np.zeros(1), "b": np.zeros(1)}, "mlp")


def test_nothing_and_zero_are_compared_too():
    zero = {"zero": np.zeros(2), "nothing": np.zeros((0, 3))}
    assert [(d.relative, d.absolute) for d in testing.compare(zero, zero, "mlp")] == [(0, 0), (0, 0)]
