"""The host's limits, read from trees of files that stand for `/`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from autoplan.probes import host as host_module
from autoplan.probes.cgroup import CgroupLimits, read_cgroup_limits
from autoplan.probes.host import (
    count_usable_cores,
    parse_id_list,
    read_cpu_device,
    read_cpu_model,
    read_host,
    read_last_level_cache_bytes,
)

GIB = 1 << 30
V1_UNLIMITED = "9223372036854771712\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1_mounts(inside: str = "/") -> str:
    return (
        f"32 31 0:29 {inside} /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
        f"35 31 0:32 {inside} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    )


def test_v1_the_tightest_level_wins(tmp_path: Path) -> None:
    memory, cpu = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu,cpuacct"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job/step\n1:cpu,cpuacct:/job/step\n",
            "proc/self/mountinfo": v1_mounts(),
            f"{memory}/memory.limit_in_bytes": V1_UNLIMITED,
            f"{memory}/job/memory.limit_in_bytes": f"{8 * GIB}\n",
            f"{memory}/job/memory.usage_in_bytes": f"{6 * GIB}\n",
            f"{memory}/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {1 * GIB}\n",
            f"{memory}/job/step/memory.limit_in_bytes": f"{16 * GIB}\n",
            f"{memory}/job/step/memory.usage_in_bytes": f"{2 * GIB}\n",
            f"{cpu}/cpu.cfs_quota_us": "-1\n",
            f"{cpu}/cpu.cfs_period_us": "100000\n",
            f"{cpu}/job/cpu.cfs_quota_us": "250000\n",
            f"{cpu}/job/cpu.cfs_period_us": "100000\n",
        },
    )
    limits = read_cgroup_limits(root)
    assert limits.version == 1
    assert limits.memory_limit_bytes == 8 * GIB
    assert limits.memory_free_bytes == 3 * GIB, "the page cache can be reclaimed"
    assert limits.memory_source == "/sys/fs/cgroup/memory/job/memory.limit_in_bytes"
    assert limits.cpu_limit == 2.5


def test_v1_in_a_container_the_mount_shows_only_its_part(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc/inner\n1:cpu,cpuacct:/docker/abc\n",
            "proc/self/mountinfo": v1_mounts("/docker/abc"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/inner/memory.limit_in_bytes": V1_UNLIMITED,
        },
    )
    limits = read_cgroup_limits(root)
    assert (limits.memory_limit_bytes, limits.memory_free_bytes) == (4 * GIB, 3 * GIB)
    assert limits.cpu_limit is None


def test_v1_a_path_outside_the_mount_means_the_mount(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/kubepods/pod1\n",
            "proc/self/mountinfo": v1_mounts("/docker/abc"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        },
    )
    assert read_cgroup_limits(root).memory_limit_bytes == GIB


def test_v2_max_high_and_cpu(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
            f"{top}/user.slice/memory.max": f"{12 * GIB}\n",
            f"{top}/user.slice/memory.high": "max\n",
            f"{top}/user.slice/memory.current": f"{9 * GIB}\n",
            f"{top}/user.slice/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            f"{top}/user.slice/cpu.max": "max 100000\n",
            f"{top}/user.slice/job.scope/memory.max": "max\n",
            f"{top}/user.slice/job.scope/memory.high": f"{10 * GIB}\n",
            f"{top}/user.slice/job.scope/memory.current": f"{1 * GIB}\n",
            f"{top}/user.slice/job.scope/cpu.max": "150000 100000\n",
        },
    )
    limits = read_cgroup_limits(root)
    assert limits.version == 2
    assert limits.memory_limit_bytes == 10 * GIB
    assert limits.memory_source.endswith("job.scope/memory.high")
    assert limits.memory_free_bytes == 5 * GIB, "the slice above has less left than the scope"
    assert limits.cpu_limit == 1.5


def test_hybrid_memory_is_where_its_controller_is(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n0::/job\n",
            "proc/self/mountinfo": v1_mounts() + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "0\n",
            "sys/fs/cgroup/unified/job/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/unified/job/cpu.max": "300000 100000\n",
        },
    )
    limits = read_cgroup_limits(root)
    assert (limits.version, limits.memory_limit_bytes, limits.cpu_limit) == (1, 2 * GIB, 3.0)


def test_mount_points_with_escaped_characters(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 23 0:26 / /my\\040cgroups rw - cgroup2 cgroup2 rw\n",
            "my cgroups/memory.max": f"{GIB}\n",
        },
    )
    assert read_cgroup_limits(root).memory_limit_bytes == GIB


def test_nothing_mounted_and_nonsense_limit_nothing(tmp_path: Path) -> None:
    assert read_cgroup_limits(tmp_path).version is None
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/memory.max": "what\n",
            "sys/fs/cgroup/cpu.max": "0 100000\n",
        },
    )
    limits = read_cgroup_limits(root)
    assert (limits.memory_limit_bytes, limits.memory_free_bytes, limits.cpu_limit) == (None, None, None)


def test_the_host_takes_the_tighter_of_cgroup_and_machine(tmp_path: Path) -> None:
    limit = 64 << 20
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/memory.max": f"{limit}\n",
            "sys/fs/cgroup/memory.current": f"{limit // 4}\n",
            "sys/fs/cgroup/cpu.max": "100000 100000\n",
        },
    )
    host = read_host(root)
    assert host.memory_available_bytes.value == limit * 3 // 4
    assert host.memory_total_bytes.value == psutil.virtual_memory().total
    assert read_cpu_device(host).memory_total_bytes.value == limit
    assert host.cores_usable == 1


@pytest.mark.parametrize("quota, cores", [(0.4, 1), (1.9, 1), (None, None), (10_000.0, None)])
def test_cores_follow_the_quota_down_to_whole_cores(quota: float | None, cores: int | None) -> None:
    limits = CgroupLimits(
        version=2,
        memory_limit_bytes=None,
        memory_free_bytes=None,
        memory_source="",
        cpu_limit=quota,
        cpu_source="",
    )
    assert count_usable_cores(limits) == (cores if cores is not None else count_usable_cores())


def test_cpu_model_flags_numa_and_caches(tmp_path: Path) -> None:
    cache = "sys/devices/system/cpu/cpu0/cache"
    root = write(
        tmp_path,
        {
            "proc/cpuinfo": "model name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx2 amx_bf16 fma\n\nmodel name\t: Other\n",
            "sys/devices/system/node/online": "0-1,3\n",
            f"{cache}/index0/size": "48K\n",
            f"{cache}/index3/size": "32M\n",
        },
    )
    assert read_cpu_model(root) == ("Some CPU @ 2 GHz", ("avx2", "fma", "amx_bf16"))
    assert read_host(root).numa_nodes == 3 and parse_id_list("0-1,3\n") == (0, 1, 3)
    assert read_last_level_cache_bytes(root) == 32 << 20
    assert read_last_level_cache_bytes(tmp_path / "nowhere") is None
    assert parse_id_list("") == ()


def test_arm_features(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/cpuinfo": "processor : 0\nFeatures : fp asimd sve bf16 i8mm\n"})
    name, flags = read_cpu_model(root)
    assert name and flags == ("asimd", "sve", "bf16", "i8mm")


def test_torch_build_is_read_without_importing_it() -> None:
    code = (
        "import json, sys; from autoplan.probes.run import read_host_profile; host = read_host_profile().host;"
        "print(json.dumps(['torch' in sys.modules, host.torch, host.cuda]))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True, timeout=120
    )
    loaded, version, cuda = json.loads(done.stdout)
    assert not loaded and version == torch.__version__ and cuda == torch.version.cuda


def test_missing_shared_memory_has_a_reason(tmp_path: Path) -> None:
    reading = host_module.read_shared_memory(tmp_path / "nowhere")
    assert reading.value is None and reading.reason
