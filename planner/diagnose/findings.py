"""From what was measured to at most five findings, in the order of what they cost.

A cause that was removed is a finding if the interval of its gain lies above 1; the level is shared by all that were
removed (Bonferroni), so that a script with many suspects gets no more false findings. What cannot be removed is
estimated from its own time, as if all of that could go, and says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence

from autoplan.planner.diagnose.gains import LEAST_PAIRS, gain_of, is_gain, is_slower
from autoplan.planner.diagnose.rank_findings import WORK, exchange_words, with_ranks
from autoplan.planner.diagnose.records import (
    PARTS,
    Answer,
    Facts,
    Finding,
    LoaderFacts,
    Observation,
    Part,
    Repeated,
    Stack,
    SwitchTrial,
    exactly,
)
from autoplan.planner.diagnose.session import compiles_again, seen_once
from autoplan.planner.diagnose.suspects import FUSABLE, LEAST_GROWTH_BYTES, NO_EFFECT, find_suspects, tried_words
from autoplan.planner.records.trials import Interval
from autoplan.units import format_bytes, format_seconds

MOST_FINDINGS = 5

LEAST_ESTIMATE = 0.05
"""What is only estimated is a finding from this share on: a mend seldom takes all of it away."""

LEAST_EVALUATION = 0.1
"""An evaluation is wanted: from this share on it is one too many, or too long."""

MANY_CALLS = 100
"""Calls in a step from which on they are what the code around them is there for."""

LEAST_LOOP = 0.15
"""A loop over small operations is a finding from this share on: some of it stays in whatever takes its place."""

SEEN = ("padding", "needless_gradients", "anomaly", "profiler", "float64")
"""Causes that the first steps show for certain: with no time to remove them they are estimated, from LEAST_LOOP on."""

LEAST_IDLE = 0.1
"""A GPU that waits for the host for less of the time is as good as busy: some lies between the steps of any script."""

LOOP_MENDS = {
    "model": "one operation for all of them: another dimension of the tensors, nn.LSTM, index_add, padding; or "
    "torch.compile",
    "optimizer": "an optimizer of torch.optim with fused=True or foreach=True, or torch._foreach_mul_ and its like",
}

LEAST_MORE_BYTES, MORE_SHARE = 64 << 20, 0.2
"""Saving or evaluation that takes less memory beyond the steps is no note: the allocator keeps some."""

LEAST_FUSED = 1.15
"""A faster optimizer step that gives less is a note: torch's default is not fused, so most scripts could have that."""

MOST_OF_PART = 2.0
"""Of the optimizer's share of the time, what its mend may give at the most, caches included: more was the machine's."""

MORE_THERE = 1.2
"""If the batches could be had so many times faster than with the mend that was measured, that is a finding too."""

MORE_TOGETHER = 1.1
"""If two mends at once give so many times what either gives, they are one finding."""

WHAT: Mapping[str, str] = {
    "batches": "each step waits for its batch",
    "workers": "each step waits for its batch",
    "persistent": "the workers of the DataLoader are started again in each epoch",
    "saving": "checkpoints are saved while the training waits",
    "logging": "printing and logging take time in the steps",
    "evaluation": "evaluations take a large part of the run",
    "no_grad": "forwards without gradients (samples, previews, rollouts) take a large part of the run",
    "gc": "Python's garbage collector goes over many objects in the steps",
    "freeze": "Python's garbage collector goes over many objects in the steps",
    "threads": "the number of threads does not fit the cores",
    "fused": "the optimizer is not fused",
    "foreach": "the optimizer steps one parameter after another",
    "together": "fp32 products keep the GPU busy about as long as the optimizer's step keeps the host",
    "idle": "the GPU waits while the host launches operations one by one",
    "tf32": "the matrix products run in fp32 where TF32 is faster",
    "padding": "batches are padded further than their longest sample",
    "needless_gradients": "gradients are computed that nobody uses",
    "anomaly": "the anomaly detection of autograd is on",
    "profiler": "torch.profiler records the steps",
    "recompilation": "torch.compile compiles again in the steps",
    "small_operations": "Python goes through small operations one by one",
    "communication": "the steps wait for the exchange between ranks",
    "bf16": "the matrix products run in fp32 where bf16 is faster",
    "float64": "the model is in fp64",
    "checkpointing": "activations are computed again in backward, and there is memory to keep them",
    "compile": "operations that go over memory run one by one: nothing is compiled",
    "attention": "attention is written in single operations",
    "two_backwards": "backward runs again over a graph that it went over before",
    "unused_rows": "the optimizer goes over rows of embeddings that the batch did not use",
    "sync": "tensors are read on the host in the steps",
    "loop": "the loop's own code takes time in each step",
    "throttled": "the limit on CPU time of the container stops the training",
    "copy": "the host waits for copies to the device",
}

