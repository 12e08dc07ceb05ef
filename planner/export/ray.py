"""The export target ray: a script for Ray Train, and the PyTorch script whose functions its workers call.

In: a plan. Out: two files. The driver has ScalingConfig, TorchConfig and RunConfig as plain values, which the check
reads back with Ray's own classes, where Ray is installed. Workers get the text of the other file, so that it need not
lie on every node.
"""

from __future__ import annotations

from typing import Any

from autoplan.planner.export.base import CODING, Export, Target, comment, provenance_lines, same_or_error_each
from autoplan.planner.export.companion import read_constants
from autoplan.planner.export.launch import not_carried, rank_variables, ranks_per_node
from autoplan.planner.export.pytorch import PytorchTarget
from autoplan.planner.export.user_code import read_by_tool
from autoplan.planner.plan.key_tables import installed_version
from autoplan.planner.plan.plan import Plan
from autoplan.processes import RankContext

WRITTEN_FOR = "2.60"
"""The version of Ray whose classes the values were read back with, and under which a plan was trained."""

TIMEOUT_S = 1800
"""Seconds that a collective operation may take: Ray's own default."""


def settings(plan: Plan) -> dict[str, Any]:
    """The constants of the driver, by name: keyword arguments of Ray's classes, and the batch of its other file."""
    config = plan.config
    cores = max(1, plan.hardware.host.cores_usable // ranks_per_node(plan))
    threads = int(rank_variables(plan).get("OMP_NUM_THREADS", cores))
    resources: dict[str, Any] = {"CPU": threads if plan.device == "cpu" else 1}
    if plan.device == "cuda":
        resources["GPU"] = 1
    return {
        "SCALING": {
            "num_workers": config.world_size,
            "use_gpu": plan.device == "cuda",
            "resources_per_worker": resources,
            "placement_strategy": "PACK",
        },
        "TORCH": {
            "backend": "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo",
            "timeout_s": TIMEOUT_S,
        },
        "MAX_FAILURES": 0,
        "ENVIRONMENT": rank_variables(plan),
        "GLOBAL_BATCH": plan.workload.global_batch,
    }


class RayTarget(Target):
    """A script for Ray Train."""

    name = "ray"
    suffix = ".py"
    runs_code = True

    def render(self, plan: Plan, stem: str) -> Export:
        training = f"{stem}_training.py"
        script = PytorchTarget().render(plan, f"{stem}_training").files[training]
        left = (
            *not_carried(plan),
            "a resumed run: a worker that fails ends the training (max_failures=0), and the last step's checkpoint has "
            "the model alone",
        )
        head = [
            *provenance_lines(plan),
            f"Written for Ray {WRITTEN_FOR} (Ray Train).",
            f"The functions are those of {training}, the plan's script for torchrun: the same code trains here.",
        ]
        lines = [
            CODING,
            comment(head, left),
            '"""The plan on Ray Train. Run it with --steps 10; it starts Ray here, or joins that of RAY_ADDRESS."""',
            "",
            _IMPORTS,
            f"TRAINING = {training!r}",
            *(f"{name} = {value!r}" for name, value in settings(plan).items()),
            _FUNCTIONS,
        ]
        return Export(files={f"{stem}.py": "\n".join(lines) + "\n", training: script}, not_carried=left)

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        driver, training = export.files
        PytorchTarget().check(plan, Export(files={training: export.files[training]}))
        text, wanted = export.files[driver], settings(plan)
        constants = read_constants(text)
        same_or_error_each(wanted | {"TRAINING": training}, constants)
        version = installed_version("ray")
        if version is None:
            return ("not read by Ray's own classes: Ray is not installed (pip install 'ray[train]')",)
        parts = (constants["SCALING"], constants["TORCH"], constants["MAX_FAILURES"])
        read = read_by_tool(f"{__name__}:read_in_rank", parts, tool=f"Ray {version}", what="the settings")
        same_or_error_each({**wanted["SCALING"], **wanted["TORCH"], "max_failures": wanted["MAX_FAILURES"]}, read)
        if not version.startswith(WRITTEN_FOR + "."):
            return (f"written for Ray {WRITTEN_FOR}; {version} is installed, whose classes read the settings too",)
        return ()


def read_in_rank(context: RankContext, scaling: dict[str, Any], torch: dict[str, Any], failures: int) -> dict[str, Any]:
    """The settings as Ray's classes hold them, in this process."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig

    made = ScalingConfig(**scaling), TorchConfig(**torch)
    run = RunConfig(failure_config=FailureConfig(max_failures=failures))
    read = {key: getattr(made[0], key) for key in scaling} | {key: getattr(made[1], key) for key in torch}
    return read | {"max_failures": run.failure_config.max_failures}


_IMPORTS = """from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

"""

_FUNCTIONS = '''

def load_training(text):
    """The functions of the plan's script, from its text, as a module of this worker."""
    path = Path(tempfile.mkdtemp()) / "plan_training.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("plan_training", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_training"] = module
    spec.loader.exec_module(module)
    return module


def train_loop(config):
    """What each worker runs, one for each rank of the plan."""
    training = load_training(config["script"])
    assert training.GLOBAL_BATCH == config["global_batch"]
    run = training.prepare(ray.train.torch.get_device())
    first, history = ray.train.get_context().get_world_rank() == 0, []
    for number in range(config["steps"]):
        batch = training.rank_batch(run, number)
        metrics = {"step": number + 1, "learning_rate": float(run.optimizer.param_groups[0]["lr"])}
        result = training.train_step(run, batch)
        metrics["loss"] = float(result.loss)
        if result.grad_norm is not None:
            metrics["grad_norm"] = float(result.grad_norm)
        history.append(metrics)
        if first:
            print(f"step {number + 1}: loss {metrics['loss']:.8f}", flush=True)
        if number + 1 < config["steps"]:
            ray.train.report(metrics)
    # The last step comes with a checkpoint: the whole model, and what each step reported. All ranks gather it.
    state = get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    with tempfile.TemporaryDirectory() as folder:
        if first:
            torch.save(state, Path(folder) / "model.pt")
            (Path(folder) / "steps.json").write_text(json.dumps(history))
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder) if first else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--storage", default=None, help="where results and the checkpoint go; every node must see it")
    arguments = parser.parse_args()
    script = Path(__file__).with_name(TRAINING).read_text(encoding="utf-8")
    ray.init(runtime_env={"env_vars": ENVIRONMENT})
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"global_batch": GLOBAL_BATCH, "script": script, "steps": arguments.steps},
        scaling_config=ScalingConfig(**SCALING),
        torch_config=TorchConfig(**TORCH),
        run_config=RunConfig(
            storage_path=arguments.storage, failure_config=FailureConfig(max_failures=MAX_FAILURES)
        ),
    )
    result = trainer.fit()
    step, loss = result.metrics["step"], result.metrics["loss"]
    print(f"step {step}: loss {loss:.8f}; the model is in {result.checkpoint.path}")


if __name__ == "__main__":
    main()'''
