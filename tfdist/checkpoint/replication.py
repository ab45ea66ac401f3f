"""In-memory checkpoints on several hosts: which ranks share a directory, and copying of missing files between hosts."""

import contextlib
import errno
import logging
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tfdist.checkpoint.format import Checkpoint, LocalFiles, clean_partial, newest
from tfdist.checkpoint.transfer import ByteTransfer, can_transfer
from tfdist.coordination import Group
from tfdist.coordination.timeouts import LONG_SECONDS
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, TfdistError

_log = logging.getLogger(__name__)

_MARK = ".host"  # a file that distinguishes directories of the same name on different hosts
_TRIES, _PAUSE = 500, 0.01  # seconds


def hosts(group: Group, directory: Path) -> list[list[int]]:
    """Returns the ranks that share a directory, for each directory of this name; every rank must call it.

    Creates the directory if necessary, with a small file in it.

    Raises:
      InputError: on all ranks, if it cannot be written.
    """
    mark = failure = ""
    try:
        mark = _mark(directory)
    except OSError as error:
        failure = f"{directory} ({error.strerror})"
    everyone = group.gather("commits/hosts", [mark, failure], LONG_SECONDS)
    found: dict[str, list[int]] = {}
    for rank, (mark, failure) in enumerate(everyone):
        if failure:
            raise InputError(
                f"Commits need a writable directory. Received, on rank {rank}: {failure}. Give another --commit_dir."
            )
        found.setdefault(mark, []).append(rank)
    return list(found.values())


def _mark(directory: Path) -> str:
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / _MARK
    with contextlib.suppress(FileExistsError), open(path, "x") as file:
        file.write(secrets.token_hex(8))
    for _ in range(_TRIES):  # the process that created it may not have written it yet
        if text := path.read_text():
            return text
        time.sleep(_PAUSE)
    raise OSError(errno.EIO, f"{_MARK} in it is empty")


def share(strategy: Strategy, folder: Path) -> list[str] | None:
    """Copies the newest in-memory checkpoint that is complete across all hosts to each host. Removes none.

    Every process must call it before reading an in-memory checkpoint.

    Args:
      strategy: strategy of the processes.
      folder: directory of this host's in-memory checkpoints.

    Returns:
      Names of the in-memory checkpoints that are complete on every host; None if all processes share a directory, or
        cannot send files, in which case none has been examined.
    """
    group = strategy.group
    those = _hosts_that_are(group, folder) if group.size > 1 else [[0]]
    if len(those) == 1 or not can_transfer(strategy):
        return None
    firsts = [host[0] for host in those]
    everyone = group.gather("commits/held", _all_held(folder) if group.rank in firsts else {}, LONG_SECONDS)
    held = {rank: {name: LocalFiles(*one) for name, one in everyone[rank].items()} for rank in firsts}
    names = sorted(set().union(*held.values()), reverse=True)
    possible = [name for name in names if _is_whole(name, held)]
    found = [name for name in possible if all(_is_whole(name, {rank: own}) for rank, own in held.items())]
    chosen = next(iter(possible), "")
    if chosen and chosen not in found:
        found += (
            [chosen] if _send(strategy, folder / chosen, {rank: own.get(chosen) for rank, own in held.items()}) else []
        )
    left_out = [name for name in names if name > max(found, default="")]
    if left_out and strategy.is_chief:
        _log.warning(
            "Ignoring the commit %s: the hosts of this start do not have all of its files.", ", ".join(left_out)
        )
    return found


def _hosts_that_are(group: Group, folder: Path) -> list[list[int]]:
    """Same as `hosts`; if a host cannot create the directory, each process counts as a host without files."""
    try:
        return hosts(group, folder)
    except InputError:
        return [[rank] for rank in range(group.size)]


def _all_held(folder: Path) -> dict[str, LocalFiles]:
    found = {}
    with contextlib.suppress(OSError):
        clean_partial(folder)
    for path in newest(folder):
        with contextlib.suppress(OSError, TfdistError):  # of the manifest: another host may have it
            found[path.name] = Checkpoint.held(path)
    return found


def _is_whole(name: str, held: Mapping[int, Mapping[str, LocalFiles]]) -> bool:
    """Returns whether the hosts together have all files of an in-memory checkpoint."""
    there = [own[name] for own in held.values() if name in own]
    return len({one.manifest for one in there}) == 1 and all(
        any(file in one.intact for one in there) for file in there[0].sizes
    )


def _send(strategy: Strategy, path: Path, held: Mapping[int, LocalFiles | None]) -> bool:
    """Sends each missing file from a host that has it to those that do not; returns whether all have them now."""
    carrier = ByteTransfer(strategy)
    sizes = next(one for one in held.values() if one).sizes
    me, failure, is_new = strategy.group.rank, "", not path.exists()
    for file, size in sizes.items():
        holder, *others = [rank for rank, one in held.items() if one and file in one.intact]
        lacking = held.keys() - {holder, *others}
        for begin in range(0, size, carrier.piece) if lacking else ():
            data = np.zeros(min(carrier.piece, size - begin) * (me == holder), np.uint8)
            if me == holder:
                with open(path / file, "rb") as source:
                    source.seek(begin)
                    source.readinto(data.data)
            piece = carrier.to_all(data)[holder]
            if me in lacking and not failure:
                failure = _written(path / file, piece, begin, size)
    failures = strategy.group.gather("commits/shared", failure, LONG_SECONDS)
    for rank, said in enumerate(failures):
        if said and me == 0:
            _log.warning("Rank %d cannot write the commit %s, which the others have: %s.", rank, path.name, said)
    if failure and is_new:
        shutil.rmtree(path, ignore_errors=True)
    return not any(failures)


def _written(path: Path, piece: np.ndarray, begin: int, size: int) -> str:
    """Writes a piece of a file, which is renamed after the last piece; returns the error, or ""."""
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
