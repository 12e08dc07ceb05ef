"""`autoplan estimate --anchor`: what was measured on one device, projected onto others; and how far off it was."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autoplan
from autoplan.cli.estimate import estimate_command
from autoplan.errors import AutoplanError, PlanError, UsageError
from autoplan.planner.cost.analytical.cluster import Cluster, cluster_hardware
from autoplan.planner.cost.calibrate import FACTORS
from autoplan.planner.cost.traced.rates import from_device
from autoplan.planner.estimate import traced
from autoplan.planner.estimate.anchor import (
    Learned,
    Measured,
    Target,
    anchored_spec,
    carry,
    read_target,
    search_flags,
    with_cores,
    with_loader,
)
from autoplan.planner.estimate.traced import look_and_trace
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.loading import Loading
from autoplan.planner.records.trials import PeakMemory, Trial
from autoplan.planner.trace.model_profile import ModelProfile
from autoplan.probes.profile import CollectiveReading, HardwareProfile
from autoplan.processes import Zygote
from autoplan.record import Reading
from autoplan.strategies.config import PLAIN, TrainingConfig
from autoplan.strategies.knob_text import parse_knob
from autoplan.strategies.workloads.loading.settings import LoaderSetting
from autoplan.strategies.workloads.sources import make_spec
from autoplan.strategies.workloads.spec import WorkloadSpec
from tests.recorded import make_hardware, make_plan, make_trial

MODEL = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 4,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 512,
    "n_positions": 64,
}
BATCH = 16
SLOWER = {"matmul/full": 1.3, "memory": 1.6, "dispatch": 1.4, "optimizer": 1.2, "communication": 1.5}
"""By which the device that the trials stand for is slower than its probes say."""

ONE = [PLAIN.model_copy(update={"micro_batch": size}) for size in (1, 2, 4, 8, 16)]
ONE += [PLAIN.model_copy(update={"micro_batch": 4, "checkpointing": "full"})]
TWO = [PLAIN.model_copy(update={"micro_batch": size, "dp_replicate": 2}) for size in (1, 4, 8)]
FOUR = [PLAIN.model_copy(update={"micro_batch": size, "dp_replicate": 4}) for size in (1, 2, 4)]


def cpu_hardware(cores: int = 4) -> HardwareProfile:
    """A host whose ranks were probed in twos."""

    def known(value: float, unit: str) -> Reading:
        return Reading(value=value, unit=unit, provenance="measured")

    reading = CollectiveReading(
        operation="all_reduce",
        backend="gloo",
        group_size=2,
        latency_s=known(4e-4, "s"),
        algbw_bytes_per_s=known(1e9, "bytes/s"),
        busbw_bytes_per_s=known(1e9, "bytes/s"),
    )
    return make_hardware(cores=cores).model_copy(update={"collectives": (reading,)})


def measured_on(hardware: HardwareProfile, kind: str, trials: Sequence[Trial] = ()) -> Measured:
    return Measured(hardware=hardware, kind=kind, trials=trials, global_batch=BATCH)


def trials_of(
    hardware: HardwareProfile, kind: str, profile: ModelProfile, configs: Sequence[TrainingConfig]
) -> list[Trial]:
    """Trials of a device that is slower than its probes say, as SLOWER has it."""
    estimator = measured_on(hardware, kind).estimator(profile)
    seconds = slow_seconds(estimator, configs)
    peaks = estimator.table(configs).peak_memory_bytes
    return [
        make_trial(i, config, float(step), peak_memory=PeakMemory(resident_bytes=int(peak)))
        for i, (config, step, peak) in enumerate(zip(configs, seconds, peaks, strict=True))
    ]


def slow_seconds(estimator: Any, configs: Sequence[TrainingConfig]) -> Any:
    """Step times of a device that is slower than the estimator's rates."""
    factors = np.array([SLOWER.get(name, 1.0) for name in FACTORS])
    return factors @ estimator.table(configs).parts_s


