"""The shared part of quern's language models `gpt` and `unet`, in plain PyTorch for the library transformers.

`quern export` copies this file and that of the model. They need torch and transformers only. `config.json` holds the
values of the configuration. Attention is `scaled_dot_product_attention` with an explicit mask: exact, and slower than
quern's kernels. A key-value cache holds all tokens, also for layers with a window.

Shapes: B rows, T all tokens so far, N new tokens (the last of the T), D width, H query heads, K key and value heads,
E head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

EPS = 1e-6
"""Added to the mean square under the norms' root."""


class QuernConfig(PretrainedConfig):
    """The fields that both architectures have, most with the names of Llama's.

    max_position_embeddings: Tokens of a row in training; longer inputs compute without an error. windows: For each
    layer, the tokens that a query sees, itself included; None is all of them. softcap: See `cap` of the model.
    key_offset: In layers that see all tokens, keys are partly those of the token before (`offset`).
    bigram_rows: Rows of the table of bigrams, a token with the one before it, which are added before every block.
    """

    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    vocab_size = hidden_size = num_hidden_layers = head_dim = max_position_embeddings = 0
    num_attention_heads = num_key_value_heads = 1
    windows: Sequence[int | None] = ()
    rope_base, softcap, initializer_range = 100_000.0, 15.0, 0.02
    key_offset = False
    bigram_rows = 0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"tie_word_embeddings": False})


class QuernGPTConfig(QuernConfig):
    """The configuration of `QuernGPTForCausalLM`."""

    model_type = "quern_gpt"


class QuernUNetConfig(QuernConfig):
    """The configuration of `QuernUNetForCausalLM`."""

    model_type = "quern_unet"


