"""Variables of a pipelined job on the host: each is in the processes of its stage, and some are in all."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.coordination.timeouts import LONG_SECONDS
from tfdist.distribution.dtensor import is_spread
from tfdist.distribution.variable_blocks import VariableBlocks, VariablesOfAll
from tfdist.pipelining.has_stages import HasStages


class StageBlocks(VariableBlocks):
    """Variables of this process's stages; of those with the same stage, the first replica writes them."""

    spans_processes = True

    def __init__(self, strategy: HasStages):
        """Initializes the blocks.

        Args:
          strategy: the strategy.
        """
        super().__init__(strategy)
        self._strategy = strategy

    @property
    def _writes_same(self) -> bool:
        """See base class."""
        return self._strategy.local_replicas.start == 0

    def written(
        self, variable: tf.Variable, per_replica: bool, copied: bool = True
    ) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """See base class; the value of a variable on several devices is copied to be put together."""
        return super().written(variable, per_replica, copied or is_spread(variable))

    def of_all(self, forms: Mapping[str, Any]) -> VariablesOfAll:
        """See base class; in the order of the stages.

        What several stages have, such as tied weights and the optimizer's step, the first of them writes.
        """
        everyone = self._strategy.group.gather("stages/forms", dict(forms), LONG_SECONDS)
        found: dict[str, Any] = {}
        for each in everyone:
            found |= {name: form for name, form in each.items() if name not in found}
        earlier = everyone[: self._strategy.grid.ranks_of_stage(self._strategy.pipeline_rank)[0]]
        return VariablesOfAll(found, frozenset(forms).difference(*earlier))
