"""The course of a script: warm-up, the steps that are looked at, then blocks of steps with and without each cause.

The end of each optimizer step hands over to `Session.on_step`, which goes on with the course until the next step is
needed. Blocks of a pair lie side by side in the order A-B-B-A, the first drawn, so that a drift of the machine cancels.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autoplan.planner.diagnose import roofline
from autoplan.planner.diagnose.clock import Clock, LineCounter, LineSampler, Step, worst_line
from autoplan.planner.diagnose.gains import LEAST_PAIRS, MORE_PAIRS, PAIRS, is_open, is_rough, is_slower
from autoplan.planner.diagnose.hooks import Hooks
from autoplan.planner.diagnose.memory import MemoryMeter, cut_graphs, find_kept, growth_bytes, sizes_of_names
from autoplan.planner.diagnose.ranks import Peers, critical, rank_block
from autoplan.planner.diagnose.records import (
    PARTS,
    Answer,
    Facts,
    HandAttention,
    Kept,
    LoaderFacts,
    MemoryFacts,
    Observation,
    Part,
    PartTime,
    RankBlock,
    Rates,
    Repeated,
    Request,
    Stack,
    Suspect,
    SwitchTrial,
    SyncLine,
)
from autoplan.planner.diagnose.sandbox import Sandbox
from autoplan.planner.diagnose.suspects import (
    LEAST_SHARE,
    MOST_WORKERS,
    NO_EFFECT,
    find_suspects,
    together,
    tried_words,
    workers_suspect,
)
from autoplan.planner.diagnose.switches import can_foreach, can_fuse, has_acted, remove
from autoplan.planner.trials.measure import median_interval
from autoplan.planner.verify.meter import WARM_UP_STEPS
from autoplan.probes.cgroup import cpu_stat_path
from autoplan.probes.cpu import read_throttling
from autoplan.probes.timing import TORCH_DTYPES
from autoplan.processes.cause import is_users_file

LOOK_STEPS = 20
"""Steps that are looked at; fewer where they take longer than LOOK_SHARE of the budget, but LEAST_LOOK_STEPS."""

LOOK_SHARE, LEAST_LOOK_STEPS, LEAST_LOOK_S = 0.25, 4, 1.0

LONG_LOOK_SHARE, LEAST_ONCE = 0.6, 0.05
"""Where nothing is suspected the look goes on for so much of the budget: an evaluation may come each 100 steps. It also
goes on where something was seen once, and took so much of the time, until it comes again."""

MOST_LOOK_STEPS = 20_000

BLOCK_S = 0.25
"""A block is no shorter: a moment of other work on the machine should not fill it."""

MOST_OF_IT = 0.8
"""Of a part's time: the steps that hold so much of it are those that have it."""

STILL_WAITS = 0.25
"""With the workers that were tried, the step still waits for more of the time than this: more are tried."""

STALLED = 4
"""A block that takes so many times as long as it should ends: more threads than free cores take ten times as long."""

COMPILES_S = 30.0
"""Seconds for compiling a model as it is tried. Four small blocks took over 20 on two cores."""

COMPARES_S = 10.0
"""Seconds for the pairs of blocks after that; a look that finds nothing leaves both of them."""

COMPILE_SHARE = 0.05
"""From this share of the time on compiling in the steps is looked at again with dynamic shapes, in another process."""

OTHER_PROCESS_SHARE = 0.4
"""Of the budget, for that process."""

BLOCKS_SEEN = 6

TRACED_STEPS, TRACE_SHARE, MOST_TRACE_BYTES = 3, 0.05, 64 << 20
"""Steps that are traced, if they take no larger share of the budget; a larger file takes too long to read."""

MOST_TIMED = 3
"""Sizes of attention in single operations beside which torch's own is timed."""

MOST_STACKS, LEAST_STACK = 12, 0.01
"""Stacks that are kept, and the least share of them."""

MANY_RUNS, SMALL_S = 20, 1e-3
"""A line that runs so many times in a step, for less than this each time, is one of a loop over small operations."""

