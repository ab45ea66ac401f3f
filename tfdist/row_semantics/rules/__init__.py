"""Rules: for each type of operation of TensorFlow, the labels of its outputs from those of its inputs."""

from tfdist.row_semantics.rules import elementwise, indexing, reductions, shapes
from tfdist.row_semantics.rules.registry import RULES, Call

__all__ = ["RULES", "Call", "elementwise", "indexing", "reductions", "shapes"]
