"""Hugging Face's files of the tokenizer and the chat format: tokenizer.json, its settings, the template; both ways.

The ids of any text are equal, because three things carry over: the split pattern (in Oniguruma's dialect), the rule
that a piece which is a whole token is not merged, and the merges as pairs (`merge_pairs`).

Special tokens in text differ: quern never reads them from text, Hugging Face does unless it is called with
`split_special_tokens=True`. Its chat template relies on this, so a user's message can end a turn there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from quern.records import read_regular, typed
from quern.text.tokenizer import (
    GPT2_SPLIT_PATTERN,
    GPT4_SPLIT_PATTERN,
    GPT4O_SPLIT_PATTERN,
    LLAMA3_SPLIT_PATTERN,
    SPECIAL_TOKENS,
    Tokenizer,
    split_pattern,
    unused_name,
)
from quern.validate import extra

# Oniguruma reads two things differently. A + after a counted repetition is left out, because nothing follows that could
# take characters back. $ matches at the end of any line; in GPT-2's its case is left out, since the next one covers it.
DIALECT = {
    **{split_pattern(n): split_pattern(n).replace(f"{{1,{n}}}+", f"{{1,{n}}}") for n in (1, 2, 3)},
    GPT2_SPLIT_PATTERN: GPT2_SPLIT_PATTERN.replace(r"|\s++$", ""),
    GPT4_SPLIT_PATTERN: GPT4_SPLIT_PATTERN.replace("{1,3}+", "{1,3}").replace("$", r"\z"),
    LLAMA3_SPLIT_PATTERN: LLAMA3_SPLIT_PATTERN,
    GPT4O_SPLIT_PATTERN: GPT4O_SPLIT_PATTERN,
}
"""quern's split patterns, and the same patterns in Oniguruma's dialect."""
ISOLATED = {"type": "Split", "behavior": "Isolated", "invert": False}
SPLITS = (ISOLATED, ISOLATED | {"behavior": "Removed", "invert": True})
"""Both make a piece of each match; every character is in one."""
FIRST_TOKENS = ("<|bos|>", "<|endoftext|>", "<|begin_of_text|>", "<|startoftext|>", "<s>")
"""Names of the token that begins documents."""
_VISIBLE, _OTHERS = {*range(33, 127), *range(161, 173), *range(174, 256)}, count(256)
BYTE_CHARACTERS = tuple(chr(byte if byte in _VISIBLE else next(_OTHERS)) for byte in range(256))
"""The character for each byte: the byte itself if printable, else the next one above 255 (GPT-2's alphabet)."""

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8").strip()
"""`chat.render` of OpenAI's messages and tools (conversations.py) as a Jinja template; with add_generation_prompt,
`chat.render_prompt`. docs/export.md lists what differs. `generation` marks learned words of the assistant, in whole
runs, because transformers marks only the first token of a run's last character."""


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The body of tokenizer.json, with the same ids. Encoding puts BOS first unless add_special_tokens is False.

    Raises:
        ValueError: The split pattern is not one of quern's, so its meaning in Oniguruma is unknown.
        ImportError: `tokenizers` is not installed.
    """
    if tokenizer.pattern not in DIALECT:
        raise ValueError("the tokenizer splits text by a pattern of its own, which may mean something else there")
    with extra("export", "Hugging Face's tokenizer.json needs an extra package"):
        import tokenizers
    hf: Any = tokenizers
    vocabulary = {spell(token): rank for token, rank in tokenizer.ranks.items()}
    merges = [(spell(left), spell(right)) for left, right in merge_pairs(tokenizer).values()]
    made = hf.Tokenizer(hf.models.BPE(vocabulary, merges, ignore_merges=True))
    split = hf.pre_tokenizers.Split(hf.Regex(DIALECT[tokenizer.pattern]), "isolated")
    byte_level = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = hf.pre_tokenizers.Sequence([split, byte_level])
    made.decoder = hf.decoders.ByteLevel()
    made.post_processor = hf.processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B:1", special_tokens=[("<|bos|>", tokenizer.bos)]
    )
    made.add_special_tokens([hf.AddedToken(name, normalized=False) for name in tokenizer.special_tokens])
    return json.loads(made.to_str())


def tokenizer_config(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    """The body of tokenizer_config.json. context: the model's longest input, in tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|assistant_end|>",
        "pad_token": "<|bos|>",  # never learned in conversations, unlike the end of a reply
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        # transformers 4 gives token_type_ids by default, which `generate` then refuses.
        "model_input_names": ["input_ids", "attention_mask"],
    }


def open_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer from the file of any of the programs: quern's or Hugging Face's JSON, or tiktoken's.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is none of these, or quern would encode differently.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    if path.suffix == ".tiktoken":
        return Tokenizer.from_tiktoken(path)
    try:
        body = json.loads(read_regular(path))
        if isinstance(body, dict) and "model" in body:
            return read_tokenizer(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a tokenizer that quern can use: {error}; it reads quern's own tokenizer.json, Hugging "
            "Face's of a byte-level BPE such as GPT-2's or Llama 3's, and vocabularies of tiktoken (.tiktoken)"
        ) from error
    return Tokenizer.load(path)


# The fields of tokenizer.json whose sizes matter.
Id = Annotated[int, msgspec.Meta(ge=0, lt=2**24)]  # msgspec does not read annotated-types


class _Added(TypedDict):
    id: Id
    content: str
    special: bool


class _Model(TypedDict):
    vocab: dict[str, Id]
    merges: list[str | list[str]]


class _Body(TypedDict):
    model: _Model
    added_tokens: list[_Added]


