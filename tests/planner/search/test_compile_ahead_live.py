"""Real compilations side by side, their trials after them, and what becomes of faults in them.

How many are compiled ahead is arithmetic; these tests give it sixteen cores that do not wait for each other, whatever
the machine has.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.search import compile_ahead
from autoplan.planner.search.compile_ahead import CompileAhead, Machine
from autoplan.planner.search.run import SearchOptions, run_search
from autoplan.planner.search.trial_cost import was_warm
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.cases import some
from tests.planner.data.faulty import GLOBAL_BATCH
from tests.planner.search.test_compile_ahead import searching
from tests.processes.helpers import survivors, wait_until

DATA = Path(__file__).parents[1] / "data"
SOUND, INJECTED = f"{DATA / 'faulty.py'}:make_sound", f"{DATA / 'injected.py'}:make"
LINEAR = f"{DATA / 'faulty.py'}:make_linear"  # its graphs have the fewest kernels to compile
PRELOAD = ("torch", "torch._inductor.compile_fx", "autoplan.planner.trials.worker")
LIMIT_BYTES = 4 << 30
REAL = CompileAhead._machine


def with_cores(self: CompileAhead) -> Machine:
    return replace(REAL(self), cores=16, serial_share=1.0)


@pytest.fixture(autouse=True)
def _many_cores_and_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompileAhead, "_machine", with_cores)
    monkeypatch.setattr(compile_ahead, "USED_SHARE", 1.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def real_session(folder: Path, workload: str, zygote: Zygote) -> Any:
    """A session whose next two trials would compile, with real processes."""
    candidates = [
        TrainingConfig.model_validate({"micro_batch": size, "compile": scope})
        for size in (32, 64)
        for scope in ("off", "model")
    ]
    found = searching(folder, candidates, global_batch=GLOBAL_BATCH)
    found.context.spec = make_spec(model=workload).model_copy(update={"global_batch": GLOBAL_BATCH})
    found.context.host_limit_bytes = found.context.memory_limit_bytes = 64 << 30
    found.zygote = zygote
    found.attempts = []
    found.add_attempt = lambda part, report: found.attempts.append(part)
    found.said = []
    found.observer.on_note = found.said.append
    found.observer.on_phase = lambda name, detail: found.said.append(name)
    found.on_progress = lambda progress: None
    return found


def measure(found: Any, folder: Path) -> list[Any]:
    """The trials of both compiled candidates."""
    runner = TrialRunner(
        found.zygote,
        found.context.spec,
        device="cpu",
        memory_limit_bytes=LIMIT_BYTES,
        host_limit_bytes=LIMIT_BYTES,
        directory=folder / "trials",
    )
    configs = [config for config in found.model.candidates if config.compile == "model"]
    return [
        runner.run(TrialOrder(number=number, purpose="search", config=config, prediction=None, deadline_s=300.0))
        for number, config in enumerate(configs)
    ]


@pytest.mark.slow
def test_trials_find_the_kernels_that_were_compiled_ahead(tmp_path: Path) -> None:
    with Zygote(preload=PRELOAD) as zygote:
        found = real_session(tmp_path / "s", LINEAR, zygote)
        ahead = CompileAhead(found)
        work = ahead.option()
        assert work is not None and work.kind == "compile ahead" and work.cost_s > 0
        ahead.run()
        assert ahead.option() is None, "once"
        (group,) = found.store.compiled_ahead
        assert len(group.configs) == 2 and not found.attempts and found.said == ["compile ahead"]
        assert all(one.compile_s and not one.cached for one in group.compiled) and group.seconds > 0
        assert all(found.trial_cost.is_warm(config) for config in group.configs)
        trials = measure(found, tmp_path)
        assert [trial.outcome.value for trial in trials] == ["ok", "ok"]
        assert all(was_warm(trial) for trial in trials), [trial.warnings for trial in trials]
        found.store.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["kill", "kill_zygote", "raise", "memory"])
def test_a_fault_while_compiling_ahead_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "part").write_text("compile ahead")
    (faults / "plan.json").write_text(json.dumps({"compile ahead": [kind, 1]}))
    monkeypatch.setenv("FAULTS", str(faults))
    with Zygote(preload=PRELOAD) as zygote:
        found = real_session(tmp_path / "s", INJECTED, zygote)
        if kind == "memory":
            monkeypatch.setattr(compile_ahead, "COMPILER_BYTES", 0)
            found.context.host_limit_bytes = LIMIT_BYTES
        ahead = CompileAhead(found)
        ahead.run()
        assert len(list(faults.glob("compile ahead.*"))) == 1, "the fault was met"
        (group,) = found.store.compiled_ahead
        failed = [one for one in group.compiled if one.why_not is not None]
        all_lost = kind in ("kill_zygote", "memory")
        assert (len(failed) == 2) if all_lost else (len(failed) == 1)
        assert found.attempts == (["compile ahead"] if kind == "kill_zygote" else [])
        assert any("were not compiled ahead" in text for text in found.said)
        assert not found.store.trials and found.store.take_number() == 0
        assert ahead.option() is None, "they are left to their own trials"
        trials = measure(found, tmp_path)
        assert [trial.outcome.value for trial in trials] == ["ok", "ok"], [trial.reason for trial in trials]
        found.store.close()


PLANNER = """
import sys
from pathlib import Path
from autoplan.planner.search import compile_ahead
from autoplan.planner.search.compile_ahead import CompileAhead
from autoplan.processes import Zygote
from tests.planner.search.test_compile_ahead_live import PRELOAD, SOUND, real_session, with_cores

