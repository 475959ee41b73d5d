"""Matrices that do not start at zero start orthogonal.

Hypothesis: equal singular values pass signals and gradients alike.
Source: Saxe et al. 2013 (arXiv 1312.6120), by way of parameter-golf. nanochat's experiment log, 2026-03-24: no help.
Each matrix is the polar factor of the baseline's, at the same norm.
Expected effect: no difference.
Verdict: undecided on rung 0 (+0.0040 bits per byte, 8 pairs); multiplier × 0.967 [0.935, 0.998]. Study ladder-2.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quern.model.gpt import GPT, CausalSelfAttention
from quern.model.layers import Draw, SquaredReluMLP
from quern.recipes.gpt import RECIPE as BASELINE

OWN_INITIAL_VALUES = ("blocks.*.attention.*.weight", "blocks.*.mlp.up.weight")


def orthogonal(weight: Tensor) -> Tensor:
    """The nearest matrix with equal singular values."""
    left, values, right = torch.linalg.svd(weight.detach().float(), full_matrices=False)
    return left @ right * (values.norm() / len(values) ** 0.5)


class Attention(CausalSelfAttention):
    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        for linear in (self.query, self.key, self.value):
            draw.fill(linear.weight, orthogonal(linear.weight))


class MLP(SquaredReluMLP):
    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.fill(self.up.weight, orthogonal(self.up.weight))


class OrthogonalGPT(GPT):
    attention_type, mlp_type = Attention, MLP


RECIPE = replace(BASELINE, name="orthogonal_init", make_model=OrthogonalGPT)
