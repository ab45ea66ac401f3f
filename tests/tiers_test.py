"""The choice of tests: every test is in one tier and in one slice, and what shares a job is never divided."""

import subprocess
import types

import pytest

from tests import landing, tiers
from tests.tiers import Unit


def unit(name: str, seconds: float, *marks: str) -> Unit:
    """Returns a unit of a file in tests/data/, or in the folder that its name has."""
    file = name.partition("::")[0]
    path = tiers.TESTS / (file if "/" in file else f"data/{file}")
    return Unit(name, path, seconds, frozenset(marks))


UNITS = [
    unit("a_test.py::test_short", 0.2),
    unit("a_test.py::test_new", 0.0, "tensorflow"),
    unit("a_test.py::test_cheapest", 1.5),
    unit("a_test.py::test_long", 2.5, "tensorflow"),
    unit("b_test.py", 9.0, "tensorflow"),
    unit("c_test.py::test_job", 30.0, "processes", "smoke"),
    unit("c_test.py::test_another_job", 20.0, "processes"),
    unit("c_test.py::test_short_job", 0.9, "processes"),
]


def names(units: list[Unit]) -> list[str]:
    return [unit.name.rpartition("::")[2] or unit.name for unit in units]


def test_what_is_short_new_or_marked_is_quick_and_so_is_the_cheapest_other_of_a_file_in_this_process():
    quick = ["test_short", "test_new", "test_cheapest", "test_job", "test_short_job"]
    assert names(tiers.units_of_tier(UNITS, "quick")) == quick
    assert names(tiers.units_of_tier(UNITS, "plain")) == ["test_short", "test_cheapest"]


def test_the_longest_begin_and_short_ones_keep_their_order():
    order = ["test_job", "test_another_job", "b_test.py", "test_long", "test_cheapest"]
    assert names(tiers.longest_first(UNITS)) == [*order, "test_short", "test_new", "test_short_job"]


def test_quick_and_slow_are_all_that_is_collected(request: pytest.FixtureRequest):
    """This session's own units; in `make test`, all there are."""
    units = request.config.stash[tiers.UNITS]
    quick, slow = (tiers.units_of_tier(units, tier) for tier in ("quick", "slow"))
    assert sorted(quick + slow) == sorted(units)
    assert tiers.unit_of(request.node) in {unit.name for unit in units}


@pytest.mark.parametrize("value", ["[a", "é"])
def test_a_test_is_a_unit_of_its_own(request: pytest.FixtureRequest, value: str):
    assert tiers.unit_of(request.node) == request.node.nodeid.removeprefix("tests/")


@pytest.mark.parametrize(
    ("source", "scope", "mark", "shares"),
    [
        ("", "function", "smoke", False),
        ("", "module", "smoke", True),
        ("", "module", "separable", False),
        ("@functools.cache\ndef job(): pass", "function", "smoke", True),
        ("@functools.cache\ndef job(): pass", "function", "separable", False),
        ("job = functools.cache(int)", "function", "smoke", False),  # a function of another package
        ("@pytest.fixture(scope='module')\ndef job(): pass", "function", "smoke", True),  # which it may request by name
        ("@pytest.fixture\ndef job(): pass", "function", "smoke", False),
    ],
)
def test_tests_that_share_a_job_are_a_unit(source: str, scope: str, mark: str, shares: bool):
    module = types.ModuleType("tests.data.a_test")
    exec(f"import functools, pytest\n{source}", vars(module))
    item = types.SimpleNamespace(
        nodeid="tests/data/a_test.py::test_a",
        path=tiers.TESTS / "data" / "a_test.py",
        module=module,
        fixturenames=["request"],
        get_closest_marker=lambda name: name == mark or None,
        _fixtureinfo=types.SimpleNamespace(name2fixturedefs={"a": [types.SimpleNamespace(scope=scope)]}),
    )
    assert tiers.unit_of(item) == ("data/a_test.py" if shares else "data/a_test.py::test_a")


@pytest.mark.parametrize("parts", [1, landing.SLOW_PARTS, 7])
def test_slices_have_each_unit_once_and_take_about_as_long(parts: int):
    units = [unit(f"a{n}_test.py", float(n % 17)) for n in range(200)]
    slices = [tiers.slice_of(units, f"{number}/{parts}") for number in range(1, parts + 1)]
    assert sorted(one for each in slices for one in each) == sorted(units)
    totals = [sum(one.seconds for one in each) for each in slices]
    assert max(totals) - min(totals) <= 16


@pytest.mark.parametrize("text", ["0/3", "4/3"])
def test_a_slice_that_does_not_exist_is_refused(text: str):
    with pytest.raises(pytest.UsageError, match=f"N from 1 to M. Received: {text}."):
        tiers.slice_of(UNITS, text)


def test_units_of_changed_packages_are_the_shortest_until_the_time_is_up(monkeypatch):
    monkeypatch.setattr(tiers, "CHANGED_SECONDS", 8.5)
    units = [unit("trainer/a_test.py", 1.0), unit("gradients/a_test.py", 5.0), unit("gradients/b_test.py", 3.0)]
    assert [one.name for one in tiers.changed_units(units, {"gradients"})] == [
        "gradients/b_test.py",
        "gradients/a_test.py",
    ]
    assert [one.name for one in tiers.changed_units(units, None)] == ["trainer/a_test.py", "gradients/b_test.py"]


def test_changed_packages(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    def change(*files: str) -> None:
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(f"{len(list(tmp_path.rglob('*')))}")
        git("add", ".")
        git("commit", "-qm", "a change")

    git("init", "-q")
    change("README.md")
    monkeypatch.setattr(tiers, "TESTS", tmp_path)
    change("tfdist/step/a.py", "strategies/b.py", "tests/data/c_test.py", "tfdist/train.py", "docs/d.md")
    assert tiers.changed_packages("HEAD~1") == {"step", "strategies", "data", "commands"}
    change("tests/data/conftest.py")
    assert tiers.changed_packages("HEAD~1") is None
    change("tfdist/keras_internals/models.py")
    assert tiers.changed_packages("HEAD~1") is None
    assert tiers.changed_packages("HEAD") == set()
