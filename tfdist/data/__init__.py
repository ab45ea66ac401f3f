"""Data: sources of examples, pipelines that deal them to replicas, and a catalog of names."""

from tfdist.data.catalog import load
from tfdist.data.class_weight import with_class_weight
from tfdist.data.data_set import DataSet
from tfdist.data.examples import Element, Examples, Transform
from tfdist.data.order import steps_in_epochs
from tfdist.data.own import as_data_set, as_examples
from tfdist.data.pipeline import EvaluationPipeline, Pipeline, check_batch_size
from tfdist.data.position import Position
from tfdist.data.rows import check_equal_shares, rows
from tfdist.data.source import ArraySource, Source
from tfdist.data.stream import StreamSource
from tfdist.data.text import TextSource

__all__ = [
    "ArraySource",
    "DataSet",
    "Element",
    "EvaluationPipeline",
    "Examples",
    "Pipeline",
    "Position",
    "Source",
    "StreamSource",
    "TextSource",
    "Transform",
    "as_data_set",
    "as_examples",
    "check_batch_size",
    "check_equal_shares",
    "load",
    "rows",
    "steps_in_epochs",
    "with_class_weight",
]
