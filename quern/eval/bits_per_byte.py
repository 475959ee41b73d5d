"""Bits per byte: how well a model predicts text, in a unit that does not depend on the tokenizer.

The measure is the sum of the losses (nats) over the targets that count, divided by ln 2 and by the bytes of these
targets. A target counts if its mask is True and its token has at least one byte, so special tokens (the BOS before each
document, the marks of a chat) add neither loss nor bytes. The bytes come from a table with one integer per token id,
computed from the tokenizer's raw bytes: half a character counts its own bytes, not those of a replacement character.
The caller chooses the text. For validation, the batches are consecutive windows of each document, each starting at
BOS, so every byte is counted once.

Units: nats, tokens, bytes, bits per byte.
Source: The Pile (Gao et al., 2020, arXiv 2101.00027, section 3.1).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quern import compiler
from quern.data.loader import Batch
from quern.data.packing import windows
from quern.data.shards import Corpus
from quern.eval.score import SINGLE, Score, own_part
from quern.machine import Machine
from quern.mesh import ProcessGroup
from quern.model.base import LanguageModel, loss_sum
from quern.text.tokenizer import Tokenizer

VALIDATION, TRAIN = "validation", "train"


@dataclass(frozen=True)
class BitsPerByte:
    """The measure and its parts; `tokens` and `bytes` are sums over the targets that count."""

    bpb: float
    nats_per_token: float
    tokens: int
    bytes: int

    @classmethod
    def of(cls, nats: float, tokens: int, num_bytes: int) -> "BitsPerByte":
        """Computes the measure from sums, which may be sums over ranks. Raises ValueError: no byte was measured."""
        if num_bytes < 1 or tokens < 1:
            raise ValueError("bits per byte needs at least one target that stands for text: give more validation text")
        return cls(nats / (math.log(2) * num_bytes), nats / tokens, tokens, num_bytes)

    def uniform_bpb(self, vocab_size: int) -> float:
        """The score of a uniform guess over the vocabulary on the same targets."""
        return self.tokens * math.log2(vocab_size) / self.bytes


def bits_per_byte(
    model: LanguageModel,
    batches: Iterable[Batch],
    token_bytes: np.ndarray,
    machine: Machine,
    replicas: ProcessGroup = SINGLE,
) -> BitsPerByte:
    """Measures a model, without gradients. The model does not change. Losses are summed in float64, so the result does
    not depend on how rows are grouped into batches.

    Args:
        token_bytes: The number of bytes of each token id, (vocab_size,).
        replicas: The processes that measure other batches. The result covers all batches.

    Raises:
        ValueError: No target counts.
    """
    nats, tokens, num_bytes = sums(
        batches, token_bytes, lambda batch: batch_losses(model, batch.tokens, batch.targets, machine)
    )
    if replicas.size > 1:
        totals = torch.tensor([nats, tokens, num_bytes], dtype=torch.float64, device=machine.device)
        replicas.all_reduce(totals).wait()
        nats, tokens, num_bytes = totals[0].item(), int(totals[1]), int(totals[2])
    return BitsPerByte.of(nats, tokens, num_bytes)


def sums(
    batches: Iterable[Batch], token_bytes: np.ndarray, losses: Callable[[Batch], np.ndarray]
) -> tuple[float, int, int]:
    """Nats, tokens and bytes over the targets that count. losses: computes the nats of a batch's targets, float64."""
    table = np.asarray(token_bytes, dtype=np.int64)
    nats, tokens, num_bytes = 0.0, 0, 0
    for batch in batches:
        bytes_BT = np.where(batch.mask, table[np.where(batch.mask, batch.targets, 0)], 0)
        counts_BT = bytes_BT > 0
        nats += float(losses(batch)[counts_BT].sum())
        tokens += int(counts_BT.sum())
        num_bytes += int(bytes_BT.sum())
    return nats, tokens, num_bytes


def batch_losses(model: LanguageModel, tokens_BT: np.ndarray, targets_BT: np.ndarray, machine: Machine) -> np.ndarray:
    """The loss (nats, float64) of every target, without gradients; both arguments are integer arrays (B, T).

    It runs eagerly: rows have many lengths, and compiling for each would cost more than it saves.
    """
    with torch.no_grad(), compiler.eager():
        tokens = torch.from_numpy(np.ascontiguousarray(tokens_BT, dtype=np.int64)).to(machine.device)
        targets = torch.from_numpy(np.ascontiguousarray(targets_BT, dtype=np.int64)).to(machine.device)
        zeros = torch.zeros(targets.shape, device=machine.device)
        losses = loss_sum(model, tokens, targets, zeros, attention=machine.attention)[1]
    return losses.float().cpu().numpy().astype(np.float64)


def text_scores(
    model: LanguageModel,
    tokenizer: Tokenizer,
    machine: Machine,
    val: Corpus,
    train: Corpus | None = None,
    *,
    kinds: Sequence[str] = (),
    context: int,
    rows: int,
    group: ProcessGroup = SINGLE,
) -> list[Score]:
    """Measures a model's texts. The validation text is read once, kind by kind, and its score is of their sum.

    Args:
        model: In evaluation mode.
        val: The validation text.
        train: Training text, as from `sample`; None: not measured.
        kinds: The kind of each document of `val`; "" has no score of its own. Empty: no kinds.
        context: The most targets of a window.
        rows: Windows in a batch.
        group: The ranks that measure some batches each.

    Returns:
        Scores named validation, train, and validation/KIND for each kind.
    """

    def measure(corpus: Corpus) -> BitsPerByte:
        batches = own_part(windows(corpus, context, rows=rows), group)
        return bits_per_byte(model, batches, tokenizer.token_bytes(), machine, group)

    names = np.array(kinds or [""] * val.num_documents, dtype=object)
    parts = {kind: measure(val.part(np.flatnonzero(names == kind))) for kind in dict.fromkeys(names)}
    nats = sum(part.nats_per_token * part.tokens for part in parts.values())
    tokens, size = (sum(getattr(part, name) for part in parts.values()) for name in ("tokens", "bytes"))
    found = {VALIDATION: BitsPerByte.of(nats, tokens, size)}
    if train is not None:
        found[TRAIN] = measure(train)
    found |= {f"{VALIDATION}/{kind}": parts[kind] for kind in sorted(parts) if kind}
    guess = {name: one.uniform_bpb(tokenizer.vocab_size) for name, one in found.items()}
    return [Score(name, "bpb", one.bpb, None, None, one.bytes, guess[name], bos=True) for name, one in found.items()]


def sample(corpus: Corpus, tokens: int) -> Corpus:
    """Documents from all over a corpus, always the same ones, of `tokens` tokens at most. The last one may be cut."""
    count = max(1, min(corpus.num_documents, corpus.num_documents * tokens // corpus.num_tokens))
    chosen = corpus.part(np.linspace(0, corpus.num_documents - 1, count).astype(np.int64))
    before = np.cumsum(chosen.lengths) - chosen.lengths
    lengths = np.clip(tokens - before, 0, chosen.lengths)
    kept = chosen.part(np.flatnonzero(lengths > 1))
    kept.lengths[:] = lengths[lengths > 1]
    return kept


def kinds_of_documents(corpus: Corpus, tokenizer: Tokenizer, known: Iterable[tuple[str, str]]) -> list[str]:
    """The kind of each document of a corpus; "" for one that is not among the known (kind, text)."""
    by_text = {text: kind for kind, text in known}
    texts = (tokenizer.decode(corpus.gather(number, 1).tolist()) for number in range(corpus.num_documents))
    return [by_text.get(text, "") for text in texts]
