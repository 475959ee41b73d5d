"""Configurations of the language models `gpt` and `unet` of quern, for the library transformers.

`config.json` holds the values. This file needs transformers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig


class QuernConfig(PretrainedConfig):
    """The fields that both architectures have.

    Args:
        vocab_size: The number of tokens.
        hidden_size: The width of the residual stream.
        num_hidden_layers: The number of blocks.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; None for as many as query heads.
        head_dim: Channels of a head.
        max_position_embeddings: The length of the rows in training, in tokens. Longer inputs compute without an error.
        windows: For each layer, the tokens that a query sees, itself included; None is all of them.
        rope_base: The base of the rotary frequencies.
        softcap: The bound of the logits; see `cap` of the model.
        bos_token_id: The token that every document begins with.
        initializer_range: The standard deviation of new weights; loaded weights do not need it.
        kwargs: Of `PretrainedConfig`.
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
