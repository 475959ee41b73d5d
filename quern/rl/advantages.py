"""The weights of tokens, from the rewards of replies.

A group is the replies to one question. The baseline of a reply is the mean reward of its group (REINFORCE with a group
baseline: Shao et al., 2024, https://arxiv.org/abs/2402.03300). By default the difference is not divided by the standard
deviation, which would give questions that are nearly always or nearly never answered a larger weight (Liu et al., 2025,
"Dr. GRPO", https://arxiv.org/abs/2503.20783). The loss is a mean over all tokens of the global batch, not over replies
(Yu et al., 2025, "DAPO", https://arxiv.org/abs/2503.14476).
"""

from __future__ import annotations

import numpy as np


def advantages(rewards_GS: np.ndarray, normalize: bool = False) -> np.ndarray:
    """The reward of each reply minus the mean of its group, float64 (G, S).

    Args:
        rewards_GS: Rewards of S replies to each of G questions.
        normalize: Also divide by the group's standard deviation.
    """
    centred_GS = rewards_GS - rewards_GS.mean(axis=1, keepdims=True)
    if normalize:
        deviation_G1 = rewards_GS.std(axis=1, keepdims=True)
        centred_GS = np.divide(centred_GS, deviation_G1, out=np.zeros_like(centred_GS), where=deviation_G1 > 0)
    return centred_GS


def is_uniform(rewards_S: np.ndarray) -> bool:
    """Whether all replies to a question got the same reward, so that none has an advantage."""
    return bool((rewards_S == rewards_S[0]).all())


def overlong_penalty(length: int, max_tokens: int, overlong_tokens: int) -> float:
    """The penalty of a reply of this length: 0 to 1 over the last `overlong_tokens` before `max_tokens` (DAPO §3.4)."""
    if not overlong_tokens:
        return 0.0
    return min(1.0, max(0.0, (length - (max_tokens - overlong_tokens)) / overlong_tokens))


def clipped_ratios(
    logprobs: np.ndarray, sampled_logprobs: np.ndarray, weights: np.ndarray, low: float, high: float
) -> np.ndarray:
    """The weights of tokens for an update of a model that has changed since it sampled them.

    The clipped objective min(r·A, clip(r, 1-low, 1+high)·A) has the gradient r·A·∇log p where it is not clipped and 0
    where it is (Schulman et al., 2017, https://arxiv.org/abs/1707.06347; two limits: DAPO §3.1). So the weights r·A of
    a plain policy gradient give exactly its gradient at the current model.

    weights: The tokens' advantages; low, high: how far the ratio may leave 1 before a token stops counting.
    """
    ratio = np.exp(logprobs - sampled_logprobs)
    clipped = ((weights > 0) & (ratio > 1 + high)) | ((weights < 0) & (ratio < 1 - low))
    return np.where(clipped, 0.0, ratio * weights)


def pass_at_k(right: int, samples: int, k: int) -> float:
    """The probability that at least one of k replies is right, estimated without bias from `samples` replies.

    Source: Chen et al., 2021, "Evaluating Large Language Models Trained on Code", https://arxiv.org/abs/2107.03374.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {right} right is not defined")
    return 1.0 - float(np.prod(1.0 - k / np.arange(samples - right + 1, samples + 1)))
