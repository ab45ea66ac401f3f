"""The wheel contains every module under its name, and each can be imported without the checkout and optional packages."""

import configparser
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from tfdist import __main__ as listing

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


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with the files that the wheel of this tree installs."""
    folder = tmp_path_factory.mktemp("packaging")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("tfdist", "strategies"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    built = subprocess.run([*command, folder, "."], cwd=tree, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


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


def test_every_module_imports_outside_the_checkout_without_optional_packages(unpacked: pathlib.Path):
    # Only modules named horovod..., which are loaded when Horovod is chosen, may import it.
    # What PYTHONPATH names comes before site-packages, and so before an editable installation's finder.
    environment = os.environ | {"PYTHONPATH": str(unpacked), "TF_CPP_MIN_LOG_LEVEL": "3"}
    wanted = json.dumps([list(modules().values()), OPTIONAL])
    command = [sys.executable, "-P", "-c", _IMPORT_ALL, wanted]
    done = subprocess.run(command, cwd=unpacked.parent, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    places, horovod_is_here = json.loads(done.stdout.splitlines()[-1])
    assert places.items() <= {name: str(unpacked / place) for place, name in modules().items()}.items()
    assert horovod_is_here <= (len(places) == len(modules()))


def test_strategies_under_another_name_say_how_to_install():
    spec = importlib.util.spec_from_file_location("strategies", ROOT / "strategies" / "__init__.py")
    assert spec and spec.loader
    with pytest.raises(
        ImportError, match=r"tfdist\.strategies\. Received: import strategies\. Run `pip install -e \.`"
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _is_installed() -> bool:
    try:
        return bool(importlib.metadata.version("tfdist"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not _is_installed(), reason="tfdist is not installed in this environment")
def test_the_installation_finds_the_strategies_from_any_folder(tmp_path: pathlib.Path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import tfdist.strategies; print(tfdist.strategies.__file__)"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert pathlib.Path(done.stdout.strip()).parent.name == "strategies"


def test_the_list_of_commands_has_each_with_its_docstrings_first_line(capsys: pytest.CaptureFixture[str]):
    assert listing.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  install_horovod  Build Horovod for the installed TensorFlow, and install it." in lines
    assert all(summary for summary in listing.commands().values())


def test_the_list_of_commands_appears_without_importing_them(tmp_path: pathlib.Path):
    code = (
        "import runpy, sys\ntry:\n  runpy.run_module('tfdist', run_name='__main__')\n"
        "except SystemExit as end:\n  assert not end.code\n"
        "assert not {'tensorflow', 'keras', 'absl', 'tfdist.install_horovod'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "install_horovod" in done.stdout
