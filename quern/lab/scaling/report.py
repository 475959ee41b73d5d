"""The output of `quern lab scaling`: its plan, its fits, and how a study agrees with the predictions of another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quern.lab.scaling.fits import Envelope, Estimate
from quern.lab.scaling.isoflop import CONVENTIONS, TOLERANCE, Plan, Stability
from quern.lab.scaling.parametric import SurfaceFit
from quern.terminal import duration, grid

MISFIT = 0.05
"""The p of `fits.lack_of_fit` below which a warning is printed."""


def plan_lines(plan: Plan) -> list[str]:
    """The plan as a table."""
    head = ("FLOPs", "size", "width", "seed", "parameters", "steps", "batch", "tokens", "time")
    rows = [
        (
            f"{cell.budget:.3g}",
            cell.size,
            f"{cell.width:,}",
            str(cell.seed),
            f"{cell.parameters['chinchilla']:,}",
            f"{cell.steps:,}",
            f"{cell.batch_tokens:,}",
            f"{cell.tokens:,}",
            "-" if cell.seconds is None else duration(cell.seconds),
        )
        for cell in plan.cells
    ]
    seconds = [cell.seconds for cell in plan.cells if cell.seconds is not None]
    total = f"{len(plan.cells)} runs of {plan.flops:.3g} FLOPs in all"
    return [
        *grid(head, rows),
        *(f"not planned: {reason}" for reason in plan.refused),
        f"{total}, about {duration(sum(seconds))}" if seconds else total,
    ]


def heading(convention: str) -> str:
    """The name of a convention with what it counts."""
    return f"{convention}: {CONVENTIONS[convention].meaning}"


def convention_lines(
    found: Envelope, surface: SurfaceFit, ahead: float, predictions: Mapping[str, Mapping[str, Estimate]]
) -> list[str]:
    """The fits by one convention."""
    lines = [*_budget_rows(found), *_law_lines(found), *_surface_lines(surface)]
    for method, predicted in predictions.items():
        shown = ", ".join(f"{what} {one}" for what, one in predicted.items())
        lines += [f"  at {ahead:.3g} FLOPs by the {method}: {shown}"] if predicted else []
    return lines


def _budget_rows(found: Envelope) -> list[str]:
    head = ("FLOPs", "runs", "parameters", "tokens", "tokens per parameter", "bits per byte")
    rows = [
        (
            f"{one.flops:.3g}",
            str(one.cells),
            *(str(value or "-") for value in (one.parameters, one.tokens, one.ratio, one.loss)),
        )
        for one in found.optima
    ]
    refusals = [f"  {one.flops:.3g} FLOPs: {one.refusal}" for one in found.optima if one.refusal]
    return [*grid(head, rows), *refusals] if rows else []


def _law_lines(found: Envelope) -> list[str]:
    if found.refusal:
        return [f"  no envelope: {found.refusal}"]
    left = [f"  without {flops:.3g} FLOPs: N* ∝ C^{n:.3f}, D* ∝ C^{d:.3f}" for flops, n, d in found.leave_out]
    if found.misfit < MISFIT:
        left.append(
            f"  lack of fit: a cubic term fits the budgets better (p = {found.misfit:.2g}), so the intervals of the "
            "minima are too narrow: measure sizes closer to them"
        )
    law = f"  envelope: N* ∝ C^{found.parameters}, D* ∝ C^{found.tokens}, tokens per parameter {found.ratio}"
    return [law, *left]


def _surface_lines(found: SurfaceFit) -> list[str]:
    if found.surface is None:
        return [f"  no parametric fit: {found.refusal}"]
    names = {"alpha": "α", "beta": "β", "exponent": "a = β / (α + β)"}
    shown = ", ".join(f"{names.get(name, name)} {one}" for name, one in found.intervals.items())
    lines = [f"  E + A / N^α + B / D^β: {shown}; one run deviates by {100 * found.residual_sd:.2f} %"]
    lines += [f"  {found.note}"] if found.note else []
    for one in found.leave_out:
        constants = f"E {one.E:.4g}, α {one.alpha:.3f}, β {one.beta:.3f}, a {one.exponent:.3f}"
        lines.append(f"  without {one.label}: {constants}")
    return lines


def stability_lines(stable: Stability) -> list[str]:
    """Which convention has the most stable ratio of tokens to parameters."""
    if stable.spreads is None or stable.support is None:
        return [f"conventions are not compared: {stable.refusal}"]
    spreads = ", ".join(f"{name} {100 * spread:.0f} %" for name, spread in stable.spreads.items())
    support = 100 * stable.support[stable.name or ""]
    return [
        f"tokens per parameter vary least over the budgets by the convention {stable.name} "
        f"(SD: {spreads}), in {support:.0f} % of the resamples"
    ]


def is_budget(budget: float, flops: float) -> bool:
    """Whether a budget is the number of FLOPs that a study predicts."""
    return abs(budget / flops - 1) <= TOLERANCE


def check_lines(name: str, predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Compares the predictions that a study kept with the optima that another one measured at that budget."""
    flops = predicted["predictions"]["flops"]
    rows = []
    for convention in CONVENTIONS:
        optima = measured["conventions"][convention]["envelope"]["optima"]
        optimum = next((one for one in optima if is_budget(one["flops"], flops)), None)
        if optimum is None or optimum["refusal"]:
            reason = optimum["refusal"] if optimum else "no run has finished"
            return [f"the predictions of {name} cannot be checked: {reason}"]
        for method, values in predicted["predictions"][convention].items():
            for what, value in values.items():
                if what in optimum:
                    rows.append((convention, method, what, *_checked(value, optimum[what])))
    head = ("convention", "method", "at the optimum", "predicted", "measured", "agree")
    return [f"the predictions of {name} for {flops:.3g} FLOPs", *grid(head, rows)]


def _checked(predicted: Mapping[str, float | None], measured: Mapping[str, float | None]) -> tuple[str, str, str]:
    """Both as text, and whether their intervals overlap; a limit that is None is infinite."""

    def ends(one: Mapping[str, float | None]) -> Estimate:
        value, low, high = one["value"], one["low"], one["high"]
        assert value is not None
        return Estimate(value, float("-inf") if low is None else low, float("inf") if high is None else high)

    ours, theirs = ends(predicted), ends(measured)
    overlap = ours.low <= theirs.high and theirs.low <= ours.high
    return str(ours), str(theirs), "yes" if overlap else "no"
