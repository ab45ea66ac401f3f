"""Versions of Python and of the packages that affect results, and which of them tfdist supports."""

import importlib.metadata
import platform
import re
import sys
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import tfdist
from tfdist.cli.horovod_build import PATCHED
from tfdist.machine.report import Finding, Section, Status
from tfdist.reporting.environment import versions

_PACKAGES = {"tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
_HOROVOD, _INSTALL_HOROVOD = "horovod", "tfdist install_horovod"


class _Supported(NamedTuple):
    text: str
    allows: bool


def section() -> Section:
    """Returns the versions; an installed package that is not supported is a warning."""
    installed = {"tfdist": tfdist.__version__, **versions()}
    python = _python(installed["python"])
    findings = [
        Finding(Status.OK, f"tfdist {installed['tfdist']}, {platform.platform()}"),
        _finding("Python", installed["python"], python, "Use a supported version."),
    ]
    facts = {
        "tfdist": {"version": installed["tfdist"], "supported": None, "is_supported": True},
        "python": _facts(installed["python"], python),
        "platform": platform.platform(),
        "executable": sys.executable,
    }
    for name, title in _PACKAGES.items():
        version = installed.get(name)
        supported = _required(name, version)
        findings.append(_finding(title, version, supported, f"pip install '{name}{supported.text.replace(' ', '')}'"))
        facts[name] = _facts(version, supported)
    version = installed.get(_HOROVOD)
    supported = _Supported(PATCHED, version == PATCHED)
    if version is None:
        findings.append(Finding(Status.MISSING, "Horovod is not installed", _INSTALL_HOROVOD))
    else:
        findings.append(_finding("Horovod", version, supported, _INSTALL_HOROVOD))
    facts[_HOROVOD] = _facts(version, supported)
    return Section("versions", facts, findings)


def _finding(title: str, version: str | None, supported: _Supported, remedy: str) -> Finding:
    if version is None:
        return Finding(Status.FAILED, f"{title} is not installed, and tfdist requires it", remedy)
    if not supported.allows:
        return Finding(Status.WARNING, f"{title} {version} is not supported; supported: {supported.text}", remedy)
    return Finding(Status.OK, f"{title} {version}" + (f" (supported: {supported.text})" if supported.text else ""))


def _facts(version: str | None, supported: _Supported) -> dict[str, object]:
    return {"version": version, "supported": supported.text or None, "is_supported": supported.allows}


def _python(version: str) -> _Supported:
    """Returns the versions of Python with which tfdist is tested, which its classifiers list."""
    pattern = re.compile(r"Programming Language :: Python :: (\d+\.\d+)")
    supported = [match[1] for match in map(pattern.fullmatch, _metadata("Classifier")) if match]
    return _Supported(", ".join(supported), not supported or version.rpartition(".")[0] in supported)


def _required(name: str, version: str | None) -> _Supported:
    """Returns the versions of a package that tfdist's requirements allow; an empty text if they allow any."""
    requirements = map(Requirement, _metadata("Requires-Dist"))
    specifier = next((each.specifier for each in requirements if each.name == name), SpecifierSet())
    return _Supported(str(specifier), version is not None and specifier.contains(version, prereleases=True))


def _metadata(field: str) -> list[str]:
    """Returns a field of tfdist's metadata; empty if tfdist is used from a directory without installation."""
    try:
        return importlib.metadata.metadata("tfdist").get_all(field) or []
    except importlib.metadata.PackageNotFoundError:
        return []
