"""The export target slurm: an sbatch script that starts a plan's ranks with torchrun on one node or several.

In: a plan. Out: two files, the script and the plan's. Traps that the script avoids, of sbatch(1), srun(1) and
torchrun:

- the batch script is copied to a spool folder, so files are found from SLURM_SUBMIT_DIR, not beside it;
- `--signal` without `B:` goes to the steps and not to the script, and bash runs a trap only once a foreground command
  has ended: so srun runs in the background, and the trap passes TERM on to it;
- since SLURM 22.05 srun does not take `--cpus-per-task` over from sbatch: it is given again;
- one task per node, since torchrun starts the ranks of a node itself;
- torchrun sets OMP_NUM_THREADS to 1 where nobody did.
"""

from __future__ import annotations

import re
import shutil
import subprocess

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

SIGNAL_BEFORE_END_S = 120
"""Seconds before the job's time is over at which TERM is sent."""

TIME_LIMIT = "24:00:00"

# What the check puts in the place of what SLURM says to the job.
_ON_ONE_NODE = {"$SLURM_JOB_NUM_NODES": "1", "$HEAD:$PORT": "node1:29500", "$SLURM_JOB_ID": "1", "$@": "train.py"}


def options(plan: Plan) -> dict[str, str | None]:
    """The options of the `#SBATCH` lines."""
    config, host = plan.config, plan.hardware.host
    name = re.sub(r"[^\w.-]+", "-", plan.workload.name, flags=re.ASCII)[:40].strip("-")
    found: dict[str, str | None] = {
        "job-name": f"autoplan-{name or 'plan'}",
        "nodes": "1",
        "ntasks-per-node": "1",
    }
    cores = host.cores_usable
    if plan.device == "cuda":
        found["gpus-per-node"] = str(config.world_size)
        gpus = sum(device.type == "cuda" for device in plan.hardware.devices)
        cores = cores * min(config.world_size, gpus) // gpus if gpus else cores
    found["cpus-per-task"] = str(max(cores, config.world_size))
    found |= {"mem": "0", "exclusive": None, "time": TIME_LIMIT, "signal": f"B:TERM@{SIGNAL_BEFORE_END_S}"}
    return found | {"output": "%x-%j.out"}


class SlurmTarget:
    """The sbatch script of a plan."""

    name = "slurm"
    suffix = ".sh"
    runs_code = False

    def render(self, plan: Plan, stem: str) -> Export:
        left = (
            *not_carried(plan),
            f"how long you train: --time is {TIME_LIMIT}, and partition and account are yours (sbatch --time=...)",
        )
        config = plan.config
        head = [
            *provenance_lines(plan),
            f"Written for SLURM 22.05 and later, and {WRITTEN_FOR}.",
            f"sbatch {stem}.sh: steps of the plan's own workload, by autoplan run. Submit it from its folder, with the "
            "environment of your training active. Options are those of autoplan run: --model train.py:workload, where "
            "you did not search it.",
            f"sbatch {stem}.sh train.py --its arguments: your script on the plan's {config.world_size} rank(s). It "
            "takes the plan with autoplan.current_plan(), or is the script of autoplan export --to pytorch.",
            "The plan was measured on one node that had nothing else to do: hence --exclusive and all its memory "
            "(--mem=0). On several: sbatch --nodes=2 --gpus-per-node=... A node needs at least ranks x (loader workers "
            "+ 1) cores in --cpus-per-task.",
            *(f"NOT CARRIED: {text}." for text in left),
        ]
        lines = [
            "#!/usr/bin/env bash",
            *(f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in options(plan).items()),
            comment(head),
            "set -euo pipefail",
            *plan_lines(f"{stem}.plan.json", "${SLURM_SUBMIT_DIR:-.}"),
            *variable_lines(plan),
            *program_lines(plan),
            "",
            f"RANKS={config.world_size}",
            f"SAME_NODE={config.tp}  # ranks that split a tensor between them talk most, and stay on one node",
            "RANKS_PER_NODE=$((RANKS / SLURM_JOB_NUM_NODES))",
            *_CHECK_OF_NODES,
            "",
            'mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "HEAD=${HOSTS[0]}",
            "PORT=$((29500 + SLURM_JOB_ID % 1000))",
            "",
            'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\',
            '    torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$RANKS_PER_NODE" \\',
            '    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$SLURM_JOB_ID" \\',
            '    "$@" &',
            *_WAIT,
        ]
        files = {f"{stem}.sh": "\n".join(lines) + "\n", f"{stem}.plan.json": plan.file_text()}
        return Export(files=files, not_carried=left)

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        script, file = export.files
        values, notes = check_script(plan, export.files[script], file)
        same_or_error("the plan's file", Plan.model_validate_json(export.files[file]).config, plan.config)
        same_or_error("the #SBATCH lines", values.options, options(plan))
        ranks = str(plan.config.world_size)
        same_or_error("RANKS", values.names.get("RANKS"), ranks)
        same_or_error("SAME_NODE", values.names.get("SAME_NODE"), str(plan.config.tp))
        known = _ON_ONE_NODE | {"$RANKS_PER_NODE": ranks}
        words = [known.get(word, word) for word in values.command if word != "&"]
        read = parse_torchrun(words)
        wanted = {
            "nnodes": "1",
            "nproc_per_node": ranks,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "node1:29500",
            "rdzv_id": "1",
            "standalone": False,
            "training_script": "train.py",
        }
        same_or_error("the torchrun command", {name: read[name] for name in wanted}, wanted)
        return (*notes, *_test_only(export.files[script]))


_CHECK_OF_NODES = [
    "if [ $((RANKS_PER_NODE * SLURM_JOB_NUM_NODES)) -ne $RANKS ] || [ $((RANKS_PER_NODE % SAME_NODE)) -ne 0 ]; then",
    '    echo "The plan has $RANKS ranks, $SAME_NODE of them on the same node: not on $SLURM_JOB_NUM_NODES nodes." >&2',
    "    exit 2",
    "fi",
]

_WAIT = [
    "STEP=$!",
    "trap 'kill -TERM \"$STEP\"' TERM INT  # srun passes it on to torchrun, and that to the ranks",
    "CODE=0",
    'wait "$STEP" || CODE=$?',
    'while kill -0 "$STEP" 2> /dev/null; do  # a signal ended the wait, not the step',
    "    CODE=0",
    '    wait "$STEP" || CODE=$?',
    "done",
    'exit "$CODE"',
]


def _test_only(text: str) -> tuple[str, ...]:
    """What `sbatch --test-only` says, where SLURM is installed; it asks the cluster and submits nothing."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        return ()
    try:
        done = subprocess.run([sbatch, "--test-only"], input=text, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (f"sbatch --test-only did not answer: {error}",)
    said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
    return (f"sbatch --test-only says: {said[:500]}",)
