"""Models of any architecture with random or freshly initialised parameters, and tokens for them."""

from typing import Any

import torch

from quern.machine import Machine
from quern.recipes import gpt, llama, unet

CPU = Machine(torch.device("cpu"), torch.float32, compile=False, threads=1)
RECIPES = {"gpt": gpt.RECIPE, "llama": llama.RECIPE, "unet": unet.RECIPE}


def randomized(model: Any, vectors: float = 0.5, seed: int = 3, matrices: float = 1.0) -> Any:
    """Every parameter random: no path through the model is silent. vectors: the deviation of scales and norms;
    matrices: the deviation of their products with vectors whose entries deviate by 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            size = matrices * p.size(-1) ** -0.5 if p.dim() > 1 else vectors
            p.copy_(size * torch.randn(p.shape, generator=generator))
    return model.eval()


def moved(model: Any, by: float = 0.05, seed: int = 1) -> Any:
    """Noise on every weight, since projections that start at zero silence most gradients."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by * torch.randn(p.shape, generator=generator).to(p.dtype))
    return model


def tokens(B: int = 2, T: int = 24, V: int = 53) -> torch.Tensor:
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(T))


def initialised(model: Any, seed: int) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.initialize(seed)
    return model
