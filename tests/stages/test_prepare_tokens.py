"""Tokens that are there already: which files train, which validate, which tokenizer reads them."""

import hashlib
import inspect
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from tiktoken_ext import openai_public
from tiktoken_ext.openai_public import r50k_pat_str

from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.estimate import memory_check
from quern.generate.engine import Engine
from quern.mesh import alone
from quern.recipe import Recipe, Resolved, TextRecipe
from quern.recipes.gpt import RECIPE as GPT_RECIPE
from quern.recipes.unet import RECIPE
from quern.resolve import resolve
from quern.runs.load import load
from quern.runs.origin import read_saved
from quern.runs.run_dir import RunDir
from quern.stages import pretrain
from quern.stages import tokenizers as vocabularies
from quern.stages.prepare import open_source, prepare
from quern.stages.prepare_tokens import is_tokens
from quern.stages.session import Session
from quern.text.hugging_face import tokenizer_json
from quern.text.tokenizer import Tokenizer
from tests.support.command import Told
from tests.support.command import run as run_command
from tests.support.memory_corpus import ids_of, texts_of
from tests.support.rows import write_rows
from tests.support.small_text import token_shard, write_tiktoken
from tests.support.toy_training import CPU

pytestmark = pytest.mark.usefixtures("eager")

TOKENIZER = Tokenizer.train(["the miller grinds the grain and the baker bakes the bread, day after day"] * 4, 280)


def texts(count: int, start: int = 0) -> list[str]:
    return [f"the grain {i} and the bread {i * i}" for i in range(start, start + count)]


def write_bin(path: Path, documents: list[str]) -> Path:
    path.write_bytes(token_shard(TOKENIZER, documents))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return str(TOKENIZER.save(tmp_path / "tokenizer.json"))


def recipe_for(data: Path, tokenizer: str | None, val: Path | None = None, megabytes: float = 1.0) -> Resolved:
    text = TextRecipe(tokenizer=tokenizer, val_megabytes=megabytes)
    return Resolved.of(resolve(replace(RECIPE, data=str(data), val=str(val) if val else None, text=text)))


read = partial(texts_of, tokenizer=TOKENIZER)
"""The documents of a corpus."""


def test_a_folder_as_the_speedruns(tmp_path: Path, tokenizer: str) -> None:
    for name, first in [("valley_train_000001", 0), ("valley_train_000002", 30), ("valley_val_000000", 60)]:
        write_bin(tmp_path / f"{name}.bin", texts(30, first))
    prepared = prepare(recipe_for(tmp_path, tokenizer), tmp_path / "out", print)
    assert read(prepared.train) == texts(60) and read(prepared.val) == texts(30, 60)
    several = [f"{tmp_path}/*_00000[12].bin", f"{tmp_path}/valley_val_000000.bin"]
    again = prepare(replace(recipe_for(tmp_path, tokenizer), data="\n".join(several)), tmp_path / "out", print)
    assert again.origin == prepared.origin
    assert prepared.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert prepared.facts["data"]["train"] == {"documents": 60, "tokens": prepared.train.num_tokens}
    assert prepared.facts["tokenizer"]["compression"][0]["bytes_per_token"] > 1


def test_one_file_holds_out_every_twentieth_document(tmp_path: Path, tokenizer: str) -> None:
    prepared = prepare(recipe_for(write_bin(tmp_path / "x.bin", texts(100)), tokenizer), tmp_path / "out", print)
    assert read(prepared.val) == texts(100)[10::20]
    assert sorted(read(prepared.train) + read(prepared.val)) == sorted(texts(100))


def test_validation_is_as_much_as_was_asked_for(tmp_path: Path, tokenizer: str) -> None:
    path, val = write_bin(tmp_path / "x.bin", texts(50)), write_bin(tmp_path / "y.bin", texts(50, 50))
    for data in (path, tmp_path):  # a folder may hold the validation file: that is not trained on
        prepared = prepare(recipe_for(data, tokenizer, val, megabytes=1e-4), tmp_path / "out", print)  # 25 tokens
        assert read(prepared.train) == texts(50)
        kept = read(prepared.val)
        assert kept == texts(50, 50)[: len(kept)]
        assert prepared.val.num_tokens - prepared.val.lengths[-1] < 25 <= prepared.val.num_tokens