def norm(x: Tensor) -> Tensor:
    """RMSNorm without parameters over the last dim, computed in fp32 (arXiv 1910.07467)."""
    return F.rms_norm(x.float(), (x.size(-1),), eps=EPS).to(x.dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the pairs (i, i + E/2) of each head clockwise, in fp32 (arXiv 2104.09864). x: (B, N, heads, E)."""
    cos, sin = rotary
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1).to(x.dtype)


def half_frequencies(head_dim: int, base: float, device: torch.device) -> Tensor:
    """Radians per token (E / 2,): the first half of the pairs turn, by 1 to 1/base."""
    turning = head_dim // 4
    exponents = torch.arange(turning, dtype=torch.float32, device=device) / max(1, turning - 1)
    return F.pad(base**-exponents, (0, head_dim // 2 - turning))


def offset(k: Tensor, valid_BT: Tensor | None) -> Tensor:
    """The keys (B, K, T, E) with the pairs that do not turn, (i, i + E/2) with i ≥ E/4, from the token before."""
    known = k if valid_BT is None else k * valid_BT[:, None, :, None]  # nothing is before the first token
    before = F.pad(known[:, :, :-1], (0, 0, 1, 0)).chunk(4, dim=-1)
    own = k.chunk(4, dim=-1)
    return torch.cat([own[0], before[1], own[2], before[3]], dim=-1)


def rotary_table(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1 or B, N, 1, E / 2) for positions (1 or B, N) and frequencies (E / 2,) in radians."""
    angles = positions.float()[..., None, None] * frequencies
    return angles.cos(), angles.sin()


class SquaredReluMLP(nn.Module):
    """D → 4D → D with ReLU² in between (arXiv 2109.08668)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Text:
    """The text of one forward pass: positions, masks, and the cache.

    Args:
        input_ids: (B, T) tokens from the first one on, those in the cache included.
        attention_mask: (B, T): 1 for a token, 0 for padding on the left or right; None: no padding.
        cache: Keys and values of the tokens before; None: there are none.
        bos: The token that begins a document, if attention does not cross from one document into the next.

    Raises:
        ValueError: The arguments do not fit together; the message says what to pass.
    """

    def __init__(
        self, input_ids: Tensor, attention_mask: Tensor | None, cache: DynamicCache | None, bos: int | None
    ) -> None:
        self.input_ids, self.cache, self.total = input_ids, cache, input_ids.size(1)
        self.new = self.total - (cache.get_seq_length() if cache is not None else 0)
        if self.new <= 0:
            raise ValueError(
                f"the cache holds {self.total - self.new} tokens and input_ids {self.total}: pass the whole text in "
                "input_ids, with the tokens that are in the cache"
            )
        self.valid_BT = None if attention_mask is None else _checked(attention_mask, input_ids)
        self.documents_BT = None
        if bos is not None:
            starts_BT = input_ids == bos
            self.documents_BT = (starts_BT if self.valid_BT is None else starts_BT & self.valid_BT).cumsum(1)
        self._masks: dict[int | None, Tensor] = {}

    def positions(self) -> Tensor:
        """Positions (1 or B, N) of the new tokens; the first token that is not padding has position 0."""
        if self.valid_BT is None:
            return torch.arange(self.total, device=self.input_ids.device)[None, -self.new :]
        return (self.valid_BT.cumsum(1) - 1).clamp(min=0)[:, -self.new :]

    def mask(self, window: int | None) -> Tensor:
        """(1 or B, 1, N, T): whether a new token sees a token."""
        if window not in self._masks:
            keys = torch.arange(self.total, device=self.input_ids.device)
            queries = keys[-self.new :, None]
            seen = keys <= queries
            if window is not None:
                seen = seen & (keys > queries - window)
            seen = seen[None, None]
            if self.documents_BT is not None:
                documents = self.documents_BT
                seen = seen & (documents[:, None, -self.new :, None] == documents[:, None, None, :])
            if self.valid_BT is not None:
                # Padding sees itself: a softmax over nothing would be NaN.
                seen = seen & self.valid_BT[:, None, None, :] | (keys == queries)
            self._masks[window] = seen
        return self._masks[window]

    def attend(
        self,
        layer: int,
        q_BNHE: Tensor,
        k_BNKE: Tensor,
        v_BNKE: Tensor,
        window: int | None,
        scale: float | None,
        key_offset: bool = False,
    ) -> Tensor:
        """Causal attention of the new tokens → (B, N, H·E). Adds their keys and values to the cache."""
        q, k, v = (x.transpose(1, 2) for x in (q_BNHE, k_BNKE, v_BNKE))
        if self.cache is not None:
            k, v = self.cache.update(k, v, layer)
        k = offset(k, self.valid_BT) if key_offset else k
        grouped = q.size(1) != k.size(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(window), scale=scale, enable_gqa=grouped)
        return y.transpose(1, 2).flatten(2)


def _checked(attention_mask: Tensor, input_ids: Tensor) -> Tensor:
    """The mask as booleans; raises ValueError unless it says which tokens are padding on the left or right."""
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)}: both must be "
            "(rows, tokens) of the whole text, with the tokens that are in the cache"
        )
    valid = attention_mask.bool()
    starts = F.pad(valid, (1, 0))[:, :-1].logical_not() & valid
    if (starts.sum(1) > 1).any():
        raise ValueError("attention_mask has zeros between ones: only padding on the left or right can be masked")
    return valid


class QuernForCausalLM(PreTrainedModel, GenerationMixin):
    """The part that both architectures share: the logits, the loss and generation.

    The cache holds keys and values only. Whatever else depends on earlier tokens is computed again from their ids, so
    `input_ids` always holds the whole text; `generate` does that. Subclasses have `hidden_states`, the normed hidden
    states (B, N, D) of the new tokens, and `cap`, which bounds fp32 logits.
    """

    config_class = QuernConfig
    _supports_sdpa = True

    embedding: nn.Embedding
    head: nn.Linear

    def hidden_states(self, text: Text) -> Tensor:
        raise NotImplementedError

    def cap(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def document_start(self) -> int | None:
        """The token that begins a document, if documents of one row do not see each other."""
        return None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        cache: DynamicCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """The logits of the next tokens (B, N, V) in fp32, the loss and the cache. Raises ValueError for an argument
        that is missing or not supported.

        Args:
            input_ids: (B, T) tokens of the whole text, also of what the cache holds.
            attention_mask: (B, T): 1 for a token, 0 for padding on the left or right; None: no padding.
            past_key_values, cache: The cache, by its name before and from transformers 5.24 on; the tokens that it does
                not hold are new.
            labels: (B, T) tokens as `input_ids`, -100 where no loss is wanted; the loss shifts them itself.
            logits_to_keep: Only the last so many logits, or the logits at these indices; 0: of all new tokens.
            kwargs: `num_items_in_batch`, which the loss is divided by.
        """
        items = {name: kwargs.pop(name) for name in ("num_items_in_batch",) if name in kwargs}
        unknown = [name for name, value in kwargs.items() if value is not None and value is not False]
        if unknown:
            raise ValueError(f"this model does not support the arguments {', '.join(sorted(unknown))}: leave them out")
        if input_ids is None:
            raise ValueError("this model needs input_ids: embeddings alone do not determine its output")
        cache = past_key_values if cache is None else cache
        if cache is not None and not isinstance(cache, DynamicCache):
            raise ValueError(f"the cache must be a DynamicCache, not a {type(cache).__name__}")
        if use_cache and cache is None:
            cache = DynamicCache()
        text = Text(input_ids, attention_mask, cache, self.document_start())
        x = self.hidden_states(text)
        kept = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.cap(self.head(x[:, kept]).float())
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **items)
        output = CausalLMOutputWithPast(loss, logits, cache)
        return output.to_tuple() if return_dict is False else output

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """The arguments of `forward` for the next step: the whole text, not its last token alone."""
        names = ("attention_mask", "past_key_values", "cache", "use_cache", "logits_to_keep")
        return {"input_ids": input_ids} | {name: kwargs[name] for name in names if kwargs.get(name) is not None}

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        raise NotImplementedError("the vocabulary cannot be resized: the value embeddings have a row for each token")
