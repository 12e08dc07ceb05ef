"""What the exports torchrun and slurm share: the variables of a plan's ranks, and how such a script is read back.

In: a plan, or the text of a script. Out: lines of bash, or the values that the lines set.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoplan.errors import ExportError
from autoplan.planner.export.base import same_or_error
from autoplan.planner.export.user_code import read_by_tool
from autoplan.planner.export.variables import rank_variables
from autoplan.planner.plan.plan import Plan

if TYPE_CHECKING:
    from autoplan.processes import RankContext

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


def program_lines(plan: Plan) -> list[str]:
    """What the ranks run: the script and its arguments that are given, else the plan's own workload.

    What runs then is asked by `autoplan run`, which takes the options that are given: `--model train.py:workload`.
    """
    lines = ["export AUTOPLAN_PLAN=$PLAN  # for autoplan.current_plan() in a script of yours"]
    lines.append('if [ $# -eq 0 ] || [ "${1#--}" != "$1" ]; then')
    if plan.workload.kind == "object":
        lines.append('    echo "The plan was made of Python objects: give your script and its arguments." >&2')
        lines.append("    exit 2")
    else:
        lines.append('    set -- -m autoplan run "$PLAN" "$@"')
    return [*lines, "fi"]


def plan_lines(plan_file: str, folder: str) -> list[str]:
    """Where the plan's file is, with the check that it is there.

    Args:
        plan_file: Its name.
        folder: The folder of the script, as bash says it.
    """
    return [
        f"HERE={folder}",
        f"FILE={shlex.quote(plan_file)}",
        "PLAN=${PLAN:-$HERE/$FILE}",
        'if [ ! -f "$PLAN" ]; then',
        '    echo "There is no $PLAN: the file of the plan lies beside this script, or PLAN=/its/path says where." >&2',
        "    exit 2",
        "fi",
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptValues:
    """What a script sets, as it was read back.

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


def check_script(plan: Plan, text: str, plan_file: str) -> tuple[ScriptValues, tuple[str, ...]]:
    """What both targets are checked for: bash's own syntax check, and every variable.

    Returns:
        The values that were read back, and notes.

    Raises:
        ExportError: bash refuses it, or a value is not the plan's.
    """
    notes = check_syntax(text)
    values = read_script(text)
    wanted = {**rank_variables(plan), "AUTOPLAN_PLAN": "$PLAN"}
    same_or_error("the exported variables", values.exports, wanted)
    same_or_error("FILE", values.names.get("FILE"), plan_file)
    return values, notes


def check_syntax(text: str) -> tuple[str, ...]:
    """`bash -n`; a note where there is no bash.

    Raises:
        ExportError: bash refuses the script.
    """
    bash = shutil.which("bash")
    if bash is None:
        return ("not read by bash, which is not installed here",)
    done = subprocess.run([bash, "-n"], input=text, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ExportError(
            f"bash refuses the script: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}",
            hint="Nothing was written. Please report it.",
        )
    return ()


def parse_torchrun(words: list[str]) -> dict[str, Any]:
    """What torchrun's own parser reads of its arguments, in a process of its own, since that loads torch.

    Raises:
        ExportError: the parser refuses them.
    """
    return read_by_tool(f"{__name__}:parse_in_rank", (words,), tool="torchrun's parser", what="the command")


def parse_in_rank(context: RankContext, words: list[str]) -> dict[str, Any]:
    """What torchrun's parser reads, in this process."""
    from torch.distributed.run import get_args_parser

    try:
        read = get_args_parser().parse_args(words)
    except SystemExit as error:
        raise ValueError(f"torchrun does not take {' '.join(words)}") from error
    return {name: value for name, value in vars(read).items() if isinstance(value, (str, int, bool, list, type(None)))}
