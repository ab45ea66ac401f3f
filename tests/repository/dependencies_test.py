"""Versions of dependencies: what setup.cfg allows, what constraints.txt pins, what is installed, and what `make` installs."""

import configparser
import importlib.metadata
import os
import pathlib
import subprocess

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = pathlib.Path(__file__).parents[2]
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = [Requirement(line) for line in LINES if line and not line.startswith("#")]
PINNED = {
    canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("=="))
    for pin in PINS
    if pin.marker is None or pin.marker.evaluate()
}


def requirements() -> list[Requirement]:
    """Returns what setup.cfg requires, with all extras but CUDA's libraries, except for tfdist itself."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = [text for name, text in config["options.extras_require"].items() if name != "gpu"]
    texts = [config["options"]["install_requires"], *extras]
    found = [Requirement(line) for text in texts for line in text.splitlines() if line and not line.startswith("#")]
    return [requirement for requirement in found if requirement.name != "tfdist"]


def installed() -> dict[str, Version]:
    """Returns the versions of all installed packages that setup.cfg requires, also indirectly."""
    versions: dict[str, Version] = {}
    remaining, seen = requirements(), set()
    while remaining:
        requirement = remaining.pop()
        name, extras = canonicalize_name(requirement.name), {"", *requirement.extras}
        distribution = importlib.metadata.distribution(name)
        versions[name] = Version(distribution.version)
        for one in map(Requirement, distribution.requires or ()):
            applies = one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
            if applies and str(one) not in seen:
                seen.add(str(one))
                remaining.append(one)
    return versions


def test_the_installed_versions_are_the_pinned_ones():
    assert installed() == PINNED, "run `make .venv/.installed-test`, or change constraints.txt"


def test_setup_cfg_admits_every_pinned_version():
    refused = [str(one) for one in requirements() if PINNED[canonicalize_name(one.name)] not in one.specifier]
    assert not refused


@pytest.mark.parametrize("name", ["tensorflow", "keras"])
def test_setup_cfg_refuses_versions_that_no_test_has_run_with(name: str):
    (requirement,) = (one for one in requirements() if one.name == name)
    major, minor = PINNED[name].release[:2]
    assert Version(f"{major}.{minor}.99") in requirement.specifier
    assert Version(f"{major}.{minor + 1}.0") not in requirement.specifier
    assert Version(f"{major}.{minor - 1}.99") not in requirement.specifier


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_each_package_is_pinned_once_for_each_python(python: str):
    assert all(str(pin.specifier).startswith("==") and "*" not in str(pin.specifier) for pin in PINS)
    applying = [pin for pin in PINS if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    assert sorted(canonicalize_name(pin.name) for pin in applying) == sorted({canonicalize_name(p.name) for p in PINS})


def test_make_gives_the_pinned_versions_to_every_pip():
    targets = [".venv/.installed-examples", ".venv/.installed-test", ".venv/.installed-horovod", "peers"]
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", *targets]
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
    commands = [line for line in done.stdout.splitlines() if "pip " in line and " install " in line]
    assert len(commands) == 3
    assert not [line for line in commands if not line.startswith("PIP_CONSTRAINT=constraints.txt ")]
