"""Configurations of the language models `gpt` and `unet` of quern, for the library transformers.

`config.json` holds the values. This file needs transformers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig


class QuernConfig(PretrainedConfig):
    """The fields that both architectures have, most with the names of Llama's.

    max_position_embeddings: Tokens of a row in training; longer inputs compute without an error. windows: For each
    layer, the tokens that a query sees, itself included; None is all of them. softcap: See `cap` of the model.
    """

    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 0,
        hidden_size: int = 0,
        num_hidden_layers: int = 0,
        num_attention_heads: int = 1,
        num_key_value_heads: int | None = None,
        head_dim: int = 0,
        max_position_embeddings: int = 0,
        windows: Sequence[int | None] = (),
        rope_base: float = 100_000.0,
        softcap: float = 15.0,
        bos_token_id: int | None = None,
        initializer_range: float = 0.02,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.windows = list(windows)
        self.rope_base = rope_base
        self.softcap = softcap
        self.initializer_range = initializer_range
        super().__init__(**kwargs | {"bos_token_id": bos_token_id, "tie_word_embeddings": False})


class QuernGPTConfig(QuernConfig):
    """The configuration of `QuernGPTForCausalLM`."""

    model_type = "quern_gpt"


class QuernUNetConfig(QuernConfig):
    """The configuration of `QuernUNetForCausalLM`."""

    model_type = "quern_unet"