MEND: Mapping[str, str] = {
    "persistent": "DataLoader(..., persistent_workers=True)",
    "saving": "save more seldom, or in a thread of its own (torch.distributed.checkpoint.async_save)",
    "logging": "log every N steps, and print no line for each sample",
    "evaluation": "evaluate more seldom, or on fewer samples",
    "no_grad": "make them more seldom, or fewer, where the training does not need them",
    "gc": "no gc.collect() in the steps; gc.disable() before the loop, and gc.collect() between epochs",
    "freeze": "gc.collect(); gc.freeze() once all is set up, before the loop; no gc.collect() in it",
    "padding": "pad each batch to its own longest sample, in collate_fn (transformers: DataCollatorWithPadding)",
    "anomaly": "remove set_detect_anomaly(True) and detect_anomaly(): they are for finding a NaN, not for training",
    "profiler": "leave the profiler out, or let it record once: torch.profiler.schedule(..., repeat=1)",
    "recompilation": "torch.compile(..., dynamic=True), or batches of one shape (drop_last=True, few lengths)",
    "communication": "exchange less often or less: more samples per rank and step, accumulation under model.no_sync(), "
    "model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
    "float64": "model.float() and inputs in fp32, where that is precise enough. Compare the losses",
    "checkpointing": "no torch.utils.checkpoint (transformers: gradient_checkpointing=False) while memory is enough",
    "tf32": 'torch.set_float32_matmul_precision("high") before the loop. Compare the losses',
    "attention": "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...) (transformers: "
    'attn_implementation="sdpa"; nn.MultiheadAttention: need_weights=False)',
    "compile": "model = torch.compile(model), or @torch.compile for the functions in it",
    "two_backwards": "one backward of the sum of the losses, without retain_graph=True; if their gradients are "
    "only added",
    "bf16": "run forward and loss in torch.autocast(device, torch.bfloat16); Trainer: bf16=True. Compare the losses",
    "sync": "keep it as a tensor (detach()), and read it once every N steps",
    "loop": "do it once before the loop, every N steps, or in a Dataset with DataLoader workers",
    "throttled": "raise the container's limit, or use fewer threads and workers",
    "copy": "DataLoader(..., pin_memory=True) and tensor.to(device, non_blocking=True)",
}


def find_causes(answer: Answer, failed: Sequence[str] = ()) -> list[Finding]:
    """The findings of a script, the costliest first; `failed` are the keys of what it failed without."""
    seen = answer.observation
    assert seen is not None
    found = [*_proved(answer, seen), *_estimated(answer, seen, failed), *_of_memory(answer, seen)]
    found = with_ranks(found, answer, seen)
    found = sorted(found, key=lambda one: -one.gain.median)[:MOST_FINDINGS]
    return [one.model_copy(update={"stack": _stack_of(one, seen)}) for one in found]


def _stack_of(finding: Finding, seen: Observation) -> Stack | None:
    """The most frequent stack of a finding's line, of its part if there is one; of its part where the line has none."""
    part = {"batches": "data", "workers": "data", "persistent": "data", "freeze": "gc"}.get(
        finding.cause, finding.cause
    )
    at_line = [one for one in seen.stacks if any(name.startswith(f"{finding.line} in ") for name in one.frames)]
    of_part = [one for one in seen.stacks if one.part == part]
    return next(iter([*(one for one in of_part if one in at_line), *at_line, *of_part]), None)


# What was removed.


