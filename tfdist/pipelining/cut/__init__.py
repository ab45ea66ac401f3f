"""Cutting a functional or sequential Keras model into stages, each with its own calls of layers and its own variables."""

from tfdist.pipelining.cut.boundaries import Crossing
from tfdist.pipelining.cut.cutting import Cut, TracedModel, cut_model, trace_model
from tfdist.pipelining.cut.description import StageDescription, describe_stages
from tfdist.pipelining.cut.graph import Graph, Tensor
from tfdist.pipelining.cut.stage_graph import StageGraph
from tfdist.pipelining.cut.timing import measure_seconds
from tfdist.pipelining.cut.variables import StageVariables, initialize

__all__ = [
    "Crossing",
    "Cut",
    "Graph",
    "StageDescription",
    "StageGraph",
    "StageVariables",
    "Tensor",
    "TracedModel",
    "cut_model",
    "describe_stages",
    "initialize",
    "measure_seconds",
    "trace_model",
]
