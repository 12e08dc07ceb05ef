"""The export targets torchrun and slurm: bash scripts that start a plan's ranks, beside the plan's file.

In: a plan. Out: two files. Without arguments the script runs the plan's own workload (`autoplan run`); with arguments
it runs that script with them. Every value is read back, the command by torchrun's own parser. Traps that the sbatch
script avoids, of sbatch(1), srun(1) and torchrun:

- the batch script is copied to a spool folder, so files are found from SLURM_SUBMIT_DIR, not beside it;
- `--signal` without `B:` goes to the steps and not to the script, and bash runs a trap only once a foreground command
  has ended: so srun runs in the background, and the trap passes TERM on to it;
- since SLURM 22.05 srun does not take `--cpus-per-task` over from sbatch: it is given again;
- one task per node, since torchrun starts the ranks of a node itself;
- torchrun sets OMP_NUM_THREADS to 1 where nobody did.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from autoplan.errors import ExportError
from autoplan.planner.export.base import Export, Target, comment, provenance_lines, same_or_error, same_or_error_each
from autoplan.planner.export.user_code import read_by_tool
from autoplan.planner.plan.current import PLAN_VARIABLE, variables_for
from autoplan.planner.plan.plan import Plan
from autoplan.processes import RankContext

_CARRIED = re.compile(r"CUDA_DEVICE_MAX_CONNECTIONS|(TORCH_)?NCCL_[A-Z0-9_]+")
_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_PLAIN = re.compile(r"[\w:,.^+-]{1,200}", re.ASCII)
"""Values that are taken from a plan's file into a script: no paths, no spaces, nothing that a shell reads."""
_MACHINE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def ranks_per_node(plan: Plan) -> int:
    """Ranks on each of the plan's nodes; all of them where it was measured on one machine."""
    return -(-plan.config.world_size // _node_count(plan))


def _node_count(plan: Plan) -> int:
    return 1 if plan.nodes is None else plan.nodes.count


def _refuse_uneven_nodes(plan: Plan) -> None:
    """Refuses a plan of several nodes that torchrun, with as many ranks on each, cannot start as it was measured.

    Raises:
        ExportError: its nodes have other numbers of ranks, or ranks that split a tensor are on two of them.
    """
    ranks, here = plan.config.world_size, ranks_per_node(plan)
    if plan.nodes is None or (here * plan.nodes.count == ranks and here % plan.config.tp == 0):
        return
    raise ExportError(
        f"the plan's {ranks} ranks, {plan.config.tp} of them on the same node, do not divide over its "
        f"{plan.nodes.count} nodes, and torchrun starts as many on each",
        hint=f"Use autoplan run with --launcher {plan.nodes.launcher}, or the target ray.",
    )


def rank_variables(plan: Plan) -> dict[str, str]:
    """The environment variables of each rank, besides the plan's file: those of `autoplan run`, and NCCL's.

    torchrun sets OMP_NUM_THREADS to 1 where several ranks have none: not what was measured.
    """
    then, cores = plan.environment.variables, plan.hardware.host.cores_usable
    found = variables_for(plan, Path("plan.json"), {}, cores, ranks_per_node(plan))
    del found[PLAN_VARIABLE]
    if plan.config.world_size > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks_per_node(plan))))
    for name in sorted(then):
        if _CARRIED.fullmatch(name) and _PLAIN.fullmatch(then[name]):
            found[name] = then[name]
    for name, other in (_ALLOCATOR_NAMES, _ALLOCATOR_NAMES[::-1]):  # older versions of torch read the second alone
        if name in found:
            found.setdefault(other, found[name])
    return dict(sorted(found.items()))


def not_carried(plan: Plan) -> tuple[str, ...]:
    """Sentences on the variables that the plan was found with and that a script does not set."""
    then, carried = plan.environment.variables, rank_variables(plan)
    others = [name for name in sorted(then) if name not in carried and name not in _MACHINE]
    if not others:
        return ()
    values = ", ".join(f"{name}={then[name]}" for name in others)
    return (f"the plan was found with {values}: set what of it you want, here or in your environment",)


WRITTEN_FOR = "torch 2.13 (torchrun), read back by the parser of the torch that is installed"


