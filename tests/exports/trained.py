"""Exports a plan, trains it with the real tool for six steps, and compares: what the tests of each tool share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoplan.planner.export.run import Exported, export_plan
from autoplan.planner.plan.plan import Plan
from autoplan.processes import Zygote
from tests.exports import train_export
from tests.exports.environments import run_python
from tests.exports.six_steps import WORKLOAD, SixSteps, compare, make_plan, plain_loop, prepared
from tests.recorded import make_hardware

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def on_gpus(workload: str = WORKLOAD, **knobs: Any) -> Plan:
    """A plan for GPUs."""
    plan = make_plan(workload, **knobs)
    return plan.model_copy(update={"device": "cuda", "hardware": make_hardware(gpu=True)})


def export(tool: str, folder: Path, workload: str, *, gpus: bool = False, **knobs: Any) -> tuple[Plan, Exported]:
    """A plan and its export, both in the folder."""
    plan = (on_gpus if gpus else make_plan)(workload, **knobs)
    (folder / "plan.json").write_text(plan.model_dump_json())
    suffix = {"accelerate": "yaml"}.get(tool, "json")
    return plan, export_plan(plan, tool, folder / f"export.{suffix}")


def differences(
    tool: str,
    folder: Path,
    workload: str,
    *,
    environment: str | None = None,
    interleaved: bool = False,
    relative: float = 1e-4,
    with_prepare: bool = True,
    pretend_gpus: bool = False,
    zygote: Zygote | None = None,
    **knobs: Any,
) -> list[str]:
    """What differs between the exported files in the real tool, plan.prepare and a plain loop; none where all agree.

    Args:
        tool: The target.
        folder: An empty folder.
        workload: One of six_steps.
        environment: Where the tool is installed; None: where the tests are.
        interleaved: The tool deals micro-batches out to the ranks one by one.
        relative: See `compare`.
        with_prepare: Compare with plan.prepare too, whose ranks have contiguous shares.
        zygote: Forks the ranks of plan.prepare, where there are several.
        pretend_gpus: The plan is for GPUs, and accelerate takes the CPU for some.
        **knobs: Of the plan.
    """
    plan, _ = export(tool, folder, workload, gpus=pretend_gpus, **knobs)
    ranks = plan.config.world_size
    script = [str(train_export.__file__), tool, str(folder)]
    if tool == "accelerate":
        command = ["-m", "accelerate.commands.launch", "--config_file", str(folder / "export.yaml"), *script]
    elif tool == "deepspeed" or ranks > 1:
        command = [*TORCHRUN, str(ranks), *script]
    else:
        command = script
    variables = {"DS_ACCELERATOR": "cpu"} | ({"PRETEND_GPUS": "1"} if pretend_gpus else {})
    run_python(environment, command, timeout_s=240.0, env=variables, cwd=folder)
    found = SixSteps.load(folder / "steps.pt")
    wanted = plain_loop(plan, shares="interleaved" if interleaved else "contiguous")
    differing = compare(found, wanted, relative=relative)
    if with_prepare and (ranks == 1 or not interleaved or not wanted.buffers):
        by_prepare = SixSteps(**{**vars(prepared(plan, zygote)), "start": wanted.start})
        differing += [f"against plan.prepare: {text}" for text in compare(found, by_prepare, relative=relative)]
    return differing
