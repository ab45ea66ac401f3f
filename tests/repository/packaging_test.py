"""A release: what the source distribution and the wheel contain, and that the wheel works without the checkout."""

import configparser
import email
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest
from packaging.version import Version

import tfdist

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(__file__).parents[2]
OPTIONAL = ("horovod", "sklearn", "mlxtend", "tensorflow_datasets", "pytest", "hypothesis")

_IMPORT_ALL = """
import importlib, importlib.util, json, sys
modules, optional = json.loads(sys.argv[1])
horovod_is_here = importlib.util.find_spec("horovod") is not None
sys.modules.update(dict.fromkeys(optional))  # None there makes an import fail as if it were not installed
without = [name for name in modules if not name.rpartition(".")[2].startswith("horovod")]
places = {name: importlib.import_module(name).__file__ for name in without}
del sys.modules["horovod"]
if horovod_is_here:
    places = {name: importlib.import_module(name).__file__ for name in modules}
print(json.dumps([places, horovod_is_here]))
"""


def modules() -> dict[str, str]:
    """Yields path in the wheel and module name of every file in the two directories."""
    found = {}
    for folder, package in (("tfdist", "tfdist"), ("strategies", "tfdist/strategies")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = pathlib.PurePosixPath(package) / path.relative_to(ROOT / folder).as_posix()
            parts = place.with_suffix("").parts
            found[str(place)] = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return found


def checkout() -> list[str]:
    """Returns the files of the checkout, except for what only continuous integration and git read."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    there = [name for name in done.stdout.splitlines() if (ROOT / name).exists()]
    return sorted(name for name in there if not name.startswith("."))


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with the two files of a release, which `make dist` has built in a copy of the checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("a release is built from a checkout")
    tree = tmp_path_factory.mktemp("packaging") / "tree"
    for name in [*checkout(), "runs/first/metrics.jsonl", "tests/__pycache__/conftest.cpython-311.pyc"]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
        else:  # what stands in the checkout of whoever has used it
            (tree / name).touch()
    # The tests' own environment is used as it is.
    command = ["make", "--no-print-directory", "--assume-old=.venv/.installed-test", "dist", f"PY={sys.executable}"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "PYTHONPATH")}
    environment["PIP_NO_INDEX"] = "1"
    built = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    shown = built.stdout.splitlines()[-2:]
    assert shown == [f"dist/tfdist-{tfdist.__version__}{end}" for end in ("-py3-none-any.whl", ".tar.gz")]
    return tree / "dist"


@pytest.fixture(scope="module")
def unpacked(released: pathlib.Path) -> pathlib.Path:
    """A directory with the files that the wheel installs."""
    (wheel,) = released.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(released.parent.parent / "unpacked")
    return released.parent.parent / "unpacked"


@pytest.fixture(scope="module")
def installed(released: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The `bin` of a new environment with the wheel; the packages that it requires are those of this environment."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A path that is listed in a file is not searched for such files itself: the editable installation is not seen.
    (packages / "required.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    (wheel,) = released.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--no-index"]
    done = subprocess.run([*pip, "--no-deps", wheel], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return environment / "bin"


def output_of(*command: str | pathlib.Path, directory: pathlib.Path, **variables: str) -> str:
    """Returns the standard output of a command, which must succeed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    environment |= variables
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_setup_cfg_lists_every_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = config["options"]["packages"].split()
    in_tree = {name if place.endswith("__init__.py") else name.rpartition(".")[0] for place, name in modules().items()}
    assert listed == sorted(in_tree), "add the folder to `packages` of setup.cfg"
    assert not [name for name in in_tree if name not in modules().values()], "a package has an __init__.py"


def test_the_wheel_has_every_module_under_its_name_and_nothing_else(unpacked: pathlib.Path):
    installed = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*.py")}
    assert installed == set(modules())
    assert (unpacked / "tfdist" / "py.typed").exists()
    assert (unpacked / "tfdist" / "cli" / "horovod_build_requirements.txt").exists()
    (scripts,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert scripts.read_text(encoding="utf-8").split() == ["[console_scripts]", "tfdist", "=", "tfdist.__main__:start"]


def test_the_source_distribution_is_the_checkout(released: pathlib.Path):
    (source,) = released.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    assert sorted(name for name in names if not name.startswith("tfdist.egg-info/")) == sorted(
        ["PKG-INFO", *checkout()]
    )


def test_the_metadata_has_what_an_index_shows(unpacked: pathlib.Path):
    (folder,) = unpacked.glob("*.dist-info")
    metadata = email.message_from_string((folder / "METADATA").read_text(encoding="utf-8"))
    assert (metadata["Name"], metadata["Version"]) == ("tfdist", tfdist.__version__)
    assert (metadata["License"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert (metadata["Requires-Python"], metadata["Description-Content-Type"]) == (">=3.11", "text/markdown")
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    extras = metadata.get_all("Provides-Extra")
    assert {"examples", "gpu", "horovod", "tfds"} <= set(extras)
    required = [one for one in metadata.get_all("Requires-Dist") if one.endswith('extra == "gpu"')]
    assert required == ['tensorflow[and-cuda]; extra == "gpu"']


def test_the_changelog_begins_with_this_version_or_what_comes_after_it():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", text, re.MULTILINE)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for version, date in sections if version != "Unreleased")
    versions = [Version(version) for version, _ in sections if version != "Unreleased"]
    assert versions == sorted(versions, reverse=True)
    assert sections[0][0] == "Unreleased" or versions[0] == Version(tfdist.__version__)
    assert not versions or versions[0] <= Version(tfdist.__version__)


def test_an_installed_wheel_trains_from_another_directory(installed: pathlib.Path, tmp_path: pathlib.Path):
    assert output_of(installed / "tfdist", "--version", directory=tmp_path).startswith(f"tfdist {tfdist.__version__}")
    assert "--learning_rate" in output_of(installed / "tfdist", "help", "train", directory=tmp_path)
    flags = ["--model=mlp", "--dataset=synthetic:8x8x1", "--strategy=mirrored", "--devices=2", "--steps=10"]
    output_of(installed / "tfdist", "train", *flags, "--output_dir=run", directory=tmp_path)
    run = tmp_path / "run"
    assert json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["step"] == 10
    assert json.loads((run / "environment.json").read_text(encoding="utf-8"))
    code = "import tfdist.strategies as found; print(found.__file__)"
    place = output_of(installed / "python", "-P", "-c", code, directory=tmp_path).strip()
    assert pathlib.Path(place).is_relative_to(installed.parent)


def test_every_module_imports_outside_the_checkout_without_optional_packages(unpacked: pathlib.Path):
    # Only modules named horovod..., which are loaded when Horovod is chosen, may import it.
    # What PYTHONPATH names comes before site-packages, and so before an editable installation's finder.
    variables = {"PYTHONPATH": str(unpacked), "TF_CPP_MIN_LOG_LEVEL": "3"}
    wanted = json.dumps([list(modules().values()), OPTIONAL])
    said = output_of(sys.executable, "-P", "-c", _IMPORT_ALL, wanted, directory=unpacked.parent, **variables)
    places, horovod_is_here = json.loads(said.splitlines()[-1])
    assert places.items() <= {name: str(unpacked / place) for place, name in modules().items()}.items()
    assert horovod_is_here <= (len(places) == len(modules()))


def test_strategies_under_another_name_say_how_to_install():
    spec = importlib.util.spec_from_file_location("strategies", ROOT / "strategies" / "__init__.py")
    assert spec and spec.loader
    with pytest.raises(
        ImportError, match=r"tfdist\.strategies\. Received: import strategies\. Run `pip install -e \.`"
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
