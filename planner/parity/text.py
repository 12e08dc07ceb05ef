"""What a parity check says for people: what was compared, on what, what failed, what was left out. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.planner.parity.differences import excess
from autoplan.planner.parity.judge import SAME_MASKS, buffers_to_compare
from autoplan.planner.parity.records import ParityMeasurement
from autoplan.planner.records import ParityCheck

LIMITS = "What no check of a few steps can see is listed in docs/parity.md"


def describe_failures(checks: Sequence[ParityCheck]) -> tuple[str, ...]:
    """A sentence for each comparison that failed, the worst first."""
    failed = sorted((check for check in checks if excess(check) > 1.0), key=excess, reverse=True)
    return tuple(
        f"{check.name}: {check.where + ' ' if check.where else ''}differs by {check.difference:.2g} "
        f"(at most {check.allowed:.2g} passes)"
        for check in failed
    )


def describe_check(ours: ParityMeasurement, checks: Sequence[ParityCheck]) -> str:
    """What was compared and on what, in a few short phrases."""
    size = f"{ours.global_batch} samples"
    if ours.sequence_length is not None:
        size += f" of {ours.sequence_length} tokens"
    phrases = [
        f"checked on {size} in micro-batches of {ours.micro_batch} ({ours.accumulation} per rank and step), "
        f"{len(ours.steps)} steps, dropout off",
        "compared for each parameter: gradients, clipping, optimizer groups and what the optimizer did",
    ]
    if ours.deterministic is False:
        phrases.append("the loss draws noise of its own: every micro-batch was seeded alike in both runs")
    if ours.has_labels and not ours.labels_masked:
        phrases.append("all micro-batches counting the same: the loss does not leave masked labels out")
    phrases += [*_clipping(ours), *_optimizer(ours)]
    if ours.own_length is not None:
        phrases.append(f"one forward and backward at {ours.own_length.sequence_length} tokens")
    if ours.chunk_rows is not None:
        phrases.append(f"the fused loss in chunks of {ours.chunk_rows} rows")
    if ours.dropout:
        same = any(check.name == SAME_MASKS for check in checks)
        phrases.append("dropout on: " + ("the same masks and gradients" if same else "as much noise as the reference"))
    return "; ".join(phrases)


def not_checked(plain: ParityMeasurement, ours: ParityMeasurement) -> tuple[str, ...]:
    """What was not compared this time, and why."""
    found = list(dict.fromkeys((*plain.not_checked, *ours.not_checked)))
    if ours.accumulation == 1:
        found.append("accumulation: ddp_static_graph was checked with one micro-batch per step")
    if ours.replay is not None and ours.replay.method == "norms":
        found.append(f"the optimizer by replay: {ours.replay.reason}; the norms of the changes were compared")
    elif ours.replay is not None and ours.replay.unresolved:
        share = f"{len(ours.replay.unresolved)} of {len(plain.parameters)}"
        found.append(
            f"the optimizer's step of {share} parameters: in the first steps it is smaller than their rounding"
        )
    if any(plain.buffers.values()) and not buffers_to_compare(plain, ours):
        found.append("buffers: ranks share the model, or each has those of its own samples in micro-batches that vary")
    return tuple(found)


def _clipping(ours: ParityMeasurement) -> list[str]:
    if ours.max_grad_norm is None:
        return []
    scaled = [step.gradient_factor for step in ours.steps if step.gradient_factor != 1.0]
    if scaled:
        return [f"clipping did not bind by itself, and was checked on gradients scaled by {scaled[0]:.3g}"]
    return []


def _optimizer(ours: ParityMeasurement) -> list[str]:
    if ours.replay is None or ours.replay.method == "norms":
        return []
    return ["the workload's own optimizer replayed on the candidate's gradients"]
