"""Exported = native: Hugging Face's own Llama computes what ours does, from the files alone; imported = exported.

The oracle is `transformers.LlamaForCausalLM`, which shares no code with quern. Logits within four roundings of
their sums, gradients within 1e-4 of the largest, weights back bit for bit, ids equal. Some tests break what is exported
and require the same comparison to notice.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from safetensors.torch import load_file, save_file

from quern.generate.engine import Engine
from quern.generate.sampling import GREEDY
from quern.interop import export_hf, import_hf
from quern.interop.llama_format import weights_to
from quern.model.base import loss_sum
from quern.model.context import CausalContext
from quern.recipe import Resolved
from quern.recipes.llama import RECIPE
from quern.runs.load import load
from quern.runs.run_dir import RunDir
from quern.text.chat import render, render_prompt
from quern.text.hugging_face import DIALECT, tokenizer_json
from quern.text.tokenizer import Tokenizer
from tests.support.llama_run import CHAT, FP32, llama_recipe, model_of, relative, rounding, write_run
from tests.support.llama_run import SHAPES as ALL_SHAPES
from tests.support.toy_engine import toy_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.usefixtures("eager")

BAR = 4
"""Standard deviations of rounding, of the largest logit."""
SHAPES: dict[str, dict[str, Any]] = ALL_SHAPES | {
    "depth 6, as one trains": {"depth": 6, "width": 384, "head_dim": 64, "heads": 6, "kv_heads": 6, "mlp_width": 1536}
}


def tokens(recipe: Resolved, B: int = 2, T: int = 41) -> torch.Tensor:
    assert recipe.model.vocab_size
    return torch.randint(0, recipe.model.vocab_size, (B, T), generator=torch.Generator().manual_seed(T))


def exported(tmp_path: Path, recipe: Resolved) -> Path:
    run_dir, folder = write_run(tmp_path / "out", recipe), tmp_path / "exported"
    export_hf.run(run_dir, folder, stage=None, dtype=torch.float32, log=lambda line: None)
    return folder


def deviation(folder: Path, recipe: Resolved, T: int = 41) -> float:
    """Largest difference of a logit between the two models, relative, in roundings (`rounding`)."""
    theirs, ours, ids = transformers.LlamaForCausalLM.from_pretrained(folder), model_of(recipe), tokens(recipe, T=T)
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        logits = ours.logits(ours(ids, CausalContext()))
        assert logits.std() > 1, "logits this flat prove nothing"
        return relative(theirs(ids).logits, logits) / rounding(ours)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_transformers(name: str, tmp_path: Path, law: Callable[..., None]) -> None:
    recipe = llama_recipe(**SHAPES[name])
    folder = exported(tmp_path, recipe)
    found = max(deviation(folder, recipe), deviation(folder, recipe, T=1))
    law("exported Llama = transformers' Llama: logits, fp32, odd sizes, grouped queries, in roundings", found, "≤ 4")
    assert found <= BAR


@pytest.mark.parametrize("name", ALL_SHAPES)
def test_gradients_are_transformers(name: str, tmp_path: Path, law: Callable[..., None]) -> None:
    recipe = llama_recipe(**SHAPES[name])
    theirs, ours = transformers.LlamaForCausalLM.from_pretrained(exported(tmp_path, recipe)), model_of(recipe)
    ids = tokens(recipe)
    loss = theirs(ids, labels=ids).loss
    loss.backward()
    inputs, targets = ids[:, :-1], ids[:, 1:]
    total, _ = loss_sum(ours, inputs, targets, torch.full(targets.shape, 1 / targets.numel()))
    total.backward()
    grads = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    found = weights_to(grads, recipe.model.depth or 0)
    assert found.keys() == expected.keys()
    worst = max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items())
    law("exported Llama = transformers' Llama: every gradient of the loss, fp32, relative", worst, "≤ 1e-4")
    assert abs(total.item() - loss.item()) <= 1e-5 * loss.item() and worst <= 1e-4


def test_imported_is_exported_bit_for_bit(tmp_path: Path, law: Callable[..., None]) -> None:
    recipe = llama_recipe()
    folder = exported(tmp_path, recipe)
    copy = RunDir(tmp_path / "out", "copy")
    import_hf.run(folder, copy, recipe, stage="pretrain", tokenizer=None, log=lambda line: None)
    loaded, before = load(copy, FP32, print), model_of(recipe).state_dict()
    now = loaded.model.state_dict()
    equal = now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)
    law("imported = exported: weights, fp32; tokenizer", equal, "equal")
    assert equal and loaded.tokenizer.fingerprint == toy_tokenizer().fingerprint
    assert loaded.recipe.model == recipe.model


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "tied"), [("float32", 2, False), ("bfloat16", 1, True), ("float16", 4, False)]
)
def test_what_transformers_saved_is_read_back(
    dtype: str, kv_heads: int, tied: bool, tmp_path: Path, law: Callable[..., None]
) -> None:
    """A model of theirs, never ours before, in several files, its tokenizer written by their library too."""
    folder = tmp_path / "theirs"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=toy_tokenizer().vocab_size,
        hidden_size=48,
        intermediate_size=76,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="30KB")
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (folder / "model.safetensors.index.json").exists()
    transformers.AutoTokenizer.from_pretrained(exported(tmp_path, llama_recipe())).save_pretrained(folder)
    run_dir = RunDir(tmp_path / "out", "theirs")
    import_hf.run(folder, run_dir, RECIPE, stage="pretrain", tokenizer=None, log=lambda line: None)
    loaded = load(run_dir, FP32, print)
    assert loaded.recipe.model.kv_heads == kv_heads
    ids = tokens(loaded.recipe)
    with torch.no_grad():
        logits = loaded.model.logits(loaded.model(ids, CausalContext()))
        found = relative(theirs(ids).logits, logits) / rounding(theirs)
    law("imported Llama = transformers' own: logits, fp32, several files, tied or not, in roundings", found, "≤ 4")
    assert logits.std() > 0.5 and found <= BAR
    assert loaded.tokenizer.fingerprint == toy_tokenizer().fingerprint


# What is exported, broken -----------------------------------------------------------------------------------


def interleave_halves(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """The other layout of rotary pairs: neighbours instead of halves."""
    for name in [name for name in weights if "q_proj" in name or "k_proj" in name]:
        by_head = weights[name].unflatten(0, (-1, 2, config["head_dim"] // 2))
        weights[name] = by_head.transpose(1, 2).flatten(0, 2).contiguous()


def forget_the_epsilon(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["rms_norm_eps"] = 1e-5


@pytest.mark.parametrize("broken", [interleave_halves, forget_the_epsilon])
def test_the_law_can_fail(broken: Callable[..., None], tmp_path: Path) -> None:
    recipe = llama_recipe()
    folder = exported(tmp_path, recipe)
    assert deviation(folder, recipe) <= BAR
    weights, path = load_file(folder / "model.safetensors"), folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    broken(weights, config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path.write_text(json.dumps(config), encoding="utf-8")
    assert deviation(folder, recipe) > 10 * BAR


# The words --------------------------------------------------------------------------------------------------

ODD_TEXTS = (
    "",
    " ",
    "The miller grinds the grain at dawn, and it's 1234567 o'clock.",
    "    indented\n\n\n  twice\t\ttabs \r\n\r\n trailing   ",
    "don't DON'T we'LL I'm they'ſ '’s",
    "Grüße aus Köln! Ça va? 你好，世界。 Привет, мир. ١٢٣٤٥ ²³ Ⅻ",
    "👋🏽 👨‍👩‍👧 é e\u0301 हिन्दी \u200b\u00a0\u2028\u3000\x00\x1f\x85",
    "a" * 300 + " " * 700 + "\n" * 300 + "1" * 301,
    "hahahahahaha aaaaaaa ababab    ha",
    "<|bos|><|user_start|>Who are you?<|user_end|> <|bos|x <|assistant_end|>",
    "for i in range(10):\n\tprint(f'{i:>3}')  # !!! ... ---\n",
)


def test_the_tokenizer_is_transformers(tmp_path: Path, law: Callable[..., None]) -> None:
    ours, theirs = toy_tokenizer(), transformers.AutoTokenizer.from_pretrained(exported(tmp_path, llama_recipe()))
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
    law("exported tokenizer = native: ids and text of odd strings", "equal", "equal")


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


def test_the_chat_template_is_the_chat_format(tmp_path: Path, law: Callable[..., None]) -> None:
    ours, theirs = toy_tokenizer(), transformers.AutoTokenizer.from_pretrained(exported(tmp_path, llama_recipe()))
    for count in (2, 4):
        asked = theirs.apply_chat_template(CHAT[:count], add_generation_prompt=True, return_dict=False)
        assert asked == render_prompt(ours, CHAT[:count])
    assert theirs.apply_chat_template(CHAT[:3], return_dict=False) == render(ours, CHAT[:3])[0].tolist()
    law("exported chat template = native: ids of a conversation", "equal", "equal")


def test_transformers_generates_what_we_do(tmp_path: Path, law: Callable[..., None]) -> None:
    recipe, tokenizer = llama_recipe(), toy_tokenizer()
    folder = exported(tmp_path, recipe)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
    prompt = [tokenizer.bos, *tokenizer.encode("The miller")]
    ours = Engine(model_of(recipe), tokenizer, FP32).generate([prompt], max_tokens=20, sampling=GREEDY)[0][0].ids
    found = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, temperature=None, top_k=None)
    assert found[0, len(prompt) :].tolist() == ours
    law("generated by transformers = by the engine: greedy tokens", "equal", "equal")
