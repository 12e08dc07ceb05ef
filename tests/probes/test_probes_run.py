"""run_probes from the start of the rank to the cache, and the command on top of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from autoplan.cli.probe import format_share, peak_rows, probe_command
from autoplan.errors import DeviceError, UsageError
from autoplan.probes import run as run_module
from autoplan.probes.gpu import read_gpus
from autoplan.probes.host import read_torch_build
from autoplan.probes.merge import cache_path, load_cached, save_cached
from autoplan.probes.profile import HardwareProfile
from autoplan.probes.run import (
    choose_threads,
    for_all_alike,
    one_of_each_model,
    pick_device,
    read_host_profile,
    run_probes,
)
from autoplan.probes.worker import Measured
from autoplan.processes import Zygote
from autoplan.record import Reading
from tests.probes.fake_nvml import FakeGpu, FakeNvml

BUDGET_S = 1.5
LOAD_SENTENCE = run_module.load_sentence
Moment = tuple[list[Measured], list[str]]


class NoZygote:
    """A zygote for calls that must not start anything."""

    layout = ""

    def start(self) -> None:
        raise AssertionError("something was measured")

    run = start


@pytest.fixture(scope="module", autouse=True)
def _idle_machine() -> Iterator[None]:
    """Profiles are kept, though other tests may run on this machine meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "load_sentence", lambda *facts: None)
        yield


@pytest.fixture(scope="module")
def zygote(training_zygote: Zygote) -> Zygote:
    return training_zygote


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def told() -> list[str]:
    """What `measured` says of its progress."""
    return []


@pytest.fixture(scope="module")
def measured(zygote: Zygote, cache_dir: Path, told: list[str]) -> HardwareProfile:
    return run_probes(zygote, device="cpu", budget_s=BUDGET_S, cache_dir=cache_dir, on_progress=told.append)


@pytest.fixture(scope="module")
def moment(zygote: Zygote) -> Moment:
    """What a rank measures in a moment, for the tests that change what is said of it."""
    return run_module._measure(zygote, read_host_profile(), "cpu", 0.3, None)


def test_the_cpu_is_measured_in_a_rank(measured: HardwareProfile) -> None:
    cpu = measured.device("cpu")
    peak = cpu.peak_flops_per_s["float32"]
    assert peak.value is not None and peak.value > 1e8 and peak.provenance == "measured"
    assert peak.value == cpu.best_rate("matmul", "float32")
    assert "matmul" in peak.source
    assert cpu.kernel_launch_s is not None and cpu.kernel_launch_s.value is not None
    assert cpu.host_to_device_bytes_per_s == {}
    assert HardwareProfile.model_validate_json(measured.model_dump_json()) == measured


def test_gpus_of_one_model_are_measured_once() -> None:
    models = ["H100", "H100", "L4", "H100"]
    given = read_gpus(FakeNvml([FakeGpu(name=name, uuid=f"GPU-{at}") for at, name in enumerate(models)]), environ={})
    first = one_of_each_model(given.devices)
    assert [(device.index, device.name) for device in first] == [(0, "H100"), (2, "L4")]
    notes = [Measured(type="cuda", index=device.index, notes=(device.name,)) for device in first]
    found = for_all_alike(notes, given.devices)
    assert [(one.index, one.notes) for one in found] == [(at, (name,)) for at, name in enumerate(models)]
    assert [one.index for one in for_all_alike(notes[1:], given.devices)] == [2], "what was not measured stays so"


def test_the_second_time_nothing_is_measured(measured: HardwareProfile, cache_dir: Path) -> None:
    again = run_probes(NoZygote(), device="cpu", budget_s=BUDGET_S, cache_dir=cache_dir)  # type: ignore[arg-type]
    assert again.device("cpu").operations == measured.device("cpu").operations
    assert again.device("cpu").peak_flops_per_s == measured.device("cpu").peak_flops_per_s
    assert any(measured.created in note for note in again.notes)
    assert again.fingerprint == measured.fingerprint


@pytest.mark.parametrize("fresh, budget_s", [(True, BUDGET_S), (False, 2 * BUDGET_S)])
def test_fresh_or_a_larger_budget_measures_again(
    measured: HardwareProfile, cache_dir: Path, fresh: bool, budget_s: float
) -> None:
    with pytest.raises(AssertionError, match="something was measured"):
        run_probes(NoZygote(), device="cpu", budget_s=budget_s, fresh=fresh, cache_dir=cache_dir)  # type: ignore[arg-type]


DAMAGED = '{"budget_s": 99, "profile": {}}'


@pytest.mark.parametrize("text", ["", "{", DAMAGED, "\x00\xff"])
def test_a_damaged_cache_is_no_profile(tmp_path: Path, text: str) -> None:
    path = cache_path(read_host_profile().fingerprint, "cpu", tmp_path)
    path.write_text(text)
    cached, problem = load_cached(path)
    assert cached is None and "measured again" in str(problem)


