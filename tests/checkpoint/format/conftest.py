from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.coordination.members import members
from tfdist.checkpoint.format import TensorBlock, write_checkpoint
from tfdist.coordination import Group, LocalGroup


@pytest.fixture(autouse=True)
def every_thread_ends(no_thread_is_left: None) -> None:
    """Applies `no_thread_is_left` to every test in this directory."""


@pytest.fixture(scope="session")
def write() -> Callable[..., Path]:
    """Returns a function that writes a checkpoint, with default arguments."""

    def written(directory: Path, parts: list[TensorBlock], group: Group | None = None, **given: Any) -> Path:
        arguments = {"step": 120, "seed": 1, "flags": {"batch_size": 64}, "values": {"examples": 7680}, "keep": 2}
        return write_checkpoint(group or LocalGroup(), directory, parts, **(arguments | given))

    return written


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., list[Any]]:
    """Calls a function concurrently with the group of each rank; returns what each call returned or raised."""

    def run(size: int, function: Callable[[Group], Any]) -> list[Any]:
        with members(size) as joined, ThreadPoolExecutor(size) as pool:
            calls = [pool.submit(function, member) for member in joined]
            return [call.exception() or call.result() for call in calls]

    return run
