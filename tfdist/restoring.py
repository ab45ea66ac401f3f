"""From checkpoints on a disk to the state of a run: the newest good one, on all processes the same."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from tfdist.checkpoint import Checkpoint, CheckpointError, Damaged, newest, set_aside
from tfdist.group import Group
from tfdist.run_state import RunState

READING_SECONDS = 3600.0

_log = logging.getLogger(__name__)


def checkpoints_at(path: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints that a path names, the newest first: itself, those in it, or those of the run whose directory it is."""
    path = Path(path).expanduser()
    if path.name.startswith("step-"):
        return [path]
    return newest(path) or newest(path / "checkpoints")


def restore(state: RunState, paths: Sequence[str], group: Group, sets_aside: bool = True) -> Checkpoint | None:
    """Gives a run the state of the first of these checkpoints that is good; every process calls it with the same paths.

    One that is damaged, wherever that shows, is named and left out; with `sets_aside` the chief renames it, so that nobody
    takes it again.

    Returns:
      The checkpoint; None if there are no paths.

    Raises:
      InputError: a checkpoint is of another model or optimizer, or of a newer version.
      CheckpointError: none of them is good.
    """
    chief, damages = group.rank == 0, []
    for number, path in enumerate(paths):
        checkpoint, damage = _restored(state, Path(path), whole=chief)
        found = group.gather(f"checkpoint/read/{number}", damage, READING_SECONDS)
        if not any(found):
            return checkpoint
        damages.append(next(text for text in found if text))
        if chief:
            aside = f" It is set aside as {set_aside(Path(path))}." if sets_aside else ""
            _log.warning("%s%s", damages[-1], aside)
    if damages:
        raise CheckpointError(
            f"A run goes on from a good checkpoint. Received: {len(damages)} damaged. {damages[0]} Begin anew with "
            "--resume=never, or name another run's with --resume=PATH."
        )
    return None


def _restored(state: RunState, path: Path, whole: bool) -> tuple[Checkpoint | None, str]:
    """The checkpoint whose values the state has now, and what is wrong with it; `whole` looks at what nobody needs, too."""
    try:
        checkpoint = Checkpoint.open(path)
        state.restore(checkpoint)
        if whole:
            checkpoint.verify()
    except Damaged as damaged:
        return None, str(damaged)
    return checkpoint, ""
