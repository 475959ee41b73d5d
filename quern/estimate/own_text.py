"""A law of what a run learns from a text of one's own: how much is needed, which size fits, what more would bring.

The law has the form and the exponents of arXiv 2203.15556 (Hoffmann et al.), for bits per byte of held-out text:

    L(N, D) = E + A / N^0.34 + B / D^0.28

N: parameters of the matrices and the head, at most one for each byte of text. D: bytes that are read; those of a
repeated text count less, as in arXiv 2305.16264 (Muennighoff et al., equation 5). docs/your-own-text.md says to what
runs the constants are fitted, and how far the law is off.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quern.recipe import Recipe
from quern.resolve import resolve
from quern.terminal import human_size

LEAST_BYTES = 2_000  # the least text, about a page: from less, nothing can be learned and held out
ENOUGH_BYTES = 100_000  # the size of text from which on a model writes more words of its own than it repeats
MINUTES = 10.0  # the training time of `quern run` on a text of one's own, where no length is asked for
LEAST_DEPTH, MOST_DEPTH = 2, 7
"""Bounds of the default depth: one layer copies no phrases; recipes of 8 and more have other contexts and batches."""
TOKENS_PER_PARAMETER = 3  # below it, a smaller model learns more in the same time (measured: docs/your-own-text.md)
E, A, B = 1.0, 18.4, 54.2
N_EXPONENT, D_EXPONENT = 0.34, 0.28
REPEATS_WORTH = 2.0
"""The constant R* of the law of repeated text: reading it ever again is worth at most so many readings of new text. Of
large models on web text it is 15; small ones memorise a small text sooner."""
PARAMETERS_PER_BYTE = 1
READINGS, FEW_BYTES = 5, 400_000
"""The limit of `most_readings`, and the size of a text in bytes below which the limit rises."""
EXPECTED = (
    (1.75, "sentences that hold together for a while"),
    (2.15, "sentences that read like the text and make little sense"),
    (2.4, "the text's words and phrases, in a grammar that comes and goes"),
    (2.9, "the text's most common words, with invented ones between them"),
    (math.inf, "letters that look like words"),
)
"""Bits per byte of English prose, and what a model with fewer writes."""


def bits_per_byte(parameters: float, text_bytes: float, read_bytes: float) -> float:
    """Returns the law's bits per byte. parameters: number in matrices and head; read_bytes: repeated bytes included."""
    again = max(0.0, read_bytes / text_bytes - 1)
    worth = min(read_bytes, text_bytes) + text_bytes * REPEATS_WORTH * -math.expm1(-again / REPEATS_WORTH)
    parameters = min(parameters, PARAMETERS_PER_BYTE * text_bytes)
    return E + A * parameters**-N_EXPONENT + B * worth**-D_EXPONENT


def most_readings(parameters: float, text_bytes: float) -> float:
    """Returns how often a model may read a text before it learns the text by heart, where the law no longer holds.

    The limit is 5 readings. It rises for a text with more bytes than the model has parameters, and to 10 for a small
    text, of which 5 readings are few steps. The roots are a guess between the runs of docs/your-own-text.md.
    """
    return READINGS * max(1.0, math.sqrt(text_bytes / parameters), min(2.0, math.sqrt(FEW_BYTES / text_bytes)))


def vocabulary(megabytes: float) -> int:
    """Returns the vocabulary for a text: 512 tokens for 0.1 MB, 2,048 for 1 MB, 4,096 for 10 MB, at most 8,192: a token
    must be read often to be learned."""
    return max(320, min(8192, 2 ** math.floor(11 + 0.5 * math.log2(max(1e-6, megabytes)))))


def parameters_of(recipe: Recipe, vocab_size: int) -> int:
    """Returns the parameters of the matrices and the head, about, with the vocabulary of the text's tokenizer."""
    model = resolve(recipe).model
    return 12 * model.depth * model.width**2 + vocab_size * model.width


def best_depth(recipe: Recipe, vocab_size: int, text_bytes: float, bytes_per_token: float, flops: float) -> int:
    """Returns the largest depth whose model reads at least TOKENS_PER_PARAMETER tokens for each parameter in so many
    FLOPs of training, and the text no more often than `most_readings`; LEAST_DEPTH if none does."""

    def tokens_per_parameter(depth: int) -> float:
        parameters = parameters_of(replace(recipe, depth=depth), vocab_size)
        most = most_readings(parameters, text_bytes) * text_bytes / bytes_per_token
        return min(flops / (6 * parameters), most) / parameters

    depths = range(LEAST_DEPTH, MOST_DEPTH + 1)
    return max((depth for depth in depths if tokens_per_parameter(depth) >= TOKENS_PER_PARAMETER), default=LEAST_DEPTH)


def expectation(parameters: float, text_bytes: float, read_bytes: float, untrained: float) -> list[str]:
    """Returns lines for the user: how much text there is, how often it is read, what to expect.

    untrained: Bits per byte before training, the most that is expected.
    """
    expected = min(untrained, bits_per_byte(parameters, text_bytes, read_bytes))
    what = next(text for most, text in EXPECTED if expected <= most)
    lines = [
        f"your text: {human_size(text_bytes)} to train on, about {text_bytes / 6:,.0f} words of English; it is read "
        f"{read_bytes / text_bytes:.2g} times",
        f"to expect, if it is English prose: about {expected:.1f} bits per byte of text that it has not read: {what}",
    ]
    if text_bytes < ENOUGH_BYTES:
        lines.append(f"warning: the model will repeat so little text: give {human_size(ENOUGH_BYTES)}, or better 1 MB")
    return lines


def more(parameters: float, text_bytes: float, read_bytes: float, measured: float) -> list[tuple[str, float]]:
    """Returns what the law expects of more text and time, from the bits per byte that a run measured: (label, bits per
    byte), without cases in which the text would be learned by heart."""
    readings, most = read_bytes / text_bytes, most_readings(parameters, text_bytes)
    scale = measured / bits_per_byte(parameters, text_bytes, read_bytes) if readings <= most else 1.0
    cases = (
        ("twice the time", 1, 2, 1), ("ten times the time", 1, 10, 1), ("twice the text, in the same time", 2, 1, 1),
        ("ten times the text, in the same time", 10, 1, 1), ("ten times the text and the time", 10, 10, 1),
        ("ten times the text and the parameters, in a hundred times the time", 10, 10, 10),
    )  # fmt: skip
    return [
        (label, scale * bits_per_byte(size * parameters, text * text_bytes, read * read_bytes))
        for label, text, read, size in cases
        if readings * read / text <= most_readings(size * parameters, text * text_bytes)
    ]
