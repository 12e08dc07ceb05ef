"""The changes, by name, between a search and the code, data and versions that its plan meets.

In: the workload's spec in a plan, and what is here now. Out: a refusal, or a sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoplan.errors import PlanError

if TYPE_CHECKING:
    from autoplan.strategies.workloads.spec import WorkloadSpec

PARTS = ("model", "weights", "loss", "optimizer", "schedule", "data", "environment")
"""The parts of `WorkloadSpec.sources` that objects are compared with."""

SHOWN = 4
"""How many changed pieces are named."""

USE_ALL_THE_SAME = "Search again: autoplan search. To use it all the same: prepare(changed_ok=True), --changed-ok."


def refuse_changed_parts(spec: WorkloadSpec, *, changed_ok: bool, **parts: Any) -> str | None:
    """Compares the parts that `plan.prepare` was given with those of the search.

    Args:
        spec: The plan's workload.
        changed_ok: Changed training code is a warning.
        parts: model, loss, optimizer, schedule, make_batch; None: not given.

    Returns:
        What else changed, in words; None: nothing that is known of.

    Raises:
        PlanError: the code or the values of the model, loss, optimizer or schedule are others than in the search.
    """
    if not spec.sources.keys() & {*PARTS}:
        return None
    from autoplan.strategies.workloads.fingerprint import TRAINING_PARTS, changed_names, fingerprints

    found = {
        part: changed_names(spec.sources[part], now)
        for part, now in fingerprints(**parts).items()
        if part in spec.sources
    }
    code = [name for part in TRAINING_PARTS for name in found.get(part, ())]
    other = [f"{name} (data)" for name in found.get("data", ())] + found.get("weights", [])
    for name in found.get("environment", ()):
        (other if name.startswith("$") else code).append(name)
    if code and not changed_ok:
        raise PlanError(
            f"{_named(code)} {'is' if len(code) == 1 else 'are'} not what the search had: it trains something else",
            hint=USE_ALL_THE_SAME,
        )
    if not code and not other:
        return None
    return f"changed since the plan was found: {_named(code + other)}"


def name_pieces(pieces: list[str]) -> str:
    """` (helper.py, net.py and 3 more)`; nothing where none is known."""
    return f" ({_named(pieces)})" if pieces else ""


def _named(pieces: list[str]) -> str:
    more = f" and {len(pieces) - SHOWN} more" if len(pieces) > SHOWN else ""
    return ", ".join(pieces[:SHOWN]) + more