def _whole(answer: Answer) -> list[SwitchTrial]:
    """What was removed often enough to tell something."""
    return [trial for trial in answer.trials if len(trial.pairs) >= LEAST_PAIRS]


def _with_gain(answer: Answer) -> Iterator[tuple[SwitchTrial, Interval]]:
    """What costs something: its interval lies above 1, and it is worth a mend."""
    for trial in _whole(answer):
        gain = gain_of(trial, chosen_from=len(_whole(answer)))
        if gain is not None and is_gain(gain):
            yield trial, gain


def _proved(answer: Answer, seen: Observation) -> Iterator[Finding]:
    gains: dict[str, tuple[SwitchTrial, Interval]] = {}
    for trial, gain in _with_gain(answer):
        known = gains.get(trial.suspect.switch)
        if trial.suspect.switch != "graphs" and (known is None or gain.median > known[1].median):
            gains[trial.suspect.switch] = trial, gain
    _choose_of_loader(gains)
    if "freeze" in gains and "gc" in gains:
        keep = gains["gc"][1].median > MORE_THERE * gains["freeze"][1].median
        del gains["freeze" if keep else "gc"]
    _choose_of_both(gains)
    bound = next((gain_of(trial) for trial in _whole(answer) if trial.suspect.switch == "batches"), None)
    for switch, (trial, gain) in gains.items():
        most = 1 / (1 - min(0.9, MOST_OF_PART * seen.share("optimizer")))
        if switch in ("fused", "foreach") and (gain.median < LEAST_FUSED or gain.low > most):
            continue
        if switch == "evaluation" and gain.median < 1 / (1 - LEAST_EVALUATION):
            continue
        yield Finding(
            cause=switch,
            what=WHAT[switch],
            evidence=_evidence(trial, seen, bound),
            mend=_mend(trial, seen, any(one.suspect.switch == "workers" and one.pairs for one in answer.trials)),
            gain=gain,
            measured=True,
            line=_line(trial, seen),
        )


def _choose_of_loader(gains: dict[str, tuple[SwitchTrial, Interval]]) -> None:
    """Of the ways to wait less for batches: workers that stay, unless more of them, which stay too, save much more."""
    if "workers" in gains and "persistent" in gains:
        more, stay = (1 - 1 / gains[name][1].median for name in ("workers", "persistent"))  # of a step's time
        del gains["persistent" if more > MORE_THERE * stay else "workers"]
    if {"workers", "persistent"} & set(gains):
        gains.pop("batches", None)


def _choose_of_both(gains: dict[str, tuple[SwitchTrial, Interval]]) -> None:
    """Two mends at once, where they give more than either; otherwise those alone."""
    if "together" not in gains:
        return
    members = [name for name in ("tf32", "fused", "foreach") if name in gains]
    best = max((gains[name][1].median for name in members), default=1.0)
    for name in members if gains["together"][1].median > MORE_TOGETHER * best else ["together"]:
        del gains[name]


