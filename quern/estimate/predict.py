"""The time of one training step on a layout: matrix products, memory traffic, and communication that nothing hides.

A model with these parts, in seconds of one rank:

- products: FLOPs of its tokens (model/count.py), of blocks that run again in the backward pass, and of its share of the
  update, at the rate of large matrix products;
- pointwise: the operations between products, bound by memory. The forward pass writes and reads what autograd keeps,
  the backward pass reads it and writes its gradient: four passes, and two more over what is computed again. Each
  optimizer buffer is read and written;
- update: also the way of masters and moments to a GPU and back, where they are kept in the CPU's memory;
- model: the collectives of tensor parallelism, which nothing hides;
- data: gradients, hidden behind the backward pass of the last micro-batch except for the last bucket; parameters,
  hidden behind the update in the same way, or both behind all passes where replicas share parameters; and matrices
  on the way to their owners and back, not hidden.

Links follow the α-β model (Hockney, 1994): a ring of n ranks takes (n - 1) hops of α each, twice for an all-reduce,
plus its bytes over β. Shards are neighbours within a machine. A ring over several machines is as fast as its slowest
part: the adapters of its members in each machine. Kernel launches, waiting for data and stragglers are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.utils.flop_counter import FlopCounterMode

from quern.estimate.hardware import ATTAINED_BANDWIDTH, HOST_BANDWIDTH, Network, Processor
from quern.estimate.layout import Layout
from quern.estimate.memory import Memory, owned_counts, run_update
from quern.estimate.traffic import bytes_per_step, calls

BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in the time of a micro-batch."""
PASSES = 4


