import json
import random

import pytest

from tfdist.trainer.train_state import Line, ReplicaSpeeds, fastest_allocation


def run(speeds, lines, decisions, noise=0.0, seed=3):
    """Returns the allocations of a run whose replicas have these true lines."""
    drawn = random.Random(seed)
    for number in range(decisions):
        times = [line(n) * drawn.uniform(1, 1 + noise) for line, n in zip(lines, speeds.counts, strict=True)]
        speeds.observe(times)
        found = speeds.propose()
        if found is not None:
            speeds.change(10 * number, found)
    return speeds


def slowest(lines, counts):
    return max(line(n) for line, n in zip(lines, counts, strict=True))


@pytest.mark.parametrize(
    "lines",
    [
        [Line(0.0, 1.0), Line(0.0, 2.0)],
        [Line(5.0, 1.0), Line(5.0, 2.0)],
        [Line(30.0, 0.5), Line(5.0, 2.0), Line(1.0, 1.0)],
        [Line(0.0, 1.0), Line(0.0, 30.0)],
        [Line(200.0, 1.0), Line(0.0, 1.0)],
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_slowest_replica_is_within_a_tenth_of_the_best_allocation(lines, noise):
    speeds = run(ReplicaSpeeds.initial(0, 64, len(lines)), lines, 60, noise, 7)
    assert sum(speeds.counts) == 64
    assert min(speeds.counts) >= 1
    assert slowest(lines, speeds.counts) <= 1.1 * slowest(lines, fastest_allocation(64, lines))


def test_equal_replicas_keep_the_even_allocation_despite_noise():
    lines = [Line(2.0, 1.0)] * 3
    for seed in range(20):
        speeds = run(ReplicaSpeeds.initial(0, 63, 3), lines, 100, 0.15, seed)
        assert speeds.counts == [21, 21, 21], seed


def test_an_outlier_changes_nothing():
    speeds = run(ReplicaSpeeds.initial(0, 64, 2), [Line(0.0, 1.0)] * 2, 2)
    speeds.observe([32.0, 900.0])
    assert speeds.propose() is None


def test_a_replica_that_becomes_slow_or_fast_is_followed():
    slow, fast = [Line(3.0, 1.0), Line(3.0, 2.0)], [Line(3.0, 1.0), Line(3.0, 1.0)]
    speeds = run(ReplicaSpeeds.initial(0, 64, 2), fast, 20)
    assert speeds.counts == [32, 32]
    run(speeds, slow, 20)
    assert slowest(slow, speeds.counts) <= 1.1 * slowest(slow, fastest_allocation(64, slow))
    run(speeds, fast, 30)
    assert slowest(fast, speeds.counts) <= 1.1 * 35.0


def test_the_state_is_json():
    lines = [Line(5.0, 1.0), Line(5.0, 2.0)]
    speeds = run(ReplicaSpeeds.initial(0, 64, 2), lines, 9, 0.1)
    again = ReplicaSpeeds.from_json(json.loads(json.dumps(speeds.to_json())))
    assert again.to_json() == speeds.to_json()
    assert again.lines() == speeds.lines()
    assert again.resume(100, 64, 2) is again


def test_other_replicas_begin_evenly_and_another_batch_in_proportion():
    speeds = ReplicaSpeeds.initial(0, 64, 2)
    speeds.change(10, [48, 16])
    assert speeds.resume(20, 64, 3).counts == [22, 21, 21]
    assert speeds.resume(20, 32, 2).counts == [24, 8]
    assert speeds.resume(20, 32, 2).allocations[0].step == 20


def test_the_fastest_allocation_is_the_best_of_all():
    lines = [Line(3.0, 1.0), Line(0.5, 2.5), Line(4.0, 0.7)]
    best = min(slowest(lines, (a, b, 17 - a - b)) for a in range(1, 16) for b in range(1, 17 - a))
    assert slowest(lines, fastest_allocation(17, lines)) == pytest.approx(best)
