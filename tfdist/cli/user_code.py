"""Which flags of a run name code of a user, which is imported and called."""

from tfdist.config.train_config import TrainConfig
from tfdist.data.catalog import is_own
from tfdist.grammar.spec import parse


def user_code(config: TrainConfig) -> list[str]:
    """Returns the names of the flags whose value is a `package.module:function`, of those that make the model."""
    named = [name for name in ("model", "optimizer", "loss", "decay") if ":" in parse(getattr(config, name)).name]
    return [*named, "dataset"] if is_own(config.dataset) else named