def _evidence(trial: SwitchTrial, seen: Observation, bound: Interval | None) -> str:
    suspect, facts, switch = trial.suspect, seen.facts, trial.suspect.switch
    if switch in ("batches", "workers", "persistent"):
        beyond = (
            "" if bound is None or switch == "batches" else f"; with batches at hand {bound.median:.2f} times as fast"
        )
        return f"{_part_words(seen, 'data')}{_loader_words(facts)}{beyond}"
    if switch == "threads":
        return f"{facts.threads} threads on {facts.cores} cores"
    if switch == "padding":
        return f"{facts.padding:.0%} of the columns of a batch are padding for all its samples"
    if switch == "needless_gradients":
        return f"parameters of {' and '.join(facts.needless)} get gradients, and no optimizer has them"
    if switch == "anomaly":
        return "each operation keeps its stack, and each gradient is looked at"
    if switch == "two_backwards":
        return _again_words(seen)
    if switch == "profiler":
        return f"it recorded in {facts.profiled:.0%} of the steps"
    if switch == "recompilation":
        return f"{_compile_words(seen)}; another process with dynamic=True beside it"
    if switch == "float64":
        return "the optimizer has parameters in fp64"
    if switch == "checkpointing":
        peak = f"; {format_bytes(seen.memory.peak_bytes)} of memory at the most with it" if seen.memory else ""
        return f"{facts.recomputed:,.0f} calls of torch.utils.checkpoint in a step{peak}"
    if switch == "unused_rows":
        names = " and ".join(facts.unused_rows)
        own = f"{facts.unused_share:.0%} of all trained numbers are such rows of {names}"
        return f"{own}; {_part_words(seen, suspect.part)}"
    if switch == "communication":
        return exchange_words(trial, seen)
    if switch == "compile":
        kinds = sorted((one for one in seen.operations if one.kind in FUSABLE), key=lambda one: -one.share)
        return "of the time " + ", ".join(f"{one.share:.0%} {one.kind}" for one in kinds[:3])
    if switch in ("bf16", "tf32"):
        name, times = ("bf16", facts.bf16_gain) if switch == "bf16" else ("TF32", facts.tf32_gain)
        return f"a large product is {times or 0:.1f} times as fast in {name} on this {facts.device}"
    if switch == "together":
        return f"either alone gives less: the other is waited for; {_part_words(seen, 'optimizer')} in the optimizer"
    often = "" if suspect.cycle == 1 else f", about every {suspect.cycle} steps"
    return f"{_part_words(seen, suspect.part)}{often}"


def _part_words(seen: Observation, part: Part) -> str:
    own = seen.part(part)
    if own is None:
        return ""
    return f"{own.share:.0%} of the time, {format_seconds(own.seconds)} a step"


def _loader_words(facts: Facts) -> str:
    loader = facts.loader
    if loader is None:
        return ""
    words = f"; num_workers={loader.workers}"
    if loader.make_s is not None and loader.collate_s is not None and loader.make_s + loader.collate_s > 0:
        share = loader.make_s / (loader.make_s + loader.collate_s)
        words += f", {share:.0%} of it in the dataset and {1 - share:.0%} in collate_fn"
    return words


def _mend(trial: SwitchTrial, seen: Observation, workers_were_tried: bool) -> str:
    suspect, facts = trial.suspect, seen.facts
    match suspect.switch:
        case "communication" if facts.exchange is not None and not facts.exchange.ddp:
            return "DistributedDataParallel, which exchanges gradients while backward still runs"
        case "workers":
            once = ", made once, before the epochs" if facts.loader and facts.loader.remade else ""
            return f"DataLoader(..., num_workers={suspect.setting}, persistent_workers=True){once}"
        case "persistent" if facts.loader and facts.loader.remade:
            return "make the DataLoader once, before the epochs, with persistent_workers=True"
        case "unused_rows":
            names = " and ".join(facts.unused_rows)
            return f"nn.Embedding(..., sparse=True) for {names}, in SGD or torch.optim.SparseAdam (not quite Adam)"
        case "batches":
            return _mend_of_samples(facts.loader, workers_were_tried)
        case "threads":
            return f"OMP_NUM_THREADS={suspect.setting}, or torch.set_num_threads({suspect.setting})"
        case "fused":
            return f"{facts.optimizer}(..., fused=True)"
        case "foreach":
            return f"{facts.optimizer}(...) without foreach=False"
        case "together":
            step = f"{facts.optimizer}(..., fused=True)" if facts.can_fuse else f"no foreach=False in {facts.optimizer}"
            return f'torch.set_float32_matmul_precision("high"), and {step}. Compare the losses'
        case "needless_gradients":
            return f"requires_grad_(False) for {' and '.join(facts.needless)}; without trained layers before, no_grad()"
    return MEND[suspect.switch]


def _mend_of_samples(loader: LoaderFacts | None, workers_were_tried: bool) -> str:
    where = f" ({loader.make_line})" if loader and loader.make_line else ""
    cheaper = f"make a sample cheaper{where}: prepare it once, before the training"
    if loader is None or loader.iterable or workers_were_tried:
        return cheaper
    return f"DataLoader(..., num_workers={'N' if loader.workers == 0 else 'more'}), not measured here; or {cheaper}"