def variable_lines(plan: Plan) -> list[str]:
    """`export` lines, each with why."""
    why = {"OMP_NUM_THREADS": "threads per rank, as measured; torchrun's own would be 1 for several ranks"}
    if plan.config.threads is None and "OMP_NUM_THREADS" not in plan.environment.variables:
        why["OMP_NUM_THREADS"] = "a rank's share of the cores, as in the trials; torchrun's own would be 1"
    lines = []
    for name, value in rank_variables(plan).items():
        lines += [f"# {why[name]}"] if name in why else []
        lines.append(f"export {name}={shlex.quote(value)}")
    return lines


def script_lines(plan: Plan, stem: str, folder: str) -> list[str]:
    """The lines of both scripts: where the plan's file is, the variables, and what the ranks run.

    They run the given script with its arguments, else the plan's own workload. `autoplan run` then asks what may run,
    and takes the options that are given: `--model train.py:workload`.

    Args:
        plan: The plan.
        stem: The name of the script without its suffix.
        folder: The folder of the script, as bash says it.
    """
    own = ['    set -- -m autoplan run "$PLAN" "$@"']
    if plan.workload.kind == "object":
        own = ['    echo "The plan was made of Python objects: give your script and its arguments." >&2', "    exit 2"]
    return [
        "set -euo pipefail",
        f"HERE={folder}",
        f"FILE={shlex.quote(f'{stem}.plan.json')}",
        "PLAN=${PLAN:-$HERE/$FILE}",
        'if [ ! -f "$PLAN" ]; then',
        '    echo "There is no $PLAN: the file of the plan lies beside this script, or PLAN=/its/path says where." >&2',
        "    exit 2",
        "fi",
        *variable_lines(plan),
        "export AUTOPLAN_PLAN=$PLAN  # for autoplan.current_plan() in a script of yours",
        'if [ $# -eq 0 ] || [ "${1#--}" != "$1" ]; then',
        *own,
        "fi",
    ]


class ScriptValues(NamedTuple):
    """The values that a script sets, as they were read back.

    Attributes:
        exports: By name of a variable.
        names: Plain assignments of the script's own.
        options: Of `#SBATCH` lines, without the dashes; None for a flag.
        command: The words of the one torchrun command, after `torchrun`.
    """

    exports: dict[str, str]
    names: dict[str, str]
    options: dict[str, str | None]
    command: list[str]


def read_script(text: str) -> ScriptValues:
    """Reads a script back, line by line, as bash splits words.

    Raises:
        ExportError: it has no torchrun command, or several.
    """
    exports: dict[str, str] = {}
    names: dict[str, str] = {}
    options: dict[str, str | None] = {}
    commands = []
    code_began = False
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("#SBATCH ") and not code_began:  # sbatch stops reading at the first command
            name, equals, value = line.removeprefix("#SBATCH ").strip().removeprefix("--").partition("=")
            options[name] = value if equals else None
            continue
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        code_began = True
        words = shlex.split(line, comments=True)
        into = exports if words[0] == "export" else names
        assigned = re.fullmatch(r"(\w+)=(.*)", words[1] if words[0] == "export" else words[0])
        if assigned:
            into[assigned[1]] = assigned[2]
        if "torchrun" in words:
            commands.append(words[words.index("torchrun") + 1 :])
    if len(commands) != 1:
        raise ExportError(f"the script has {len(commands)} torchrun commands", hint="Please report it.")
    return ScriptValues(exports=exports, names=names, options=options, command=commands[0])


def _export(plan: Plan, stem: str, lines: list[str], left: tuple[str, ...]) -> Export:
    """The script, and the plan's file beside it."""
    files = {f"{stem}.sh": "\n".join(lines) + "\n", f"{stem}.plan.json": plan.file_text()}
    return Export(files=files, not_carried=left)


def check_script(plan: Plan, export: Export) -> tuple[ScriptValues, tuple[str, ...]]:
    """Checks a script of either target: by bash's own syntax check, every variable, and the plan's file.

    Returns:
        The values that were read back, and notes.

    Raises:
        ExportError: bash refuses the script, or a value is not the plan's.
    """
    (_, text), (plan_file, document) = export.files.items()
    bash = shutil.which("bash")
    notes: tuple[str, ...] = ()
    if bash is None:
        notes = ("not read by bash, which is not installed here",)
    elif (done := subprocess.run([bash, "-n"], input=text, capture_output=True, text=True, timeout=60)).returncode:
        raise ExportError(
            f"bash refuses the script: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}",
            hint="Nothing was written. Please report it.",
        )
    values = read_script(text)
    same_or_error("the plan's file", Plan.model_validate_json(document).config, plan.config)
    wanted = {**rank_variables(plan), "AUTOPLAN_PLAN": "$PLAN"}
    same_or_error("the exported variables", values.exports, wanted)
    same_or_error("FILE", values.names.get("FILE"), plan_file)
    return values, notes


