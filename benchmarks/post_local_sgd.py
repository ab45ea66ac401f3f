"""PyTorch's local SGD over Gloo on the perceptron, by its `PostLocalSGDOptimizer`; runs in .venv-peers.

    python benchmarks/post_local_sgd.py [--averager=periodic|hierarchical] [--period=16] [--inner_period=4]

Processes under a TF_CONFIG, as for `ddp.py`. From the first step on, gradients stay local: `periodic` averages the weights
of all ranks every `--period` steps, `hierarchical` also those of pairs of ranks every `--inner_period` steps. `--wrap=ddp`
wraps the model as PyTorch's documentation does; `--wrap=none` leaves out the wrapper, which has nothing to communicate here.

Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2018 (arXiv:1808.07217).
"""

import argparse
from collections import OrderedDict

import ddp
import stopwatch
import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from workload import LEARNING_RATE

PAIR = 2


def averager(arguments: argparse.Namespace) -> ModelAverager:
    """When weights are averaged, and among which ranks."""
    if arguments.averager == "periodic":
        return PeriodicModelAverager(arguments.period)
    levels = [(arguments.inner_period, PAIR), (arguments.period, distributed.get_world_size())]
    return HierarchicalModelAverager(OrderedDict(levels))


def model(wrap: str) -> torch.nn.Module:
    """The perceptron, whose gradients stay local."""
    if wrap == "none":
        return ddp.perceptron()
    wrapped = DistributedDataParallel(ddp.perceptron())
    state = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    return wrapped


def main(arguments: argparse.Namespace) -> None:
    """Joins the other processes and trains."""
    ddp.join()
    local = model(arguments.wrap)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(local.parameters(), LEARNING_RATE), averager(arguments))
    ddp.train(local, optimizer, arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--averager", choices=("periodic", "hierarchical"), default="periodic")
    parser.add_argument("--period", type=int, default=16, help="steps between averages over all ranks")
    parser.add_argument("--inner_period", type=int, default=4, help="steps between averages over pairs of ranks")
    parser.add_argument("--wrap", choices=("ddp", "none"), default="ddp")
    stopwatch.add_arguments(parser)
    given = parser.parse_args()
    if given.workload != "mlp":
        parser.error("this side has the workload mlp alone")
    main(given)
