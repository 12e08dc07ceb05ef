"""The export target json: the short document of the plan. (The plan file itself is JSON too, with all its trials.)"""

from __future__ import annotations

import json

from autoplan.planner.export.base import Export, same_or_error
from autoplan.planner.export.document import plan_document
from autoplan.planner.plan.plan import Plan


class JsonTarget:
    """The short document as JSON."""

    name = "json"
    suffix = ".json"
    runs_code = False

    def render(self, plan: Plan, stem: str) -> Export:
        return Export(files={f"{stem}.json": json.dumps(plan_document(plan), indent=2) + "\n"})

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        (text,) = export.files.values()
        same_or_error("the document", json.loads(text), json.loads(json.dumps(plan_document(plan))))
        return ()