def parse_torchrun(words: list[str]) -> dict[str, Any]:
    """The values that torchrun's own parser reads, in a process of its own, since the parser loads torch.

    Raises:
        ExportError: the parser refuses them.
    """
    return read_by_tool(f"{__name__}:parse_in_rank", (words,), tool="torchrun's parser", what="the command")


def parse_in_rank(context: RankContext, words: list[str]) -> dict[str, Any]:
    """The values that torchrun's parser reads, in this process."""
    from torch.distributed.run import get_args_parser

    try:
        read = get_args_parser().parse_args(words)
    except SystemExit as error:
        raise ValueError(f"torchrun does not take {' '.join(words)}") from error
    return {name: value for name, value in vars(read).items() if isinstance(value, (str, int, bool, list, type(None)))}


PORT = 29400
"""Of the first node, where torchrun's nodes meet: torchrun's own default."""


def torchrun_options(plan: Plan, first: str) -> str:
    """The options of the command that starts the plan's ranks: on one machine, or on each of its nodes.

    Args:
        plan: The plan.
        first: The name of the first node.
    """
    if plan.nodes is None:
        return f"--standalone --nproc-per-node {plan.config.world_size}"
    return (
        f"--nnodes {plan.nodes.count} --nproc-per-node {ranks_per_node(plan)} --rdzv-backend c10d "
        f'--rdzv-endpoint "{first}:{PORT}"'
    )


_CHECK_OF_FIRST = [
    'if [ -z "${FIRST:-}" ]; then',
    '    echo "The plan is for several nodes: run this on each, with FIRST=host of the first." >&2',
    "    exit 2",
    "fi",
]


class TorchrunTarget(Target):
    """The torchrun command of a plan, as a script."""

    name = "torchrun"
    suffix = ".sh"
    carries_loader = False

    def render(self, plan: Plan, stem: str) -> Export:
        _refuse_uneven_nodes(plan)
        left = not_carried(plan)
        ranks = plan.config.world_size
        head = [
            *provenance_lines(plan),
            f"Written for {WRITTEN_FOR}.",
            f"bash {stem}.sh: steps of the plan's own workload on its {ranks} rank(s), by autoplan run, which takes "
            f"options: bash {stem}.sh --model train.py:workload, where you did not search it.",
            f"bash {stem}.sh train.py --its arguments: your script on them. It takes the plan with "
            "autoplan.current_plan(), or is the script of autoplan export --to pytorch.",
        ]
        if plan.nodes is not None:
            head.append(
                f"Run it on each of {plan.nodes.count} nodes, with FIRST=host, the first of them: its port {PORT} is "
                "where they meet."
            )
        lines = [
            "#!/usr/bin/env bash",
            comment(head, left),
            *script_lines(plan, stem, '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'),
            *(_CHECK_OF_FIRST if plan.nodes is not None else ()),
            f'exec torchrun {torchrun_options(plan, "$FIRST")} "$@"',
        ]
        return _export(plan, stem, lines, left)

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        values, notes = check_script(plan, export)
        read = parse_torchrun(["train.py" if word == "$@" else word for word in values.command])
        wanted: dict[str, Any] = {"standalone": True, "nproc_per_node": str(ranks_per_node(plan))}
        if plan.nodes is not None:
            wanted |= {"standalone": False, "nnodes": str(plan.nodes.count)}
            wanted |= {"rdzv_backend": "c10d", "rdzv_endpoint": f"$FIRST:{PORT}"}
        same_or_error_each(wanted | {"training_script": "train.py"}, read)
        return notes


SIGNAL_BEFORE_END_S = 120
"""Seconds before the job's time is over at which TERM is sent."""

TIME_LIMIT = "24:00:00"

