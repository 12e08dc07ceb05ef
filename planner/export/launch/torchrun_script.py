"""The export target torchrun: a bash script that starts a plan's ranks on this machine, and the plan's file.

In: a plan. Out: two files. Without arguments the script runs the plan's own workload (`autoplan run`); with arguments
it runs that script with them. Every value is read back, the command by torchrun's own parser.
"""

from __future__ import annotations

from autoplan.planner.export.base import Export, comment, provenance_lines, same_or_error
from autoplan.planner.export.launch.launch_script import (
    WRITTEN_FOR,
    check_script,
    parse_torchrun,
    plan_lines,
    program_lines,
    variable_lines,
)
from autoplan.planner.export.variables import not_carried
from autoplan.planner.plan.plan import Plan


class TorchrunTarget:
    """The torchrun command of a plan, as a script."""

    name = "torchrun"
    suffix = ".sh"
    runs_code = False

    def render(self, plan: Plan, stem: str) -> Export:
        left = not_carried(plan)
        ranks = plan.config.world_size
        head = [
            *provenance_lines(plan),
            f"Written for {WRITTEN_FOR}.",
            f"bash {stem}.sh: steps of the plan's own workload on its {ranks} rank(s), by autoplan run, which takes "
            f"options: bash {stem}.sh --model train.py:workload, where you did not search it.",
            f"bash {stem}.sh train.py --its arguments: your script on them. It takes the plan with "
            "autoplan.current_plan(), or is the script of autoplan export --to pytorch.",
            *(f"NOT CARRIED: {text}." for text in left),
        ]
        lines = [
            "#!/usr/bin/env bash",
            comment(head),
            "set -euo pipefail",
            *plan_lines(f"{stem}.plan.json", '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'),
            *variable_lines(plan),
            *program_lines(plan),
            f'exec torchrun --standalone --nproc-per-node {ranks} "$@"',
        ]
        files = {f"{stem}.sh": "\n".join(lines) + "\n", f"{stem}.plan.json": plan.file_text()}
        return Export(files=files, not_carried=left)

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        script, file = export.files
        values, notes = check_script(plan, export.files[script], file)
        same_or_error("the plan's file", Plan.model_validate_json(export.files[file]).config, plan.config)
        read = parse_torchrun(["train.py" if word == "$@" else word for word in values.command])
        same_or_error("--standalone", read["standalone"], True)
        same_or_error("--nproc-per-node", read["nproc_per_node"], str(plan.config.world_size))
        same_or_error("the script of the command", read["training_script"], "train.py")
        return notes