def _line(trial: SwitchTrial, seen: Observation) -> str | None:
    if trial.suspect.switch == "recompilation":
        return _recompiled_line(seen)
    if trial.suspect.switch == "two_backwards":
        return seen.facts.backward_line
    with_lines = ("batches", "workers", "saving", "logging", "evaluation", "gc", "freeze", "communication")
    if trial.suspect.switch not in with_lines:
        return None
    own = seen.part(trial.suspect.part)
    return None if own is None else own.line


# What was not.


def _estimated(answer: Answer, seen: Observation, failed: Sequence[str]) -> Iterator[Finding]:
    """What cannot be removed without an edit, and what there was no time for."""
    facts = seen.facts
    tested = _whole(answer)
    measured = {trial.suspect.part for trial in tested if not _is_open(trial, seen, len(tested))}
    for switch in ("batches", "saving", "logging", "evaluation", "no_grad", "gc"):
        part: Part = "data" if switch == "batches" else switch  # type: ignore[assignment]
        own = seen.part(part)
        once = own is not None and own.events == 1 and seen.steps > 1  # how often it comes is not known
        least = LEAST_EVALUATION if switch in ("evaluation", "no_grad") else LEAST_ESTIMATE
        if own is not None and own.share >= least and part not in measured and not once:
            loader = facts.loader
            if switch == "batches" and loader is None:
                continue
            tried = any(one.suspect.switch == "workers" and one.pairs for one in answer.trials)
            mend = MEND.get("freeze" if switch == "gc" else switch) or _mend_of_samples(loader, tried)
            yield _estimate(switch, _part_words(seen, part), own.share, own.line, mend)
    yield from _untried(answer, seen, failed)
    loop, most = seen.part("loop"), _waits_at_most(answer, seen)
    read_s, many = sum(one.seconds for one in facts.syncs), MANY_CALLS if facts.device == "cpu" else 0
    if loop is not None and facts.syncs and facts.syncs[0].line == loop.line and facts.syncs[0].calls > many:
        read_s, loop = max(read_s, loop.seconds), None  # what is around the calls is there for them
    share = 0.0 if most is None else min(read_s / seen.mean_s, most)
    if share >= LEAST_ESTIMATE:
        one = facts.syncs[0]
        said = f"{one.calls:,.0f} calls in a step, {format_seconds(read_s)} with what is around them"
        yield _estimate("sync", said, share, one.line)
    if any(trial.suspect.switch == "profiler" for trial, _ in _with_gain(answer)):
        loop = None  # the time of its steps and of what it writes
    if loop is not None and loop.share - (facts.compile_s / seen.mean_s) < LEAST_ESTIMATE:
        loop = None  # of a loop that calls a compiled function
    own_s = 0.0 if loop is None else loop.seconds - (read_s if most is None else 0.0)  # those wait for the GPU
    if loop is not None and (share := min(own_s / seen.mean_s, _or_all(most))) >= LEAST_ESTIMATE:
        said = f"{_part_words(seen, 'loop')} outside the loader, the model and the optimizer{_unknown(most)}"
        yield _estimate("loop", said, share, loop.line)
    if compiles_again(seen) and not any(trial.suspect.switch == "recompilation" for trial, _ in _with_gain(answer)):
        mend = "keep shapes, modes and Python numbers the same in all steps; TORCH_LOGS=recompiles names each guard"
        share = facts.compile_s / seen.mean_s
        yield _estimate("recompilation", _compile_words(seen), share, _recompiled_line(seen), mend)
    yield from _of_graph(seen, {trial.suspect.switch for trial in tested})
    loops = [one for one in facts.repeated if one.share >= LEAST_LOOP]
    yield from (_small_operations(one, seen) for one in loops)
    if not loops:
        yield from _idle(answer, seen)
    if facts.throttled >= LEAST_ESTIMATE:
        said = f"{facts.throttled:.0%} of the time this process stood still"
        yield _estimate("throttled", said, min(0.9, facts.throttled))
    copy = seen.part("copy")
    if copy is not None and (share := min(copy.share, _or_all(most))) >= LEAST_ESTIMATE:
        yield _estimate("copy", _part_words(seen, "copy") + _unknown(most), share, copy.line)


