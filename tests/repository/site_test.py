"""The documentation site builds without a warning, and has an entry for each public name and each flag."""

import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

import tfdist
from tests.repository.documents_test import known_flags
from tfdist.__main__ import commands

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def anchors(page: pathlib.Path) -> set[str]:
    return set(re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8")))


@pytest.mark.tensorflow
def test_each_public_name_has_an_entry(site: pathlib.Path):
    pages = {path.stem: anchors(path) for path in (site / "reference" / "api").glob("*.html")}
    expected = {f"tfdist.{name}" for name in tfdist.__all__}
    assert expected <= pages.pop("tfdist")
    packages = {name for name in tfdist.__all__ if inspect.ismodule(getattr(tfdist, name))}
    assert packages <= pages.keys()
    for name, found in pages.items():
        public = importlib.import_module(f"tfdist.{name}").__all__
        assert {f"tfdist.{name}.{one}" for one in public} <= found


def test_each_flag_has_an_entry(site: pathlib.Path):
    flags = {name for command in commands() for name in known_flags(command)}
    assert len(flags) > 100
    flags |= {"flagfile", "config", "help"}
    pages = (site / "reference" / "flags").glob("*.html")
    assert flags <= anchors(site / "reference" / "flags.html") & set().union(*map(anchors, pages))


def test_nothing_is_loaded_from_elsewhere(site: pathlib.Path):
    """So that the site can be read without a network."""
    loaded = [
        f"{path.name}: {url}"
        for path in site.rglob("*.html")
        for url in re.findall(
            r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', path.read_text(encoding="utf-8")
        )
    ]
    assert not loaded
    scripts = re.findall(
        r'<script src="([^"]*file_worker.js)"', (site / "guides" / "data.html").read_text(encoding="utf-8")
    )
    assert [(site / "guides" / script).is_file() for script in scripts] == [
        True
    ]  # by which a file can be searched, too
    assert (site / "search" / "search_index.js").is_file()
