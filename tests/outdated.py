"""Prints which dependencies have a newer version than the tests run with, and which tests pin the behavior of the old one.

    python -m tests.outdated

Asks pip for the newest versions that this Python can install. Exits with 0 if there are no newer ones, with 1 if there are, and
with 2 if pip finds no version at all, as without a network.

Which tests pin the behavior of a package is read from docstrings: a file is printed if one of its tests has a docstring that
begins with "Guards" and names the package, or, in tests/traps and tests/keras_internals, if its own docstring names it.
"""

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import Version

from tfdist.cli import horovod_build

ROOT = pathlib.Path(__file__).parents[1]
# Name of the package for pip, and in docstrings.
PACKAGES = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "horovod": "Horovod",
    "numpy": "NumPy",
    "absl-py": "absl",
    "tensorflow-datasets": "tensorflow_datasets",
}
_DEPENDENCIES = ("traps", "keras_internals")  # folders in which every test is about a dependency
_TIMEOUT = ("--retries=1", "--timeout=15")


def constraints() -> Iterator[tuple[str, Version]]:
    """Yields name and version of each package in constraints.txt, as they apply to this Python."""
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                yield requirement.name, Version(str(requirement.specifier).removeprefix("=="))


def newest(package: str) -> Version:
    """Returns the newest release of a package that pip could install; raises `ConnectionError` if pip finds none."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *_TIMEOUT, "index", "versions", package]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise ConnectionError(f"pip finds no version of {package}: {horovod_build.last_error(done.stderr)}")
    return Version(done.stdout.split()[1].strip("()"))  # keras (3.15.1)


def pins() -> dict[str, str]:
    """Returns the docstrings that say which behavior is pinned, by the path of the file with the tests."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("*_test.py")):
        text = path.read_text(encoding="utf-8")
        if path.parent.name not in _DEPENDENCIES and '"""Guards' not in text:
            continue
        tree = ast.parse(text)
        docstrings = [ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)]
        said = [text for text in docstrings if text.startswith("Guards")]
        if path.parent.name in _DEPENDENCIES:
            said.append(ast.get_docstring(tree) or "")
        if said:
            found[str(path.relative_to(ROOT))] = "\n".join(said)
    return found


def files_that_pin(package: str) -> list[str]:
    """Returns the files whose docstrings say that they pin the behavior of a package."""
    return [file for file, text in pins().items() if PACKAGES[package] in text]


def main() -> int:
    """Prints one or two lines for each package, and returns the exit code."""
    tested = {**dict(constraints()), "horovod": Version(horovod_build.VERSION)}
    code = 0
    for package in PACKAGES:
        try:
            version = newest(package)
        except ConnectionError as error:
            print(f"{error}. Is there a network?", file=sys.stderr)
            return 2
        if version <= tested[package]:
            print(f"{package} {tested[package]} is the newest version.")
            continue
        code = 1
        print(f"{package} {version} is newer than {tested[package]}, which the tests run with.")
        files = files_that_pin(package)
        print(f"  python -m pytest -m '' {' '.join(files)}" if files else "  No tests pin its behavior. Run: make test")
    return code


if __name__ == "__main__":
    sys.exit(main())
