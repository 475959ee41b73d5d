"""The tokenizer and the chat format as Hugging Face's files: `tokenizer.json`, its settings, a template; and back.

Written by hand, without their libraries. The same ids for any text, because the three things that decide them carry
over: the split pattern (Oniguruma's dialect there), the rule that a piece which is a token as a whole is not merged,
and the merges. Here a pair is merged by the rank of the bytes it spells, there only if it is listed; but of all pairs
that spell a token only one can ever meet, the last of the token's own derivation, so one pair for each token is enough.

What differs is special tokens in text: ours never come from text, theirs do, unless the tokenizer is called with
`split_special_tokens=True`. Their chat template relies on it, so there what a user writes can end a turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from quern.text.tokenizer import GPT2_SPLIT_PATTERN, SPLIT_PATTERN, Tokenizer

# Two things mean something else in Oniguruma: a counted repetition with a + behind it, which is left out there because
# nothing follows that it could give back to; and $, the end of any line there, in a case that the next one covers.
DIALECT = {
    **{SPLIT_PATTERN.replace("{1,2}", f"{{1,{n}}}"): SPLIT_PATTERN.replace("{1,2}+", f"{{1,{n}}}") for n in (1, 2, 3)},
    GPT2_SPLIT_PATTERN: GPT2_SPLIT_PATTERN.replace(r"|\s++$", ""),
}
"""Our split patterns, and how they are written there."""

CHAT_TEMPLATE = (
    "{{- '<|bos|>' -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('roles are system, user and assistant') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '_start|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}{{- part['text'] -}}"
    "{%- else -%}{{- '<|' + part['type'] + '_start|>' + part['text'] + '<|' + part['type'] + '_end|>' -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|' + message['role'] + '_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant_start|>' -}}{%- endif -%}"
)
"""What `chat.render` does, in Jinja; with add_generation_prompt, `chat.render_prompt`."""


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The body of tokenizer.json. Ids are ours; encoding puts BOS first unless add_special_tokens is False.

    Raises ValueError for a split pattern that is not one of ours, whose meaning there is unknown.
    """
    if tokenizer.pattern not in DIALECT:
        raise ValueError("the tokenizer splits text by a pattern of its own, which may mean something else there")
    spelled = _alphabet()
    tokens = [*(bytes([byte]) for byte in tokenizer.single_bytes), *tokenizer.merges]
    ranks = {token: rank for rank, token in enumerate(tokens)}

    def spell(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    pairs = (_last_pair(token, ranks) for token in tokenizer.merges)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id_,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for name, id_ in tokenizer.special_ids.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_split(tokenizer.pattern), byte_level]},
        "post_processor": _begin_with("<|bos|>", tokenizer.bos),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {spell(token): rank for token, rank in ranks.items()},
            "merges": [[spell(left), spell(right)] for left, right in filter(None, pairs)],
        },
    }


def tokenizer_config(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    """The body of tokenizer_config.json. context: tokens that the model reads."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|assistant_end|>",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }


def read_tokenizer(body: Mapping[str, Any]) -> Tokenizer:
    """Our tokenizer from the body of a tokenizer.json that is one of ours, whoever wrote the file.

    Raises ValueError where ours would encode differently: single bytes must be ids 0 to 255, merges follow, special
    tokens come last, BOS among them.
    """
    try:
        byte_of = {character: byte for byte, character in enumerate(_alphabet())}
        by_id = sorted(body["model"]["vocab"].items(), key=lambda entry: entry[1])
        tokens = [bytes(byte_of[character] for character in token) for token, _ in by_id]
        special = [entry["content"] for entry in sorted(body["added_tokens"], key=lambda entry: entry["id"])]
        pattern = body["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        tokens = [token for token, (name, _) in zip(tokens, by_id, strict=True) if name not in special]
        ours = {theirs: ours for ours, theirs in DIALECT.items()}[pattern]
        tokenizer = Tokenizer(tokens[256:], ours, special, single_bytes=b"".join(tokens[:256]))
        written = tokenizer_json(tokenizer)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"it is not a byte-level BPE as quern writes it ({error!r} is missing or foreign)") from error
    differing = [name for name, now in _deciding(written).items() if now != _deciding(body)[name]]
    if differing:
        raise ValueError(f"quern's tokenizer would encode differently: its {', '.join(differing)} cannot be kept")
    return tokenizer


def _deciding(body: Mapping[str, Any]) -> dict[str, Any]:
    """What of a tokenizer.json decides the ids of a text."""
    model = body["model"]
    split, byte_level = body["pre_tokenizer"]["pretokenizers"]
    special = {entry["content"]: entry["id"] for entry in body["added_tokens"]}
    return {
        "normalizer": body["normalizer"],
        "split": (split["type"], split["pattern"], split["behavior"], split["invert"]),
        "bytes": (byte_level["type"], byte_level["add_prefix_space"], byte_level["use_regex"]),
        "special tokens": special,
        "vocabulary": {token: id_ for token, id_ in model["vocab"].items() if token not in special},
        "merges": [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]],
        "whole words": model.get("ignore_merges", False),
        "dropout": model.get("dropout"),
    }


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": DIALECT[pattern]}, "behavior": "Isolated", "invert": False}


def _begin_with(name: str, id_: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": name, "type_id": 0}}
    a, b = ({"Sequence": {"id": text, "type_id": type_id}} for text, type_id in (("A", 0), ("B", 1)))
    return {
        "type": "TemplateProcessing",
        "single": [first, a],
        "pair": [first, a, b],
        "special_tokens": {name: {"id": name, "ids": [id_], "tokens": [name]}},
    }


def _alphabet() -> list[str]:
    """The character that stands for each byte in their files: itself where it can be seen, else one past 255."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = count(256)
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def _last_pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that merging by rank makes of a token before the token itself; None where it never gets there."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [(ranks[joined], i) for i in range(len(parts) - 1) if (joined := parts[i] + parts[i + 1]) in ranks]
        if not found:
            return None
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
