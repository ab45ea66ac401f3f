"""What looks at a training now and then, between its steps, and leaves it as it was: costs, errors, choices."""

from tfdist.inspections.auto import Auto
from tfdist.inspections.contract import Inspection, Site
from tfdist.inspections.exposure import Exposure, advice
from tfdist.inspections.guard import Guard
from tfdist.inspections.in_sync import GradientNorms, InSync

__all__ = ["Auto", "Exposure", "GradientNorms", "Guard", "InSync", "Inspection", "Site", "advice"]