Course = Generator[None, Step, Any]


class Session:
    """What happens between the steps of one script.

    Args:
        request: What is asked.
        sandbox: Where the script's writes go.
        report: Takes the answer so far; it is called after each piece.
        end: Ends the process.
        tell: Takes the words for what is done.
        peers: The other ranks of the script.
    """

    def __init__(
        self,
        request: Request,
        sandbox: Sandbox,
        report: Callable[[Answer], None],
        end: Callable[[], None],
        tell: Callable[[str], None],
        peers: Peers | None = None,
    ) -> None:
        self.request, self.sandbox = request, sandbox
        self._report, self._end, self._tell = report, end, tell
        self.peers = peers or Peers()
        self.clock = Clock()
        self.hooks = Hooks(self.clock, sandbox, self.on_step)
        self.answer = Answer(observation=request.observation, trials=request.trials, ranks=request.ranks)
        self._began = time.monotonic()
        self._kept_s = 0.0
        self._steps = 0
        self._random = random.Random(0)
        self._meter = MemoryMeter()
        self._clock_is_open = False
        self._acted = False
        self._course = self._run()
        next(self._course)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left for this process."""
        return self.request.budget_s - self._kept_s - (time.monotonic() - self._began)

    def on_step(self) -> None:
        """The end of an optimizer step of the script."""
        self._steps += 1
        if self.hooks.cut is not None:
            cut_graphs(self.hooks.kept, self.hooks.cut)
        if self._clock_is_open:
            try:
                self._course.send(self.clock.close())
                over = self.left_s < 0 and self.answer.observation is not None and self.peers.ranks == 1
            except StopIteration:
                over = True
            if over:
                self.keep(how="done")
                self._end()
        self._clock_is_open = True
        self.clock.open()

    def finish(self) -> None:
        """The end of the script: if it came while steps were looked at, those that were seen count."""
        self._course.close()
        self.keep(how="ended")

    def keep(self, **changed: Any) -> None:
        """Changes the answer, and writes it down."""
        refused = tuple(dict.fromkeys(self.sandbox.refused))
        self.answer = self.answer.model_copy(update={"steps": self._steps, "refused": refused} | changed)
        self._report(self.answer)

    # The course. Each `yield` waits for the end of a step.

    def _run(self) -> Course:
        self._tell("waiting for the first steps")
        for _ in range(WARM_UP_STEPS):
            yield
            self.hooks.look_again()
        seen = self.answer.observation
        if seen is None:
            seen = self._of_all_ranks((yield from self._look()))
        if self.request.dynamic:
            return
        if compiles_again(seen) and self.peers.ranks == 1:
            self._kept_s = OTHER_PROCESS_SHARE * self.request.budget_s
        if self.request.trace is not None or not seen.operations:
            yield from self._trace(seen)
            seen = seen if self.peers.ranks > 1 else self.answer.observation or seen  # a rank alone is traced
        kept = seen.memory.kept if seen.memory else ()
        self.hooks.kept = tuple(one.name for one in kept if one.graphs)
        wanted = [one for one in find_suspects(seen) if one.key not in self.request.without]
        suspects = [one for one in wanted if one.switch != "compile"]
        for place, suspect in enumerate(suspects):
            yield from self._try(suspect, seen, self.peers.agree(self.left_s) / (len(suspects) - place))
            if suspect.switch in ("workers", "batches"):
                yield from self._try_more_workers(seen)
        both = together(seen, {one.suspect.switch for one in self.answer.trials if len(one.pairs) >= LEAST_PAIRS})
        if self.peers.agree(both is not None and both.key not in self.request.without):
            assert both is not None
            yield from self._try(both, seen, self.peers.agree(self.left_s) / 2)
        yield from self._try_again(is_open, seen, MORE_PAIRS)
        for suspect in wanted:
            if suspect.switch == "compile":
                yield from self._try(suspect, seen, self.peers.agree(self.left_s))
        for most in (2 * PAIRS, MORE_PAIRS):
            yield from self._try_again(is_rough, seen, most)

    def _try_again(self, tells_more: Callable[[SwitchTrial, int], bool], seen: Observation, most: int) -> Course:
        """More pairs for what was tried, where they may tell more."""
        tried = [one for one in self.answer.trials if one.suspect.switch != "graphs"]
        keys = self.peers.agree([one.suspect.key for one in tried if tells_more(one, len(tried))])
        again = [one.suspect for one in tried if one.suspect.key in keys]
        for place, suspect in enumerate(again):
            yield from self._try(suspect, seen, self.peers.agree(self.left_s) / (len(again) - place), most)

    def _of_all_ranks(self, seen: Observation) -> Observation:
        """What the rank showed that the others wait for; its causes are those that are removed, in all ranks."""
        if self.peers.ranks == 1:
            return seen
        ranks = tuple(Observation.model_validate(one) for one in self.peers.gather(seen.model_dump(mode="json")))
        chosen = ranks[critical(ranks)]
        self.keep(observation=chosen, ranks=ranks)
        return chosen

    def _look(self) -> Course:
        """Looks at steps as they are: enough of them that what comes seldom is seen, as far as the budget goes."""
        rates = rates_here(self.hooks.trained())
        yield  # a step whose operands are no longer in the caches
        self._tell("looking at the steps as they are")
        self.clock.lines.clear()
        self.hooks.loaders.restart()
        self.hooks.collectives.calls = self.hooks.recomputed = self.hooks.profiled = 0
        self.hooks.again_s = 0.0
        self.hooks.modules.anomaly = False
        sampler, began, compiled = LineSampler(self.clock, self._meter.read_bytes), time.monotonic(), compile_seconds()
        memory, sizes = [self._meter.read_bytes()], sizes_of_names()
        throttled = read_throttling(cpu_stat_path())[1]
        sampler.start()
        steps: list[Step] = []
        traced = 0

        def see() -> Observation:
            count = len(steps) + traced
            facts = self._facts(count, (compile_seconds() - compiled) / count, rates)
            stopped = (read_throttling(cpu_stat_path())[1] - throttled) / (time.monotonic() - began)
            seen = observe(steps, facts.model_copy(update={"throttled": stopped}), self.clock, sampler)
            kept = find_kept(sizes, len(steps))
            seen = seen.model_copy(update={"memory": memory_facts(memory, sampler, kept)})
            if (before := self.answer.observation) is not None and before.operations:
                own = seen.facts.model_copy(update={"attention": before.facts.attention})
                seen = seen.model_copy(update={"operations": before.operations, "facts": own})
            self.keep(observation=seen)
            return seen

        seldom: dict[Part, float] = {}
        try:
            for share in (LOOK_SHARE, LONG_LOOK_SHARE):
                most_s = share * self.request.budget_s
                if share == LONG_LOOK_SHARE:
                    before = self._steps
                    assert self.answer.observation is not None  # of the first look
                    sampler.is_paused = True
                    yield from self._trace(self.answer.observation)
                    yield  # what reading the trace took is no part of a step
                    sampler.is_paused = False
                    traced = self._steps - before
                    memory[:] = [self._meter.read_bytes()]
                    if any(one.switch == "compile" for one in find_suspects(self.answer.observation)):
                        left_s = self.left_s - COMPILES_S - COMPARES_S
                        most_s = min(most_s, time.monotonic() - began + left_s)
                    self._tell("looking on, for what comes seldom")
                least_s = max(most_s / 4, min(LEAST_LOOK_S, most_s)) if share == LOOK_SHARE else most_s
                while len(steps) < MOST_LOOK_STEPS:
                    steps.append((yield))
                    memory.append(self._meter.read_bytes())
                    spent = time.monotonic() - began
                    again = any(2 * steps[-1].parts.get(part, 0.0) > seconds for part, seconds in seldom.items())
                    if self.peers.agree(
                        again
                        or (spent >= least_s and len(steps) >= (LOOK_STEPS if spent <= most_s else LEAST_LOOK_STEPS))
                    ):
                        break
                seen = see()
                seldom = seen_once(seen)
                if self.peers.agree(self.request.dynamic or (bool(find_suspects(seen)) and not seldom)):
                    break
        finally:  # a script that ends now has shown enough, or too little
            sampler.stop()
            if len(steps) >= LEAST_LOOK_STEPS:
                seen = see()
        if not self.peers.agree(compile_seconds() > 0):  # it looks at frames as they run
            counter = LineCounter()
            counter.start()
            try:
                yield
            finally:
                counter.stop()
            facts = seen.facts.model_copy(update={"repeated": repeated_lines(sampler, counter, seen.mean_s)})
            seen = seen.model_copy(update={"facts": facts})
            self.keep(observation=seen)
        return seen

    def _facts(self, steps: int, compile_s: float, rates: Rates) -> Facts:
        hooks, loaders = self.hooks, self.hooks.loaders
        loader, optimizer = loaders.loader, hooks.anchor
        parameters = hooks.trained()
        device = parameters[0].device.type if parameters else "cpu"
        hooks.modules.device = device
        low = hooks.modules.low_precision or any(one.dtype in (torch.bfloat16, torch.float16) for one in parameters)
        unused = hooks.unused_rows()
        all_numbers = sum(one.numel() for one in parameters) or 1
        read = [(seconds, calls, line) for (of, line), (seconds, calls) in self.clock.lines.items() if of == "sync"]
        syncs = [
            SyncLine(line=line, calls=n / steps, seconds=s / steps) for s, n, line in sorted(read, reverse=True)[:5]
        ]
        found = None
        if loader is not None and loaders.got:
            found = LoaderFacts(
                workers=loader.num_workers,
                persistent=bool(loader.persistent_workers),
                iterable=isinstance(loader.dataset, torch.utils.data.IterableDataset),
                start_s=loaders.start_s / steps,
                epoch_steps=steps / loaders.starts if loaders.starts else None,
                remade=loaders.remade,
                make_s=None if loader.num_workers else loaders.make_s / steps,
                collate_s=None if loader.num_workers else loaders.collate_s / steps,
                make_line=line_of_samples(loader.dataset),
            )
        return Facts(
            device=device,
            threads=torch.get_num_threads(),
            cores=max(1, len(os.sched_getaffinity(0)) // self.peers.ranks),
            optimizer=type(optimizer).__name__ if optimizer else None,
            can_fuse=can_fuse(optimizer),
            can_foreach=can_foreach(optimizer),
            loader=found,
            padding=statistics.median(loaders.padding) if loaders.padding else 0.0,
            needless=tuple(hooks.needless()),
            anomaly=hooks.modules.anomaly,
            profiled=min(1.0, hooks.profiled / steps),
            syncs=tuple(syncs),
            compile_s=compile_s,
            recompiled=recompile_reasons() if compile_s else (),
            graph_breaks=graph_breaks(),
            bf16_gain=None if low else gain_in(rates, "bfloat16"),
            tf32_gain=None if low else gain_in(rates, "tf32"),
            compiled=compile_seconds() > 0,
            rates=rates,
            float64=any(one.dtype == torch.float64 for one in parameters),
            recomputed=hooks.recomputed / steps,
            backward_again_s=hooks.again_s / steps,
            backward_line=worst_line(self.clock.lines, "backward_again"),
            unused_rows=tuple(unused),
            unused_share=sum(share * one.numel() for one, share in unused.values()) / all_numbers,
            exchange=hooks.collectives.facts(list(hooks.modules.called), steps) if self.peers.ranks > 1 else None,
        )

    def _trace(self, seen: Observation) -> Course:
        """Traces a few steps: the kinds of operations, and for Perfetto a file without shapes and values."""
        keep, steps = self.request.trace, TRACED_STEPS
        long = keep is None and steps * seen.mean_s > TRACE_SHARE * self.request.budget_s
        of_script = torch._C._autograd._profiler_enabled() or bool(self.hooks.profilers)
        if self.peers.agree(seen.facts.rates is None or long or of_script):
            return
        assert seen.facts.rates is not None
        self._tell(f"tracing {steps} steps")
        profiled, activities = self.hooks.profiled, [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        took: list[Step] = []
        lines = contextlib.nullcontext() if seen.facts.compiled else self.hooks.lines_of_softmax()
        with lines, torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            while len(took) < steps:
                took.append((yield))
            synchronize()
        self.hooks.profiled = profiled
        self.hooks.profilers.pop(profiler, None)  # it is none of the script's
        if self.peers.rank:
            return
        path = Path(self.request.sandbox) / "operations.json"
        profiler.export_chrome_trace(str(path))
        if keep is None and path.stat().st_size > MOST_TRACE_BYTES:
            return
        try:
            trace = json.loads(path.read_bytes())
        except ValueError:  # a name that torch did not escape
            return
        whole_s = sum(step.seconds for step in took)
        found = roofline.read_operations(trace, steps, whole_s, seen.facts.rates, steps * seen.step_s.median)
        as_is = min(1.0, steps * seen.step_s.median / (roofline.device_s(trace) or whole_s))
        facts = seen.facts.model_copy(update={"attention": self._hand_attention(trace, seen, as_is / steps)})
        self.keep(observation=seen.model_copy(update={"operations": found, "facts": facts}))
        if keep is not None:
            Path(keep).write_text(json.dumps(roofline.without_shapes(trace)))

    def _hand_attention(self, trace: Mapping[str, Any], seen: Observation, times: float) -> HandAttention | None:
        """Attention in single operations, of all sizes together, beside torch's own, which is timed for the largest.

        Args:
            trace: Of some steps.
            seen: The steps as they are.
            times: Of the seconds of the trace, those of a step that is not traced.
        """
        found = roofline.find_scores(trace)
        seconds = times * sum(one.seconds for one in found)
        if not found or seconds < LEAST_SHARE * seen.mean_s:
            return None
        timed = [(one, roofline.fused_attention_s(one, seen.facts.device)) for one in found[:MOST_TIMED]]
        known = [(one, fused_s * one.calls) for one, fused_s in timed if fused_s is not None]
        if not known:
            return None
        of_all = seconds / (times * sum(one.seconds for one, _ in known))  # the others are taken to be like these
        calls_s = sum(fused_s for _, fused_s in known)
        return HandAttention(
            scores=found[0].shape,
            seconds=seconds,
            fused_s=of_all * calls_s / TRACED_STEPS,
            line=worst_line(self.clock.lines, f"softmax {found[0].shape}"),
        )

    # One cause.

    def _try_more_workers(self, seen: Observation) -> Course:
        """More workers than cores, where samples wait for something else than the processor."""
        tried = [one for one in self.answer.trials if one.suspect.switch == "workers" and one.pairs]
        bound = next((one for one in self.answer.trials if one.suspect.switch == "batches"), None)
        if len(tried) != 1 or bound is None or not bound.pairs:
            return
        with_workers, without = (statistics.median(b for _, b in one.pairs) for one in (tried[0], bound))
        setting = tried[0].suspect.setting
        more = min(MOST_WORKERS, 4 * setting)
        if with_workers > (1 + STILL_WAITS) * without and more > setting:
            again = workers_suspect(seen, more)
            if again.key not in self.request.without:
                yield from self._try(again, seen, self.peers.agree(self.left_s) / 2)

    def _try(self, suspect: Suspect, seen: Observation, time_s: float, most: int = PAIRS) -> Course:
        """The pairs of blocks of a cause, as far as its time goes: so many at the most, with those that it has."""
        trial = next((one for one in self.answer.trials if one.suspect.key == suspect.key), None)
        trial = trial or SwitchTrial(suspect=suspect)
        wanted = most - len(trial.pairs)
        if wanted <= 0 or trial.why_not == NO_EFFECT or (trial.pairs and is_slower(trial)):
            return
        least = max(2, math.ceil(BLOCK_S / max(seen.mean_s, 1e-6)))
        steps = math.ceil(least / suspect.cycle) * suspect.cycle
        pair_s = (2 * steps + suspect.settle + suspect.settle_back) * seen.mean_s
        left_s = self.peers.agree(self.left_s)
        first_s = COMPILES_S if suspect.switch == "compile" and not self.hooks.compiled else 0.0
        if first_s + pair_s * LEAST_PAIRS > left_s or pair_s * min(wanted, LEAST_PAIRS) > 2 * time_s:
            if len(trial.pairs) < LEAST_PAIRS:
                self._note(trial.model_copy(update={"why_not": "the time was too short for it"}))
            return
        self._tell(f"trying {tried_words(suspect.key)}")
        until = time.monotonic() + min(time_s, left_s)
        first = self._random.random() < 0.5
        acted = bool(trial.pairs)
        for number in range(wanted):
            if number >= LEAST_PAIRS and self.peers.agree(time.monotonic() > until):
                break
            order = (True, False) if first ^ bool(number % 2) else (False, True)
            took: dict[bool, float] = {}
            grew: dict[bool, float] = {}
            alone: RankBlock | None = None
            for removed in order:
                took[removed], grew[removed], block = yield from self._block(suspect, removed, steps, seen.mean_s)
                acted = acted or any(self.peers.gather(self._acted))
                if removed and suspect.switch == "communication":
                    alone = rank_block(block, self.peers)
                    took[removed] = alone.lockstep_s
                else:
                    took[removed] = max(self.peers.gather(took[removed]))  # the others wait for the slowest
            if alone is not None:
                trial = trial.model_copy(update={"by_rank": (*trial.by_rank, alone)})
            trial = trial.model_copy(update={"pairs": (*trial.pairs, (took[False], took[True]))})
            if suspect.switch == "graphs":
                trial = trial.model_copy(update={"grew": (*trial.grew, (grew[False], grew[True]))})
            if not acted and len(trial.pairs) >= LEAST_PAIRS:
                self._note(SwitchTrial(suspect=suspect, why_not=NO_EFFECT))
                break
            self._note(trial)
            if acted and is_slower(trial):
                self._note(trial.model_copy(update={"why_not": "it was slower"}))
                break
        self.hooks.modules.outputs.clear()

    def _block(self, suspect: Suspect, removed: bool, steps: int, step_s: float) -> Course:
        """Seconds of a step in a block of them, the bytes that a step adds, and the steps."""
        self.keep(active=suspect.key if removed else None)  # written: a removal may kill the process, or hang it
        undo = remove(self.hooks, suspect) if removed else None
        for _ in range(suspect.settle if removed else suspect.settle_back):
            yield
        synchronize()
        before, began = self._meter.read_bytes(), time.perf_counter()
        done: list[Step] = []
        may_stall = self.peers.ranks > 1  # all ranks make as many steps
        while len(done) < steps and (not done or may_stall or time.perf_counter() - began < STALLED * steps * step_s):
            done.append((yield))
        while self.peers.ranks == 1 and (time.perf_counter() - began < BLOCK_S or len(done) % suspect.cycle):
            done.append((yield))  # without its cause a step may be a hundred times as fast
            if time.perf_counter() - began > STALLED * max(BLOCK_S, steps * step_s):
                break
        synchronize()
        seconds = (time.perf_counter() - began) / len(done)
        grew = (self._meter.read_bytes() - before) / len(done)
        self._acted = undo is not None and has_acted(self.hooks, suspect)
        if undo is not None:
            undo()
        self.answer = self.answer.model_copy(update={"active": None})
        return seconds, grew, done

    def _note(self, trial: SwitchTrial) -> None:
        others = [one for one in self.answer.trials if one.suspect.key != trial.suspect.key]
        self.keep(trials=(*others, trial))


def observe(steps: list[Step], facts: Facts, clock: Clock, sampler: LineSampler) -> Observation:
    """From the steps to their parts, the largest first."""
    whole = statistics.fmean(step.seconds for step in steps)
    parts = []
    for part in PARTS:
        own = [max(0.0, step.parts.get(part, 0.0)) for step in steps]
        events, every = steps_with(own)
        own.sort()
        mean = statistics.fmean(own)
        if mean > 0:
            line = worst_line(clock.lines, part) or (
                worst_line(sampler.seen, part) if part in ("loop", "loss", "data", "forward") else None
            )
            found = PartTime(
                part=part,
                seconds=mean,
                low=own[len(own) // 10],
                high=own[-1 - len(own) // 10],
                share=mean / whole,
                events=events,
                every=every,
                line=worst_line(sampler.seen, part) or line if part == "data" else line,
            )
            parts.append(found)
    return Observation(
        steps=len(steps),
        step_s=median_interval([step.seconds for step in steps]),
        mean_s=whole,
        parts=tuple(sorted(parts, key=lambda one: -one.seconds)),
        block_s=block_means([step.seconds for step in steps]),
        facts=facts,
        stacks=frequent_stacks(sampler),
    )


def seen_once(seen: Observation) -> dict[Part, float]:
    """What came in one step alone and took long, with its seconds there: how often it comes is not known."""
    names: tuple[Part, ...] = ("saving", "evaluation", "no_grad", "logging")
    return {
        one.part: one.seconds * seen.steps
        for one in seen.parts
        if one.part in names and one.events == 1 and one.share >= LEAST_ONCE
    }


def frequent_stacks(sampler: LineSampler) -> tuple[Stack, ...]:
    """The stacks that were seen most."""
    total = sum(sampler.stacks.values())
    found = [Stack(part=part, frames=frames, share=n / total) for (part, frames), n in list(sampler.stacks.items())]
    found = [one for one in found if one.share >= LEAST_STACK]
    return tuple(sorted(found, key=lambda one: -one.share)[:MOST_STACKS])


def repeated_lines(sampler: LineSampler, counter: LineCounter, step_s: float) -> tuple[Repeated, ...]:
    """The loops over small operations: lines that ran MANY_RUNS times in a step, each for less than SMALL_S."""
    total = sum(sampler.seen.values())
    found = []
    for part in ("forward", "loss", "optimizer"):
        share_of = {line: seen / total for (of, line), seen in sampler.seen.items() if of == part}
        many = {
            line: share
            for line, share in share_of.items()
            if (runs := counter.counts.get(line, 0)) >= MANY_RUNS and share * step_s < SMALL_S * runs
        }
        if many:
            line = max(many, key=lambda one: many[one])
            found.append(Repeated(part=part, line=line, calls=counter.counts[line], share=sum(many.values())))
    return tuple(found)


def memory_facts(samples: list[int], sampler: LineSampler, kept: list[Kept]) -> MemoryFacts | None:
    """From the memory at the ends of steps, and the peaks of parts."""
    peaks = dict(sampler.peaks)  # it may look on meanwhile
    if not peaks:
        return None
    part = max(peaks, key=lambda one: peaks[one][0])
    training = [peaks[one][0] for one in ("forward", "loss", "backward", "optimizer") if one in peaks]
    return MemoryFacts(
        peak_bytes=peaks[part][0],
        peak_part=part,
        peak_line=peaks[part][1],
        training_bytes=max(training, default=0),
        growth_bytes=growth_bytes(samples),
        kept=tuple(kept),
    )


def steps_with(seconds: list[float]) -> tuple[int, int]:
    """(how many steps have a part, steps from one to the next): those that hold MOST_OF_IT of its time, and their like.

    What is seldom and long counts: of one step alone the distance is that of all steps.
    """
    held, wanted, least = 0.0, MOST_OF_IT * sum(seconds), 0.0
    for least in sorted(seconds, reverse=True):
        held += least
        if held >= wanted:
            break
    places = [place for place, one in enumerate(seconds) if one >= least / 2 and one > 0]
    gaps = [later - earlier for earlier, later in itertools.pairwise(places)]
    return len(places), round(statistics.median(gaps)) if gaps else len(seconds)


def synchronize() -> None:
    """Waits for the device, where there is one in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def line_of_samples(dataset: Any) -> str | None:
    """Where the user's code makes a sample, as `data.py:7`, also inside a Subset; None where a library makes it."""
    while isinstance(dataset, (torch.utils.data.Subset, torch.utils.data.ConcatDataset)):
        dataset = dataset.dataset if isinstance(dataset, torch.utils.data.Subset) else dataset.datasets[0]
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    if code is None or not is_users_file(code.co_filename):
        return None
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def compile_seconds() -> float:
    """Seconds that torch.compile has spent in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    metrics = getattr(utils, "compilation_time_metrics", {})
    return sum(metrics.get("_compile.compile_inner", ()))


def compiles_again(seen: Observation) -> bool:
    """Whether torch.compile compiles in the steps, after the first ones."""
    return seen.facts.compile_s >= COMPILE_SHARE * seen.mean_s


def block_means(seconds: list[float]) -> tuple[float, ...]:
    """Means of BLOCKS_SEEN blocks of steps that follow each other; fewer steps are blocks of their own."""
    count = min(BLOCKS_SEEN, len(seconds))
    edges = [round(n * len(seconds) / count) for n in range(count + 1)]
    return tuple(statistics.fmean(seconds[low:high]) for low, high in itertools.pairwise(edges))


def recompile_reasons() -> tuple[str, ...]:
    """Functions that torch.compile compiled again, `train.py:9: tensor 'x' size mismatch at index 0`, most often first.

    What was expected and what came are left out: they are values.
    """
    read = getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", list)
    counts: collections.Counter[str] = collections.Counter()
    for one in read():
        if getattr(one, "recompile_reason", None):
            whole = str(one.recompile_reason).strip().partition("\n")[0]
            reason = re.sub(r"^\d+/\d+: *", "", whole).partition("  #")[0].partition(". expected")[0].strip()
            where = f"{os.path.basename(one.co_filename or '')}:{one.co_firstlineno}"
            if not is_users_file(one.co_filename or "<"):  # a hook around it: torch says where the guard is from
                found = re.search(r"([^\s/]+\.py:\d+) in ", whole)
                where = found[1] if found else ""
            counts[f"{where}: {reason[:120]}"] += 1
    return tuple(reason for reason, _ in counts.most_common(3))


def graph_breaks() -> tuple[str, ...]:
    """The graph breaks of torch.compile so far, the most frequent first: `train.py:9: Unsupported item() call`."""
    counts: collections.Counter[str] = collections.Counter()
    for one in getattr(sys.modules.get("torch._dynamo.utils"), "graph_break_reasons", ()):
        own = [frame for frame in one.user_stack if is_users_file(frame.filename)]
        if own:  # not in a hook, which torch.compile meets after a break
            where, reason = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}", str(one.reason).strip()
            counts[f"{where}: {reason.splitlines()[0][:120]}"] += 1
    return tuple(reason for reason, _ in counts.most_common(3))


def rates_here(parameters: Sequence[torch.Tensor]) -> Rates:
    """The rates of the device of the parameters: of fp32 and their own dtype, and of what may be faster.

    Not of bf16 on a processor without instructions for it, where one product may take seconds.
    """
    device = parameters[0].device.type if parameters else "cpu"
    dtypes = {"float32", *(str(one.dtype).removeprefix("torch.") for one in parameters if one.is_floating_point())}
    if device == "cuda":
        dtypes |= {"bfloat16", "float16"}
    elif torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        dtypes.add("bfloat16")
    return roofline.measure_rates(device, sorted(dtypes & set(TORCH_DTYPES)))


def gain_in(rates: Rates, dtype: str) -> float | None:
    """How much faster a large product is in bfloat16, or in tf32, than in fp32 as the script has set it."""
    fp32, other = (rates.flops_per_s.get(one) for one in ("float32", dtype))
    return other / fp32 if fp32 and other else None
