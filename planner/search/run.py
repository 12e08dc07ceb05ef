"""run_search: from a workload to a verified plan."""

from __future__ import annotations

from autoplan.planner.search.options import (
    Bound,
    BudgetState,
    Candidate,
    SearchObserver,
    SearchOptions,
    SearchResult,
)

__all__ = ["Bound", "BudgetState", "Candidate", "SearchObserver", "SearchOptions", "SearchResult"]
