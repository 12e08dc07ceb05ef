"""diagnose(): runs a training script that nobody edited, removes each suspected cause, and says what that gave."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoplan.errors import BudgetEndedError, UsageError, WorkloadError
from autoplan.planner.diagnose.findings import find_causes, notes_of
from autoplan.planner.diagnose.gains import LEAST_PAIRS
from autoplan.planner.diagnose.rank_findings import notes_of_ranks, rank_times
from autoplan.planner.diagnose.records import Answer, Diagnosis, Request, Suspect, SwitchTrial
from autoplan.planner.diagnose.sandbox import FILES, GONE
from autoplan.planner.diagnose.session import compiles_again
from autoplan.planner.diagnose.suspects import find_suspects, tried_words
from autoplan.probes.run import progress_reporter, read_host_profile
from autoplan.processes import Ended, ProcessReport, Task, Zygote, folder_prefix, limit_hit
from autoplan.processes.cause import hanging_frame
from autoplan.units import format_seconds, parse_duration_s, parse_memory_bytes

DEFAULT_BUDGET_S = 60.0

GRACE_S = 15.0
"""After the budget, for a step that is long, and for an interpreter that starts."""

MOST_RUNS = 5
"""A script that is short is run again for what is left to measure, so often at the most."""

LEAST_RUN_S = 5.0
"""With less of the budget left the script is not run again."""

MEMORY_SHARE = 0.8

ONLY_SEEN = "Only steps of torch.optim, or backwards where there are none, in the first process's main thread are seen."
TRAINS = "See that it trains by itself"
OFFLINE_MEND = "A diagnosis has the Hugging Face Hub offline. Run it once by itself: then the cache has what it loads."

DENIED = re.compile(r"Permission denied|Errno 13|os error 13|errno = 13|readonly database", re.IGNORECASE)
"""What Python, C, Rust and SQLite say of a write that the kernel refuses."""

DENIED_MEND = (
    "If it may write there by itself: a diagnosis lets no library in C and no other program write outside of its own "
    "folder, so your files stay as they are. Have the script write with Python or torch, or leave that out."
)
FULL, LEAST_FREE_BYTES = re.compile(r"No space left|Errno 28|Disk quota exceeded"), 64 << 20
"""What is said of a full disk; with less free than this a script that failed as it wrote, or untold, has filled it."""

MODULE_TEXT = "attempted relative import with no known parent package"

RANK_TEXTS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of torchrun; a script that misses one says its name."""

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""What gloo, the store and NCCL say of a rank that is gone."""

UNEVEN_MEND = "Give each rank as many batches: DistributedSampler(..., drop_last=True), or with model.join()."


def diagnose(
    what: str | Path | Callable[[], object] | Any,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    budget: str | float = DEFAULT_BUDGET_S,
    nproc: int = 1,
    memory_limit: str | int | None = None,
    trace: str | Path | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Finds what makes a training slow, by removing each suspected cause and measuring whole steps.

    The script runs in a process of its own, at most for the budget, from the start each time. What it would write goes
    into a folder that is removed, loggers that talk to a network are off, its standard input is closed.

    Args:
        what: A script; or a function that trains, which is called without arguments; or an object with `train()`, such
            as a Trainer. A function and an object are copied to the process.
        arguments: Of the script.
        module: `what` is the name of a module, which runs as `python -m` runs it.
        budget: Seconds, or a text like "60s"; the processes are ended some seconds after it.
        nproc: Ranks of a script for torchrun, started on this machine as torchrun starts them.
        memory_limit: Host memory that the script may use, like "8GiB"; None: 80 % of what there is.
        trace: Where to keep a trace of three steps for Perfetto.
        on_progress: Is told what is being done.

    Returns:
        At most five findings, and where the time of a step goes.

    Raises:
        UsageError: there is no such script, no place for the trace, no rank, or the budget is no duration.
        WorkloadError: the script ended, failed, or used too much memory before enough steps.
        BudgetEndedError: no, or not enough, optimizer steps in the budget.
    """
    began = time.monotonic()
    budget_s = parse_duration_s(budget)
    script, function = (str(what), None) if module else _read(what)
    name = Path(script).name if script else getattr(what, "__qualname__", type(what).__name__)
    limit_bytes = _limit_bytes(memory_limit)
    place = None if trace is None else _place_of(trace)
    if nproc < 1:
        raise UsageError(f"nproc is {nproc}; a script has at least one rank", hint="Give --nproc 2, or leave it out.")
    folder = Path(tempfile.mkdtemp(prefix=folder_prefix("doctor")))
    try:
        request = Request(
            script=script,
            is_module=module,
            arguments=tuple(map(str, arguments)),
            budget_s=budget_s,
            sandbox=str(folder),
            trace=None if place is None else str(folder / "trace.json"),
            nproc=nproc,
        )
        with Zygote(preload=()) as zygote:
            runs = _Runs(zygote, request, function, name, limit_bytes, on_progress)
            answer = runs.go()
        if place is not None and (folder / "trace.json").exists():
            runs.notes += _keep(folder / "trace.json", place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seen = answer.observation
    assert seen is not None
    failed = runs.request.without
    findings = find_causes(answer, failed)
    return Diagnosis(
        script=name,
        steps=answer.steps,
        step_s=seen.step_s,
        parts=seen.parts,
        findings=tuple(findings),
        tested=answer.trials,
        notes=(*runs.notes, *notes_of(answer, seen, findings, failed), *notes_of_ranks(answer, nproc)),
        ranks=rank_times(answer),
        stacks=seen.stacks,
        operations=seen.operations,
        rates=seen.facts.rates,
        seconds=time.monotonic() - began,
    )


def _read(what: Any) -> tuple[str | None, Callable[[], object] | None]:
    """(script, None) or (None, function)."""
    if isinstance(what, (str, os.PathLike)):
        path = Path(what)
        if not path.is_file():
            raise UsageError(f"there is no script {path}", hint="Give the file of a training script.")
        return str(path.absolute()), None
    train = getattr(what, "train", None)
    function = what if callable(what) and not hasattr(what, "parameters") and train is None else train
    if not callable(function) or hasattr(what, "parameters"):
        raise UsageError(
            f"{type(what).__name__} is no script, no function and has no train()",
            hint="Give the path of a script, a function that trains, or a Trainer.",
        )
    return None, function


def _place_of(trace: str | Path) -> Path:
    """Where the trace is kept.

    Raises:
        UsageError: it is a folder, is in none, or cannot be written.
    """
    place = Path(trace).absolute()
    if not os.path.isdir(place.parent):
        raise UsageError(f"there is no folder for the trace {trace}", hint="Make it first, or give another place.")
    if os.path.isdir(place):
        raise UsageError(f"the trace {trace} is a folder", hint=f"Give a file: {Path(trace) / 'trace.json'}.")
    if not os.access(place if os.path.exists(place) else place.parent, os.W_OK):
        raise UsageError(f"the trace {trace} cannot be written there", hint="Give another place.")
    return place


def _keep(trace: Path, place: Path) -> list[str]:
    """Copies the trace to its place; returns a note where that fails: the diagnosis stays."""
    try:
        shutil.copyfile(trace, place)
    except OSError as error:
        return [f"the trace was not kept: {place} cannot be written ({error.strerror or error})"]
    return []


def _limit_bytes(given: str | int | None) -> int:
    limit = MEMORY_SHARE if given is None else parse_memory_bytes(given)
    if isinstance(limit, int):
        return limit
    total = read_host_profile().host.memory_total_bytes.value
    return int(limit * (total or 2**40))


@dataclass
class _Runs:
    """The processes of one script, one after another, until all is measured or the budget is over."""

    zygote: Zygote
    request: Request
    function: Callable[[], object] | None
    name: str
    limit_bytes: int
    on_progress: Callable[[str], None]
    notes: list[str] = field(default_factory=list)

    def go(self) -> Answer:
        """Runs the script until the answer is whole, or nothing more comes."""
        until = time.monotonic() + self.request.budget_s
        answer, steps = Answer(), 0
        for number in range(MOST_RUNS):
            left_s = until - time.monotonic()
            if number and left_s < LEAST_RUN_S:
                break
            report = self._run(max(left_s, 1.0))
            found = _read_answer(report)
            self._add_notes(report, found)
            steps += found.steps
            alone = self.request.nproc == 1 and not self.request.one_rank
            if found.observation is None and alone and _misses_ranks(found):
                self.notes.append(
                    "run as the only rank: what ranks cost each other, or one that is late, is not seen; --nproc 2 "
                    "runs it in two"
                )
                self.request = self.request.model_copy(update={"one_rank": True})
                continue
            if found.observation is None:
                if answer.observation is None:
                    raise self._no_steps(report, found)
                self.notes.append(f"run again, the script did not come to its steps: {report.describe()}")
                break  # what was measured before stays
            progress = sum(len(one.pairs) for one in found.trials) - sum(len(one.pairs) for one in answer.trials)
            answer = found
            if not self._goes_on(report, found, progress):
                break
        return self._with_dynamic(answer, until).model_copy(update={"steps": steps})

    def _with_dynamic(self, answer: Answer, until: float) -> Answer:
        """The answer with one more process where torch.compile compiled again: there it takes all shapes at once."""
        seen, left_s = answer.observation, until - time.monotonic()
        if seen is None or not compiles_again(seen) or self.request.nproc > 1 or left_s < LEAST_RUN_S:
            return answer
        self.request = self.request.model_copy(update={"dynamic": True, "observation": None, "trials": ()})
        report = self._run(left_s)
        found = _read_answer(report)
        other = found.observation
        if other is None or found.how == "raised":
            why = found.error or "no steps in the time that was left"
            self.notes.append(f"dynamic=True of torch.compile was not measured: {why}")
            return answer
        suspect = Suspect(switch="recompilation", part="forward", worth=seen.facts.compile_s / seen.mean_s)
        trial = SwitchTrial(suspect=suspect, pairs=tuple(zip(seen.block_s, other.block_s, strict=False)))
        return answer.model_copy(update={"trials": (*answer.trials, trial)})

    def _run(self, budget_s: float) -> ProcessReport:
        shutil.rmtree(Path(self.request.sandbox, FILES), ignore_errors=True)  # what an earlier run has written
        Path(self.request.sandbox, GONE).unlink(missing_ok=True)
        self.on_progress(f"starting {self.name}")
        task = Task(
            target="autoplan.planner.diagnose.worker:run_script",
            args=(self.request.model_copy(update={"budget_s": budget_s}), self.function),
            ranks=self.request.nproc,
            env={} if self.request.nproc == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"},
            total_deadline_s=budget_s + GRACE_S,
            memory_limit_bytes=self.limit_bytes,
        )
        return self.zygote.run(
            task, on_progress=progress_reporter(lambda doing: self.on_progress(f"{self.name}: {doing}"))
        )

    def _add_notes(self, report: ProcessReport, found: Answer) -> None:
        """What the process did otherwise than the script says, and what the kernel refused."""
        texts = [found.error or "", *(rank.stderr_tail for rank in report.ranks)]
        notes = [*found.notes]
        if found.restricted and any(map(DENIED.search, texts)):
            notes.append(
                "something was refused (permission denied): a diagnosis lets no library in C and no other program "
                "write outside of its folder"
            )
        self.notes += [note for note in notes if note not in self.notes]

    def _goes_on(self, report: ProcessReport, found: Answer, progress: int) -> bool:
        """Whether the script is run again: without what it failed with, or for what is left to measure."""
        without = self.request.without
        if found.active is not None and (found.how == "raised" or report.ended is not Ended.FINISHED):
            why = found.error or report.describe()
            self.notes.append(f"with {tried_words(found.active)} the script failed, so it was not measured: {why}")
            without = (*without, found.active)
        elif found.how == "raised":
            self.notes.append(f"the script failed after {found.steps} steps: {_at(found)}")
        elif found.how == "ended" and found.rank is not None:
            self.notes.append(f"{_uneven_end(found)}. {UNEVEN_MEND}")
        elif found.how == "running" and report.ended is not Ended.FINISHED:
            self.notes.append(f"the script was ended after {found.steps} steps: {report.describe()}")
        assert found.observation is not None
        whole = {one.suspect.key for one in found.trials if len(one.pairs) >= LEAST_PAIRS or one.why_not}
        left = [one for one in find_suspects(found.observation) if one.key not in {*whole, *without}]
        self.request = self.request.model_copy(
            update={
                "without": without,
                "observation": found.observation,
                "trials": found.trials,
                "ranks": found.ranks,
                "trace": None,
            }
        )
        return found.how != "done" and bool(left) and (progress > 0 or len(without) > 0 or found.how == "ended")

    def _no_steps(self, report: ProcessReport, found: Answer) -> Exception:
        """The one sentence for a script that did not come so far."""
        name, steps = self.name, found.steps
        counted = f"{steps} optimizer step{'s' * (steps > 1)}" if steps else "an optimizer step"
        few = f"after {counted}, too few to see where the time goes" if steps else f"without {counted}"
        place = os.path.dirname(self.request.sandbox)
        untold = found.how == "running" or "writ" in (found.error or "")
        if FULL.search(found.error or "") or (untold and shutil.disk_usage(place).free < LEAST_FREE_BYTES):
            return WorkloadError(
                f"{name} was ended {few}: the disk of {place} is full, and what the script writes goes there",
                hint="Make room there, or set TMPDIR to a folder of a larger disk.",
            )
        if found.error is not None and found.error.startswith("EOFError"):
            return WorkloadError(
                f"{name} asked for input{_where(found)}, and its standard input is closed",
                hint="Give it what it asks for as arguments, after --.",
            )
        if found.how == "raised":
            tail = report.ranks[found.rank or 0].stderr_tail.strip().splitlines()
            said = f": {tail[-1][:200]}" if tail and (found.error or "").startswith("exit code") else ""
            return WorkloadError(f"{name} failed {few}: {_at(found)}{said}", hint=self._mend(found, tail))
        if found.how == "ended" and found.rank is not None:
            return WorkloadError(f"{name}: {_uneven_end(found)}", hint=UNEVEN_MEND)
        hit = limit_hit(report, f"the run of {name}")
        if hit is not None and hit.kind == "memory":
            return WorkloadError(hit.text, hint=hit.hint)
        if report.ended is Ended.DEADLINE:
            frame = hanging_frame(report)
            place = "" if frame is None else f" (it was in {re.sub(', in .*', '', frame)})"
            return BudgetEndedError(
                f"{name} made {counted if steps else 'no optimizer step'} in "
                f"{format_seconds(self.request.budget_s)}{place}",
                hint=f"Give a larger --budget. {ONLY_SEEN}",
            )
        if report.ended is not Ended.FINISHED:
            return WorkloadError(f"{name} was ended: {report.describe()}", hint=f"{TRAINS}.")
        return WorkloadError(
            f"{name} ended {few}",
            hint=f"Give it the arguments with which it trains, after --. {ONLY_SEEN}",
        )

    def _mend(self, found: Answer, tail: list[str]) -> str:
        """What to do about a script that failed before enough steps."""
        if found.offline:
            return OFFLINE_MEND
        if MODULE_TEXT in (found.error or ""):
            file = Path(os.path.relpath(self.request.script or ""))
            module = ".".join(file.with_suffix("").parts)
            return f"It is a part of a package. Run it as a module: autoplan doctor -m {module}."
        if found.restricted and any(map(DENIED.search, (found.error or "", *tail))):
            return DENIED_MEND
        if self.request.one_rank:
            return "It was run as its only rank. Give it more: --nproc 2."
        return f"{TRAINS}: python, its name and its arguments."


def _read_answer(report: ProcessReport) -> Answer:
    """Rank 0's answer; where a rank failed or ended before the others, with how that went."""
    answers = [Answer.model_validate(rank.result or {}) for rank in report.ranks]
    first = answers[0]
    if len(answers) == 1:
        return first
    raised = [(one.raised_at or 0.0, rank) for rank, one in enumerate(answers) if one.how == "raised"]
    ended = [(one.steps, rank) for rank, one in enumerate(answers) if one.how == "ended"]
    others = [one for one in answers if one.how != "ended"]
    waits = [one.how == "running" or any(text in (one.error or "") for text in LOST_PEER) for one in others]
    if ended and others and all(waits):  # for it, or they fail since it is gone
        rank = min(ended)[1]
        return first.model_copy(update={"how": "ended", "rank": rank, "error": None, "steps": answers[rank].steps})
    if raised:
        rank = min(raised)[1]
        cause = {name: getattr(answers[rank], name) for name in ("error", "line", "offline", "active")}
        return first.model_copy(update={"how": "raised", "rank": rank, **cause})
    return first


def _uneven_end(found: Answer) -> str:
    return f"rank {found.rank} ended after {found.steps} steps, before the others, which wait for it"


def _misses_ranks(found: Answer) -> bool:
    """Whether the script failed since torchrun did not start it."""
    error = found.error or ""
    missing = "expected, but not set" in error or error.startswith("KeyError")
    return found.how == "raised" and missing and any(text in error for text in RANK_TEXTS)


def _where(found: Answer) -> str:
    return f" at {found.line}" if found.line else ""


def _at(found: Answer) -> str:
    return f"{'' if found.rank is None else f'rank {found.rank}: '}{found.error}{_where(found)}"
