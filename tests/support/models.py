"""Models of any architecture with random or freshly initialised parameters, and tokens for them."""

from typing import Any

import torch


def randomized(model: Any, vectors: float = 0.5) -> Any:
    """Every parameter random: no path through the model is silent. vectors: the deviation of scales and norms."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p.size(-1) ** -0.5 if p.dim() > 1 else vectors) * torch.randn(p.shape, generator=generator))
    return model.eval()


def tokens(B: int = 2, T: int = 24, V: int = 53) -> torch.Tensor:
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(T))


def initialised(model: Any, seed: int) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.initialize(seed)
    return model