def read_tokenizer(body: Mapping[str, Any]) -> Tokenizer:
    """A quern tokenizer from the body of a tokenizer.json, with the same ids of any text without special tokens.

    The token that begins documents becomes BOS. quern's other special tokens follow the file's, which keep their ids.

    Raises:
        ValueError: The quern tokenizer would encode differently. Single bytes must have ids 0 to 255, followed by the
            merges and then the special tokens.
    """
    typed(body, _Body)
    byte_of = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    try:
        pattern, special = _pattern(body), {entry["content"]: entry["id"] for entry in body["added_tokens"]}
        by_id = sorted((id_, name) for name, id_ in body["model"]["vocab"].items() if name not in special)
        tokens = [bytes(byte_of[character] for character in name) for _, name in by_id]
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in body["model"]["merges"]]
        merges = [tuple(bytes(byte_of[character] for character in part) for part in pair) for pair in pairs]
        whole_words, bos = body["model"].get("ignore_merges", False), _first_token(body, special)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        why = f"{error} is missing or unknown" if isinstance(error, KeyError) else "a part of it has another form"
        raise ValueError(f"it is not a byte-level BPE: {why}") from error
    if [id_ for id_, _ in by_id] != list(range(len(by_id))) or any(len(token) != 1 for token in tokens[:256]):
        raise ValueError("its ids must be the single bytes, from 0, then the merges, then the special tokens")
    names = {id_: "<|bos|>" if name == bos else name for name, id_ in special.items()}
    if (low := min(names)) < len(by_id):
        raise ValueError(f"its special token {names[low]} has the id {low:,} of another token")
    if max(names) > 2 * (len(by_id) + len(names)):  # each id takes memory, and a row of the model's tables
        raise ValueError(f"its special token {names[max(names)]} has the id {max(names):,}, far above its other tokens")
    names = [names.get(id_, unused_name(id_)) for id_ in range(len(by_id), max(names) + 1)]
    names += [name for name in SPECIAL_TOKENS if name not in names]
    tokenizer = Tokenizer(tokens[256:], pattern, names, single_bytes=b"".join(tokens[:256]))
    _refuse_other_merges(tokenizer, merges, whole_words)
    return tokenizer


def _pattern(body: Mapping[str, Any]) -> str:
    """quern's split pattern of a tokenizer.json. Raises ValueError for anything else that would change ids."""
    model, steps, normalizer = {"type": "BPE"} | body["model"], body["pre_tokenizer"], body["normalizer"]
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    # Older files, such as GPT-2's own, leave out what has its default.
    bytes_of, split = {"use_regex": True} | steps[-1], steps[0] if len(steps) == 2 else None
    known = [(ours, {"pattern": {"Regex": theirs}, **how}) for ours, theirs in DIALECT.items() for how in SPLITS]
    found = [ours for ours, form in ((GPT2_SPLIT_PATTERN, None), *known) if split == form]
    differing = {
        f"kind, {model['type']}": model["type"] != "BPE" or model.get("byte_fallback", False),
        "normalizer": normalizer is not None and normalizer.get("normalizers") != [],
        "dropout": model.get("dropout"),
        "affixes of words": model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"),
        "steps before merging": bytes_of["type"] != "ByteLevel" or bytes_of["add_prefix_space"] or len(steps) > 2,
        "split": not found or bytes_of["use_regex"] != (split is None),
        "added tokens that are no special ones": not all(entry["special"] for entry in body["added_tokens"]),
    }
    _refuse([name for name, differs in differing.items() if differs])
    return found[0]


def _first_token(body: Mapping[str, Any], special: Mapping[str, int]) -> str:
    """The special token that a tokenizer.json puts before a text, or one with a known name."""
    processors = body.get("post_processor") or {}
    found = [
        piece["SpecialToken"]["id"]
        for processor in processors.get("processors", [processors])
        for piece in processor.get("single", [])[:1]
        if "SpecialToken" in piece
    ]
    named = next((name for name in (*found, *FIRST_TOKENS) if name in special), None)
    if named is None:
        raise ValueError(f"no special token begins documents: one must be named {' or '.join(FIRST_TOKENS)}")
    return named


def _refuse_other_merges(tokenizer: Tokenizer, merges: Sequence[tuple[bytes, ...]], whole_words: bool) -> None:
    """Refuses merges that lead to other ids than merging by the rank of the bytes. Each token's own last pair must be
    listed, in the order of the ids. A token that merging never forms has none, and must count as a whole word."""
    ranks = {token: rank for rank, token in enumerate(tokenizer.merges)}
    order = [ranks.get(b"".join(pair), -1) for pair in merges]
    derived = merge_pairs(tokenizer)
    _refuse(
        ["merges"] * (order != sorted(order) or -1 in order or not set(derived.values()) <= set(merges))
        + ["whole words"] * (not whole_words and len(derived) < len(ranks))
    )


def _refuse(differing: Sequence[str]) -> None:
    if differing:
        raise ValueError(f"quern's tokenizer would encode differently: its {', '.join(differing)} cannot be kept")


def spell(token: bytes) -> str:
    """The characters of a token's bytes."""
    return "".join(BYTE_CHARACTERS[byte] for byte in token)


def merge_pairs(tokenizer: Tokenizer) -> dict[bytes, tuple[bytes, bytes]]:
    """Token → the pair that forms it, in rank order, without the tokens that merging never forms."""
    found = ((token, _last_pair(token, tokenizer.ranks)) for token in tokenizer.merges)
    return {token: pair for token, pair in found if pair is not None}


def _last_pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The last pair that merging by rank joins to form a token; None if merging never forms it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [(ranks[joined], i) for i in range(len(parts) - 1) if (joined := parts[i] + parts[i + 1]) in ranks]
        if not found:
            return None
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
