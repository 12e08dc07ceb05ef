"""autoplan schema: what a plan file contains, as JSON Schema."""

from __future__ import annotations

import json


def schema_command() -> None:
    """Print the JSON Schema of plan.json."""
    from autoplan.planner.plan.plan import Plan

    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Plan.model_json_schema()
    print(json.dumps(schema, indent=2))
