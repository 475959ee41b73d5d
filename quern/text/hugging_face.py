"""Hugging Face's files of the tokenizer and the chat format: tokenizer.json, its settings, the template; both ways.

The ids of any text are equal, because three things carry over: the split pattern (in Oniguruma's dialect), the rule
that a piece which is a whole token is not merged, and the merges as pairs (`byte_characters.py`).

Special tokens in text differ: quern never reads them from text, Hugging Face does unless it is called with
`split_special_tokens=True`. Its chat template relies on this, so a user's message can end a turn there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quern.text.byte_characters import byte_characters, merge_pairs, spell
from quern.text.tokenizer import GPT2_SPLIT_PATTERN, Tokenizer, split_pattern
from quern.validate import install

# Oniguruma reads two things differently. A + after a counted repetition is left out, because nothing follows that could
# take characters back. $ matches at the end of any line, so its case is left out; the next case covers it.
DIALECT = {
    **{split_pattern(n): split_pattern(n).replace(f"{{1,{n}}}+", f"{{1,{n}}}") for n in (1, 2, 3)},
    GPT2_SPLIT_PATTERN: GPT2_SPLIT_PATTERN.replace(r"|\s++$", ""),
}
"""quern's split patterns, and the same patterns in Oniguruma's dialect."""

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
"""`chat.render` as a Jinja template; with add_generation_prompt, `chat.render_prompt`."""


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The body of tokenizer.json, with the same ids. Encoding puts BOS first unless add_special_tokens is False.

    Raises:
        ValueError: The split pattern is not one of quern's, so its meaning in Oniguruma is unknown.
        ImportError: `tokenizers` is not installed.
    """
    if tokenizer.pattern not in DIALECT:
        raise ValueError("the tokenizer splits text by a pattern of its own, which may mean something else there")
    hf = _library()
    tokens = [*(bytes([byte]) for byte in tokenizer.single_bytes), *tokenizer.merges]
    made = hf.Tokenizer(
        hf.models.BPE(
            {spell(token): rank for rank, token in enumerate(tokens)},
            [(spell(left), spell(right)) for left, right in merge_pairs(tokenizer).values()],
            ignore_merges=True,
        )
    )
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
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        # transformers 4 gives token_type_ids by default, which `generate` then refuses.
        "model_input_names": ["input_ids", "attention_mask"],
    }


def read_tokenizer(body: Mapping[str, Any]) -> Tokenizer:
    """A quern tokenizer from the body of a tokenizer.json in quern's form, whichever program wrote the file.

    Raises:
        ValueError: The quern tokenizer would encode differently. Single bytes must have ids 0 to 255, followed by the
            merges and then the special tokens, which include BOS.
        ImportError: `tokenizers` is not installed.
    """
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    ours_of = {theirs: ours for ours, theirs in DIALECT.items()}
    try:
        special = [entry["content"] for entry in sorted(body["added_tokens"], key=lambda entry: entry["id"])]
        by_id = sorted(body["model"]["vocab"].items(), key=lambda entry: entry[1])
        tokens = [bytes(byte_of[character] for character in name) for name, _ in by_id if name not in special]
        pattern = ours_of[body["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]]
        tokenizer = Tokenizer(tokens[256:], pattern, special, single_bytes=b"".join(tokens[:256]))
        now, before = _deciding(tokenizer_json(tokenizer)), _deciding(body)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"it is not a byte-level BPE in quern's form ({error!r} is missing or unknown)") from error
    differing = [name for name, value in now.items() if value != before[name]]
    if differing:
        raise ValueError(f"quern's tokenizer would encode differently: its {', '.join(differing)} cannot be kept")
    return tokenizer


def _deciding(body: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a tokenizer.json that decide the ids of a text."""
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


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"Hugging Face's tokenizer.json needs an extra package ({error}): {install('export')}"
        ) from error
    return tokenizers
