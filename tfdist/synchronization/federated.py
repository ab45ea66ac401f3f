"""Federated averaging: steps are rounds, after which all replicas have the global weights; see `FedAvg`."""

import dataclasses

import keras

from tfdist.data import Examples
from tfdist.data.client_examples import ClientExamples
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.grammar.sync import FedAvg, Sync
from tfdist.step.compiled_loop import Loop
from tfdist.step.compiled_steps import Steps
from tfdist.step.metrics import ModelMetrics
from tfdist.step.reduction import Reduction
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step
from tfdist.synchronization.client_step import ClientGradients, ClientStep
from tfdist.synchronization.interface import Exchanges
from tfdist.synchronization.round_exchange import RoundExchange
from tfdist.synchronization.round_loop import compile_round_loop
from tfdist.synchronization.round_state import RoundState


class FederatedRounds(Exchanges):
    """Replaces steps by rounds, each of which exchanges weights; between rounds, replicas agree."""

    def __init__(
        self,
        sync: FedAvg,
        model: keras.Model,
        strategy: Strategy,
        reduction: Reduction,
    ):
        """Creates the variables of the rounds.

        Args:
          sync: the clients.
          model: compiled and built model.
          strategy: its strategy.
          reduction: sums changes of weights over replicas.
        """
        self._sync, self._model, self._strategy = sync, model, strategy
        self._state = RoundState(model, strategy, sync.outer)
        self.variables = self._state.global_weights.optimizer_variables
        self._exchange = RoundExchange(strategy, reduction, self._state)

    def loop(self, steps: Steps, batch_size: int, rate: float, step: int) -> Loop:
        """See base class."""

        def create(settings: Settings, store: StateStore, metrics: ModelMetrics) -> tuple[Step, Loop]:
            settings = dataclasses.replace(settings, batch_size=batch_size)
            options = self._model, self._strategy, store, settings, metrics
            source = ClientGradients(*options, sync=self._sync, global_weights=self._state.global_weights)
            of_client = ClientStep(source, store, self._state)
            loop = compile_round_loop(of_client, self._state, self._exchange, self._strategy, batch_size)
            return of_client, loop

        return steps.other_loop(("rounds", batch_size), create)

    @property
    def payload_per_step(self) -> float:
        """See base class; what is sent in a round."""
        recording = self._exchange.recording
        return recording.payload_bytes if recording else 0


def check_options(settings: Settings, optimizer: keras.Optimizer) -> None:
    """Checks that the options of steps agree with the method.

    Raises:
      InputError: they do not.
    """
    sync = settings.sync
    if not sync.trains_clients:
        return
    refused = {
        "accumulate_steps": (settings.micro_steps > 1, "Lower batch_size, which is that of a client"),
        "a loss scale": (settings.loss_scale is not None, "Use mixed_bfloat16 or float32"),
        "ema": (optimizer.use_ema, "Leave it out, or give an outer optimizer"),
    }
    for name, (is_given, remedy) in refused.items():
        if is_given:
            raise InputError(
                f"Clients start each round anew, without state of earlier steps. Received: sync={sync} and {name}. {remedy}."
            )


def owned_by_clients(
    sync: Sync, examples: Examples, batch_size: int, seed: int, elastic_batch: str, balance: str
) -> Examples:
    """Returns the training examples as the clients of a method own them; unchanged for a method without clients.

    Args:
      sync: how replicas are kept in agreement.
      examples: training examples; those of clients are returned as they are.
      batch_size: rows of a client's batch.
      seed: seed of the run.
      elastic_batch: see `Schedule`.
      balance: how rows are allocated to replicas.

    Raises:
      InputError: the examples cannot be divided among clients.
    """
    if not isinstance(sync, FedAvg) or isinstance(examples, ClientExamples):
        return examples
    if elastic_batch != "global":
        raise InputError(
            "The batch size of a client does not depend on the number of replicas. Received: "
            f"sync={sync} and elastic_batch={elastic_batch}. Use elastic_batch=global."
        )
    if balance != "equal":
        raise InputError(
            f"Whole clients are allocated to replicas, by their examples. Received: sync={sync} and balance={balance}. Use "
            "balance=equal."
        )
    return ClientExamples(examples, sync, batch_size, seed)


def examples_per_step(sync: Sync, size: int, batch_size: int, replicas: int) -> int:
    """Returns `Sync.examples_per_step`.

    Raises:
      InputError: there are more replicas than examples in a round.
    """
    found = sync.examples_per_step(size, batch_size)
    if sync.trains_clients and found < replicas:
        raise InputError(
            "A round must have an example for each replica. Received: "
            f"sync={sync}, {size} examples and {replicas} replicas. Use a larger fraction, or fewer replicas."
        )
    return found
