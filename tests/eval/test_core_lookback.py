"""CORE on a model that looks at previous tokens: endings that continue from a cache see the prefix's last one."""

import random

import pytest
import torch

from experiments.bigram import BigramGPT
from quern.eval.core.prompts import make_example
from quern.eval.core.tasks import BY_NAME
from quern.eval.likelihood import score_examples
from tests.eval.test_core import alone, model_of, rows_of
from tests.support.tiny_model import CPU, tiny_tokenizer

CONTEXT = 1024
"""No prompt is cut: options that are cut differently share nothing."""


@pytest.mark.parametrize("name", ["arc_easy", "copa", "winograd", "lambada_openai"])
def test_a_model_with_lookback_scores_as_one_example_at_a_time(name: str) -> None:
    task, tokenizer = BY_NAME[name], tiny_tokenizer()
    model = BigramGPT(model_of(tokenizer, context=CONTEXT).shape).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    rows = rows_of(task.kind, 14, random.Random(5))
    made = [make_example(task, rows, item, tokenizer, CONTEXT) for item in range(14)]
    examples = [example for example in made if example]
    assert len(examples) == 14 and (task.kind == "language" or any(example.shared for example in examples))
    answers = score_examples(model, examples, CPU, tokenizer.vocab_size)
    for example, answer in zip(examples, answers, strict=True):
        losses, says = alone(model, example, tokenizer.vocab_size)
        assert answer.losses == pytest.approx(losses, abs=1e-4)
        if task.kind == "language":
            assert answer.correct == says
