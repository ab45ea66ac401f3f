"""Checks of the options of pipelines, as flags and as arguments of `load_strategy`."""

from tfdist.errors import InputError
from tfdist.grammar.cut import parse_cut
from tfdist.grammar.pipeline_schedule import ZBH1, OneFOneB, parse_pipeline_schedule

DEFAULT_SCHEDULE = OneFOneB.name


def schedule_text(text: str) -> str:
    """Normalizes `--pipeline_schedule`; raises `InputError` for a schedule that cannot be executed."""
    schedule = parse_pipeline_schedule(text)
    if isinstance(schedule, ZBH1):
        raise InputError(
            "Schedules that compute the gradients of inputs and of weights apart cannot be executed yet. Received: "
            f"{schedule}. Use {OneFOneB.name}."
        )
    return str(schedule)


def cut_text(text: str) -> str:
    """Normalizes `--cut`."""
    parse_cut(text)
    return text.strip()
