"""autoplan doctor --nproc: what ranks cost each other is named, with the rank and where."""

from __future__ import annotations

import pytest

import autoplan
from autoplan.errors import UsageError, WorkloadError
from autoplan.planner.diagnose.rank_findings import with_ranks
from autoplan.planner.diagnose.records import (
    Answer,
    Diagnosis,
    Exchange,
    Facts,
    Finding,
    Observation,
    RankBlock,
    Suspect,
    SwitchTrial,
)
from autoplan.planner.records.trials import Interval
from tests.cases import some
from tests.planner.diagnose.test_diagnose import SCRIPTS

GAIN = Interval(median=1.5, low=1.4, high=1.6, samples=6)
STEP = Interval(median=0.1, low=0.1, high=0.1, samples=20)


def diagnose_ranks(planted: str, budget: float = 30.0) -> Diagnosis:
    """A diagnosis of two ranks of the script."""
    return autoplan.diagnose(SCRIPTS / "two_ranks.py", [planted], nproc=2, budget=budget)


LATE = [("model", "forward"), ("data", "waiting for the DataLoader")]


@pytest.mark.parametrize(("planted", "part"), some(LATE, LATE[1:]))
def test_a_rank_that_is_late_is_named_with_where_it_is(planted: str, part: str) -> None:
    found = diagnose_ranks(planted)
    first = found.findings[0]
    assert first.cause == "straggler" and "rank 1 is slower" in first.what, found.findings
    assert part in first.evidence, found.findings
    assert first.gain.median > 1.5 and [one.rank for one in found.ranks] == [0, 1]
    alone = [one.seconds for one in found.ranks]
    assert alone[0] is not None and alone[1] is not None and alone[1] > 2 * alone[0]


def test_the_batches_of_one_rank_that_are_larger_are_named() -> None:
    found = diagnose_ranks("larger")
    first = found.findings[0]
    assert first.cause == "uneven" and "the batches of rank 1" in first.what, found.findings
    assert "2.0 times as many elements" in first.evidence and not first.measured


@pytest.mark.timing
def test_batches_that_differ_from_step_to_step_are_named() -> None:
    found = diagnose_ranks("lengths")
    first = found.findings[0]
    assert first.cause == "uneven" and "the largest" in first.what and first.gain.median > 1.1, found.findings


@pytest.mark.timing
def test_an_exchange_that_nothing_hides_is_measured_by_leaving_it_out() -> None:
    found = diagnose_ranks("exchange")
    first = found.findings[0]
    assert (first.cause, first.measured) == ("communication", True) and "of gradients" in first.evidence
    assert first.gain.low > 1.2, found.findings


@pytest.mark.timing
def test_ranks_that_are_alike_are_no_cause() -> None:
    found = diagnose_ranks("alike")
    assert not {one.cause for one in found.findings} & {"straggler", "uneven"}, found.findings


def test_a_rank_that_ends_before_the_others_is_said() -> None:
    with pytest.raises(WorkloadError, match="rank 1 ended after 60 steps, before the others") as raised:
        diagnose_ranks("ends", budget=40.0)
    assert "join" in (raised.value.hint or "")


def test_a_script_that_needs_ranks_and_got_none_is_told_so() -> None:
    with pytest.raises(WorkloadError, match="this needs two ranks") as raised:
        autoplan.diagnose(SCRIPTS / "two_ranks.py", ["alike"], budget=30.0)
    assert "nproc=2" in (raised.value.hint or "")


def test_no_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="nproc is 0"):
        autoplan.diagnose(SCRIPTS / "two_ranks.py", nproc=0)


def answer(*blocks: RankBlock) -> Answer:
    """What rank 0 answers after blocks whose steps take 100 ms with the exchange."""
    facts = Facts(
        device="cpu",
        threads=1,
        cores=1,
        optimizer="SGD",
        can_fuse=False,
        exchange=Exchange(ddp=True, gradient_bytes=8, calls=0),
    )
    suspect = Suspect(switch="communication", part="communication", worth=1.0)
    return Answer(
        observation=Observation(steps=20, step_s=STEP, mean_s=0.1, parts=(), facts=facts),
        trials=(SwitchTrial(suspect=suspect, pairs=tuple((0.1, one.lockstep_s) for one in blocks), by_rank=blocks),),
    )


def block(late_s: float, part: str = "forward") -> RankBlock:
    """Four ranks, of which the third takes so much longer than 40 ms."""
    seconds = (0.04, 0.041, 0.04 + late_s, 0.04)
    parts = tuple({part: one, "optimizer": 0.001} for one in seconds)
    return RankBlock(seconds=seconds, inputs=(8.0,) * 4, lockstep_s=max(seconds), largest_inputs=1.0, parts=parts)


def found_in(told: Answer, *others: Finding) -> list[Finding]:
    assert told.observation is not None
    return with_ranks(others, told, told.observation)


def test_the_promise_is_what_the_late_rank_takes_longer() -> None:
    (one,) = found_in(answer(block(0.05), block(0.049), block(0.051), block(0.05)))
    assert one.cause == "straggler" and one.what.startswith("rank 2 ") and "forward" in one.evidence
    assert one.gain.median == pytest.approx(2.0, rel=0.05) and not one.measured  # 100 ms without 50 ms
    assert found_in(answer(block(0.002), block(0.0), block(0.001), block(0.002))) == []


def test_a_loader_that_is_late_in_one_rank_is_one_finding_with_what_workers_gave() -> None:
    workers = Finding(cause="workers", what="", evidence="", mend="num_workers=2", gain=GAIN, measured=True)
    saving = workers.model_copy(update={"cause": "saving"})
    blocks = [block(0.05, "data") for _ in range(3)]
    kept, late = found_in(answer(*blocks), workers, saving)
    assert kept is saving and late.cause == "straggler" and late.measured and late.mend == "num_workers=2"
    blocks = [block(0.05, "saving") for _ in range(3)]
    (one,) = found_in(answer(*blocks), saving)  # that is what the others wait for: named once, with the rank
    assert one.model_copy(update={"evidence": ""}) == saving and "rank 2 is slower" in one.evidence
