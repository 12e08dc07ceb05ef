"""Compiles the next candidates side by side before the first of them is measured, where that saves time.

In: the sampler's ranking, what compilations cost, the cores and the memory. Out: kernels in the compile cache, and one
line in the record; no trial and no verdict. While it runs nothing is measured; then each candidate is measured alone.

A compilation alone leaves most of many cores idle: tracing and lowering run in one thread, and only the compilers that
it starts run side by side. So several take less time together than one after the other. How many are worth it is
arithmetic (`choose`): the sum of what they take alone, less what they take together and what stays for each
trial with the kernels in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.planner.records.trials import Compiled, CompiledAhead, Outcome
from autoplan.planner.search.next_work import Option
from autoplan.planner.search.session import Session
from autoplan.planner.search.setup import context_bytes
from autoplan.planner.search.trial_cost import was_warm, what_is_compiled
from autoplan.planner.trace.model_profile import ModelProfile
from autoplan.planner.trials.request import CompileAnswer, CompileRequest
from autoplan.planner.trials.runner import PHASE_DEADLINES_S, load_compiler
from autoplan.processes import Cause, Ended, ProcessReport, RankReport, Task, ZygoteError, cause_of
from autoplan.strategies.config import SLOW_COMPILE_MODES, TrainingConfig

COMPILERS = 7
"""At a time in one compilation: those of a graph's kernels are started together and waited for. The graphs of a block
of GPT-2, forward and backward, had 15 kernels on CPU."""

MOST = 8
"""Processes side by side: the ranking says little of what comes after as many trials."""

COMPILER_BYTES = 0.4 * 2**30
"""Of one compiler process: 870 MiB were measured at the peak of a trial that compiled with one, 500 from the cache."""

HOST_BYTES = 3.0 * 2**30
"""Of host memory, what a process takes that trains on a GPU. Assumed."""

LEAST_SAVING_S, LEAST_SAVING_SHARE = 2.0, 0.1
"""A smaller saving than this, and than this share of what the compilations take alone, is within what is not known."""


TARGET = "autoplan.planner.trials.worker:run_compile_only"

SERIAL_SHARE = {"cpu": 0.2, "cuda": 0.6}
"""Of a compilation's time on one core, what runs in one thread: tracing and lowering. On CPU 17 and 24 % were measured
of the blocks of a GPT-2 with four layers. On CUDA assumed: no GPU has shown it."""

USED_SHARE = 0.8
"""Of the candidates after the first, how many will be measured: each trial changes the ranking. Assumed."""

DEADLINE_FACTOR, DEADLINE_S = 4.0, 60.0
"""They are ended after this many times what is expected, and these seconds; graphs that are finished stay in the
cache."""


class CompileAhead:
    """Compiles ahead in one run of a search.

    Args:
        session: The search.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._tried: set[TrainingConfig] = set()
        self._stopped = False
        for group in session.store.compiled_ahead:
            for config in group.configs:
                session.model.observe_ahead(config, None)

    def option(self) -> Option | None:
        """Compiling the next candidates side by side; None if the next one does not compile, or it saves nothing."""
        waiting = self.waiting()
        choice = choose(waiting, self._machine()) if waiting else None
        if choice is None:
            return None
        return Option(
            kind="compile ahead",
            config=waiting[0].config,
            cost_s=choice.seconds,
            why=f"{choice.number} configurations side by side save {choice.saving_s:.0f} s",
        )

    def run(self) -> None:
        """Compiles them; the clock and the ranking are others afterwards."""
        waiting = self.waiting()
        choice = choose(waiting, self._machine()) if waiting else None
        if choice is not None:
            self._run(waiting[: choice.number], choice)

    def waiting(self) -> list[Waiting]:
        """The best candidates whose trials would compile with an empty cache, each graph once.

        None where the next trial is not one of them: then it is measured first, and may change what comes after. None
        where batches differ in size: each size is compiled anew.
        """
        session, cost = self.session, self.session.trial_cost
        ranked = session.model.ranking(session.left_s) if session.sampler is None else []
        sizes = session.context.spec.batch_sizes
        if self._stopped or not ranked or not self._may(ranked[0]) or (sizes is not None and sizes.vary):
            return []
        graphs: dict[TrainingConfig, TrainingConfig] = {}
        for config in filter(self._may, ranked):
            graphs.setdefault(what_is_compiled(config), config)
        most = session.options.max_trials
        configs = list(graphs.values())[: MOST if most is None else min(MOST, most - session.trials_done)]
        if not configs:
            return []
        table = session.context.estimator.table(configs)
        return [
            Waiting(
                config=config,
                cold_s=cost.compile_s(config),
                warm_s=cost.compile_s(config, warm=True),
                trial_s=max(0.0, session.model.cost_s(config) - cost.compile_s(config)),
                micro_step_s=float(step_s) / config.accumulation(session.context.spec.global_batch),
                peak_bytes=float(peak),
            )
            for config, step_s, peak in zip(configs, table.step_time_s, table.peak_memory_high_bytes, strict=True)
        ]

    def _may(self, config: TrainingConfig) -> bool:
        """Whether a candidate compiles anew, and may be compiled ahead: several ranks compile side by side already."""
        cold = config.compile != "off" and not self.session.trial_cost.is_warm(config)
        alone = config.world_size == 1 and config.compile_mode not in SLOW_COMPILE_MODES
        context = self.session.context
        padding = context.device == "cuda" and times_padding(context.estimator.profile, config)
        return cold and alone and not padding and config not in self._tried

    def _machine(self) -> Machine:
        session, context = self.session, self.session.context
        return Machine(
            cores=context.hardware.host.cores_usable,
            memory_limit_bytes=context.memory_limit_bytes,
            host_limit_bytes=context.host_limit_bytes,
            context_bytes=context_bytes(context.hardware) if context.device == "cuda" else 0.0,
            serial_share=SERIAL_SHARE[context.device],
            fixed_s=session.trial_cost.fixed_s,
            left_s=session.left_s,
        )

    def _run(self, waiting: Sequence[Waiting], choice: Choice) -> None:
        session = self.session
        configs = [one.config for one in waiting]
        self._tried.update(configs)
        names = "; ".join(config.describe() for config in configs)
        session.observer.on_phase("compile ahead", f"{choice.number} configurations side by side: {names}")
        total = sum(one.peak_bytes for one in waiting) or 1.0
        limit = session.context.memory_limit_bytes - self._machine().context_bytes * (choice.number - 1)
        requests = tuple(
            CompileRequest(
                spec=session.context.spec,
                config=one.config,
                device=session.context.device,
                memory_limit_bytes=int(limit * one.peak_bytes / total),
            )
            for one in waiting
        )
        number = len(list((session.store.folder / "trials").glob("ahead*")))
        task = Task(
            target=TARGET,
            args=(requests,),
            ranks=len(requests),
            independent=True,
            directory=session.store.folder / "trials" / f"ahead{number:02d}",
            deadlines_s=PHASE_DEADLINES_S,
            total_deadline_s=min(DEADLINE_FACTOR * choice.seconds + DEADLINE_S, session.left_s),
            memory_limit_bytes=session.context.host_limit_bytes,
        )
        began_s = session.store.spent_s
        try:
            load_compiler(session.zygote, *(one.config for one in waiting))
            report = session.zygote.run(task, on_progress=session.on_progress)
        except ZygoteError as error:
            if not error.transient:
                raise
            self._stopped = True
            return  # a trial starts them again, with pauses
        self._take_in(waiting, choice, report, session.store.spent_s - began_s)

    def _take_in(self, waiting: Sequence[Waiting], choice: Choice, report: ProcessReport, seconds: float) -> None:
        """Keeps what came of it: in the record, and for what compilations cost."""
        session, compiled, machine = self.session, [], self._machine()
        for one, rank in zip(waiting, report.ranks, strict=True):
            answer = None if rank.exit_code != 0 or rank.result is None else CompileAnswer.model_validate(rank.result)
            if answer is None:
                compiled.append(Compiled(config=one.config, why_not=_how_it_ended(report, rank)))
                continue
            cached = answer.hits > 0 and answer.misses == 0
            compiled.append(Compiled(config=one.config, compile_s=answer.compile_s, cached=cached))
            beside_s = max(answer.compile_s - choice.number * one.micro_step_s, 0.1 * answer.compile_s)
            alone_s = beside_s / slowdown(choice.number, machine.cores, machine.serial_share) + one.micro_step_s
            session.model.observe_ahead(one.config, None if cached else alone_s)
        group = CompiledAhead(
            compiled=tuple(compiled), seconds=seconds, expected_s=choice.seconds, expected_saving_s=choice.saving_s
        )
        session.store.add(group)
        if cause_of(report) is Cause.OUTSIDE:
            session.add_attempt("compile ahead", report)
        failed = [one for one in compiled if one.why_not is not None]
        if failed:
            session.observer.on_note(
                f"{len(failed)} of {len(compiled)} configurations were not compiled ahead ({failed[0].why_not}); each "
                "is compiled in its own trial"
            )
        self._stopped = report.ended is not Ended.FINISHED or not group.configs

    def say(self) -> None:
        """Adds to the plan how many were compiled ahead and what came of it."""
        session, groups = self.session, self.session.store.compiled_ahead
        done = {config for group in groups for config in group.configs}
        if not done:
            return
        kinds = (Outcome.OK, Outcome.PRUNED)
        looks = (trial for trial in session.store.trials if trial.purpose == "search" and trial.outcome in kinds)
        measured = [trial for trial in looks if trial.config in done]
        session.note(
            f"compiled ahead: {len(done)} configurations in {len(groups)} group(s) side by side, in "
            f"{sum(group.seconds for group in groups):.0f} s; {len(measured)} of them were then measured, each "
            f"alone, {sum(map(was_warm, measured))} with all kernels from the cache"
        )