def _of_graph(seen: Observation, tested: Collection[str]) -> Iterator[Finding]:
    """Attention in single operations, where torch's own takes less here; a backward over a graph once more."""
    facts, own = seen.facts, seen.facts.attention
    share = 0.0 if own is None else (own.seconds - own.fused_s) / seen.mean_s
    if own is not None and share >= LEAST_ESTIMATE:
        said = (
            f"scores of {' x '.join(map(str, own.scores))}: {format_seconds(own.seconds)} a step; torch's own "
            f"attention takes {format_seconds(own.fused_s)} for these sizes here"
        )
        yield _estimate("attention", said, share, own.line)
    share = facts.backward_again_s / seen.mean_s
    if share >= LEAST_ESTIMATE and "two_backwards" not in tested:
        yield _estimate("two_backwards", _again_words(seen), share, facts.backward_line)


def _again_words(seen: Observation) -> str:
    again_s = seen.facts.backward_again_s
    return f"{format_seconds(again_s)} a step, {again_s / seen.mean_s:.0%} of the time"


def _untried(answer: Answer, seen: Observation, failed: Sequence[str]) -> Iterator[Finding]:
    """What is there for certain, and there was no time to remove: the share that was expected to go.

    Not what the script failed without: columns of features, say, that look like padding.
    """
    known = {
        one.suspect.key
        for one in answer.trials
        if one.why_not == NO_EFFECT or len(one.pairs) >= LEAST_PAIRS or (one.pairs and is_slower(one))
    }
    for suspect in find_suspects(seen):
        if suspect.switch in SEEN and suspect.key not in {*known, *failed} and suspect.worth >= LEAST_LOOP:
            trial = SwitchTrial(suspect=suspect)
            said, mend = _evidence(trial, seen, None), _mend(trial, seen, False)
            yield _estimate(suspect.switch, said, suspect.worth, mend=mend)


def _small_operations(found: Repeated, seen: Observation) -> Finding:
    """Of a forward, the estimate goes from the lines alone to the lines with all of their part of backward."""
    share, forward = found.share, seen.share("forward") + seen.share("loss")
    with_backward = share if found.part == "optimizer" else share * (1 + seen.share("backward") / max(forward, share))
    said = f"it runs {found.calls:,} times in a step; such lines take {share:.0%} of the time"
    said += "" if with_backward == share else f", up to {with_backward:.0%} with their backward"
    mend = LOOP_MENDS["optimizer" if found.part == "optimizer" else "model"]
    low, high = (1 / (1 - min(one, 0.99)) for one in (share, with_backward))
    finding = _estimate("small_operations", said, share, found.line, mend)
    gain = Interval(median=(low * high) ** 0.5, low=low, high=high, samples=1)
    return finding.model_copy(update={"gain": gain})


def _idle(answer: Answer, seen: Observation) -> Iterator[Finding]:
    """A GPU that the host does not keep busy with forward, backward and optimizer: all of that could go at the most.

    Other waits (for data, copies, saving and so on) have findings of their own, and are taken off.
    """
    *kinds, _ = seen.operations or (None,)
    facts, busy_s = seen.facts, _busy_s(seen)
    compiled = any(trial.suspect.switch == "compile" for trial, _ in _with_gain(answer))
    if busy_s is None or facts.exchange is not None or compiled:
        return
    step_s = _shortest_step_s(answer, seen)
    others_s = sum(one.seconds for one in seen.parts if one.part not in WORK)
    share = min(step_s - busy_s - others_s, sum(one.seconds for one in seen.parts if one.part in WORK)) / step_s
    if share < LEAST_IDLE:
        return
    calls = sum(one.calls for one in kinds if one is not None)
    said = f"it is idle for {share:.0%} of the time, in forward, backward and optimizer; {calls:,.0f} operations a step"
    said += "" if facts.compiled else "; nothing is compiled"
    mend = "" if facts.compiled else "torch.compile(model), "
    mend += 'mode="reduce-overhead" where shapes are fixed; '
    mend += f"{facts.optimizer}(..., fused=True); " if facts.can_fuse and seen.share("optimizer") >= LEAST_LOOP else ""
    mend += "more samples in a step, if memory allows"
    yield _estimate("idle", said, share, mend=mend)


