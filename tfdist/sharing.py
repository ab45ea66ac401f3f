"""Commits on several hosts: which ranks see one directory, and how each host gets the files that only others have."""

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tfdist.carrying import PIECE, Carrier, can_carry
from tfdist.checkpoint import Checkpoint, CheckpointError, Held, clean_partial, newest, remove, step_of
from tfdist.errors import InputError
from tfdist.group import Group
from tfdist.strategy import Strategy

_log = logging.getLogger(__name__)

_MARK = ".host"  # a file in a directory, which tells it from those of the same name on other hosts
_SECONDS = 3600.0  # in which the slowest host reads what it has, or writes what it gets


def hosts(group: Group, directory: Path) -> list[list[int]]:
    """The ranks that see one directory, for each directory of this name that there is; every rank calls it.

    It is made if need be, and gets a small file.

    Raises:
      InputError: on all ranks: it cannot be written.
    """
    mark = failure = ""
    try:
        mark = _mark(directory)
    except OSError as error:
        failure = f"{directory} ({error.strerror})"
    everyone = group.gather("commits/hosts", [mark, failure])
    found: dict[str, list[int]] = {}
    for rank, (mark, failure) in enumerate(everyone):
        if failure:
            raise InputError(
                f"Commits need a directory that can be written. Received, on rank {rank}: {failure}. Give another --commit_dir."
            )
        found.setdefault(mark, []).append(rank)
    return list(found.values())


def _mark(directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    path, own = directory / _MARK, directory / f"{_MARK}-{secrets.token_hex(8)}"
    if not path.exists():
        own.write_text(own.name)
        with contextlib.suppress(FileExistsError):
            os.link(own, path)  # of all ranks here one makes it, and nobody sees half of it
        own.unlink()
    return path.read_text()


def share(strategy: Strategy, folder: Path, behind: int) -> None:
    """Behind it, each host has the newest commit of which the hosts together have all files, and no other one.

    Every process calls it, before it reads a commit. If all see one directory, nothing is done.

    Args:
      strategy: of the processes.
      folder: with this host's commits; it need not be there.
      behind: only commits of later steps are of interest.
    """
    group = strategy.group
    those = hosts(group, folder) if group.size > 1 else [[0]]
    if len(those) == 1 or not can_carry(strategy):
        return
    firsts = [host[0] for host in those]
    everyone = group.gather("commits/held", _all_held(folder, behind) if group.rank in firsts else {}, _SECONDS)
    held = {rank: {name: Held(*one) for name, one in everyone[rank].items()} for rank in firsts}
    names = sorted(set().union(*held.values()), reverse=True)
    chosen = next((name for name in names if _is_whole(name, held)), "")
    if group.rank in firsts:
        for path in newest(folder):
            if path.name != chosen:
                remove(path)
    if chosen:
        _send(strategy, folder / chosen, {rank: own.get(chosen) for rank, own in held.items()})


def _all_held(folder: Path, behind: int) -> dict[str, Held]:
    clean_partial(folder)
    found = {}
    for path in (path for path in newest(folder) if step_of(path) > behind):
        with contextlib.suppress(CheckpointError):  # of the manifest: another host may have it
            found[path.name] = Checkpoint.held(path)
    return found


def _is_whole(name: str, held: Mapping[int, Mapping[str, Held]]) -> bool:
    """Whether the hosts together have all files of one commit."""
    there = [own[name] for own in held.values() if name in own]
    return len({one.manifest for one in there}) == 1 and all(
        any(file in one.intact for one in there) for file in there[0].sizes
    )


def _send(strategy: Strategy, path: Path, held: Mapping[int, Held | None]) -> None:
    """Sends each file that a host lacks to all of them, from one that has it; the manifest is the last."""
    carrier = Carrier(strategy)
    sizes = next(one for one in held.values() if one).sizes
    me, failure = strategy.group.rank, ""
    for file, size in sizes.items():
        holder, *others = [rank for rank, one in held.items() if one and file in one.intact]
        lacking = held.keys() - {holder, *others}
        for begin in range(0, size, PIECE) if lacking else ():
            data = np.fromfile(path / file, np.uint8, PIECE, offset=begin) if me == holder else np.zeros(0, np.uint8)
            piece = carrier.to_all(data)[holder]
            if me in lacking and not failure:
                failure = _written(path / file, piece, begin, size)
    failures = strategy.group.gather("commits/shared", failure, _SECONDS)
    if any(failures):
        rank = next(rank for rank, failure in enumerate(failures) if failure)
        if me == 0:
            _log.warning("A commit is left out, %s, as rank %d cannot write it: %s.", path.name, rank, failures[rank])
        if me in held:
            shutil.rmtree(path, ignore_errors=True)


def _written(path: Path, piece: np.ndarray, begin: int, size: int) -> str:
    """Writes a piece of a file, which gets its name with the last one; returns what went wrong."""
    arriving = path.with_name(f".{path.name}.arriving")
    try:
        path.parent.mkdir(exist_ok=True)
        with open(arriving, "r+b" if begin else "wb") as file:
            file.seek(begin)
            file.write(piece.data)
        if begin + piece.size == size:
            arriving.replace(path)
    except OSError as error:
        return f"{path.parent} ({error.strerror})"
    return ""
