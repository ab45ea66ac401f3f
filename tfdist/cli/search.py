"""`--find`: a search with a training command, instead of training."""

from tfdist.cli.early_checks import Place
from tfdist.config.train_config import TrainConfig
from tfdist.grammar.search import BatchSizeSearch, parse_search


def run(config: TrainConfig, place: Place) -> int:
    """Searches as `--find` says, prints what was found, and writes it to the output directory; returns the exit code.

    Raises:
      InputError: the output directory cannot be used, or the search is not possible here.
    """
    from tfdist.cli import batch_size_search, learning_rate_search

    search = parse_search(config.find)
    if isinstance(search, BatchSizeSearch):
        return batch_size_search.run(config, search, place)
    return learning_rate_search.run(config, search, place)