@pytest.fixture(scope="module", autouse=True)
def _one_zygote(training_zygote: Zygote) -> Iterator[None]:
    """Each estimate would start its own, which imports torch and transformers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "Zygote", lambda **given: nullcontext(training_zygote))
        yield


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> WorkloadSpec:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(MODEL))
    return make_spec(model=str(path), sequence_length=64, global_batch=BATCH)


@pytest.fixture(scope="module")
def profiles(spec: WorkloadSpec) -> dict[str, ModelProfile]:
    """The model traced for both kinds of device."""
    return {
        device: look_and_trace(spec, cpu_hardware(), ranks=4, device=device, wanted=lambda facts: [*ONE, *TWO, *FOUR])[
            "profile"
        ]
        for device in ("cpu", "cuda")
    }


@pytest.fixture(scope="module")
def plan(spec: WorkloadSpec, profiles: dict[str, ModelProfile]) -> Plan:
    return plan_of(spec, cpu_hardware(), profiles["cpu"])


def plan_of(
    spec: WorkloadSpec, hardware: HardwareProfile, profile: ModelProfile, configs: Sequence[TrainingConfig] = ONE
) -> Plan:
    trials = trials_of(hardware, "cpu", profile, configs)
    best = min(trials, key=lambda trial: trial.step_time_s.median if trial.step_time_s else math.inf)
    found = make_plan(best.config, workload=spec, hardware=hardware)
    measured = found.measurement.model_copy(update={"step_time_s": best.step_time_s, "trials": (best.number,)})
    return found.model_copy(
        update={"evidence": tuple(trials), "baseline": trials[0], "measurement": measured, "alternatives": ()}
    ).sealed()


def cpu_target(ranks: int, cores: int = 4) -> Target:
    cluster = Cluster(nodes=1, gpus_per_node=ranks, chip="Test CPU <3 GHz>")
    return Target(cluster=cluster, here=True, cores=cores, assumed=())


@pytest.mark.parametrize(("seen", "there"), [(ONE, TWO), ([*ONE, *TWO], FOUR)])
def test_what_trials_taught_holds_for_more_ranks_of_the_same_host(
    profiles: dict[str, ModelProfile], seen: list[TrainingConfig], there: list[TrainingConfig]
) -> None:
    profile, hardware = profiles["cpu"], cpu_hardware()
    truth = slow_seconds(measured_on(hardware, "cpu").estimator(profile), there)
    errors, widths = {}, {}
    for name, trials in (("anchored", trials_of(hardware, "cpu", profile, seen)), ("alone", [])):
        learned = Learned.of(measured_on(hardware, "cpu", trials), profile)
        table = carry(learned, cpu_target(there[0].world_size), profile, BATCH).estimator.table(there)
        errors[name] = np.abs(table.step_time_s / truth - 1).mean()
        widths[name] = (table.step_time_high_s / table.step_time_low_s).mean()
        if name == "anchored":
            assert (table.step_time_low_s <= truth).all() and (truth <= table.step_time_high_s).all()
    assert errors["anchored"] < 0.5 * errors["alone"] and errors["alone"] > 0.1
    assert widths["anchored"] < widths["alone"]


def test_another_chip_takes_ratios_of_datasheets_and_a_wider_interval(profiles: dict[str, ModelProfile]) -> None:
    profile, host = profiles["cuda"], make_hardware().host
    hardware = {
        name: cluster_hardware(Cluster(nodes=1, gpus_per_node=1, chip=name), host)
        for name in ("A100 SXM 80GB", "H100 SXM 80GB")
    }
    trials = trials_of(hardware["A100 SXM 80GB"], "cuda", profile, ONE)
    learned = Learned.of(measured_on(hardware["A100 SXM 80GB"], "cuda", trials), profile)
    there = measured_on(hardware["H100 SXM 80GB"], "cuda").estimator(profile)
    tables = {}
    for chip in hardware:
        target = Target(
            cluster=Cluster(nodes=1, gpus_per_node=1, chip=chip), here=chip.startswith("A100"), cores=0, assumed=()
        )
        tables[chip] = carry(learned, target, profile, BATCH).estimator.table(ONE)
    truth = slow_seconds(there, ONE)
    raw = there.table(ONE).step_time_s
    found = tables["H100 SXM 80GB"]
    assert np.abs(found.step_time_s / truth - 1).mean() < 0.5 * np.abs(raw / truth - 1).mean()
    widths = {chip: (table.step_time_high_s / table.step_time_low_s).mean() for chip, table in tables.items()}
    assert widths["H100 SXM 80GB"] > 1.1 * widths["A100 SXM 80GB"]


def test_more_cores_are_faster_and_share_one_memory() -> None:
    rates = from_device(make_hardware(cores=2).device("cpu"))
    more = with_cores(rates, 8)
    assert more.matmul["float32"].flops_per_s == pytest.approx(4 * rates.matmul["float32"].flops_per_s)
    assert rates.memory_bytes_per_s < more.memory_bytes_per_s < 2 * rates.memory_bytes_per_s
    assert with_cores(more, 2).matmul["float32"].flops_per_s == pytest.approx(rates.matmul["float32"].flops_per_s)


def test_ranks_of_a_cpu_share_its_cores_and_its_memory() -> None:
    rates = from_device(make_hardware(cores=4).device("cpu"))
    zero = np.zeros(4)
    ranks = np.array([1.0, 2.0, 4.0, 8.0])
    assert rates.thread_slowdown(zero, ranks).tolist() == [1.0, 2.0, 4.0, 8.0]
    assert rates.memory_slowdown(zero, ranks).tolist() == [1.0, 2.0, 4.0, 8.0]
    assert rates.thread_slowdown(np.array([1.0]), 1.0).tolist() == [4.0]
    assert rates.memory_slowdown(np.array([1.0]), 1.0).tolist() == [2.0]  # half of the cores use up the bandwidth


def test_an_answer_says_where_each_part_comes_from_and_goes_back_to_a_search(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan.save(tmp_path / "plan.json")
    estimate_command(anchor=path, cluster="2xhere", as_json=True, top=3)
    document = json.loads(capsys.readouterr().out)
    assert document["anchor"]["trials"] == len(ONE) and document["anchor"]["same_kind"]
    sources = document["anchor"]["sources"]
    assert sources["launch"] == "measured here, by 6 trials"
    assert sources["communication"] == "measured here over 2 ranks"
    assert set(sources) >= {"matmul", "launch", "optimizer", "input", "peak_memory"}
    for entry in document["best"]:
        words = entry["search_flags"].split()
        assert words[:2] == ["--nproc", "2"]
        fixed = dict(parse_knob(word) for word in words[3::2])
        config = TrainingConfig.model_validate(fixed)
        assert config.world_size == 2 and config.describe() == TrainingConfig.model_validate(entry["layout"]).describe()
    estimate_command(anchor=path, cluster="2xhere")
    text = capsys.readouterr().out
    assert "anchor: 6 trials on 1 x Test CPU <3 GHz>" in text and "autoplan search --nproc 2 --fix" in text


def with_loading(plan: Plan, waiting_share: float) -> Plan:
    """Two workers delivered ten samples a second, for which the steps waited so long."""
    setting = LoaderSetting(workers=2)
    loading = Loading(
        source="data.py:rows", identity="0", setting=setting, waiting_share=waiting_share, samples_per_s=10.0
    )
    return plan.model_copy(update={"loading": loading}).sealed()


def test_of_a_cpu_only_the_loader_holds_for_a_gpu(plan: Plan) -> None:
    document = autoplan.estimate(anchor=with_loading(plan, 0.3), cluster="1x8xH100")
    sources = document["anchor"]["sources"]
    assert {sources[part] for part in ("matmul", "memory", "communication")} == {"datasheet"}
    assert any("its trials" not in line and "the loader holds" in line for line in document["assumed"])
    best = document["best"][0]
    assert best["bound"] == "input"
    assert best["step_time_s"] == pytest.approx(BATCH / (8 * 10.0), rel=0.01)


def test_a_loader_that_was_never_the_limit_sets_none(plan: Plan) -> None:
    cluster, said = with_loader(with_loading(plan, 0.0), Cluster(nodes=1, gpus_per_node=8, chip="H100"), 64)
    assert cluster.input_tokens_per_s is None and "never the limit" in said[0]


def test_bad_anchors_are_refused_with_what_to_do(plan: Plan, tmp_path: Path) -> None:
    no_trials = plan.model_copy(update={"evidence": ()}).sealed()
    unverified = plan.model_copy(update={"unverified": "the budget ended"}).sealed()
    path = tmp_path / "edited.json"
    document = json.loads(plan.file_text())
    document["measurement"]["step_time_s"]["median"] *= 1.001
    path.write_text(json.dumps(document))
    other = tmp_path / "config.json"
    other.write_text(json.dumps(MODEL | {"n_layer": 5}))
    for anchor, given, error, words in (
        (no_trials, {}, PlanError, "no trial with a step time"),
        (unverified, {}, PlanError, "unverified"),
        (path, {}, PlanError, "edited"),
        (tmp_path / "none.json", {}, PlanError, "none.json"),
        (plan, {"model": "gpt2"}, UsageError, "another workload"),
        (plan, {"model": str(other)}, UsageError, "another workload"),
        (plan, {"sequence_length": 32}, UsageError, "samples of 64 tokens"),
        (plan, {"cluster": "0xhere"}, UsageError, "no rank"),
        (plan, {"cluster": "2x2xhere"}, UsageError, "no link between them"),
        (plan, {"cluster": "2x8xX100"}, UsageError, "no chip"),
        (plan, {"cluster": None}, UsageError, "needs a cluster"),
        (plan, {"prices": {"H100": "2 USD/h"}, "tokens": 1e9}, UsageError, "does not go with"),
        (plan, {"calibrate": "rows.csv"}, UsageError, "its own measurements"),
    ):
        with pytest.raises(error, match=words) as caught:
            autoplan.estimate(anchor=anchor, **({"cluster": "2xhere"} | given))
        assert isinstance(caught.value, AutoplanError) and caught.value.hint


def test_an_anchor_whose_model_changed_since_is_refused(tmp_path: Path) -> None:
    """Its own digests were compared with themselves."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    plan = make_plan(ONE[0], workload=make_spec(model=str(path), sequence_length=64, global_batch=BATCH))
    assert anchored_spec(plan, None, code=None, global_batch=None) == plan.workload
    path.write_text(json.dumps(MODEL | {"n_layer": 8}))
    with pytest.raises(PlanError, match="the model of .* changed since") as caught:
        anchored_spec(plan, None, code=None, global_batch=None)
    assert "changed_ok" not in str(caught.value), "an estimate has no such option"


