"""Where a search runs: how many ranks, the limit of a trial on several GPUs, and mappings of CUDA's driver."""

from types import SimpleNamespace
from typing import Any

import pytest

from autoplan.errors import ConfigError, UsageError
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.setup import CUDA_MEMORY_SHARE, Target, degree_combinations, find_target, limits
from autoplan.probes.gpu import read_gpus
from autoplan.probes.profile import HardwareProfile
from autoplan.probes.run import read_host_profile
from autoplan.processes import supervisor
from autoplan.strategies.analysis.facts import ParallelFacts
from tests.probes.fake_nvml import FakeGpu, FakeNvml
from tests.recorded import make_plan


def machine(*gpus: FakeGpu) -> HardwareProfile:
    host = read_host_profile()
    devices = read_gpus(FakeNvml(list(gpus)), environ={}).devices
    return host.model_copy(update={"devices": (*devices, host.device("cpu"))})


def test_the_gpu_with_the_least_memory_sets_the_limit():
    free = [80e9, 79e9, 40e9]
    gpus = [FakeGpu(uuid=f"GPU-{at}", free=int(left)) for at, left in enumerate(free)]
    profile = machine(*gpus)
    per_rank = {ranks: limits(profile, "cuda", None, ranks=ranks)[0] for ranks in (1, 2, 3)}
    assert per_rank[1] - per_rank[2] == pytest.approx(CUDA_MEMORY_SHARE * 1e9, abs=2)
    assert per_rank[2] - per_rank[3] == pytest.approx(CUDA_MEMORY_SHARE * 39e9, abs=2)
    assert limits(profile, "cuda", 5 << 30, ranks=3)[0] == 5 << 30
    target = find_target(SearchOptions(spec=make_plan().workload, device="cuda", memory_limit="50%"), profile)
    assert target.nproc == 3 and target.given_limit_bytes == gpus[0].total // 2


def test_each_rank_on_this_machine_has_a_gpu_of_its_own():
    profile = machine(FakeGpu(uuid="GPU-0"), FakeGpu(uuid="GPU-1"))
    given: dict[str, Any] = {"spec": make_plan().workload, "nproc": 3}
    with pytest.raises(UsageError, match=r"nproc is 3, and 2 GPU\(s\) can be used") as caught:
        find_target(SearchOptions(**given), profile)
    assert "give as many ranks as GPUs" in (caught.value.hint or "")
    assert find_target(SearchOptions(**given | {"nproc": 2}), profile).nproc == 2
    for elsewhere in ({"device": "cpu"}, {"launcher": "slurm", "nodes": "2x2"}):
        assert find_target(SearchOptions(**given | elsewhere), profile).nproc == 3


def test_tensor_parallelism_stays_within_a_node():
    parallel = ParallelFacts(num_blocks=1, tp_unit=16)
    facts: Any = SimpleNamespace(spec=SimpleNamespace(global_batch=16, sequence_length=None), parallel=parallel)

    def target(nodes: str) -> Target:
        given: dict[str, Any] = {"device": "cpu", "launcher": "slurm", "nodes": nodes}
        return find_target(SearchOptions(spec=make_plan().workload, **given), read_host_profile())

    for nodes, most in (("2x8", 8), ("1x16", 16)):
        degrees, _ = degree_combinations({}, facts, target(nodes))
        assert max(found.get("tp", 1) for found in degrees) == most
    with pytest.raises(ConfigError, match=r"tp=16: tp stays within a node \(16 ranks, 8 per node\)"):
        degree_combinations({"tp": 16}, facts, target("2x8"))


@pytest.mark.parametrize(("file", "limited"), [("/dev/nvidiactl", False), ("/dev/dxg", False), ("/dev/null", True)])
def test_mappings_are_not_limited_where_there_is_a_gpu(file: str, limited: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor.os.path, "exists", lambda path: path == file)
    assert (supervisor.data_limit_bytes(1 << 30, {}) is not None) is limited
    assert supervisor.data_limit_bytes(1 << 30, {"CUDA_VISIBLE_DEVICES": ""}) is not None
