"""Checks of a command's files, and of whether its run is finished, before TensorFlow is imported, which takes seconds.

Other hosts may have other files: what they lack is reported once all processes have joined, so that nobody waits for one.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from tfdist.cli import resume
from tfdist.cli.cluster_check import with_flags
from tfdist.cluster.detection import detect_cluster
from tfdist.config.data_set_files import check_files
from tfdist.config.train_config import TrainConfig
from tfdist.reporting import RunDirectory
from tfdist.storage import path_of


def check_data(config: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Raises `InputError` if files of the data set are missing, if all processes are on this host."""
    cluster = detect_cluster(with_flags(environment, config))
    if cluster.local_size == cluster.size:
        check_files(config.dataset, config.data_dir)


def check_directory(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> str:
    """Returns what to say about a run that has finished, if there is one process; raises as `path_of` and `resume.origin`."""
    for path in (config.output_dir, config.resume):
        path_of(path)
    if not config.output_dir or detect_cluster(with_flags(environment, config)).size > 1:
        return ""
    directory = RunDirectory(path_of(os.path.expanduser(config.output_dir)))
    given = config.resume, directory, dataclasses.asdict(config), resume.relaunched(environment)
    said = resume.finished(*given)
    if not said:
        resume.origin(*given)
    return said
