"""The export targets json and yaml: a short document of a plan. The plan file, which is JSON too, has all trials."""

from __future__ import annotations

import json
from typing import Any

import yaml

from autoplan.planner.export.base import Export, Target, comment, provenance_lines, same_or_error
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.plan_file import with_shown_texts

DOCUMENT_VERSION = 1


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan without its trials and alternatives, as plain values; control characters in texts are written out."""
    measured = plan.measurement
    document = {
        "schema_version": DOCUMENT_VERSION,
        "plan": {"study": plan.study, "created": plan.created, "device": plan.device},
        "workload": plan.workload.model_dump(
            mode="json", include={"kind", "reference", "name", "sequence_length", "global_batch", "unit", "options"}
        ),
        "config": plan.config.model_dump(mode="json"),
        "baseline": plan.baseline.config.model_dump(mode="json"),
        "accumulation": plan.accumulation,
        "world_size": plan.config.world_size,
        "measured": {
            f"{plan.workload.unit}_per_s": measured.tokens_per_s.model_dump(mode="json"),
            "step_time_s": measured.step_time_s.model_dump(mode="json"),
            "peak_memory_bytes": measured.peak_memory_bytes,
            "mfu": measured.mfu,
            "speedup_over_baseline": plan.speedup.model_dump(mode="json"),
        },
        "hardware": {
            "device": plan.hardware.device(plan.device).name,
            "fingerprint": plan.hardware.fingerprint,
        },
        "environment": plan.environment.model_dump(mode="json"),
        "why": {choice.knob: choice.reason for choice in plan.choices},
    }
    if plan.loading is not None and plan.loading.setting is not None:
        document["loader"] = plan.loading.setting.arguments | {"waiting_share": plan.loading.waiting_share}
    shown: dict[str, Any] = with_shown_texts(document)  # a U+0085 in a text does not come back from YAML
    return shown


class JsonTarget(Target):
    """The short document as JSON."""

    name = "json"
    suffix = ".json"

    def render(self, plan: Plan, stem: str) -> Export:
        return Export(files={f"{stem}{self.suffix}": self.write(plan)})

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        (text,) = export.files.values()
        same_or_error("the document", self.read(text), json.loads(json.dumps(plan_document(plan))))
        return ()

    def write(self, plan: Plan) -> str:
        return json.dumps(plan_document(plan), indent=2) + "\n"

    def read(self, text: str) -> Any:
        return json.loads(text)


class YamlTarget(JsonTarget):
    """The short document as YAML with its origin as comments, read back with the safe loader."""

    name = "yaml"
    suffix = ".yaml"

    def write(self, plan: Plan) -> str:
        body: str = yaml.safe_dump(plan_document(plan), sort_keys=False, allow_unicode=True, width=110)
        return comment(provenance_lines(plan)) + "\n" + body

    def read(self, text: str) -> Any:
        return yaml.safe_load(text)
