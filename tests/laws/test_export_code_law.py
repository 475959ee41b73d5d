"""Exported `gpt` and `unet` = native: the Python files in the exported folder compute what quern computes.

transformers loads the files (`trust_remote_code=True`); they share no code with quern. Logits within four roundings of
their sums, greedy tokens equal to the engine's. Some tests break the exported files and require the same comparison to
notice.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from quern.generate.engine import Engine
from quern.generate.sampling import GREEDY
from quern.model.base import LanguageModel
from tests.support.exported_code import exported, load_exported, model_of, modules_in, toy_recipe
from tests.support.llama_run import FP32, relative, rounding
from tests.support.toy_engine import toy_tokenizer

pytestmark = pytest.mark.usefixtures("eager")

BAR = 4
"""Standard deviations of rounding, of the largest logit."""
LENGTHS = {"gpt": (1, 7, 8, 9, 31, 32, 50), "unet": (1, 40, 127, 128, 129, 200, 300)}
"""Shorter and longer than the short window, and longer than the context."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt, SSSL": ("gpt", {"windows": "SSSL"}),
    "gpt, L, one layer": ("gpt", {"windows": "L", "depth": 1}),
    "gpt, S, three layers, keys shared by two": ("gpt", {"windows": "S", "depth": 3, "kv_heads": 2}),
    "gpt, SL, one key head, another base and cap": (
        "gpt",
        {"windows": "SL", "depth": 5, "kv_heads": 1, "rope_base": 500.0, "softcap": 4.0},
    ),
    "gpt, SL, key offset": ("gpt", {"windows": "SL", "kv_heads": 2, "key_offset": True}),
    "unet, LSSSLSSLSSSL": ("unet", {"depth": 6}),
    "unet, L, two layers": ("unet", {"windows": "L", "depth": 2}),
    "unet, SL, another base and cap": ("unet", {"windows": "SL", "rope_base": 100.0, "softcap": 5.0}),
    "unet, S, twelve layers": ("unet", {"windows": "S", "depth": 12}),
}