def test_an_anchor_says_how_long_it_takes_and_refuses_the_page_of_what_to_rent_at_once(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = plan.save(tmp_path / "plan.json"), tmp_path / "rent.html"
    estimate_command(anchor=path, cluster="2xhere", tokens="2e9")
    assert "2B tokens: 1,953,125 steps" in capsys.readouterr().out
    with pytest.raises(UsageError, match="an anchor does not go with out"):
        estimate_command(anchor=path, cluster="2xhere", tokens="2e9", out=page)
    assert not capsys.readouterr().out and not page.exists()


def test_cores_are_of_cpus_alone_and_files_may_say_here(plan: Plan, tmp_path: Path) -> None:
    links: dict[str, float | None] = {}
    assert read_target(plan, "4xhere:16", links).cores == 16
    target = read_target(plan, "2x2xhere", {"inter_gbits_per_s_per_gpu": 10.0})
    assert target.cluster.num_gpus == 4 and target.here and target.cores == 4
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"nodes": 1, "gpus_per_node": 4, "chip": "here"}))
    assert read_target(plan, str(path), links).cluster.gpus_per_node == 4
    card = plan.model_copy(update={"device": "cuda", "hardware": make_hardware(gpu=True)})
    with pytest.raises(UsageError, match="gives cores"):
        read_target(card, "4xhere:16", links)


def test_flags_name_what_a_layout_is_and_leave_out_what_is_plain() -> None:
    layout = {"micro_batch": 2, "dp_replicate": 1, "dp_shard": 8, "tp": 1, "pp": 1, "checkpointing": "none"}
    text = search_flags(layout | {"precision": "bf16", "gradient_sync": "last"}, 8, "cuda")
    assert text.startswith("--nproc 8 --fix micro_batch=2") and "--fix precision=bf16" in text
    assert "gradient_sync" not in text