# What the check puts in the place of what SLURM says to the job, besides the nodes.
_OF_THE_JOB = {"$HEAD:$PORT": "node1:29500", "$SLURM_JOB_ID": "1", "$@": "train.py"}


def options(plan: Plan) -> dict[str, str | None]:
    """The options of the `#SBATCH` lines."""
    host, ranks = plan.hardware.host, ranks_per_node(plan)
    name = re.sub(r"[^\w.-]+", "-", plan.workload.name, flags=re.ASCII)[:40].strip("-")
    found: dict[str, str | None] = {
        "job-name": f"autoplan-{name or 'plan'}",
        "nodes": str(_node_count(plan)),
        "ntasks-per-node": "1",
    }
    cores = host.cores_usable
    if plan.device == "cuda":
        found["gpus-per-node"] = str(ranks)
        gpus = sum(device.type == "cuda" for device in plan.hardware.devices)
        cores = cores * min(ranks, gpus) // gpus if gpus else cores
    found["cpus-per-task"] = str(max(cores, ranks))
    found |= {"mem": "0", "exclusive": None, "time": TIME_LIMIT, "signal": f"B:TERM@{SIGNAL_BEFORE_END_S}"}
    return found | {"output": "%x-%j.out"}


class SlurmTarget(Target):
    """The sbatch script of a plan."""

    name = "slurm"
    suffix = ".sh"
    carries_loader = False

    def render(self, plan: Plan, stem: str) -> Export:
        _refuse_uneven_nodes(plan)
        left = (
            *not_carried(plan),
            f"how long you train: --time is {TIME_LIMIT}, and partition and account are yours (sbatch --time=...)",
        )
        config, count = plan.config, _node_count(plan)
        head = [
            *provenance_lines(plan),
            f"Written for SLURM 22.05 and later, and {WRITTEN_FOR}.",
            f"sbatch {stem}.sh: steps of the plan's own workload, by autoplan run. Submit it from its folder, with the "
            "environment of your training active. Options are those of autoplan run: --model train.py:workload, where "
            "you did not search it.",
            f"sbatch {stem}.sh train.py --its arguments: your script on the plan's {config.world_size} rank(s). It "
            "takes the plan with autoplan.current_plan(), or is the script of autoplan export --to pytorch.",
            f"The plan was measured on {f'{count} nodes' if count > 1 else 'one node'} with nothing else to do: hence "
            "--exclusive and all memory (--mem=0). On others: sbatch --nodes=... --gpus-per-node=... A node needs at "
            "least ranks x (loader workers + 1) cores in --cpus-per-task.",
        ]
        lines = [
            "#!/usr/bin/env bash",
            *(f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in options(plan).items()),
            comment(head, left),
            *script_lines(plan, stem, "${SLURM_SUBMIT_DIR:-.}"),
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
        return _export(plan, stem, lines, left)

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        values, notes = check_script(plan, export)
        same_or_error("the #SBATCH lines", values.options, options(plan))
        same_or_error_each({"RANKS": str(plan.config.world_size), "SAME_NODE": str(plan.config.tp)}, values.names)
        count, ranks = str(_node_count(plan)), str(ranks_per_node(plan))
        known = _OF_THE_JOB | {"$SLURM_JOB_NUM_NODES": count, "$RANKS_PER_NODE": ranks}
        words = [known.get(word, word) for word in values.command if word != "&"]
        read = parse_torchrun(words)
        wanted = {
            "nnodes": count,
            "nproc_per_node": ranks,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "node1:29500",
            "rdzv_id": "1",
            "standalone": False,
            "training_script": "train.py",
        }
        same_or_error_each(wanted, read)
        return (*notes, *_test_only(next(iter(export.files.values()))))


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
    """The answer of `sbatch --test-only`, if a cluster answers `scontrol ping`; nothing is submitted.

    Debian's client alone, without a cluster, fails each job with "Could not establish a configuration source".
    """
    sbatch, scontrol = shutil.which("sbatch"), shutil.which("scontrol")
    if sbatch is None or scontrol is None:
        return ()
    try:
        if subprocess.run([scontrol, "ping"], capture_output=True, timeout=60).returncode:
            return ()
        done = subprocess.run([sbatch, "--test-only"], input=text, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (f"sbatch --test-only did not answer: {error}",)
    said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
    return (f"sbatch --test-only says: {said[:500]}",)