def _how_it_ended(report: ProcessReport, rank: RankReport) -> str:
    """Why a configuration was not compiled to the end, in a few words."""
    if report.ended is not Ended.FINISHED and rank.error is None:
        return " ".join(report.describe().split())[:300]
    if rank.error is not None:
        return f"{rank.error.type_name}: {rank.error.message.strip()}"[:300]
    return f"killed by signal {rank.signal}" if rank.signal is not None else f"exit status {rank.exit_code}"


# How many: arithmetic on what they take, the cores, the memory and the time left.


def times_padding(profile: ModelProfile, config: TrainingConfig) -> bool:
    """Whether compiling on CUDA times matrix products with and without padding, and keeps what was faster.

    Inductor does so where a size is no multiple of 8 numbers of 16 bits or 4 of 32 (torch 2.13,
    torch/_inductor/fx_passes/pad_mm.py): beside other compilations these times would say nothing.
    """
    of_16_bits = config.precision in ("bf16", "fp16")
    return any(
        round(size.at(config.micro_batch)) % (8 if of_16_bits else 4)
        for variant in profile.variants.values()
        for group in variant.groups
        if group.kind == "matmul" and (config.compile == "model" or group.segment == "block")
        for size in (group.m, group.n, group.k)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A candidate whose trial would compile with an empty cache.

    Attributes:
        config: What to compile.
        cold_s, warm_s: Seconds of its compilation alone, and with the kernels in the cache.
        trial_s: Of its trial without compiling.
        micro_step_s: Of one micro-step.
        peak_bytes: High bound of its peak on the device.
    """

    config: TrainingConfig
    cold_s: float
    warm_s: float
    trial_s: float
    micro_step_s: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where they would be compiled.

    Attributes:
        cores: That may be used.
        memory_limit_bytes, host_limit_bytes: On the device, and of host memory, for all processes together.
        context_bytes: Of the device, what a further process takes before any tensor; 0 on CPU.
        serial_share: Of a compilation on one core, what runs in one thread.
        fixed_s: To start and build a process.
        left_s: For the compilations and the trials after them.
    """

    cores: int
    memory_limit_bytes: float
    host_limit_bytes: float
    context_bytes: float
    serial_share: float
    fixed_s: float
    left_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How many of the waiting candidates to compile side by side, from the first on: at least two.

    Attributes:
        number: How many.
        seconds: Expected, for all of them.
        saving_s: Expected, over compiling each in its own trial.
    """

    number: int
    seconds: float
    saving_s: float


def compile_share(cores: float, serial_share: float) -> float:
    """The time of a compilation on some cores, as a share of its time on one (Amdahl's law).

    Args:
        cores: The cores that it has to itself; more cores than COMPILERS are of no use.
        serial_share: The share of its time on one core that runs in one thread.
    """
    return serial_share + (1.0 - serial_share) / min(cores, COMPILERS)


def slowdown(processes: int, cores: int, serial_share: float) -> float:
    """How many times as long a compilation takes on its share of the cores as on all of them.

    Args:
        processes: Side by side; not more than cores.
        cores: All of them.
        serial_share: Of its time on one core, what runs in one thread.
    """
    return compile_share(cores / processes, serial_share) / compile_share(cores, serial_share)


def choose(waiting: Sequence[Waiting], machine: Machine) -> Choice | None:
    """How many to compile side by side: as many as save the most time; None: each is compiled in its own trial.

    What a further candidate saves counts only as often as it will be measured. The micro-step that each runs shares
    the device with the others', so those add up.
    """
    best: Choice | None = None
    for number in range(2, min(len(waiting), machine.cores, MOST) + 1):
        group = waiting[:number]
        together_s = machine.fixed_s + sum(one.micro_step_s for one in group)
        together_s += max(one.cold_s for one in group) * slowdown(number, machine.cores, machine.serial_share)
        later_s = sum(one.warm_s + one.trial_s for one in group)
        if not _fits(group, machine) or together_s + later_s > machine.left_s:
            break
        kept = [one.cold_s - one.warm_s for one in group]
        saving_s = kept[0] + USED_SHARE * sum(kept[1:]) - together_s
        least_s = max(LEAST_SAVING_S, LEAST_SAVING_SHARE * sum(one.cold_s for one in group))
        if saving_s >= least_s and (best is None or saving_s > best.saving_s):
            best = Choice(number=number, seconds=together_s, saving_s=saving_s)
    return best


def _fits(group: Sequence[Waiting], machine: Machine) -> bool:
    """Whether they fit beside each other: on the device, and with their compilers in the host's memory."""
    compilers = COMPILER_BYTES * max(machine.cores, len(group))
    device = sum(one.peak_bytes for one in group) + machine.context_bytes * (len(group) - 1)
    host = HOST_BYTES * len(group) if machine.context_bytes else device
    return device <= machine.memory_limit_bytes and host + compilers <= machine.host_limit_bytes
