"""The bytes that a rank sends in one training step on a layout, and the time of the step.

Time is a model with these parts, in seconds of one rank:

- products: FLOPs of its tokens (model/count.py) and of blocks that run again in the backward pass, at the rate of large
  matrix products;
- pointwise: the operations between products, bound by memory. The forward pass writes and reads what autograd keeps,
  the backward pass reads it and writes its gradient: four passes, and two more over what is computed again;
- update: FLOPs of its share, at the same rate; each optimizer buffer, read and written; and the way of masters and
  moments to a GPU and back, where they are kept in the CPU's memory;
- model: the collectives of tensor parallelism, which nothing hides;
- data: gradients, hidden behind the backward pass of the last micro-batch except for the last bucket; parameters,
  hidden behind the update in the same way, or both behind all passes where replicas share parameters; and matrices
  on the way to their owners and back, not hidden.

Links follow the α-β model (Hockney, 1994): a ring of n ranks takes (n - 1) hops of α each, twice for an all-reduce,
plus its bytes over β. Shards are neighbours within a machine. A ring over several machines is as fast as its slowest
part: the adapters of its members in each machine. docs/parallelism.md has the formulas of bytes, and what is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from quern.estimate.layout import Layout
from quern.estimate.memory import Memory, owned_counts, update_cost
from quern.estimate.options import ATTAINED_BANDWIDTH, HOST_BANDWIDTH, Network, Processor
from quern.parallel.buckets import Bucket
from quern.parallel.plan import REGIONS, plan_of, regions_of

COUNT_BYTES, PASSES_BYTES, LOSS_BYTES, NORM_BYTES = 32, 8, 4, 4
"""The counts are four int64, over the global batch: targets, positions, FLOPs of products and of attention."""


def bytes_per_step(layout: Layout, rank: int | None = None) -> dict[str, int]:
    """Returns bytes by "group/kind", as `Mesh.traffic` counts them. rank: None gives the maximum over the ranks."""
    sent = data_bytes(layout) + model_bytes(layout)
    for kind, counts in exchanged_bytes(layout).items():
        sent[kind] = max(counts) if rank is None else counts[rank]
    return {kind: count for kind, count in sorted(sent.items()) if count}


def data_bytes(layout: Layout) -> Counter[str]:
    """Bytes of the data group and the world, which communicate once per step."""
    n, world = layout.dp, layout.dp * layout.tp
    sent: Counter[str] = Counter()
    small: Counter[tuple] = Counter()
    for bucket in layout.buckets:
        if bucket.small:
            small[bucket.grads.dtype, bucket.grads.device] += bucket.grads.nbytes
        else:
            sums, gathers = calls(layout, bucket)
            sent["data/reduce_scatter"] += sums * part(bucket.grads.nbytes, n)
            sent["data/all_gather"] += gathers * part(bucket.params.nbytes, n)
    for size in (*small.values(), COUNT_BYTES, LOSS_BYTES, PASSES_BYTES if layout.parts else 0):
        sent["data/all_reduce"] += part(2 * size, n)
    sent["world/all_reduce"] += part(2 * NORM_BYTES, world)
    return sent


def calls(layout: Layout, bucket: Bucket) -> tuple[int, int]:
    """Number of times that a bucket that is cut is reduced, and gathered, in one step."""
    if bucket.share is None:
        return 1, 1
    passes, owner = len(layout.micro_batches), layout.parts[bucket.share.part]
    # The last block stays gathered while the loss is computed.
    twice = owner.again and owner.module is not layout.shard.blocks[-1]
    return passes, passes * (2 if twice else 1)


def model_bytes(layout: Layout) -> Counter[str]:
    """Bytes of the model group in all micro-batches."""
    sent: Counter[str] = Counter()
    for rows, times in Counter(layout.micro_batches).items() if layout.tp > 1 else ():
        tokens, recomputed = rows * layout.recipe.model.context, layout.recipe.train.recompute
        for kind, count in bytes_sent(layout.whole, tokens, layout.tp, recomputed).items():
            sent[f"model/{kind}"] += times * count
    return sent


def exchanged_bytes(layout: Layout) -> dict[str, list[int]]:
    """Bytes of each rank for parts of matrices that go to their owners and back, once per step."""
    n, m = layout.dp, layout.tp
    over_data, over_model = [0] * n, [0] * (n * m)
    for bucket in layout.buckets:
        if bucket.stack is None:
            continue
        s, grad, ownership = bucket.params.itemsize, bucket.grads.itemsize, bucket.stack.ownership
        for replica in range(n):
            if bucket.moves:
                gradients, parameters = ownership.sent(replica)
                over_data[replica] += grad * gradients + s * parameters
            if bucket.exchange:
                held = len(ownership.units(replica))
                for shard, own in enumerate(ownership.counts(replica)):
                    over_model[replica * m + shard] += ownership.size * (grad * (held - own) + s * (m - 1) * own)
    return {"data/all_to_all": [count for count in over_data for _ in range(m)], "model/all_to_all": over_model}


def part(size_in_bytes: int, ranks: int) -> int:
    """Returns (n-1)/n of the size."""
    return size_in_bytes * (ranks - 1) // ranks


def bytes_sent(model: Any, tokens: int, shards: int, recomputed: int) -> dict[str, int]:
    """Bytes that a rank sends through its model group in one training micro-batch of B·T tokens, by kind of collective.
    model: whole, in its training dtype; recomputed: so many first blocks run again in the backward pass."""
    plan = plan_of(model)
    width, itemsize = model.embedding.weight.size(1), model.embedding.weight.itemsize
    filled = -(-tokens // shards) * shards
    tables = 1 + hasattr(model, "bigrams")
    rows = (2 * len(regions_of(model)) + 1 + tables) * filled + plan.shifts * shards
    gathered, scattered = _repeated(model, recomputed)
    replicated = sum(p.numel() for name, p in model.named_parameters() if plan.dim_of(name) is None)
    row_bytes = width * itemsize
    numbers = (8 if getattr(model.cap, "tanh_form", None) is not None else 12) * tokens + 4 * replicated
    return {
        "all_gather": (rows + gathered * filled) * row_bytes * (shards - 1) // shards,
        "reduce_scatter": (rows + scattered * filled) * row_bytes * (shards - 1) // shards,
        "all_reduce": 2 * numbers * (shards - 1) // shards,
    }


def _repeated(model: Any, recomputed: int) -> tuple[int, int]:
    """Number of times that blocks which run again gather and scatter the stream: up to the last region's product, so
    not scattered for the last region, unless what the block adds is dropped out."""
    gathered = scattered = 0
    for layer, block in enumerate(model.blocks[:recomputed]):
        names = (f"blocks.{layer}.{name}" for name, _ in block.named_modules())
        regions = sum(any(fnmatchcase(name, pattern) for pattern in REGIONS) for name in names)
        dropped = any(isinstance(module, nn.Dropout) and module.p > 0 for module in block.modules())
        gathered += regions
        scattered += regions if dropped else max(0, regions - 1)
    return gathered, scattered


BACKWARD_SHARE = 2 / 3  # share of the backward pass in the time of a micro-batch
PASSES = 4


@dataclass(frozen=True)
class Cluster:
    """Hardware of a run, `per_machine` processors in each machine."""

    processor: Processor
    network: Network
    per_machine: int

    def ring_seconds(self, ranks: int, stride: int, sent: float, calls: int, hops_each: int) -> float:
        """Returns the seconds of some collectives over a ring of ranks. stride: distance between the ranks of
        neighbours; sent: bytes that one rank sends in all calls; hops_each: trips around the ring of one collective, 2
        for an all-reduce, else 1."""
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
    """Seconds of one step by part; `data`: what nothing hides of its communication; `flops`: of the model over all
    ranks; `traffic`: bytes that a rank sends, by collective."""

    products: float
    pointwise: float
    update: float
    model: float
    data: float
    flops: float
    traffic: dict[str, int]

    @property
    def seconds(self) -> float:
        return self.products + self.pointwise + self.update + self.model + self.data


def predict(layout: Layout, memory: Memory, cluster: Cluster, flops_per_token: float) -> Step:
    """Predicts a step of a layout whose memory is known; flops_per_token: to train the whole model."""
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
    model, flops = _model_seconds(layout, cluster, traffic), flops_per_token * batch_tokens
    return Step(products, pointwise, update, model, exposed + moved + small, flops, traffic)


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
            flops = update_cost(layout, bucket)[1]
            for rank, count in enumerate(owned_counts(bucket, layout)):
                totals[rank] += count * flops
    return float(max(totals))
