"""The export target yaml: the short document of the plan, with its origin as comments."""

from __future__ import annotations

import json

from autoplan.planner.export.base import Export, comment, provenance_lines, same_or_error
from autoplan.planner.export.document import plan_document
from autoplan.planner.plan.plan import Plan


class YamlTarget:
    """The short document as YAML, read back with the safe loader."""

    name = "yaml"
    suffix = ".yaml"
    runs_code = False

    def render(self, plan: Plan, stem: str) -> Export:
        import yaml

        body = yaml.safe_dump(plan_document(plan), sort_keys=False, allow_unicode=True, width=110)
        return Export(files={f"{stem}.yaml": comment(provenance_lines(plan)) + "\n" + body})

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        import yaml

        (text,) = export.files.values()
        same_or_error("the document", yaml.safe_load(text), json.loads(json.dumps(plan_document(plan))))
        return ()
