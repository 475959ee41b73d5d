"""The compiled decode step against the plain one: same tokens, and one version for every length and cache."""

import threading
import time
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.overrides import TorchFunctionMode

from quern import compiler
from quern.generate import compiled as compiled_module
from quern.generate.cache import KVCache, attend_masked, decode, pad
from quern.generate.compiled import SPAN, CompiledDecode, FewRows, turned_is_faster
from quern.generate.engine import Engine
from quern.generate.sampling import GREEDY, Sampling
from tests.laws.table import Law
from tests.support.toy_engine import CPU, toy_model, toy_tokenizer

ROWS = (1, 3)
CONTEXT = 150


@pytest.fixture(scope="module", autouse=True)
def works() -> None:
    """Skips the file, when it runs and not when tests are collected: the probe takes a second."""
    if compiler.problem("cpu") is not None:
        pytest.skip("torch.compile does not work on this machine")


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = toy_model("SL", depth=2, context=CONTEXT, vocab_size=toy_tokenizer().vocab_size)
    engine = Engine(model, toy_tokenizer(), replace(CPU, compile=True))
    engine.warm_up(ROWS)
    return engine


def test_compiled_is_plain(engine: Engine, law: Law) -> None:
    """Logits step by step over the whole context, ring wrapped, every span of slots up to it."""
    compiled = engine._compiled
    assert isinstance(compiled, CompiledDecode) and compiled.rows == list(ROWS)
    worst = 0.0
    for rows in ROWS:
        prompts = [[5] * (2 + 3 * row) for row in range(rows)]
        with torch.inference_mode(), torch.compiler.set_stance("fail_on_recompile"):
            caches = [KVCache(engine.model, rows, compiled.max_tokens) for _ in range(2)]
            for cache in caches:
                cache.prefill(engine.model, *pad(prompts, 0, torch.device("cpu")))
            tokens_B = torch.arange(rows)
            for step in range(CONTEXT - 10):
                slots_S = torch.arange(-(-(12 + step) // SPAN) * SPAN)
                plain_BV = decode(engine.model, caches[0], tokens_B, slots_S)
                fast_BV = compiled(caches[1], tokens_B, slots_S)
                worst = max(worst, float((plain_BV - fast_BV).abs().max()))
                assert torch.equal(plain_BV.argmax(-1), fast_BV.argmax(-1))
                tokens_B = plain_BV.argmax(-1)
    law("compiled decode = plain decode: logits, fp32; greedy tokens equal", worst, 1e-5)


def test_generation_never_compiles_again_and_does_not_change(engine: Engine) -> None:
    """Batches smaller than, equal to and larger than what was compiled for, shrinking as rows finish."""
    plain = Engine(engine.model, engine.tokenizer, CPU)
    prompts = [[engine.tokenizer.bos, *range(60, 60 + 9 * row)] for row in range(5)]
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (1, 2, 3, 5):
            for sampling in (GREEDY, Sampling()):
                arguments = {"max_tokens": 110, "sampling": sampling, "seed": 2}
                found = engine.generate(prompts[:count], **arguments)
                assert found == plain.generate(prompts[:count], **arguments)


def test_a_model_that_has_learnt_is_followed(engine: Engine) -> None:
    """Every weight moves, the ones that the step keeps a copy of too."""
    plain, prompts = Engine(engine.model, engine.tokenizer, CPU), [[engine.tokenizer.bos, 70, 71]]
    weights = list(cast(torch.nn.Module, engine.model).parameters())
    before = [p.detach().clone() for p in weights]
    first = plain.generate(prompts, max_tokens=40, sampling=GREEDY)
    try:
        with torch.no_grad():
            for p in weights:
                p.mul_(-1.5).add_(0.01)
        found = [one.generate(prompts, max_tokens=40, sampling=GREEDY) for one in (plain, engine)]
        assert found[0] == found[1] != first
    finally:
        with torch.no_grad():
            for p, old in zip(weights, before, strict=True):
                p.copy_(old)


def test_models_that_follow_each_other_are_compiled_while_prompts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that watches a run warms each newer model up while another thread reads prompts, eagerly. The versions
    of earlier models must not count, and each has its own: the compiler keeps all versions of one function together
    and is asked to check arguments only."""
    compile, counter, inside, engines = torch.compile, CompileCounter(), threading.Event(), list[Engine]()

    def quickly(function: Any, options: Any, **more: Any) -> Any:
        return compile(function, backend=counter, options={"guard_filter_fn": options["guard_filter_fn"]}, **more)

    def read() -> None:
        with compiler.eager():
            inside.set()
            time.sleep(0.3)

    monkeypatch.setattr(torch, "compile", quickly)
    monkeypatch.setattr(compiled_module, "MAX_COMPILED", 2)
    for turn in range(3):
        model = toy_model("L", depth=1, context=CONTEXT - 20 * turn, vocab_size=toy_tokenizer().vocab_size, seed=turn)
        engine, reader = Engine(model, toy_tokenizer(), replace(CPU, compile=True)), threading.Thread(target=read)
        if turn == 2:
            reader.start()
            inside.wait()
        engine.warm_up((1,))
        assert counter.frame_count == turn + 1
        if turn == 2:
            reader.join()
        engines.append(engine)
        for one in engines:
            with torch.compiler.set_stance("fail_on_recompile"):
                found = one.generate([[one.tokenizer.bos]], max_tokens=100, sampling=GREEDY)
            plain = Engine(one.model, one.tokenizer, CPU)
            assert found == plain.generate([[one.tokenizer.bos]], max_tokens=100, sampling=GREEDY)


def test_the_forms_for_few_rows_are_used_and_agree() -> None:
    """The mode replaces each of its operations; what it puts there agrees within rounding."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(64, 48, bias=False).requires_grad_(False)
    for rows in (1, 5):
        x = torch.randn(rows, 1, 64, generator=generator)
        seen: list[str] = []
        with torch.no_grad(), Watching(seen), FewRows():
            fast, capped = layer(x), torch.tanh(x)
        assert "linear" not in seen and "tanh" not in seen
        assert float((fast - layer(x)).abs().max()) <= 1e-6
        assert float((capped - x.tanh()).abs().max()) <= 2e-7
        with torch.no_grad(), Watching(seen), FewRows(turned=False):
            plain = layer(x)
        assert ("linear" in seen) == (rows > 1) and float((fast - plain).abs().max()) <= 1e-6


def test_the_form_of_a_product_is_the_one_that_is_measured_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False), torch.nn.Linear(48, 64, bias=False))
    monkeypatch.setattr(F, "linear", lambda x, weight: time.sleep(0.01))
    assert turned_is_faster(model, 4)
    monkeypatch.setattr(F, "linear", lambda x, weight: None)
    assert not turned_is_faster(model, 4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_the_attention_of_one_query_agrees(heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, heads, 1, 8, generator=generator)
    k, v = (torch.randn(3, kv_heads, 20, 8, generator=generator) for _ in range(2))
    visible = (torch.arange(20) <= torch.tensor([0, 7, 19])[:, None])[:, None]
    for scale in (None, 0.3):
        seen: list[str] = []
        plain = attend_masked(q.transpose(1, 2), k, v, visible, scale)
        with Watching(seen), FewRows():
            fast = attend_masked(q.transpose(1, 2), k, v, visible, scale)
        assert "scaled_dot_product_attention" not in seen
        assert float((fast - plain).abs().max()) <= 1e-6


class Watching(TorchFunctionMode):
    """Notes the names of the functions that reach torch."""

    def __init__(self, seen: list[str]):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN201
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))
