"""From figures to words: the mend of a slow loader, its line, notes that agree with each other."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from autoplan.planner.diagnose.clock import stack_of
from autoplan.planner.diagnose.findings import find_causes, notes_of
from autoplan.planner.diagnose.gains import gain_of, is_gain, is_open, is_rough
from autoplan.planner.diagnose.records import (
    Answer,
    Exchange,
    Facts,
    Finding,
    HandAttention,
    LoaderFacts,
    Observation,
    Operations,
    PartTime,
    Stack,
    Suspect,
    SwitchTrial,
    SyncLine,
)
from autoplan.planner.diagnose.session import graph_breaks, line_of_samples, seen_once
from autoplan.planner.diagnose.suspects import NO_EFFECT, TRIED, find_suspects, together, tried_words
from autoplan.planner.diagnose.switches import STILL_AWAY, SWITCHES
from autoplan.planner.records.trials import Interval
from autoplan.processes.cause import is_users_file
from autoplan.report.diagnosis import gain_words

STEP = Interval(median=0.1, low=0.1, high=0.1, samples=20)


def observation(*, workers: int = 0, needless: tuple[str, ...] = ()) -> Observation:
    """Steps of 100 ms that wait 60 ms for the loader."""
    loader = LoaderFacts(
        workers=workers, persistent=True, iterable=False, start_s=0, epoch_steps=None, make_line="train.py:9"
    )
    seconds = {"data": 0.06, "backward": 0.04}
    return Observation(
        steps=20,
        step_s=STEP,
        mean_s=0.1,
        parts=tuple(
            PartTime(part=part, seconds=s, low=s, high=s, share=10 * s, events=20)  # type: ignore[arg-type]
            for part, s in seconds.items()
        ),
        facts=Facts(
            device="cpu", threads=2, cores=2, optimizer="SGD", can_fuse=False, loader=loader, needless=needless
        ),
    )


def trial(switch: str, without_s: float, setting: int = 0) -> SwitchTrial:
    pairs = tuple((0.1 + 0.001 * n, without_s + 0.0005 * n) for n in range(4))
    return SwitchTrial(suspect=Suspect(switch=switch, setting=setting, part="data", worth=0.5), pairs=pairs)


def test_samples_are_to_be_cheaper_only_after_more_workers_were_measured() -> None:
    seen = observation()
    (first,) = find_causes(Answer(observation=seen, trials=(trial("batches", 0.04),)))
    assert gain_words(first).startswith("up to 2.4") and gain_words(first).endswith("measured with batches at hand")
    assert first.cause == "batches" and first.mend.startswith("DataLoader(..., num_workers=N), not measured here")
    tried = (trial("batches", 0.04), trial("workers", 0.1, 2))
    (first,) = find_causes(Answer(observation=seen, trials=tried))
    assert first.mend == "make a sample cheaper (train.py:9): prepare it once, before the training"
    slower = SwitchTrial(suspect=tried[1].suspect, pairs=((0.1, 0.3),), why_not="it was slower")
    (first,) = find_causes(Answer(observation=seen, trials=(trial("batches", 0.04), slower)))
    assert first.mend.startswith("make a sample cheaper")
    (first,) = find_causes(Answer(observation=seen))
    assert not first.measured and "num_workers=N" in first.mend


def test_more_workers_are_measured_before_their_bound_also_where_there_are_as_many_as_cores() -> None:
    assert [one.key for one in find_suspects(observation())] == ["workers=2", "batches"]
    assert [one.key for one in find_suspects(observation(workers=2))] == ["workers=4", "batches"]
    assert [one.key for one in find_suspects(observation(workers=16))] == ["batches"]
    assert [one.key for one in find_suspects(observation(workers=12))] == ["workers=16", "batches"]
    seen = observation()
    seen = seen.model_copy(update={"facts": seen.facts.model_copy(update={"cores": 64, "threads": 64})})
    assert [one.key for one in find_suspects(seen)] == ["workers=16", "batches"]


def test_a_wait_that_comes_with_each_epoch_is_measured_in_whole_epochs() -> None:
    seen = observation(workers=2)
    seen = seen.model_copy(
        update={"parts": tuple(one.model_copy(update={"events": 4, "every": 5}) for one in seen.parts)}
    )
    assert [(one.key, one.cycle) for one in find_suspects(seen)] == [("workers=4", 5), ("batches", 5)]


def test_what_is_seen_of_the_model_is_suspected_and_not_where_ranks_exchange_it() -> None:
    seen = observation()
    parts = (*seen.parts, PartTime(part="optimizer", seconds=0.03, low=0.03, high=0.03, share=0.3, events=20))
    facts = seen.facts.model_copy(
        update={"float64": True, "recomputed": 8.0, "unused_rows": ("Model.user",), "unused_share": 0.9}
    )
    keys = {one.key for one in find_suspects(seen.model_copy(update={"parts": parts, "facts": facts}))}
    assert {"float64", "unused_rows"} <= keys and "checkpointing" not in keys  # there is no forward to do again
    shared = facts.model_copy(update={"exchange": Exchange(ddp=True, gradient_bytes=8, calls=0)})
    keys = {one.key for one in find_suspects(seen.model_copy(update={"parts": parts, "facts": shared}))}
    assert not keys & {"float64", "unused_rows"}


def test_what_was_seen_once_is_waited_for() -> None:
    once = PartTime(part="evaluation", seconds=0.1, low=0.0, high=0.0, share=0.5, events=1, every=20)
    seen = observation()
    seen = seen.model_copy(update={"parts": (*seen.parts, once)})
    assert seen_once(seen) == {"evaluation": 2.0}
    assert any("evaluation was seen once in 20 steps (2.00 s)" in note for note in notes_of(Answer(), seen, ()))
    twice = seen.model_copy(update={"parts": (once.model_copy(update={"events": 2}),)})
    assert seen_once(twice) == {} and seen_once(observation()) == {}


def test_an_evaluation_that_takes_little_of_the_time_is_wanted() -> None:
    def seen_with(share: float) -> Observation:
        part = PartTime(part="evaluation", seconds=0.1 * share, low=0.0, high=0.1, share=share, events=5, every=4)
        return observation().model_copy(update={"parts": (part,)})

    assert find_causes(Answer(observation=seen_with(0.07))) == []
    (first,) = find_causes(Answer(observation=seen_with(0.12)))
    assert (first.cause, first.measured) == ("evaluation", False)
    parts = tuple(one.model_copy(update={"part": "no_grad"}) for one in seen_with(0.12).parts)
    (first,) = find_causes(Answer(observation=observation().model_copy(update={"parts": parts})))
    assert (first.cause, first.measured) == ("no_grad", False)
    little = Answer(observation=seen_with(0.07), trials=(trial("evaluation", 0.0945),))
    assert find_causes(little) == []
    assert any("tried: no evaluation: 1.07 times" in note for note in notes_of(little, seen_with(0.07), ()))
    assert find_causes(Answer(observation=seen_with(0.12), trials=(trial("evaluation", 0.08),)))[0].measured


def test_a_gain_that_scatters_is_open_and_more_pairs_decide_it() -> None:
    pairs = tuple((0.06, without_s) for without_s in (0.043, 0.057, 0.04, 0.067, 0.046, 0.038))
    one = trial("evaluation", 0.1).model_copy(update={"pairs": pairs})
    assert not is_gain(gain_of(one, 8)) and is_open(one, 8)
    more = one.model_copy(update={"pairs": 3 * pairs})
    assert is_gain(gain_of(more, 8)) and not is_open(more, 8)
    assert not is_open(trial("saving", 0.1), 8)  # no gain: nothing to prove
    assert not is_rough(one, 8) and not is_rough(trial("saving", 0.05), 8)  # no gain, and one that is told exactly
    wide = one.model_copy(update={"pairs": tuple((0.06, 0.8 * without_s) for _, without_s in pairs)})
    assert is_gain(gain_of(wide, 1)) and is_rough(wide, 1)
    assert not is_rough(wide.model_copy(update={"pairs": 3 * wide.pairs}), 1)  # no more pairs are made
    few, same = (gain_of(one.model_copy(update={"pairs": n * pairs}), 1) for n in (1, 2))
    assert few is not None and same is not None and same.high / same.low < few.high / few.low


def test_workers_that_stay_are_the_mend_unless_more_of_them_give_much_more() -> None:
    stay = trial("persistent", 0.04)
    (first,) = find_causes(Answer(observation=observation(workers=2), trials=(stay, trial("workers", 0.039, 4))))
    assert first.cause == "persistent"
    (first,) = find_causes(Answer(observation=observation(workers=2), trials=(stay, trial("workers", 0.02, 4))))
    assert first.cause == "workers"
    stay = trial("persistent", 0.01)  # 9 of 10 seconds are saved: half of what is left is little
    (first,) = find_causes(Answer(observation=observation(workers=2), trials=(stay, trial("workers", 0.005, 4))))
    assert first.cause == "persistent"


def test_what_failed_is_not_said_to_have_had_no_time() -> None:
    seen = observation(needless=("Teacher",))
    answer = Answer(observation=seen, trials=(trial("batches", 0.04), trial("workers", 0.07, 2)))
    assert any("too short: no needless gradients" in note for note in notes_of(answer, seen, ()))
    assert not any("too short" in note for note in notes_of(answer, seen, (), failed=("needless_gradients",)))


def on_a_gpu(idle: float, *, data_s: float = 0.0, compiled: bool = False) -> Observation:
    """Steps of 64 ms as an H100 showed them of GPT-2 in fp32; the device is idle for a share of them."""
    seconds = {"optimizer": 0.023, "backward": 0.021, "forward": 0.018, "copy": 0.0007, "loop": 0.0004, "data": data_s}
    step_s = sum(seconds.values())
    busy_s = (1 - idle) * step_s
    return observation().model_copy(
        update={
            "step_s": Interval(median=step_s, low=step_s, high=step_s, samples=20),
            "mean_s": step_s,
            "parts": tuple(
                PartTime(part=part, seconds=s, low=s, high=s, share=s / step_s, events=20)  # type: ignore[arg-type]
                for part, s in seconds.items()
                if s
            ),
            "facts": Facts(
                device="cuda", threads=8, cores=16, optimizer="AdamW", can_fuse=True, can_foreach=True,
                bf16_gain=9.0, tf32_gain=6.0, compiled=compiled,
            ),
            "operations": (
                Operations(kind="matrix products", seconds=busy_s, share=1 - idle, calls=465),
                Operations(kind="device idle", seconds=step_s - busy_s, share=idle),
            ),
        }
    )  # fmt: skip


def with_optimizer(share: float) -> Observation:
    """On a CPU; the optimizer takes a share of a step of 100 ms."""
    parts = [
        PartTime(part=part, seconds=0.1 * s, low=0.1 * s, high=0.1 * s, share=s, events=20)  # type: ignore[arg-type]
        for part, s in {"optimizer": share, "backward": 1 - share}.items()
    ]
    return observation().model_copy(update={"parts": tuple(parts)})


def test_a_faster_optimizer_step_is_a_finding_where_it_gives_enough_and_no_more_than_it_can() -> None:
    for share, without_s, is_found in ((0.3, 0.08, True), (0.1, 0.09, False), (0.07, 0.06, False)):
        seen = with_optimizer(share)
        tried = Answer(observation=seen, trials=(trial("fused", without_s),))
        found = [one for one in find_causes(tried) if one.cause == "fused"]
        assert bool(found) is is_found, (share, without_s)
        said = [note for note in notes_of(tried, seen, found) if "a fused optimizer step" in note]
        assert bool(said) is not is_found, "else a note says what it gave"


def test_compiling_is_tried_last_and_where_most_of_the_time_goes_over_memory() -> None:
    def suspects(share: float, **facts: Any) -> list[str]:
        seen = observation()
        slow = (Operations(kind="elementwise", seconds=0.1 * share, share=share, calls=100),)
        changed = {"operations": slow, "facts": seen.facts.model_copy(update=facts)}
        return [one.switch for one in find_suspects(seen.model_copy(update=changed))]

    assert suspects(0.6)[-1] == "compile" and len(suspects(0.6)) > 1
    assert "compile" not in suspects(0.4) and "compile" not in suspects(0.6, compiled=True)


def test_attention_in_single_operations_is_named_by_what_torchs_own_would_save() -> None:
    def found(fused_s: float) -> list[Finding]:
        own = HandAttention(scores=(2, 4, 96, 96), seconds=0.04, fused_s=fused_s, line="train.py:7")
        seen = with_optimizer(0.0)
        return find_causes(Answer(observation=seen.model_copy(update={"facts": facts_with(seen, own)})))

    (one,) = found(0.01)
    assert (one.cause, one.measured, one.line) == ("attention", False, "train.py:7")
    assert one.gain.median == pytest.approx(1 / 0.7) and "2 x 4 x 96 x 96" in one.evidence
    assert found(0.036) == [] and found(0.05) == []


def facts_with(seen: Observation, attention: HandAttention) -> Facts:
    return seen.facts.model_copy(update={"attention": attention, "loader": None})


def test_a_gpu_that_waits_for_the_host_is_named_with_compiling_as_the_mend() -> None:
    seen = on_a_gpu(0.42)
    (found,) = find_causes(Answer(observation=seen))
    assert (found.cause, found.measured) == ("idle", False)
    assert "465 operations a step; nothing is compiled" in found.evidence and found.mend.startswith("torch.compile(")
    assert "fused=True" in found.mend  # of 1,779 launches one is left
    assert 1.6 < found.gain.median < 1 / (1 - 0.42)
    (found,) = find_causes(Answer(observation=on_a_gpu(0.42, compiled=True)))
    assert found.mend.startswith('mode="reduce-overhead"') and "nothing is compiled" not in found.evidence


def test_a_gpu_that_is_busy_or_waits_for_something_else_gets_no_such_finding() -> None:
    assert find_causes(Answer(observation=on_a_gpu(0.08))) == []
    assert find_causes(Answer(observation=on_a_gpu(0.95, data_s=1.0))) == []  # it waits for batches
    faster = tuple((0.039 + 0.0001 * n, 0.039) for n in range(4))  # as it is, once nothing looks at the steps
    one = SwitchTrial(suspect=Suspect(switch="fused", part="optimizer", worth=0.2), pairs=faster)
    assert find_causes(Answer(observation=on_a_gpu(0.42), trials=(one,))) == []


def test_what_the_host_waits_for_costs_a_gpu_no_more_than_the_time_in_which_it_idles() -> None:
    """`loss.item()` in a loop whose GPU is always busy waits for most of each step, and its removal gives nothing."""

    def reads(idle: float, line: str = "train.py:9") -> list[Finding]:
        seen = on_a_gpu(idle)
        loop = PartTime(part="loop", seconds=0.03, low=0.03, high=0.03, share=0.47, events=20, line="train.py:9")
        syncs = (SyncLine(line=line, calls=1, seconds=0.028),)
        facts = seen.facts.model_copy(update={"syncs": syncs, "bf16_gain": None, "tf32_gain": None, "can_fuse": False})
        return find_causes(Answer(observation=seen.model_copy(update={"parts": (loop, *seen.parts), "facts": facts})))

    assert reads(0.04) == []
    (one,) = reads(0.25)
    assert one.cause == "sync" and one.gain.median == pytest.approx(1 / (1 - 0.25))
    assert [one.cause for one in reads(0.25, "train.py:11")] == ["sync", "loop"]  # the loop's own code is elsewhere


def test_a_gpu_that_idles_for_batches_of_workers_gains_nothing_by_fewer_reads() -> None:
    def causes(workers: int) -> set[str]:
        seen = on_a_gpu(0.5, data_s=0.06)
        loader = LoaderFacts(workers=workers, persistent=True, iterable=True, start_s=0, epoch_steps=None)
        syncs = (SyncLine(line="train.py:9", calls=1, seconds=0.03),)
        changed = {"syncs": syncs, "bf16_gain": None, "tf32_gain": None, "can_fuse": False, "loader": loader}
        facts = seen.facts.model_copy(update=changed)
        return {one.cause for one in find_causes(Answer(observation=seen.model_copy(update={"facts": facts})))}

    assert "sync" not in causes(2) and "batches" in causes(2)
    assert "sync" in causes(0)  # the host makes them, while it could launch


def test_without_a_trace_of_the_gpu_the_loops_own_code_is_named_and_its_waits_are_not() -> None:
    """Steps of over a second are not traced by default; a read in them may wait for the GPU alone."""
    seen = on_a_gpu(0.25).model_copy(update={"operations": ()})
    loop = PartTime(part="loop", seconds=0.06, low=0.06, high=0.06, share=0.5, events=20, line="train.py:9")
    syncs = (SyncLine(line="train.py:11", calls=1, seconds=0.02),)
    facts = seen.facts.model_copy(update={"syncs": syncs, "bf16_gain": None, "tf32_gain": None, "can_fuse": False})
    seen = seen.model_copy(update={"parts": (loop, *seen.parts), "facts": facts, "mean_s": 0.12})
    (one,) = find_causes(Answer(observation=seen))
    assert one.cause == "loop" and "how long the GPU works beside it is not known" in one.evidence
    assert one.gain.median == pytest.approx(1 / (1 - 0.04 / 0.12))


def test_on_a_gpu_tf32_is_tried_and_a_step_over_lists_where_there_is_no_fused_one() -> None:
    seen = on_a_gpu(0.1)
    suspects = {one.key: one for one in find_suspects(seen)}
    assert {"tf32", "bf16", "fused"} == {*suspects} and suspects["bf16"].settle > 1
    facts = seen.facts.model_copy(update={"can_fuse": False, "bf16_gain": None, "tf32_gain": None})
    assert [one.key for one in find_suspects(seen.model_copy(update={"facts": facts}))] == ["foreach"]
    on_cpu = facts.model_copy(update={"device": "cpu", "threads": 16})
    assert find_suspects(seen.model_copy(update={"facts": on_cpu})) == []
    gains = (trial("tf32", 0.05), trial("foreach", 0.07))
    first, second = find_causes(Answer(observation=seen, trials=gains))
    assert first.cause == "tf32" and "6.0 times as fast in TF32" in first.evidence
    assert second.mend == "AdamW(...) without foreach=False"


def test_two_mends_are_tried_at_once_since_each_waits_for_the_other() -> None:
    """As the H100 had it: the for-loop optimizer keeps the host as long as products in fp32 keep the GPU."""
    seen = on_a_gpu(0.05)
    assert together(seen, {"tf32", "bf16"}) is None and together(seen, {"fused"}) is None
    both = together(seen, {"tf32", "fused"})
    assert both is not None and both.key == "together"
    assert together(observation(), {"tf32", "fused"}) is None  # a CPU launches nothing ahead
    alone = (trial("tf32", 0.1), trial("fused", 0.095), trial("together", 0.06))
    (first,) = find_causes(Answer(observation=seen, trials=alone))
    assert first.cause == "together" and "fused=True" in first.mend and "float32_matmul" in first.mend
    enough = (trial("tf32", 0.06), trial("fused", 0.1), trial("together", 0.06))
    assert [one.cause for one in find_causes(Answer(observation=seen, trials=enough))] == ["tf32"]


def test_what_is_there_for_certain_is_estimated_where_there_was_no_time_for_it() -> None:
    seen = on_a_gpu(0.05)
    facts = seen.facts.model_copy(update={"padding": 0.6, "needless": ("Teacher",), "tf32_gain": None})
    seen = seen.model_copy(update={"facts": facts})
    found = find_causes(Answer(observation=seen))
    assert [(one.cause, one.measured) for one in found] == [("padding", False), ("needless_gradients", False)]
    assert 1.5 < found[0].gain.median < 1 / (1 - 0.6) and "Teacher" in found[1].mend
    tried = (trial("padding", 0.1), trial("needless_gradients", 0.1))  # it was seen that they cost nothing
    assert find_causes(Answer(observation=seen, trials=tried)) == []
    assert [one.cause for one in find_causes(Answer(observation=seen), ("padding",))] == ["needless_gradients"]
    little = seen.model_copy(update={"facts": facts.model_copy(update={"padding": 0.15, "needless": ()})})
    assert find_causes(Answer(observation=little)) == []


def test_what_did_not_reach_the_steps_is_said_and_is_no_time() -> None:
    seen = on_a_gpu(0.05)
    none = SwitchTrial(suspect=Suspect(switch="fused", part="optimizer", worth=0.2), why_not=NO_EFFECT)
    slow = SwitchTrial(suspect=Suspect(switch="bf16", part="forward", worth=0.2), pairs=((0.06, 0.2),))
    notes = notes_of(Answer(observation=seen, trials=(none, slow)), seen, ())
    assert "could not be tried: a fused optimizer step (it did not reach the steps)" in notes
    assert "tried: bf16: slower, 200 ms a step beside 60.0 ms" in notes
    assert not any("times as fast" in one for one in notes)
    assert any(one.startswith("not measured, the time was too short: TF32;") for one in notes)


def test_there_are_words_for_everything_that_is_removed() -> None:
    assert {*SWITCHES, "recompilation"} == {*TRIED}
    assert {*STILL_AWAY} <= {*SWITCHES}
    assert tried_words("workers=4") == "4 workers"


class Own(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 4


def test_the_line_of_a_sample_is_the_users() -> None:
    line = f"test_findings.py:{Own.__getitem__.__code__.co_firstlineno}"
    assert line_of_samples(Own()) == line
    assert line_of_samples(Subset(ConcatDataset([Own(), Own()]), [0])) == line
    assert line_of_samples(TensorDataset(torch.zeros(2))) is None
    assert line_of_samples([1, 2]) is None


def test_a_stack_has_the_users_lines_and_the_librarys_function_and_no_values() -> None:
    class Seen:
        def __deepcopy__(self, memo: object) -> Seen:
            stacks.append(stack_of(sys._getframe().f_back))
            return self

    def sample(secret: str) -> object:
        return copy.deepcopy([secret, Seen()])

    stacks: list[tuple[str, ...]] = []
    sample("a password")
    *outer, called, library = stacks[0]
    assert called == f"test_findings.py:{sample.__code__.co_firstlineno + 1} in sample"
    assert library == "copy.deepcopy" and "password" not in str(stacks)
    assert outer[-1].endswith("in test_a_stack_has_the_users_lines_and_the_librarys_function_and_no_values")


def test_a_finding_has_the_stack_of_its_line_or_of_its_part() -> None:
    seen = observation()
    other = Stack(part="backward", frames=("train.py:9 in fit",), share=0.6)
    data = Stack(part="data", frames=("train.py:4 in fit", "data.py:7 in __getitem__"), share=0.3)
    told = Answer(observation=seen.model_copy(update={"stacks": (other, data)}), trials=(trial("batches", 0.04),))
    assert find_causes(told)[0].stack is data
    parts = tuple(one.model_copy(update={"line": "train.py:9"}) for one in seen.parts)
    told = told.model_copy(update={"observation": seen.model_copy(update={"stacks": (data, other), "parts": parts})})
    assert find_causes(told)[0].stack is other
    same = data.model_copy(update={"frames": other.frames})  # a Trainer: all is at one line of the user's
    told = told.model_copy(update={"observation": seen.model_copy(update={"stacks": (other, same), "parts": parts})})
    assert find_causes(told)[0].stack is same
    assert find_causes(Answer(observation=seen, trials=(trial("batches", 0.04),)))[0].stack is None


def test_a_graph_break_has_the_line_of_the_users() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        largest = x.max().item()
        return x / largest

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x.sin())

    torch._dynamo.reset()
    torch._dynamo.utils.graph_break_reasons.clear()
    torch.compile(outer, backend="eager")(torch.rand(5))
    (first, *_) = graph_breaks()
    assert first.startswith(f"test_findings.py:{inner.__code__.co_firstlineno + 1}: ") and "item" in first


def test_what_torch_compile_has_written_is_no_file_of_the_users() -> None:
    assert is_users_file("/home/me/train.py")
    assert not is_users_file("/home/me/torchinductor_me/vb/cvbkt.py")