@dataclass(frozen=True)
class Cluster:
    """Hardware of a run: `ranks` processors in all, `per_machine` of them in each machine."""

    processor: Processor
    network: Network
    ranks: int
    per_machine: int

    def ring_seconds(self, ranks: int, stride: int, sent: float, calls: int, hops_each: int) -> float:
        """Returns the seconds of some collectives over a ring of ranks.

        Args:
            ranks: Members of the ring.
            stride: Distance between the ranks of neighbours.
            sent: Bytes that one rank sends in all calls.
            calls: Number of collectives.
            hops_each: Trips around the ring of one collective: 2 for an all-reduce, else 1.
        """
        if ranks == 1 or not calls:
            return 0.0
        members = max(1, min(ranks, self.per_machine // stride))  # in each machine
        machines = -(-ranks // members)
        bandwidth, hop = self.processor.link_bandwidth, self.processor.link_seconds
        seconds = (ranks - machines) * hop
        if machines > 1:
            share = members if self.network.adapter_per_gpu else members / self.per_machine
            bandwidth = min(bandwidth, self.network.bandwidth * share)
            seconds += machines * self.network.hop_seconds
        return calls * hops_each * seconds + sent / (bandwidth * ATTAINED_BANDWIDTH)


@dataclass(frozen=True)
class Step:
    """Seconds of one step by part; `data` is the part of its communication that nothing hides, `hidden` the rest.

    `flops` are those of the model over all ranks; `traffic` is the bytes that a rank sends, by collective.
    """

    products: float
    pointwise: float
    update: float
    model: float
    data: float
    hidden: float
    flops: float
    traffic: dict[str, int]

    @property
    def seconds(self) -> float:
        return self.products + self.pointwise + self.update + self.model + self.data


def predict(layout: Layout, memory: Memory, cluster: Cluster, flops_per_token: float) -> Step:
    """Predicts a step of a layout whose memory is known; flops_per_token: of training the whole model."""
    chip, context, batch_tokens = cluster.processor, layout.recipe.model.context, layout.recipe.train.batch_tokens
    rate, bandwidth = chip.peak_flops * chip.attained, chip.memory_bandwidth * ATTAINED_BANDWIDTH
    blocks = len(layout.whole.blocks)
    recomputed = min(layout.recipe.train.recompute, blocks)
    in_blocks = flops_per_token - 6 * layout.whole.head.weight.numel()  # a third of it is the forward pass
    products = (flops_per_token + in_blocks / 3 * recomputed / blocks) * layout.rows * context / layout.tp / rate
    most, again = max(layout.micro_batches), recomputed * memory.again
    pointwise = (PASSES * (memory.activations + again) + 2 * again) / most * layout.rows / bandwidth
    update = _update_flops(layout) / rate + 2 * (memory.masters + memory.moments) / bandwidth
    update += 2 * memory.away / (HOST_BANDWIDTH * ATTAINED_BANDWIDTH)
    traffic = bytes_per_step(layout)
    kinds = "data/reduce_scatter", "data/all_gather"  # gradients there, parameters back
    cut = [sum(counts) for counts in zip(*(calls(layout, one) for one in layout.buckets if not one.small), strict=True)]
    there, back = (
        cluster.ring_seconds(layout.dp, layout.tp, traffic.get(kind, 0), count, 1)
        for kind, count in zip(kinds, cut or (0, 0), strict=True)
    )
    last = (products + pointwise) * layout.micro_batches[-1] / layout.rows * BACKWARD_SHARE
    exposed = _exposed(there, cut[:1], last) + _exposed(back, cut[1:], update)
    if layout.parts:  # both of them in every pass
        exposed = _exposed(there + back, cut, products + pointwise)
    moved = _moving_seconds(layout, cluster, traffic)
    small = cluster.ring_seconds(layout.dp, layout.tp, traffic.get("data/all_reduce", 0), 3, 2)
    small += cluster.ring_seconds(layout.dp * layout.tp, 1, traffic.get("world/all_reduce", 0), 1, 2)
    return Step(
        products,
        pointwise,
        update,
        _model_seconds(layout, cluster, traffic),
        exposed + moved + small,
        there + back - exposed,
        flops_per_token * batch_tokens,
        traffic,
    )


def _exposed(seconds: float, calls: Sequence[int], beside: float) -> float:
    """Returns the seconds that computation does not hide: a call of the average length, or all beyond `beside`."""
    return max(seconds / max(1, sum(calls)), seconds - beside)


def _moving_seconds(layout: Layout, cluster: Cluster, traffic: dict[str, int]) -> float:
    """Returns the seconds of moving matrices to their owners and back: to another machine, if there are several."""
    calls = 2 * sum(bucket.moves for bucket in layout.buckets)
    apart = layout.tp if layout.dp * layout.tp <= cluster.per_machine else cluster.per_machine
    return cluster.ring_seconds(min(2, layout.dp), apart, traffic.get("data/all_to_all", 0), calls, 1)


def _model_seconds(layout: Layout, cluster: Cluster, traffic: dict[str, int]) -> float:
    """Returns the seconds of the collectives of tensor parallelism."""
    if layout.tp == 1:
        return 0.0
    micro_batches, context, width = len(layout.micro_batches), layout.recipe.model.context, layout.recipe.model.width
    stream = max(layout.micro_batches) * context * width * layout.dtype.itemsize * (layout.tp - 1) // layout.tp
    streams = -(-traffic["model/all_gather"] // stream)
    exchanges = 2 * sum(bucket.exchange for bucket in layout.buckets)
    calls = {"all_gather": (streams, 1), "reduce_scatter": (streams, 1), "all_reduce": (2 * micro_batches, 2)}
    calls["all_to_all"] = exchanges, 1
    return sum(
        cluster.ring_seconds(layout.tp, 1, traffic.get(f"model/{kind}", 0), count, hops)
        for kind, (count, hops) in calls.items()
    )


def _update_flops(layout: Layout) -> float:
    """Returns the FLOPs of the update's matrix products on the rank with the most of them."""
    totals = [0] * (layout.dp * layout.tp)
    for bucket in layout.buckets:
        if bucket.rule.stacked:
            counter = FlopCounterMode(display=False)
            run_update(bucket, 1, counter)
            for rank, count in enumerate(owned_counts(bucket, layout)):
                totals[rank] += count * counter.get_total_flops()
    return float(max(totals))
