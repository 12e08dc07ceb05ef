"""What the zygote imports before it forks ranks: the code of the model, where it is known."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from autoplan.planner.search.inspection import Means, inspect
from autoplan.planner.search.options import SearchObserver, SearchOptions
from autoplan.planner.search.preload import MODELS, PRELOAD, preload_for
from autoplan.processes import Task, Zygote
from autoplan.strategies.workloads.sources import make_spec
from autoplan.strategies.workloads.spec import WorkloadSpec
from tests.recorded import make_hardware


def named(kind: str, reference: str) -> WorkloadSpec:
    spec = make_spec(model="gpt2")
    return spec.model_copy(update={"kind": kind, "reference": reference})


def test_a_model_is_known_by_its_configuration(tmp_path: Path) -> None:
    gpt2 = (MODELS, "transformers.models.gpt2.modeling_gpt2")
    assert preload_for(make_spec(model="gpt2"))[len(PRELOAD) :] == gpt2
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlm-roberta"}))
    roberta = "transformers.models.xlm_roberta.modeling_xlm_roberta"
    assert roberta in preload_for(named("config", str(tmp_path / "config.json")))
    assert roberta in preload_for(named("folder", str(tmp_path)))


@pytest.mark.parametrize("kind", ["config", "folder", "function"])
def test_what_is_not_there_is_left_to_the_inspection(kind: str, tmp_path: Path) -> None:
    preloaded = preload_for(named(kind, str(tmp_path / "nothing.py:make")))
    assert preloaded[: len(PRELOAD)] == PRELOAD and not any("modeling_" in name[20:] for name in preloaded[5:])


def test_a_function_that_names_transformers_has_its_base_imported(tmp_path: Path) -> None:
    for text, there in (("import transformers\n", True), ("import torch\n", False)):
        (tmp_path / "work.py").write_text(text)
        assert (MODELS in preload_for(named("function", f"{tmp_path}/work.py:make"))) is there


def test_a_rank_has_the_code_of_the_model_already(training_zygote: Zygote) -> None:
    """The zygote that tests share has imported what `preload_for` names for GPT-2."""
    task = Task(target="tests.planner.search.test_preload:modules_in_rank", total_deadline_s=60.0)
    assert training_zygote.run(task).check().ranks[0].result is True
    assert not training_zygote.preload_errors.keys() & set(preload_for(make_spec(model="gpt2")))


def test_what_one_task_needs_is_imported_before_it_and_stays(tmp_path: Path) -> None:
    task = Task(target="tests.planner.search.test_preload:has_colorsys", total_deadline_s=60.0)
    with Zygote(preload=["json"]) as zygote:
        assert zygote.run(task).check().ranks[0].result is False
        pid = zygote.pid
        zygote.load(["colorsys", "no_such_module"])
        assert zygote.run(task).check().ranks[0].result is True and zygote.pid == pid
        assert list(zygote.preload_errors) == ["no_such_module"]
        zygote.renew()
        assert zygote.run(task).check().ranks[0].result is True and zygote.pid != pid, "another one has it too"
        os.kill(zygote.pid or 0, signal.SIGKILL)
        zygote.load(["wave"])
        assert zygote.run(task).check().ranks[0].result is True


HIDDEN = """
import importlib
import torch
import autoplan

importlib.import_module("trans" + "formers.activations")  # as a package that this file imports does it


def workload():
    return autoplan.Workload(
        name="work",
        build_model=lambda: torch.nn.Linear(4, 1),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        make_batch=lambda num_samples, index: {"x": torch.randn(num_samples, 4)},
        loss=lambda model, batch: autoplan.LossSum(model(batch["x"]).square().sum(), len(batch["x"])),
        global_batch=4,
    )
"""


def test_what_the_workload_imports_of_libraries_is_imported_once(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(HIDDEN)
    spec = make_spec(model=f"{tmp_path}/work.py:workload")
    assert MODELS not in preload_for(spec)
    with Zygote(preload=["torch"]) as zygote:
        means = Means(options=SearchOptions(spec=spec), zygote=zygote, observer=SearchObserver(), budget_s=60.0)
        inspect(means, make_hardware(), "cpu", 1, None)
        report = zygote.run(Task(target="tests.planner.search.test_preload:has_activations", total_deadline_s=60.0))
    assert report.check().ranks[0].result is True


def has_activations(context: object) -> bool:
    """Whether the rank has what the workload imported."""
    return "transformers.activations" in sys.modules


def has_colorsys(context: object) -> bool:
    """Whether the rank has a module that nothing else imports."""
    return "colorsys" in sys.modules


def modules_in_rank(context: object) -> bool:
    """Whether the rank has GPT-2's code before it imports anything."""
    return "transformers.models.gpt2.modeling_gpt2" in sys.modules
