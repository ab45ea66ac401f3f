"""PipeDream and 2BW: 1F1B without a flush, and the versions of the weights that it uses.

The order of 1F1B does not end with a step: process s of S is S - 1 - s micro-batches ahead with its forward passes, and begins
the forward passes of a batch before the update of the batch before it. All micro-batches of a batch use the weights that
are the newest ones when the first of them begins, so that the weights of batch t in stage s are

    delay D_s = ceil((S - 1 - s) / M) updates old                            `pipedream`, weight stashing

The backward passes of a batch use the weights of its forward passes, and the newest weights are updated:

    w_s(t + 1) = update(w_s(t), gradient_s(w_0(t - D_0), w_1(t - D_1), ..., w_{S-1}(t - D_{S-1}))),   w_s(v) = w_s(0) for v < 0

    M = 1:  w_s(t + 1) = update(w_s(t), gradient_s(w_0(t - S + 1), w_1(t - S + 2), ..., w_{S-1}(t)))

With vertical sync, all stages use weights as old as those of the first one, D_s = ceil((S - 1) / M). If M >= S - 1, this is

    w(t + 1) = update(w(t), gradient(w(t - 1)))                                      `2bw`

for which two versions of the weights suffice. So 2BW is PipeDream with vertical sync and enough micro-batches.

Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019 (doi:10.1145/3341301.3359646).
Harlap et al., PipeDream: Fast and Efficient Pipeline Parallel DNN Training, 2018 (arXiv:1806.03377).
Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021 (arXiv:2006.09503).
"""

import dataclasses

from tfdist.errors import InputError
from tfdist.pipelining.schedules.orders import one_f_one_b
from tfdist.pipelining.schedules.schedule import Schedule


def pipedream(processes: int, micro_batches: int, vertical_sync: bool = False) -> Schedule:
    """Returns the order of 1F1B from an empty pipeline until it is empty, with the delays of PipeDream.

        time of a step = M (F + B),  live activations = S - s,  versions of the weights = D_s + 1

    Args:
      processes: number of processes, S.
      micro_batches: number of micro-batches, M.
      vertical_sync: whether all stages compute a batch with weights of the same age.
    """
    ahead = [processes - 1 if vertical_sync else processes - 1 - stage for stage in range(processes)]
    return dataclasses.replace(
        one_f_one_b(processes, micro_batches),
        name="pipedream(vertical_sync=True)" if vertical_sync else "pipedream",
        delays=tuple(-(-each // micro_batches) for each in ahead),
    )


def two_bw(processes: int, micro_batches: int) -> Schedule:
    """Returns the order of 1F1B from an empty pipeline until it is empty, with the delay of 2BW.

        time of a step = M (F + B),  live activations = S - s,  versions of the weights = 2

    Raises:
      InputError: M < S - 1.
    """
    if micro_batches < processes - 1:
        raise InputError(
            f"2bw needs at least {processes - 1} micro-batches, one less than the {processes} stages of the mesh, so that two "
            f"versions of the weights suffice. Received: {micro_batches}. Raise --micro_batches, or use pipedream."
        )
    delays = (min(processes - 1, 1),) * processes
    return dataclasses.replace(one_f_one_b(processes, micro_batches), name="2bw", delays=delays)
