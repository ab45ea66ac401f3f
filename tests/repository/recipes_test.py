"""The examples of CONTRIBUTING.md as patches: each applies to this tree, touches few files, and works."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "contributing"
FOLDERS = ("tfdist", "strategies", "tests")


def applied(name: str, tree: pathlib.Path) -> list[str]:
    """Copies the tree, applies an example to the copy, and returns the files that it touches besides tests."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "tfdist" / "strategies").symlink_to("../strategies")  # as in an installation
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    patch = str(RECIPES / f"{name}.diff")
    shown, _ = (
        subprocess.run(
            ["git", "apply", *options, patch], cwd=tree, env=environment, check=True, capture_output=True, text=True
        ).stdout
        for options in (["--numstat"], [])
    )
    touched = [line.split("\t")[2] for line in shown.splitlines()]
    return [path for path in touched if not path.startswith("tests/")]


def run(tree: pathlib.Path, *arguments: str) -> tuple[int, str]:
    """Runs Python in a copy of the tree; returns its exit code and output."""
    own = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


def assert_two_pass(tree: pathlib.Path, test: str) -> None:
    """Asserts that the two tests of an example pass in a copy of the tree."""
    code, text = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", test)
    assert code == 0 and "2 passed" in text, text


def test_contributing_shows_each_example():
    shown = re.findall(r"\(docs/contributing/(\w+)\.diff\)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(path.stem for path in RECIPES.iterdir())


def test_a_flag(tmp_path):
    files = ["tfdist/cli/layout_reports.py", "tfdist/config/layout_config.py", "tfdist/layout.py"]
    assert applied("flag", tmp_path) == files
    code, text = run(tmp_path, "-m", "tfdist.layout", "--help")
    assert code == 0 and re.search(r"--paths +Number of paths", text)
    code, text = run(tmp_path, "-m", "tfdist.layout", "--paths=0")
    assert (code, text) == (2, "tfdist layout: --paths must be at least 1 and at most 100. Received: 0.\n")


def test_a_strategy(tmp_path):
    assert applied("strategy", tmp_path) == ["strategies/eager.py", "tfdist/config/strategy_registry.py"]
    code, text = run(tmp_path, "-m", "tfdist.train", "--strategy=eager", "--jit_compile")
    assert code == 2 and "leave out --jit_compile. Received: --jit_compile=true --strategy=eager." in text
    code, text = run(
        tmp_path, "-m", "tfdist.verify", "--strategy=eager", "--model=mlp(hidden=(8,))", "--steps=2", "--float64"
    )
    assert code == 0 and "Equal: the largest difference is 0.00e+00" in text, text


def test_a_synchronization_method(tmp_path):
    assert applied("synchronization", tmp_path) == ["tfdist/config/sync.py"]
    code, text = run(tmp_path, "-m", "tfdist.train", "--sync=lookahead(alpha=2)")
    assert code == 2 and "--sync: lookahead: alpha must be a number in (0, 1). Received: 2." in text, text
    assert_two_pass(tmp_path, "tests/synchronization/lookahead_test.py")


def test_a_storage_backend(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", str(tmp_path / "files"))
    assert sorted(applied("storage", tmp_path)) == ["tfdist/storage/registry.py", "tfdist/storage/scratch.py"]
    small = ("--model=mlp(hidden=(8,))", "--steps=2", "--checkpoint_every=1", "--output_dir=scratch://runs/one")
    code, text = run(tmp_path, "-m", "tfdist.train", *small)
    assert code == 0 and text.endswith("scratch://runs/one\n"), text
    assert (tmp_path / "files" / "runs" / "one" / "model.keras").exists()
    code, text = run(tmp_path, "-m", "tfdist.checkpoints", "scratch://runs/one")
    assert code == 0 and text.count("  good  ") == 2, text


def test_a_compression_method(tmp_path):
    code_files = ["tfdist/gradients/compression/catalog.py", "tfdist/gradients/compression/methods/truncation.py"]
    assert applied("compression", tmp_path) == code_files
    assert_two_pass(tmp_path, "tests/gradients/compression/methods/truncation_test.py")