def _waits_at_most(answer: Answer, seen: Observation) -> float | None:
    """The most that a step can lose by what the host does beside it, as a share: on a GPU the time in which that idles.

    While a GPU works, the host may wait for it, or compute: the next launches are queued in time. None: how long the
    GPU works is not known; of several ranks the trace is that of rank 0.
    """
    if seen.facts.device == "cpu":
        return 1.0
    busy_s = None if seen.facts.exchange is not None else _busy_s(seen)
    loader = seen.facts.loader
    waits: tuple[Part, ...] = ("saving", "logging", "evaluation", "no_grad", "gc")
    waits += ("data",) if loader is not None and loader.workers else ()  # whose workers give no batch sooner
    others_s = sum(one.seconds for one in seen.parts if one.part in waits)
    return None if busy_s is None else max(0.0, 1 - (busy_s + others_s) / _shortest_step_s(answer, seen))


def _or_all(most: float | None) -> float:
    return 1.0 if most is None else most


def _unknown(most: float | None) -> str:
    return "; how long the GPU works beside it is not known" if most is None else ""


def _busy_s(seen: Observation) -> float | None:
    """Seconds of a step in which the GPU works; None: no trace of one says it."""
    last = seen.operations[-1] if seen.operations else None
    if last is None or last.kind != "device idle" or not seen.operations[:-1]:
        return None
    whole_s = last.seconds / last.share if last.share > 0 else seen.step_s.median
    return whole_s - last.seconds


def _shortest_step_s(answer: Answer, seen: Observation) -> float:
    """The shortest step that was measured: while the first steps are looked at, the host is slower."""
    as_is = [statistics.median(one for one, _ in trial.pairs) for trial in answer.trials if trial.pairs]
    return min([seen.step_s.median, *as_is])


def _compile_words(seen: Observation) -> str:
    """`120 ms a step, after the first steps: tensor 'x' size mismatch at index 0`."""
    guard = "".join(f": {one.partition(': ')[2]}" for one in seen.facts.recompiled[:1])
    return f"{format_seconds(seen.facts.compile_s)} a step, after the first steps{guard}"


def _recompiled_line(seen: Observation) -> str | None:
    return seen.facts.recompiled[0].partition(": ")[0] or None if seen.facts.recompiled else None


def _is_open(trial: SwitchTrial, seen: Observation, chosen_from: int) -> bool:
    """Whether a measured gain is too wide to tell no gain from what the part's own time says, which is large."""
    share, gain = seen.share(trial.suspect.part), gain_of(trial, chosen_from)
    calls = trial.suspect.switch in ("saving", "logging", "evaluation")  # that the step waits for
    return calls and gain is not None and share >= 2 * LEAST_ESTIMATE and gain.low <= 1 <= 1 / (1 - share) <= gain.high


def _of_memory(answer: Answer, seen: Observation) -> Iterator[Finding]:
    """What keeps graphs from step to step: memory that grows, with and without them."""
    memory = seen.memory
    kept = [one for one in memory.kept if one.graphs] if memory else []
    if memory is None or not kept or memory.growth_bytes < LEAST_GROWTH_BYTES:
        return
    trial = next(
        (one for one in answer.trials if one.suspect.switch == "graphs" and len(one.grew) >= LEAST_PAIRS), None
    )
    gain = None if trial is None else gain_of(trial)
    evidence = f"each step adds {format_bytes(memory.growth_bytes)} of memory"
    if trial is not None:
        as_is, without = (statistics.median(max(0.0, pair[place]) for pair in trial.grew) for place in (0, 1))
        if without > as_is / 2:
            return  # something else grows
        evidence = f"each step adds {format_bytes(as_is)} of memory, without the graphs {format_bytes(without)}"
    kept = [one for one in kept if not one.is_sum] or kept
    names = " and ".join(one.name.partition("[")[0] for one in kept)
    yield Finding(
        cause="graphs",
        what=f"{names} keeps the graphs of all steps, so memory fills up",
        evidence=evidence,
        mend="keep loss.item(), or loss.detach(); no retain_graph=True where backward runs once",
        gain=gain or exactly(1.0),
        measured=gain is not None,
        line=kept[0].line,
    )


