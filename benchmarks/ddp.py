"""PyTorch's DistributedDataParallel over Gloo on the perceptron, with its communication hooks; runs in .venv-peers.

    python benchmarks/ddp.py [--hook=none|fp16|powersgd|noop] [--rank=4] [--bucket_mb=25] ...

Two processes under a TF_CONFIG, whose first address is their meeting point. `noop` communicates nothing: PyTorch's floor.
"""

import argparse
import json
import os

import stopwatch
import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from workload import LEARNING_RATE, WIDTHS, WORKLOADS, arrays


def perceptron() -> torch.nn.Module:
    """The model of the workload, the same on every rank."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in zip(WIDTHS[:-1], WIDTHS[1:], strict=True):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def model(hook: str, rank: int, bucket_mb: float) -> DistributedDataParallel:
    """The perceptron with a hook; rank is PowerSGD's."""
    wrapped = DistributedDataParallel(perceptron(), bucket_cap_mb=bucket_mb)
    if hook == "powersgd":  # from step 2 on, the earliest: buckets are final only after the first
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook != "none":
        function = {"fp16": default_hooks.fp16_compress_hook, "noop": debugging_hooks.noop_hook}[hook]
        wrapped.register_comm_hook(None, function)
    return wrapped


def join() -> None:
    """Joins the other processes, at the first address of TF_CONFIG."""
    job = json.loads(os.environ["TF_CONFIG"])
    workers, rank = job["cluster"]["worker"], job["task"]["index"]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // len(workers)))
    distributed.init_process_group("gloo", init_method=f"tcp://{workers[0]}", rank=rank, world_size=len(workers))


def train(parallel: torch.nn.Module, optimizer: torch.optim.Optimizer, arguments: argparse.Namespace) -> None:
    """Trains, reports the times on the first rank, and leaves the other processes."""
    rank = distributed.get_rank()
    x, y = map(torch.from_numpy, arrays("mlp", WORKLOADS["mlp"].rows, 100 + rank))
    loss_function = torch.nn.CrossEntropyLoss()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_function(parallel(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    measured = stopwatch.from_arguments(arguments).measure(step, float)
    if rank == 0:
        stopwatch.report(*measured)
    distributed.barrier()  # a launcher ends the others when one rank fails to leave: the report comes first
    distributed.destroy_process_group()


def main(arguments: argparse.Namespace) -> None:
    """Joins the other process and trains."""
    join()
    parallel = model(arguments.hook, arguments.rank, arguments.bucket_mb)
    train(parallel, torch.optim.SGD(parallel.parameters(), LEARNING_RATE), arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", choices=("none", "fp16", "powersgd", "noop"), default="none")
    parser.add_argument("--rank", type=int, default=4, help="of PowerSGD")
    parser.add_argument("--bucket_mb", type=float, default=25, help="DistributedDataParallel's bucket_cap_mb")
    stopwatch.add_arguments(parser)
    given = parser.parse_args()
    if given.workload != "mlp":
        parser.error("this side has the workload mlp alone")
    main(given)