def test_what_is_missing_is_said(tmp_path: Path, tokenizer: str) -> None:
    path = write_bin(tmp_path / "x.bin", texts(100))
    Path(tokenizer).rename(tokenizer := str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match="is tokens already, .* name its file with --text.tokenizer, a tokenizer.json"):
        prepare(recipe_for(path, None), tmp_path / "out", print)
    few = write_bin(tmp_path / "few.bin", texts(3))
    with pytest.raises(ValueError, match="too few documents to hold some out: name a file with --val"):
        prepare(recipe_for(few, tokenizer), tmp_path / "out", print)
    (below := tmp_path / "held" / "below").mkdir(parents=True)
    shutil.copy(few, below)
    with pytest.raises(FileNotFoundError, match="held: there is no .bin file of that name, nor one in a folder of"):
        prepare(replace(recipe_for(path, tokenizer), val=str(tmp_path / "held")), tmp_path / "out", print)
    for recipe in (recipe_for(path, None), replace(recipe_for(path, None), make_documents=lines)):
        with pytest.raises(ValueError, match=r"x.bin is tokens: a new tokenizer and a recipe's make_documents"):
            open_source(recipe, tmp_path / "out")


def test_text_beside_a_bin_file_is_text_and_what_describes_tokens_is_not(tmp_path: Path, tokenizer: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_bin(folder / "x.bin", texts(100))
    for name in ("README.md", "manifest.json", "x.starts.npy", ".notes.txt"):
        (folder / name).write_text("{}", encoding="utf-8")
    said: list[str] = []
    prepared = prepare(recipe_for(folder, tokenizer), tmp_path / "out", said.append)
    assert read(prepared.train)[:3] == texts(3)
    assert said[2] == "tokens: ignoring README.md (2 B), manifest.json (2 B), x.starts.npy (2 B)"
    (folder / "out").mkdir()
    (folder / "out" / "metrics.jsonl").write_text("{}", encoding="utf-8")
    assert is_tokens(str(folder), folder / "out") and not is_tokens(str(folder))
    (folder / "prepare.py").touch()
    assert is_tokens(str(folder), folder / "out"), "the program that wrote the files"
    (folder / "x.bin").write_bytes(b"firmware")
    assert not is_tokens(str(folder), folder / "out"), "a project with a binary"
    (folder / "x.bin").rename(folder / "openwebtext_train.bin")
    assert is_tokens(str(folder), folder / "out"), "in the manner of nanoGPT's, which have no header"
    (folder / "openwebtext_train.bin").rename(folder / "retrained.bin")
    assert not is_tokens(str(folder), folder / "out"), "no word of a split"
    (folder / "prepare.py").rename(folder / "config.yaml")
    assert is_tokens(str(folder), folder / "out"), "settings are no text"


def toy(folder: Path, tokenizer: str) -> Recipe:
    data, text = str(write_bin(folder / "x.bin", texts(80))), TextRecipe(tokenizer=tokenizer)
    shape = replace(GPT_RECIPE.model, width=32, head_dim=16, context=16)
    train = replace(GPT_RECIPE.train, steps=2, batch_tokens=64)
    return replace(GPT_RECIPE, depth=1, data=data, text=text, model=shape, train=train)


def cropped(recipe: Resolved, corpus: Corpus) -> Loader:
    return Loader(corpus, recipe.model.context, 4, recipe.data_seed, "best-fit", too_long="crop")


def test_a_packing_is_not_advised_where_the_recipe_makes_its_own_batches(tmp_path: Path, tokenizer: str) -> None:
    said: list[str] = []
    session = Session(stage="pretrain", machine=CPU, run_dir=RunDir(tmp_path / "out", "cropped"), log=said.append)
    assert pretrain.run(replace(toy(tmp_path, tokenizer), make_batches=cropped), session) == 0
    assert any(line.endswith("% of the text is in no row") for line in said), said


def test_gpt_fills_up_a_foreign_vocabulary_and_never_writes_what_fills_it(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "room_of_a_rank", lambda *_: 1.2e7)  # the default vocabulary would not fit
    recipe, run_dir, said = toy(tmp_path, tokenizer), RunDir(tmp_path / "out", "bin"), list[str]()
    horizon = 2 * 64 / (12 * 32**2 + 320 * 32)  # of the parameters with the tokenizer's vocabulary: two steps
    recipe = replace(recipe, train=replace(recipe.train, steps=None, horizon_ratio=horizon))
    session = Session(stage="pretrain", machine=CPU, run_dir=run_dir, log=said.append)
    assert pretrain.run(recipe, session) == 0
    timed = replace(recipe, train=replace(recipe.train, steps=None, minutes=1.0))
    cut = replace(session, run_dir=RunDir(tmp_path / "cut", "bin"), mesh=replace(alone(), tp=2))
    with pytest.raises(ValueError, match="train.minutes cannot be measured with --tp: give train.steps instead"):
        pretrain.run(timed, cut)
    assert not cut.run_dir.out.exists(), "before the text is read"
    saved = read_saved(run_dir, "pretrain")
    assert saved is not None and saved.train.steps == 2
    assert pretrain.run(replace(saved, train=replace(saved.train, steps=3)), replace(session, resume=True)) == 0
    needed = [line.partition("memory: ")[2] for line in said if "memory: " in line]
    assert len(needed) == 2 and needed[0] == needed[1], "a run that begins counts the tokenizer's vocabulary"
    loaded = load(run_dir, CPU, print)
    assert loaded.tokenizer.bos == loaded.recipe.model.bos == TOKENIZER.bos
    assert loaded.recipe.model.vocab_size == loaded.model.head.out_features == 320
    with torch.no_grad():  # an id beyond the tokenizer's is the likeliest one everywhere
        loaded.model.head.weight[:] = 0
        loaded.model.head.weight[-2:] = torch.randn(32) * torch.tensor([[9.0], [-9.0]])
    ((reply,),) = Engine(loaded.model, loaded.tokenizer, CPU).generate([[TOKENIZER.bos]], max_tokens=9)
    assert reply.ids and max(reply.ids) < TOKENIZER.vocab_size


def tiktoken_file(path: Path) -> tiktoken.Encoding:
    """Writes a vocabulary of GPT-2's size and order of bytes. Returns tiktoken's own encoding with it."""
    ranks = write_tiktoken(path, 50_256, TOKENIZER.merges)
    special = {"<|endoftext|>": 50_256}
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of tiktoken, in which a made vocabulary stands for GPT-2's."""
    tiktoken_file(tmp_path / "made.tiktoken")
    body = (tmp_path / "made.tiktoken").read_bytes()
    file = (vocabularies.R50K[0], hashlib.sha256(body).hexdigest())
    monkeypatch.setattr(vocabularies, "VOCABULARIES", {**vocabularies.VOCABULARIES, "gpt2": file})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "cache" / hashlib.sha1(f"{vocabularies.BASE}/{file[0]}".encode()).hexdigest()
    path.parent.mkdir()
    path.write_bytes(body)


@pytest.mark.usefixtures("cache")
def test_a_vocabulary_is_named_where_tiktoken_has_it(here: Path, told: Told) -> None:
    Path("t.txt").write_text("\n\n".join(texts(90)), encoding="utf-8")
    own = ["tokenizer", "--data", "t.txt", "--text.vocab-size", "300", "--text.val-megabytes", "0.001"]
    assert re.search(r"  held-out text .*\n    as gpt2's tokens +\d\.\d\d bytes per token\n", told(*own))
    named = ["prepare", "--data", "t.txt", "--text.val-megabytes", "0.001", "--text.tokenizer", "gpt2"]
    told(*named, "--to", "bin", "--dir", "tokens")
    of_file = Tokenizer.from_tiktoken(here / "made.tiktoken")
    assert Tokenizer.load(here / "tokens/tokenizer.json").fingerprint == of_file.fingerprint
    recipe = replace(recipe_for(here / "tokens", None), make_documents=None)
    assert prepare(recipe, here / "out", print).tokenizer.fingerprint == of_file.fingerprint  # that beside them
    Path("tokens/tokenizer.json").unlink()
    assert prepare(recipe, here / "out", print).tokenizer.fingerprint == of_file.fingerprint  # GPT-2's ids
    shutil.rmtree("cache")
    vocabularies.require_tokenizer("gpt2", of_file, saved="gpt2")
    with pytest.raises(FileNotFoundError, match="--text.tokenizer gpt2: the cache of tiktoken, "):
        vocabularies.require_tokenizer("gpt2", of_file, saved=None)
    said = told(*named[:-1], "cl100k_base", code=1)
    assert "--text.tokenizer cl100k_base: the cache of tiktoken, " in said
    assert 'tiktoken.get_encoding("cl100k_base")' in said and said.count("\n") == 1


def test_the_vocabularies_are_tiktokens() -> None:
    source = inspect.getsource(openai_public)
    assert {"gpt2", "r50k_base", "cl100k_base", "o200k_base", "gpt4"} == set(vocabularies.VOCABULARIES)
    for file, digest in set(vocabularies.VOCABULARIES.values()):
        assert re.search(rf'"{vocabularies.BASE}/{file}"', source) and digest in source


@pytest.mark.parametrize("to", ["bin", "nanogpt"])
def test_text_becomes_the_tokens_that_tiktoken_makes_and_is_read_back(
    here: Path, to: str, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt2 = tiktoken_file(here / "r50k_base.tiktoken")
    rows = [f"{text}; köln 世界 😀 don't 12345\n\n  {number}" for number, text in enumerate(texts(90))]
    splits = {"train": rows[:80], "val": rows[80:]}
    for split, some in splits.items():
        write_rows(here / f"{split}.jsonl", ({"text": text} for text in some))
    flags = ["prepare", "--data", "train.jsonl", "--val", "val.jsonl", "--text.tokenizer", "r50k_base.tiktoken"]
    flags += ["--to", to, "--dir", "to kens"]
    said = told(*flags)
    assert "to read them: --data 'to kens' --text.tokenizer 'to kens/tokenizer.json'" in said
    assert "training the tok" not in said
    run_command(*flags, code=1)
    said = capsys.readouterr()
    assert said.out == "" and ".bin is there already: name a new folder" in said.err, "before the text is read"
    for split, some in splits.items():
        (path,) = (here / "to kens").glob(f"*{split}_0*.bin" if to == "bin" else f"{split}.bin")
        ids = np.fromfile(path, dtype="<u2", offset=1024 if to == "bin" else 0).tolist()
        encoded = gpt2.encode_ordinary_batch(some)
        assert ids == [t for text in encoded for t in ((50_256, *text) if to == "bin" else (*text, 50_256))]
    again = prepare(recipe_for(here / "to kens", "to kens/tokenizer.json"), here / "out", print)
    for split, corpus in (("train", again.train), ("val", again.val)):
        assert texts_of(corpus, again.tokenizer) == splits[split]


def test_ids_that_do_not_fit_are_refused_before_the_text_is_tokenized(here: Path, told: Told) -> None:
    Path("t.txt").write_text("\n".join(texts(300)), encoding="utf-8")
    Tokenizer([bytes([a, b]) for a in range(256) for b in range(256)]).save(Path("large.json"))
    flags = ["--data", "t.txt", "--text.tokenizer", "large.json", "--to", "bin", "--dir", "to"]
    said = told("prepare", *flags, code=1)
    assert "the text has id 65,792, and these files hold ids below 65,536" in said
    assert not list(here.rglob("*.bin"))


def test_a_tokenizer_json_of_hugging_face_prepares_text_and_need_not_be_there_afterwards(tmp_path: Path) -> None:
    hf = pytest.importorskip("tokenizers", reason="needs the extra export")
    library = hf.Tokenizer.from_str(json.dumps(tokenizer_json(TOKENIZER)))
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    (tmp_path / "t.txt").write_text("\n".join(texts(50)), encoding="utf-8")
    recipe = replace(recipe_for(tmp_path / "t.txt", str(path), megabytes=0.001), make_documents=lines)
    prepared = prepare(recipe, tmp_path / "out", print)
    ids = [ids[1:] for ids in ids_of(prepared.train)]
    assert ids == [library.encode(text, add_special_tokens=False).ids for text in read(prepared.train)]
    path.unlink()
    assert prepare(recipe, tmp_path / "out", print, prepared.tokenizer).origin.tokens == prepared.origin.tokens
    with pytest.raises(FileNotFoundError, match="--text.tokenizer .*tokenizer.json: there is no such file"):
        prepare(recipe, tmp_path / "out", print)


def lines(texts: Iterator[str], split: str) -> Iterator[str]:
    return (line for text in texts for line in text.splitlines())
