"""Gradient variance and the gradient noise scale."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from membudget.accumulation.partition import _counts
from membudget.accumulation.strategies import _tensors
from membudget.checks import listed


@dataclass(frozen=True)
class GradientNoise:
    """Unbiased estimates from the gradients of one window's micro-batches.

    Attributes:
        square_norm: |G|², squared norm of the true gradient; the estimate
            may be negative where noise dominates.
        variance: tr Σ, the summed variance of one sample's gradient; that
            of a batch of B samples is tr Σ / B.
        scale: the simple noise scale tr Σ / |G|², in samples; infinite
            where ``square_norm`` is not above zero.
    """

    square_norm: float
    variance: float

    @property
    def scale(self) -> float:
        if self.square_norm <= 0:
            return float("inf")
        return self.variance / self.square_norm


def gradient_noise(
    gradients: Sequence[Sequence[torch.Tensor]], counts: Sequence[float]
) -> GradientNoise:
    """Estimate variance and noise scale from micro-batch gradients.

    With g_k the mean gradient over the n_k samples of micro-batch k, and ḡ
    the mean over all N,

        tr Σ = Σ_k n_k |g_k - ḡ|² / (K - 1),   |G|² = |ḡ|² - tr Σ / N.

    For equal micro-batches these are the estimators of McCandlish et al.
    2018 (arXiv 1812.06162), appendix A.1.

    Args:
        gradients: one sequence of tensors for each micro-batch, at least two:
            the gradient of its *mean* loss, finite and unscaled.
        counts: samples in each micro-batch.
    """
    counts = _counts(counts)
    gradients = [
        _tensors(gradient, "gradients")
        for gradient in listed(gradients, "gradients", "gradients", 0)
    ]
    if len(gradients) != len(counts) or len(counts) < 2:
        raise ValueError(
            f"{len(gradients)} gradients and {len(counts)} counts: "
            "give one count for each, and at least two micro-batches"
        )
    sizes = {sum(g.numel() for g in gradient) for gradient in gradients}
    if len(sizes) > 1:
        raise ValueError(
            f"the gradients have {', '.join(map(str, sorted(sizes)))} "
            "numbers: use those of the same parameters"
        )
    total = sum(counts)
    flat = torch.stack(
        [
            torch.cat([g.detach().double().flatten() for g in gradient])
            for gradient in gradients
        ]
    )
    bad = [k for k, g in enumerate(flat) if not g.isfinite().all()]
    if bad:
        raise ValueError(
            f"the gradients of {len(bad)} of {len(flat)} micro-batches, "
            f"number {bad[0]} first, are infinite or NaN: use finite ones, "
            "unscaled; leave out both gradient and count of a step that "
            "overflowed"
        )
    share = torch.tensor(counts, dtype=torch.float64, device=flat.device)
    mean = (share / total) @ flat
    spread = (flat - mean).square().sum(dim=1)
    variance = (share @ spread).item() / (len(counts) - 1)
    return GradientNoise(
        square_norm=mean.square().sum().item() - variance / total,
        variance=variance,
    )
