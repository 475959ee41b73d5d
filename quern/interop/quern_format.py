"""`gpt` and `unet` in a form that transformers loads with `trust_remote_code=True`: configuration, weights, code.

Weights keep their names and values. The Python files are those of `hf/`, copied word for word; they need torch and
transformers only. An idea's subclass has no such file and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quern.model.base import LanguageModel
from quern.model.gpt import GPT
from quern.model.unet import UNet
from quern.text.tokenizer import Tokenizer

SHARED_FILES = ("configuration_quern.py", "modeling_quern.py")


@dataclass(frozen=True)
class Architecture:
    """name: the `model_type`; prefix: of the names of its classes; file: its modules."""

    name: str
    prefix: str
    file: str


ARCHITECTURES: Mapping[Any, Architecture] = {
    GPT: Architecture("quern_gpt", "QuernGPT", "modeling_quern_gpt.py"),
    UNet: Architecture("quern_unet", "QuernUNet", "modeling_quern_unet.py"),
}


def config_to(model: LanguageModel, tokenizer: Tokenizer, dtype: torch.dtype) -> dict[str, Any]:
    """The body of config.json. model: exactly a `GPT` or a `UNet`."""
    shape, found = model.shape, ARCHITECTURES[type(model)]
    architecture = f"{found.prefix}ForCausalLM"
    return {
        "architectures": [architecture],
        "auto_map": {
            "AutoConfig": f"configuration_quern.{found.prefix}Config",
            "AutoModelForCausalLM": f"{found.file.removesuffix('.py')}.{architecture}",
        },
        "model_type": found.name,
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "windows": list(model.windows),
        "rope_base": shape.rope_base,
        "softcap": shape.softcap,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos if shape.bos is None else shape.bos,
        "eos_token_id": tokenizer.special("<|assistant_end|>"),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def weights_to(model: LanguageModel, tokens: int) -> dict[str, Tensor]:
    """The model's weights. Rows of tables beyond the `tokens` of the tokenizer are left out, as the engine does."""
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return {
        name: (tensor[:tokens] if name in tables | {"head.weight"} else tensor).contiguous()
        for name, tensor in model.state_dict().items()
    }


def python_files(model: LanguageModel) -> dict[str, str]:
    """File name → text of the Python files that the folder needs."""
    names = (*SHARED_FILES, ARCHITECTURES[type(model)].file)
    return {name: (Path(__file__).parent / "hf" / name).read_text(encoding="utf-8") for name in names}