def _memory_notes(seen: Observation, graphs_are_found: bool) -> Iterator[str]:
    memory = seen.memory
    if memory is None:
        return
    at = f" ({memory.peak_line})" if memory.peak_line else ""
    yield f"memory: {format_bytes(memory.peak_bytes)} at the most, in {PARTS[memory.peak_part]}{at}"
    more = memory.peak_bytes - memory.training_bytes
    if memory.peak_part in ("saving", "evaluation") and more >= max(
        LEAST_MORE_BYTES, MORE_SHARE * memory.training_bytes
    ):
        yield f"{memory.peak_part} takes {format_bytes(more)} more than the steps themselves: it sets what must fit"
    if memory.growth_bytes >= LEAST_GROWTH_BYTES and not graphs_are_found:
        yield f"each step adds {format_bytes(memory.growth_bytes)} of memory"
    for one in memory.kept:
        if not (one.graphs and graphs_are_found):
            kind = "the graph of each step, whose memory was not told apart" if one.graphs else "tensors of each step"
            at = f" ({one.line})" if one.line else ""
            yield f"{one.name.partition('[')[0]} keeps {kind}{at}"


def _estimate(cause: str, evidence: str, share: float, line: str | None = None, mend: str | None = None) -> Finding:
    what, mend = WHAT[cause], mend or MEND[cause]
    gain = exactly(1 / (1 - min(share, 0.99)))
    return Finding(cause=cause, what=what, evidence=evidence, mend=mend, gain=gain, measured=False, line=line)


def notes_of(answer: Answer, seen: Observation, causes: Sequence[Finding], failed: Sequence[str] = ()) -> list[str]:
    """What else is worth saying: what had no time, what the process could not do. `failed` was said already."""
    said = []
    tested = [trial for trial in answer.trials if trial.pairs and (len(trial.pairs) >= LEAST_PAIRS or is_slower(trial))]
    whole = {trial.suspect.key for trial in tested}
    without_effect = [one.suspect.key for one in answer.trials if one.why_not == NO_EFFECT]
    short = [one.key for one in find_suspects(seen) if one.key not in {*whole, *failed, *without_effect}]
    if short:
        words = ", ".join(map(tried_words, short))
        said.append(f"not measured, the time was too short: {words}; a larger --budget measures it")
    said += [f"could not be tried: {tried_words(key)} ({NO_EFFECT})" for key in without_effect]
    for part, seconds in seen_once(seen).items():
        took = format_seconds(seconds)
        said.append(f"{part} was seen once in {seen.steps} steps ({took}): a larger --budget tells how often")
    known = {one.cause for one in causes if one.measured}
    if known & {"workers", "persistent"}:
        known.add("batches")  # its evidence names that bound
    known.add("graphs")  # its finding or its note says it
    if known & {"gc", "freeze"}:
        known |= {"gc", "freeze"}
    untold = [trial for trial in tested if trial.suspect.switch not in known]
    said += [f"tried: {tried_words(trial.suspect.key)}: {_tried(trial, len(tested))}" for trial in untold]
    said += _memory_notes(seen, any(one.cause == "graphs" for one in causes))
    if seen.facts.graph_breaks:
        said.append(f"torch.compile has graph breaks: {'; '.join(seen.facts.graph_breaks)}")
    if seen.facts.optimizer is None:
        said.append("it has no optimizer of torch: a step is a backward here")
    if answer.refused:
        said.append(f"not written: {', '.join(answer.refused)}")
    return said


def _tried(trial: SwitchTrial, chosen_from: int) -> str:
    """`1.00 times as fast (0.87 to 1.15)`; of what was so slow that it was ended, the times of a step."""
    gain = gain_of(trial, chosen_from=chosen_from)
    if gain is None:
        as_is, without = (statistics.median(pair[place] for pair in trial.pairs) for place in (0, 1))
        return f"slower, {format_seconds(without)} a step beside {format_seconds(as_is)}"
    return f"{gain.median:.2f} times as fast ({gain.low:.2f} to {gain.high:.2f})"