CompileAhead._machine, compile_ahead.USED_SHARE = with_cores, 1.0
with Zygote(preload=PRELOAD) as zygote:
    found = real_session(Path(sys.argv[1]), SOUND, zygote)
    found.on_progress = lambda progress: print(progress.phase, flush=True)
    try:
        CompileAhead(found).run()
    except KeyboardInterrupt:
        print("interrupted", zygote.alive, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", some([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], [signal.SIGKILL]))
def test_a_planner_that_is_ended_while_it_compiles_ahead_leaves_nobody(tmp_path: Path, number: signal.Signals) -> None:
    token = uuid.uuid4().hex
    planner = subprocess.Popen(
        [sys.executable, "-c", PLANNER, str(tmp_path / "s")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PROCESS_TEST_TOKEN": token},
        cwd=Path(__file__).parents[3],
    )
    try:
        assert planner.stdout is not None
        while (line := planner.stdout.readline()) != "compile\n":
            assert line, "it ended before it compiled"
        time.sleep(2.0)
        assert len(survivors(token)) >= 5, "the planner, the guard, the zygote, two processes that compile"
        planner.send_signal(number)
        output, _ = planner.communicate(timeout=60)
    finally:
        planner.kill()
    assert wait_until(lambda: not survivors(token), 15.0), "nobody is left"
    assert planner.returncode == (0 if number is signal.SIGINT else -number)
    assert ("interrupted True" in output) is (number is signal.SIGINT)
    lines = (tmp_path / "s" / "record.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["study"], "nothing of it counts"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine")
def test_a_whole_search_that_compiles_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "DEADLINE_S", 600.0)
    fixed = {
        "precision": "fp32", "threads": 1, "checkpointing": "none", "optimizer_step": "own", "allocator": "own",
        "loss": "full",
    }  # fmt: skip
    options = SearchOptions(
        spec=make_spec(model=SOUND),
        store=tmp_path / "s",
        budget=1500.0,
        device="cpu",
        max_trials=9,
        fix=fixed,
        bound={"micro_batch": [48, 64, 96, 128, 192]},
    )
    result = run_search(options)
    assert result.status == "plan_found" and result.plan is not None, result.reason
    record = [json.loads(line) for line in (Path(result.store) / "record.jsonl").read_text().splitlines()]
    groups = [line["compiled_ahead"] for line in record if line["kind"] == "compiled_ahead"]
    assert groups, result.notes
    assert all(one["compile_s"] is not None for group in groups for one in group["compiled"]), groups
    done = [one["config"] for group in groups for one in group["compiled"]]
    trials = [trial for trial in result.trials if trial.config.model_dump(mode="json") in done]
    assert trials and all(was_warm(trial) for trial in trials), [trial.warnings for trial in trials]
    assert any(note.startswith(f"compiled ahead: {len(done)} configurations") for note in result.plan.notes)
    assert [trial.number for trial in result.trials] == list(range(len(result.trials)))
    again = run_search(options)
    assert again.from_record and again.plan == result.plan