@pytest.fixture(autouse=True, scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with modules_in(tmp_path_factory.mktemp("modules")):
        yield


def tokens(T: int, B: int = 2) -> torch.Tensor:
    """Rows that begin with BOS and hold it again somewhere."""
    tokenizer = toy_tokenizer()
    ids = torch.randint(0, tokenizer.vocab_size, (B, T), generator=torch.Generator().manual_seed(T))
    ids[:, 0] = tokenizer.bos
    ids[1, T // 3] = tokenizer.bos
    return ids


def native(model: LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    """quern's own logits, without the filler rows of unet's head."""
    return model.logits(model(ids, model.context(ids)))[..., : toy_tokenizer().vocab_size]


@torch.no_grad()
def deviation(theirs: Any, ours: LanguageModel, lengths: tuple[int, ...]) -> float:
    """Largest difference of a logit between the two models, relative, in roundings (`rounding`)."""
    worst = 0.0
    for T in lengths:
        ids = tokens(T)
        logits = native(ours, ids)
        assert logits.std() > 0.5, "logits this flat prove nothing"
        worst = max(worst, relative(theirs(ids).logits, logits) / rounding(ours))
    return worst


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_native(name: str, tmp_path: Path, law: Callable[..., None]) -> None:
    kind, shape = SHAPES[name]
    recipe = toy_recipe(kind, **shape)
    theirs = load_exported(exported(tmp_path, recipe))
    assert theirs.dtype == torch.float32
    found = deviation(theirs, model_of(recipe), LENGTHS[kind])
    law_name = f"exported {kind} = native: logits, fp32, window patterns, longer than window and context, in roundings"
    law(law_name, found, f"≤ {BAR}")
    assert found <= BAR


@pytest.mark.parametrize("kind", LENGTHS)
def test_gradients_are_native(kind: str, tmp_path: Path, law: Callable[..., None]) -> None:
    recipe, ids = toy_recipe(kind), tokens(LENGTHS[kind][-1])
    theirs, ours = load_exported(exported(tmp_path, recipe)), model_of(recipe)
    loss = theirs(ids, labels=ids).loss
    loss.backward()
    expected = F.cross_entropy(native(ours, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    found = {name: p.grad for name, p in theirs.named_parameters()}
    worst = 0.0
    for name, p in ours.named_parameters():
        assert p.grad is not None
        wanted = p.grad[: len(found[name])]
        worst = max(worst, float((found[name] - wanted).abs().max() / wanted.abs().max()))
    law(f"exported {kind} = native: every gradient of the loss, fp32, relative", worst, "≤ 1e-4")
    assert abs(loss.item() - expected.item()) <= 1e-5 * expected.item() and worst <= 1e-4


def prompts(kind: str) -> list[list[int]]:
    """Prompts of several lengths; with the reply, the longest is longer than the short window."""
    tokenizer = toy_tokenizer()
    words = tokenizer.encode("The miller grinds the grain at dawn, and the stone hums. " * 8)
    return [[tokenizer.bos, *words[:n]] for n in ((2, 6, 11) if kind == "gpt" else (2, 90, 130))]


@pytest.mark.parametrize("kind", LENGTHS)
def test_generated_is_the_engines(kind: str, tmp_path: Path, law: Callable[..., None]) -> None:
    """With the cache, without it, and all prompts in one batch that is padded on the left."""
    recipe = toy_recipe(kind)
    theirs, texts = load_exported(exported(tmp_path, recipe)), prompts(kind)
    replies = Engine(model_of(recipe), toy_tokenizer(), FP32).generate(texts, max_tokens=18, sampling=GREEDY)
    expected = [reply[0].ids for reply in replies]
    assert max(len(ids) for ids in expected) == 18 and len({tuple(ids) for ids in expected}) == 3
    settings: dict[str, Any] = {"max_new_tokens": 18, "do_sample": False, "temperature": None, "top_k": None}
    longest = max(len(ids) for ids in texts)
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in texts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in texts])
    batched = theirs.generate(padded, attention_mask=mask, pad_token_id=0, **settings)[:, longest:].tolist()
    for cached in (True, False):
        alone = [theirs.generate(torch.tensor([ids]), use_cache=cached, **settings) for ids in texts]
        assert [ids[0, len(text) :].tolist() for ids, text in zip(alone, texts, strict=True)] == expected
    assert [ids[: len(wanted)] for ids, wanted in zip(batched, expected, strict=True)] == expected
    law(f"generated by transformers = by the engine, {kind}: greedy tokens, cached or not, padded", "equal", "equal")


@pytest.mark.parametrize("kind", LENGTHS)
@torch.no_grad()
def test_cached_and_padded_is_whole(kind: str, tmp_path: Path, law: Callable[..., None]) -> None:
    """In pieces through the cache, and with padding on either side."""
    theirs, T = load_exported(exported(tmp_path, toy_recipe(kind))), LENGTHS[kind][-1]
    ids = tokens(T)
    whole = theirs(ids).logits
    cache, pieces, ends = None, [], (3, 4, T // 2, T - 1, T)
    for end in ends:
        output = theirs(ids[:, :end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        pieces.append(output.logits)
    worst = float((torch.cat(pieces, dim=1) - whole).abs().max())
    for left, right in ((5, 0), (0, 3), (2, 2)):
        padding = {"pad": (left, right), "value": 0}
        found = theirs(F.pad(ids, **padding), attention_mask=F.pad(torch.ones_like(ids), **padding)).logits
        worst = max(worst, float((found[:, left : left + T] - whole).abs().max()))
    law(f"exported {kind}, in pieces with its cache, padded = whole: logits, fp32", worst, "≤ 1e-5")
    assert worst <= 1e-5


@pytest.mark.parametrize("kind", LENGTHS)
def test_bf16_weights_are_the_masters_rounded(kind: str, tmp_path: Path, law: Callable[..., None]) -> None:
    recipe = toy_recipe(kind)
    theirs = load_exported(exported(tmp_path, recipe, torch.bfloat16))
    found, masters = theirs.state_dict(), model_of(recipe).state_dict()
    equal = found.keys() == masters.keys() and all(
        tensor.dtype == torch.bfloat16 and torch.equal(tensor, masters[name][: len(tensor)].to(torch.bfloat16))
        for name, tensor in found.items()
    )
    theirs.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    equal = equal and again.keys() == found.keys() and all(torch.equal(again[name], found[name]) for name in again)
    law(f"exported {kind} in bf16, loaded and saved by transformers = masters, rounded: weights", equal, "equal")
    assert equal
    ids = tokens(40)
    with torch.no_grad():
        assert (theirs(ids).logits - native(model_of(recipe), ids)).abs().mean() < 0.2


# What is exported, broken -----------------------------------------------------------------------------------

SHARED, GPT, UNET = "modeling_quern.py", "modeling_quern_gpt.py", "modeling_quern_unet.py"
BROKEN = {
    "window off by one": (SHARED, "keys > queries - window", "keys >= queries - window"),
    "sees what follows": (SHARED, "seen = keys <= queries", "seen = keys <= queries + 1"),
    "rotated the other way": (SHARED, "angles.cos(), angles.sin()", "angles.cos(), -angles.sin() / 2"),
    "gpt: no softcap": (GPT, "return self.config.softcap * torch.tanh(logits / self.config.softcap)", "return logits"),
    "gpt: no smear": (GPT, "return x + self.smear_scale * gate * before", "return x"),
    "gpt: backout of another layer": (GPT, "len(self.blocks) // 2 - 1", "len(self.blocks) // 2"),
    "unet: documents see each other": (UNET, "return self.config.bos_token_id", "return None"),
    "unet: skips in the same order": (UNET, "skips.pop()", "skips.pop(0)"),
    "unet: all pairs turn": (SHARED, "torch.linspace(0, 1, head", "torch.linspace(0, 2, head"),
    "gpt: keys of the token itself": (SHARED, "known[:, :, :-1], (0, 0, 1, 0)", "known, (0, 0, 0, 0)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_law_can_fail(name: str, tmp_path: Path) -> None:
    file, code, broken = BROKEN[name]
    for kind in [name.split(":")[0]] if ":" in name else list(LENGTHS):
        recipe = toy_recipe(kind, depth=4)
        folder = exported(tmp_path / kind, recipe)
        text = (folder / file).read_text(encoding="utf-8")
        assert text.count(code) == 1
        (folder / file).write_text(text.replace(code, broken), encoding="utf-8")
        # transformers takes the model's code that it knows already where the configuration's is the same.
        with (folder / "modeling_quern.py").open("a", encoding="utf-8") as configuration:
            configuration.write(f"# {name}\n")
        theirs = load_exported(folder)
        assert deviation(theirs, model_of(recipe), LENGTHS[kind][-2:]) > 2 * BAR
