"""What several ranks cost each other: one that is slower, batches that are not alike, and the exchange itself.

While nothing is exchanged each rank has its own speed. Three times of a step are compared: as it is; in lockstep, where
each step waits for its slowest rank but the exchange costs nothing; and of a rank alone. What lies between the first
two is the exchange that nothing hides. The rest is what ranks wait for each other, and is estimated: no switch makes a
rank as fast as the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autoplan.planner.diagnose.gains import LEAST_PAIRS
from autoplan.planner.diagnose.records import (
    PARTS,
    Answer,
    Finding,
    Observation,
    Part,
    RankBlock,
    RankTime,
    SwitchTrial,
    exactly,
)
from autoplan.planner.records.trials import Interval
from autoplan.planner.trials.measure import ratio_interval
from autoplan.units import format_bytes, format_seconds

LEAST_LATE = 0.1
"""A rank that takes so much more of a step than the others is late; less is usual for processes that share a host."""

LEAST_UNEVEN = 1.1
"""The largest input of a step in times of the mean of the ranks, from which on batches are not alike."""

WORK: tuple[Part, ...] = ("forward", "loss", "backward", "optimizer")

OF_DATA = ("workers", "batches", "persistent")


def exchange_words(trial: SwitchTrial, seen: Observation) -> str:
    """`25 MB of gradients a step in 2 ranks: 80 ms a step with it, 50 ms without`."""
    exchange = seen.facts.exchange
    ranks = len(trial.by_rank[0].seconds)
    as_is, without = (statistics.median(pair[place] for pair in trial.pairs) for place in (0, 1))
    what = []
    if exchange is not None and exchange.ddp:
        what.append(f"{format_bytes(exchange.gradient_bytes)} of gradients")
    if exchange is not None and exchange.calls:
        what.append(f"{exchange.calls:.1f} calls of torch.distributed")
    return (
        f"{' and '.join(what)} a step in {ranks} ranks: {format_seconds(as_is)} with it, {format_seconds(without)} "
        "without, each step as long as its slowest rank"
    )


def with_ranks(found: Sequence[Finding], answer: Answer, seen: Observation) -> list[Finding]:
    """The findings, with what the ranks wait for each other; what it explains is not named twice."""
    trial = _trial(answer)
    if trial is None:
        return list(found)
    late = _late(trial, answer) or _uneven(trial)
    if late is None:
        return list(found)
    finding, part = late
    if part == "data":
        measured = next((one for one in found if one.cause in OF_DATA and one.measured), None)
        if measured is not None:
            update = {"mend": measured.mend, "gain": measured.gain, "measured": True, "line": measured.line}
            finding = finding.model_copy(update=update)
            found = [one for one in found if one is not measured]
    else:
        same = [one for one in found if one.cause == part or (part == "gc" and one.cause == "freeze")]
        if same:  # the others wait for what that finding names
            more = {"evidence": f"{same[0].evidence}; {finding.what}"}
            return [one.model_copy(update=more) if one is same[0] else one for one in found]
    return [*found, finding]


def _trial(answer: Answer) -> SwitchTrial | None:
    """The blocks without an exchange, if they are enough."""
    trials = (one for one in answer.trials if one.suspect.switch == "communication")
    return next((one for one in trials if len(one.by_rank) >= LEAST_PAIRS), None)


def _late(trial: SwitchTrial, answer: Answer) -> tuple[Finding, Part] | None:
    """The rank that is slower than the others in each block, and the part where."""
    means = _means(trial.by_rank)
    late = means.index(max(means))
    others = [rank for rank in range(len(means)) if rank != late]
    usual = [statistics.median(block.seconds[rank] for rank in others) for block in trial.by_rank]
    own = [block.seconds[late] for block in trial.by_rank]
    more = ratio_interval([exactly(one) for one in usual], [exactly(one) for one in own])
    if more.low <= 1 or more.median < 1 + LEAST_LATE:
        return None
    part, seconds = _where(trial.by_rank, late, others)
    inputs = [statistics.fmean(block.inputs[rank] for block in trial.by_rank) for rank in range(len(means))]
    usual_inputs = statistics.median(inputs[rank] for rank in others)
    evidence = (
        f"by itself it takes {format_seconds(statistics.median(own))} a step, the others "
        f"{format_seconds(statistics.median(usual))}; {format_seconds(seconds)} more in {PARTS[part]}"
    )
    gain = _gain(trial, [max(0.0, one - other) for one, other in zip(own, usual, strict=True)])
    own_part = answer.ranks[late].part(part) if answer.ranks else None
    finding = Finding(
        cause="straggler",
        what=f"rank {late} is slower than the others, which wait for it in each step",
        evidence=evidence,
        mend=_mend(part, late),
        gain=gain,
        measured=False,
        line=None if own_part is None else own_part.line,
    )
    if usual_inputs and inputs[late] / usual_inputs >= LEAST_UNEVEN and part in WORK:
        uneven = {
            "cause": "uneven",
            "what": f"the batches of rank {late} are larger, and the others wait for it in each step",
            "evidence": f"{inputs[late] / usual_inputs:.1f} times as many elements as the others have; {evidence}",
            "mend": "give each rank batches of one size: the same batch size, and lengths alike (sorted, or packed)",
        }
        finding = finding.model_copy(update=uneven)
    return finding, part


def _mend(part: Part, late: int) -> str:
    if part in WORK:
        return (
            f"see what rank {late} does that the others do not, what else runs on its cores or device, and whether "
            "that device is as fast as theirs"
        )
    if part == "data":
        return f"see where rank {late} reads its samples from, and that its loader has as many workers as the others"
    return f"do it in all ranks in turn, in a thread, or more seldom: rank {late} does it alone"


def _uneven(trial: SwitchTrial) -> tuple[Finding, Part] | None:
    """Batches that differ from rank to rank in a step, though no rank has the larger ones always."""
    largest = statistics.median(block.largest_inputs for block in trial.by_rank)
    if largest < LEAST_UNEVEN:
        return None
    lost = [max(0.0, block.lockstep_s - statistics.fmean(block.seconds)) for block in trial.by_rank]
    gain = _gain(trial, lost)
    if gain.median < 1 + LEAST_LATE / 2:
        return None
    lockstep = statistics.median(block.lockstep_s for block in trial.by_rank)
    mean = statistics.median(statistics.fmean(block.seconds) for block in trial.by_rank)
    finding = Finding(
        cause="uneven",
        what="the ranks' batches differ in size, and each step waits for the largest",
        evidence=(
            f"the largest of a step has {largest:.1f} times the mean of the ranks; {format_seconds(lockstep)} a step "
            f"where each waits for the slowest, {format_seconds(mean)} on average"
        ),
        mend="batches of one size in all ranks: group samples by length across ranks, or pack them to a fixed length",
        gain=gain,
        measured=False,
    )
    return finding, "forward"


def _gain(trial: SwitchTrial, lost: Sequence[float]) -> Interval:
    """What it would give if so many seconds of each step went, as its median: it is estimated."""
    gains = [as_is / max(as_is - less, 0.01 * as_is) for (as_is, _), less in zip(trial.pairs, lost, strict=False)]
    return exactly(statistics.median(gains))


def _means(blocks: Sequence[RankBlock]) -> list[float]:
    """Seconds of a step by rank, over all blocks."""
    return [statistics.fmean(seconds) for seconds in zip(*(block.seconds for block in blocks), strict=True)]


def _where(blocks: Sequence[RankBlock], late: int, others: Sequence[int]) -> tuple[Part, float]:
    """The part in which a rank takes most longer than the others, and by how many seconds."""
    more: dict[Part, float] = {}
    for part in PARTS:
        own = [block.parts[late].get(part, 0.0) for block in blocks]
        usual = [statistics.median(block.parts[rank].get(part, 0.0) for rank in others) for block in blocks]
        more[part] = statistics.fmean(own) - statistics.fmean(usual)
    part = max(more, key=lambda one: more[one])
    return part, more[part]


def rank_times(answer: Answer) -> tuple[RankTime, ...]:
    """The ranks side by side; none for a script of one."""
    trial = _trial(answer)
    means: Sequence[float | None] = [None] * len(answer.ranks) if trial is None else _means(trial.by_rank)
    return tuple(
        RankTime(rank=rank, seconds=means[rank], step_s=seen.mean_s, part=seen.parts[0].part, line=seen.parts[0].line)
        for rank, seen in enumerate(answer.ranks)
    )


def notes_of_ranks(answer: Answer, nproc: int) -> list[str]:
    """What could not be told of the ranks."""
    seen = answer.observation
    if nproc == 1 or seen is None:
        return []
    exchange = seen.facts.exchange
    if exchange is None:
        return ["the script made no process group: each rank trained by itself, and none waits for another"]
    if not exchange.can_go:
        return ["what the ranks exchange could not be left out (DistributedDataParallel and all_reduce can be)"]
    if _trial(answer) is None:
        return ["the time was too short to tell what the ranks cost each other; a larger --budget tells it"]
    return []
