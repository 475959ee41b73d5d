"""Exported = native: transformers computes what quern does, from the exported files alone; imported = exported.

The oracle is `transformers.LlamaForCausalLM` for `llama`, and for `gpt` and `unet` the Python files in the exported
folder. Neither shares code with quern. Logits within four roundings of their sums, gradients within 1e-4 of the
largest, weights back bit for bit, ids equal, greedy tokens the engine's. Some tests break what is exported and require
the same comparison to notice.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies
from safetensors.torch import load_file, save_file

from quern.generate.engine import Engine
from quern.generate.sampling import GREEDY
from quern.interop import import_hf
from quern.interop.llama_format import weights_to
from quern.model.base import LanguageModel, loss_sum
from quern.recipes.llama import RECIPE
from quern.runs.load import load
from quern.runs.run_dir import RunDir
from quern.text.chat import render, render_prompt
from quern.text.hugging_face import DIALECT, tokenizer_json
from quern.text.tokenizer import Tokenizer
from tests.laws.table import Law
from tests.laws.test_tokenizer_law import FIXTURES
from tests.support.exported import CHAT, LLAMAS, exported, load_exported, model_of, modules_in, relative, rounding
from tests.support.exported import toy_recipe as recipe_of
from tests.support.models import CPU as FP32
from tests.support.toy_engine import toy_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.usefixtures("eager")

BAR = 4
"""Standard deviations of rounding, of the largest logit."""
LENGTHS = {"llama": (1, 41), "gpt": (1, 7, 8, 9, 31, 32, 50), "unet": (1, 40, 127, 128, 129, 200, 300)}
"""Tokens; for gpt and unet shorter and longer than the short window, and longer than the context."""
OURS = ("gpt", "unet")
"""The architectures whose code is exported."""
AGREE = {"llama": "exported Llama = transformers' Llama"} | {kind: f"exported {kind} = native" for kind in OURS}
OVER = {"llama": "odd sizes, grouped queries"} | dict.fromkeys(OURS, "window patterns, longer than window and context")
Shapes = dict[str, tuple[str, dict[str, Any]]]
OF_LLAMA: Shapes = {f"llama, {name}": ("llama", shape) for name, shape in LLAMAS.items()}
AS_ONE_TRAINS = {"depth": 6, "width": 384, "head_dim": 64, "heads": 6, "kv_heads": 6, "mlp_width": 1536}
SHAPES: Shapes = {
    **OF_LLAMA,
    "llama, depth 6, as one trains": ("llama", AS_ONE_TRAINS),
    "gpt, SSSL": ("gpt", {"windows": "SSSL"}),
    "gpt, L, one layer": ("gpt", {"windows": "L", "depth": 1}),
    "gpt, S, three layers, keys shared by two": ("gpt", {"windows": "S", "depth": 3, "kv_heads": 2}),
    "gpt, SL, one key head, another base and cap": (
        "gpt",
        {"windows": "SL", "depth": 5, "kv_heads": 1, "rope_base": 500.0, "softcap": 4.0},
    ),
    "gpt, SL, bigrams": ("gpt", {"windows": "SL", "bigrams": True}),
    "gpt, SL, no key offset": ("gpt", {"windows": "SL", "kv_heads": 2, "key_offset": False}),
    "gpt, SL, heads of 64": ("gpt", {"windows": "SL", "heads": 2, "kv_heads": 2, "head_dim": 64, "width": 128}),
    "unet, LSSSLSSLSSSL": ("unet", {"depth": 6}),
    "unet, L, two layers": ("unet", {"windows": "L", "depth": 2}),
    "unet, SL, another base and cap": ("unet", {"windows": "SL", "rope_base": 100.0, "softcap": 5.0}),
    "unet, S, twelve layers": ("unet", {"windows": "S", "depth": 12}),
}
OF_GRADIENTS: Shapes = {**OF_LLAMA, "gpt": ("gpt", {}), "unet": ("unet", {})}


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
def test_logits_are_native(name: str, tmp_path: Path, law: Law) -> None:
    kind, shape = SHAPES[name]
    recipe = recipe_of(kind, **shape)
    theirs = load_exported(exported(tmp_path, recipe))
    assert theirs.dtype == torch.float32 and isinstance(theirs, transformers.LlamaForCausalLM) == (kind == "llama")
    found = deviation(theirs, model_of(recipe), LENGTHS[kind])
    law(f"{AGREE[kind]}: logits, fp32, {OVER[kind]}, in roundings", found, BAR)


@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_gradients_are_native(name: str, tmp_path: Path, law: Law) -> None:
    kind, shape = OF_GRADIENTS[name]
    recipe, ids = recipe_of(kind, **shape), tokens(LENGTHS[kind][-1])
    theirs, ours = load_exported(exported(tmp_path, recipe)), model_of(recipe)
    loss = theirs(ids, labels=ids).loss
    loss.backward()
    inputs, targets = ids[:, :-1], ids[:, 1:]
    if kind == "unet":  # its own loss counts the filler rows
        total = F.cross_entropy(native(ours, inputs).flatten(0, 1), targets.flatten())
    else:
        total, _ = loss_sum(ours, inputs, targets, torch.full(targets.shape, 1 / targets.numel()))
    total.backward()
    wanted = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    if kind == "llama":
        wanted = weights_to(wanted, recipe.model.depth or 0)
    found = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    worst = max(float((g - wanted[n][: len(g)]).abs().max() / wanted[n].abs().max()) for n, g in found.items())
    law(f"{AGREE[kind]}: every gradient of the loss, fp32, relative", worst, 1e-4)
    assert abs(total.item() - loss.item()) <= 1e-5 * loss.item()


def prompts(kind: str) -> list[list[int]]:
    """Prompts of several lengths; with the reply, the longest is longer than the short window."""
    tokenizer = toy_tokenizer()
    words = tokenizer.encode("The miller grinds the grain at dawn, and the stone hums. " * 8)
    return [[tokenizer.bos, *words[:n]] for n in ((2, 90, 130) if kind == "unet" else (2, 6, 11))]


@pytest.mark.parametrize("kind", LENGTHS)
def test_generated_is_the_engines(kind: str, tmp_path: Path, law: Law) -> None:
    """With the cache, without it, and all prompts in one batch that is padded on the left."""
    recipe = recipe_of(kind)
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
    law(f"generated by transformers = by the engine, {kind}: greedy tokens, cached or not, padded")


@pytest.mark.parametrize("kind", OURS)
@torch.no_grad()
def test_cached_and_padded_is_whole(kind: str, tmp_path: Path, law: Law) -> None:
    """In pieces through the cache, and with padding on either side."""
    theirs, T = load_exported(exported(tmp_path, recipe_of(kind))), LENGTHS[kind][-1]
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
    law(f"exported {kind}, in pieces with its cache, padded = whole: logits, fp32", worst, 1e-5)


@pytest.mark.parametrize("kind", OURS)
def test_bf16_weights_are_the_masters_rounded(kind: str, tmp_path: Path, law: Law) -> None:
    recipe = recipe_of(kind)
    theirs = load_exported(exported(tmp_path, recipe, torch.bfloat16))
    found, masters = theirs.state_dict(), model_of(recipe).state_dict()
    equal = found.keys() == masters.keys() and all(
        tensor.dtype == torch.bfloat16 and torch.equal(tensor, masters[name][: len(tensor)].to(torch.bfloat16))
        for name, tensor in found.items()
    )
    theirs.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    equal = equal and again.keys() == found.keys() and all(torch.equal(again[name], found[name]) for name in again)
    law(f"exported {kind} in bf16, loaded and saved by transformers = masters, rounded: weights", equal)
    ids = tokens(40)
    with torch.no_grad():
        assert (theirs(ids).logits - native(model_of(recipe), ids)).abs().mean() < 0.2


def test_imported_is_exported_bit_for_bit(tmp_path: Path, law: Law) -> None:
    recipe = recipe_of("llama")
    folder = exported(tmp_path, recipe)
    copy = RunDir(tmp_path / "out", "copy")
    import_hf.run(folder, copy, recipe, stage="pretrain", tokenizer=None, log=lambda line: None)
    loaded, before = load(copy, FP32, print), model_of(recipe).state_dict()
    now = loaded.model.state_dict()
    equal = now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)
    law("imported = exported: weights, fp32; tokenizer", equal)
    assert loaded.tokenizer.fingerprint == toy_tokenizer().fingerprint
    assert loaded.recipe.model == recipe.model


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "tied"), [("float32", 2, False), ("bfloat16", 1, True), ("float16", 4, False)]
)
def test_what_transformers_saved_is_read_back(dtype: str, kv_heads: int, tied: bool, tmp_path: Path, law: Law) -> None:
    """A model of theirs, never ours before, in several files, its tokenizer written by their library too."""
    folder = tmp_path / "theirs"
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"vocab_size": toy_tokenizer().vocab_size, "num_key_value_heads": kv_heads, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**shape, tie_word_embeddings=tied, initializer_range=0.2)
    transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="30KB")
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (folder / "model.safetensors.index.json").exists()
    transformers.AutoTokenizer.from_pretrained(exported(tmp_path, recipe_of("llama"))).save_pretrained(folder)
    run_dir = RunDir(tmp_path / "out", "theirs")
    import_hf.run(folder, run_dir, RECIPE, stage="pretrain", tokenizer=None, log=lambda line: None)
    loaded = load(run_dir, FP32, print)
    assert loaded.recipe.model.kv_heads == kv_heads
    found = deviation(theirs, loaded.model, LENGTHS["llama"])
    law("imported Llama = transformers' own: logits, fp32, several files, tied or not, in roundings", found, BAR)
    assert loaded.tokenizer.fingerprint == toy_tokenizer().fingerprint


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
    "unet: all pairs turn": (SHARED, "/ max(1, turning - 1)", "* 2 / max(1, turning - 1)"),
    "llama: another epsilon": ("config.json", '"rms_norm_eps": 0.001', '"rms_norm_eps": 1e-5'),
    "gpt: keys of the token itself": (SHARED, "known[:, :, :-1], (0, 0, 1, 0)", "known, (0, 0, 0, 0)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_law_can_fail(name: str, tmp_path: Path) -> None:
    file, code, broken = BROKEN[name]
    for kind in [name.split(":")[0]] if ":" in name else OURS:
        recipe = recipe_of(kind, depth=4)
        folder = exported(tmp_path / kind, recipe)
        text = (folder / file).read_text(encoding="utf-8")
        assert text.count(code) == 1
        (folder / file).write_text(text.replace(code, broken), encoding="utf-8")
        if kind in OURS:  # transformers takes the model's code that it knows where the configuration's is the same
            with (folder / SHARED).open("a", encoding="utf-8") as configuration:
                configuration.write(f"# {name}\n")
        theirs = load_exported(folder)
        assert deviation(theirs, model_of(recipe), LENGTHS[kind][-2:]) > 2 * BAR


def test_the_law_tells_the_layouts_of_rotary_pairs_apart(tmp_path: Path) -> None:
    """Neighbours instead of halves."""
    recipe = recipe_of("llama")
    file = exported(tmp_path, recipe) / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if "q_proj" in name or "k_proj" in name]:
        by_head = weights[name].unflatten(0, (-1, 2, (recipe.model.head_dim or 0) // 2))
        weights[name] = by_head.transpose(1, 2).flatten(0, 2).contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    assert deviation(load_exported(file.parent), model_of(recipe), LENGTHS["llama"]) > 10 * BAR


# The words --------------------------------------------------------------------------------------------------

ODD_TEXTS = (
    *FIXTURES,
    "    indented\n\n\n  twice\t\ttabs \r\n\r\n trailing   ",
    "don't DON'T we'LL I'm they'ſ '’s 你好，世界。 Привет, мир. ²³ Ⅻ \u3000\x1f\x85",
    "hahahahahaha aaaaaaa ababab    ha" + "1" * 301,
    "for i in range(10):\n\tprint(f'{i:>3}')  # !!! ... ---\n",
)


def test_the_tokenizer_is_transformers(tmp_path: Path, law: Law) -> None:
    ours, theirs = toy_tokenizer(), transformers.AutoTokenizer.from_pretrained(exported(tmp_path, recipe_of("llama")))
    for text in ODD_TEXTS:
        ids = ours.encode(text)
        found = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert found == ids, text
        assert theirs.decode(ids) == ours.decode(ids), text
        if "<|" not in text:
            assert theirs(text)["input_ids"] == [ours.bos, *ids], text
    halves = [ours.encode("你")[0], ours.bos, 255, 0xC3]
    assert theirs.decode(halves) == ours.decode(halves)
    assert len(theirs) == ours.vocab_size
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos, ours.special("<|assistant_end|>"))
    law("exported tokenizer = native: ids and text of odd strings")


ODD_CHARACTERS = strategies.sampled_from("ab'sldte 1²٣\n\r\t\u00a0\u0085\u2028é\u0301?!-हि你👋")


@pytest.mark.parametrize("number", range(len(DIALECT)))
def test_text_is_split_as_they_split_it(number: int) -> None:
    pairs = [bytes([i // 256, i % 256]) for i in range(2**16)]  # ids tell nearly every split of a text from any other
    ours = Tokenizer(pairs, list(DIALECT)[number], single_bytes=bytes(reversed(range(256))))
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(ours)))

    @hypothesis.settings(max_examples=300)
    @hypothesis.given(strategies.text(ODD_CHARACTERS, max_size=40))
    def same(text: str) -> None:
        assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text)

    same()


def test_the_chat_template_is_the_chat_format(tmp_path: Path, law: Law) -> None:
    ours, theirs = toy_tokenizer(), transformers.AutoTokenizer.from_pretrained(exported(tmp_path, recipe_of("llama")))
    for count in (2, 4):
        asked = theirs.apply_chat_template(CHAT[:count], add_generation_prompt=True, return_dict=False)
        assert asked == render_prompt(ours, CHAT[:count])
    assert theirs.apply_chat_template(CHAT[:3], return_dict=False) == render(ours, CHAT[:3])[0].tolist()
    law("exported chat template = native: ids of a conversation")