def test_a_damaged_cache_is_measured_again_with_a_note(zygote: Zygote, tmp_path: Path) -> None:
    profile = read_host_profile()
    path = cache_path(profile.fingerprint, "cpu", tmp_path)
    path.write_text(DAMAGED)
    again = run_probes(zygote, device="cpu", budget_s=0.3, cache_dir=tmp_path, collective_ranks=1)
    assert any("measured again" in note for note in again.notes)
    assert again.device("cpu").operations
    cached, problem = load_cached(path)
    assert problem is None and cached is not None and cached.fingerprint == again.fingerprint
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_a_folder_that_cannot_be_written_is_a_note(measured: HardwareProfile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problem = save_cached(tmp_path / "file" / "x.json", measured)
    assert problem is not None and "measures again" in problem


def test_the_cache_has_a_place_of_its_own_per_device_kind(tmp_path: Path) -> None:
    assert cache_path("abc", "cpu", tmp_path) != cache_path("abc", "cuda", tmp_path)


def test_progress_is_told(measured: HardwareProfile, told: list[str]) -> None:
    assert any("matmul" in text for text in told)
    assert len(told) == len(set(told))


def test_a_device_that_does_not_work_is_an_error_with_the_reason(zygote: Zygote) -> None:
    if read_torch_build()[1] is not None:
        pytest.skip("this torch has CUDA")
    gpus = read_gpus(FakeNvml([FakeGpu()]), environ={})
    profile = read_host_profile().model_copy(update={"devices": gpus.devices})
    with pytest.raises(DeviceError, match="CUDA") as caught:
        run_module._measure(zygote, profile, "cuda", 1.0, None)
    assert caught.value.exit_code == 4 and caught.value.hint


def test_a_gpu_that_torch_cannot_use_is_a_note() -> None:
    if read_torch_build()[1] is not None:
        pytest.skip("this torch has CUDA")
    profile = read_host_profile(api=FakeNvml([FakeGpu()]))
    assert [d.type for d in profile.devices] == ["cpu"]
    assert any("built without CUDA" in note for note in profile.notes)
    with pytest.raises(DeviceError, match="built without CUDA"):
        pick_device(profile, "cuda")


def test_an_unknown_device_and_a_missing_one() -> None:
    profile = read_host_profile(api=FakeNvml([], init_error=12))
    assert pick_device(profile, None) == "cpu"
    with pytest.raises(UsageError, match="'tpu'"):
        pick_device(profile, "tpu")
    with pytest.raises(DeviceError, match="not installed"):
        pick_device(profile, "cuda")


def test_threads_follow_the_physical_cores() -> None:
    host = read_host_profile().host
    assert choose_threads(host.model_copy(update={"cores_usable": 16, "cores_physical": 8})) == 8
    assert choose_threads(host.model_copy(update={"cores_usable": 2, "cores_physical": 8})) == 2
    assert choose_threads(host.model_copy(update={"cores_usable": 3, "cores_physical": None})) == 3


@pytest.fixture
def command(measured: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """`autoplan probe` on a machine that was measured before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path(measured.fingerprint, "cpu")
    assert tmp_path in path.parents
    save_cached(path, measured.model_copy(update={"probed_s": run_module.DEFAULT_BUDGET_S}))
    app = typer.Typer()
    app.command()(probe_command)
    return app


def test_the_command_prints_the_profile_as_json(command: typer.Typer, measured: HardwareProfile) -> None:
    result = CliRunner().invoke(command, ["--json", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["schema_version"] == 1
    profile = HardwareProfile.model_validate_json(result.stdout)
    assert profile.device("cpu").operations == measured.device("cpu").operations


def test_the_command_prints_plain_lines_without_a_terminal(command: typer.Typer, measured: HardwareProfile) -> None:
    result = CliRunner().invoke(command, ["--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout and "━" not in result.stdout
    assert "matrix products" in result.stdout and "FLOP/s" in result.stdout
    assert measured.host.cpu_model in result.stdout and measured.fingerprint in result.stdout
    header = next(line for line in result.stdout.splitlines() if "in training" in line)
    row = next(line for line in result.stdout.splitlines() if line.startswith("  float32 "))
    at = header.index("in training")
    assert row[at - 1] == " " and row[at:].strip(), "an empty cell keeps its column"


def test_the_command_refuses_an_unknown_device(command: typer.Typer) -> None:
    result = CliRunner().invoke(command, ["--device", "tpu"])
    assert isinstance(result.exception, UsageError)


def test_the_share_of_the_datasheet_is_shown() -> None:
    (gpu,) = read_gpus(FakeNvml([FakeGpu()]), environ={}).devices
    half = Reading(value=494.7e12, unit="flop/s", provenance="measured", spread=0.02)
    gpu = gpu.model_copy(update={"peak_flops_per_s": {"bfloat16": half}})
    rows = {row[0]: row for row in peak_rows(gpu)}
    assert rows["bfloat16"][1:4] == ("495 TFLOP/s ± 1%", "989 TFLOP/s", "50%")
    assert rows["float32"][1] == "not measured" and rows["float32"][3] == ""
    assert format_share(half, None) == ""


@pytest.mark.parametrize(("others", "quota", "loaded"), [(0.4, None, True), (0.02, None, False), (0.4, 1.0, False)])
def test_rates_under_load_are_kept_with_the_width_of_the_load(
    moment: Moment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: float, quota: float | None, loaded: bool
) -> None:
    """The next run uses them, and says so. With a quota of a host's cores, the others' share says nothing."""
    share = others

    def measure(*arguments: Any, **options: Any) -> Any:
        measured, notes = moment
        return [one.model_copy(update={"others_cpu_share": share}) for one in measured], notes

    def host() -> HardwareProfile:
        profile = read_host_profile()
        limit = Reading.unknown("1", "none") if quota is None else Reading.driver(quota, "1", "a test")
        return profile.model_copy(update={"host": profile.host.model_copy(update={"cgroup_cpu_limit": limit})})

    monkeypatch.setattr(run_module, "load_sentence", LOAD_SENTENCE)
    monkeypatch.setattr(run_module, "_measure", measure)
    monkeypatch.setattr(run_module, "read_host_profile", host)

    def probe(fresh: bool = False) -> HardwareProfile:
        given: Any = {"budget_s": 0.3, "cache_dir": tmp_path, "collective_ranks": 1, "fresh": fresh}
        return run_probes(NoZygote(), device="cpu", **given)  # type: ignore[arg-type]

    first = probe()
    assert (first.disturbed is not None) == loaded
    monkeypatch.setattr(run_module, "_measure", lambda *arguments, **options: pytest.fail("measured again"))
    again = probe()
    spreads = [reading.rate.spread or 0.0 for reading in again.device("cpu").operations]
    assert again.disturbed == first.disturbed and again.probed_s == 0.3
    if loaded:
        assert min(spreads) >= 0.4 / 0.6 and "autoplan probe --fresh" in str(again.disturbed)
    monkeypatch.setattr(run_module, "_measure", measure)
    share = 0.9
    worse = probe(fresh=True)
    assert probe().device("cpu").operations != worse.device("cpu").operations or quota is not None


def test_the_first_rates_take_seconds_and_whole_probes_replace_them(zygote: Zygote, tmp_path: Path) -> None:
    brief = run_probes(zygote, device="cpu", cache_dir=tmp_path, brief=True)
    cpu = brief.device("cpu")
    assert {"float32", "bfloat16"} <= {reading.dtype for reading in cpu.readings("matmul")}
    assert {reading.dtype for reading in cpu.readings("linear_train")} == {"float32", "bfloat16", "float16"}
    assert cpu.memory_bandwidth_bytes_per_s is not None and cpu.readings("sdpa_train")
    assert all((reading.rate.spread or 0.0) >= run_module.BRIEF_SPREAD for reading in cpu.operations)
    cached = run_probes(NoZygote(), device="cpu", cache_dir=tmp_path, brief=True)  # type: ignore[arg-type]
    assert cached.device("cpu").operations == cpu.operations
    whole = run_probes(zygote, device="cpu", budget_s=BUDGET_S, cache_dir=tmp_path, collective_ranks=1)
    assert whole.probed_s > brief.probed_s
    again = run_probes(NoZygote(), device="cpu", cache_dir=tmp_path, brief=True)  # type: ignore[arg-type]
    assert again.probed_s == whole.probed_s, "the better ones are what a search begins with"


def test_probes_that_did_not_come_to_their_end_are_not_kept(
    moment: Moment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bandwidth is among the last series: every later search would have had an assumed one."""

    def measure(*arguments: Any, **options: Any) -> Any:
        measured, notes = moment
        return [one.model_copy(update={"complete": False}) for one in measured], notes

    monkeypatch.setattr(run_module, "_measure", measure)
    given: Any = {"budget_s": 0.3, "cache_dir": tmp_path, "collective_ranks": 1}
    profile = run_probes(NoZygote(), device="cpu", **given)  # type: ignore[arg-type]
    assert profile.device("cpu").operations and not cache_path(profile.fingerprint, "cpu", tmp_path).exists()


def test_the_probes_of_the_default_budget_measure_all_that_a_search_needs(probed_machine: None) -> None:
    """It was made for the tests that search."""
    cpu = run_probes(NoZygote(), device="cpu").device("cpu")  # type: ignore[arg-type]
    assert set(cpu.peak_flops_per_s) >= {"float32", "bfloat16"}
    assert cpu.memory_bandwidth_bytes_per_s is not None
    assert cpu.best_rate("linear_train", "bfloat16") and cpu.readings("matmul_threads")
