"""Readings of what the machine can do, with units and provenance. Knows nothing of models or plans.

run.py          all probes in order, within a budget, with a cache: `run_probes`, `read_host_profile`
profile.py      the records: HardwareProfile, Device, Host, Link, OperationReading, CollectiveReading
host.py         CPU, memory, versions: read, not measured
cpu.py          the cores' time, and what others took of it
cgroup.py       the limits of a container or a batch system
gpu.py          the GPUs that are visible, through the driver
nvml.py         the one place that calls the driver (NVML)
topology.py     links between GPUs and to the host
worker.py       what runs in the rank that measures: which operations, in which order
operations.py   the operations to time: matrix products, attention, memory, copies between host and GPU
timing.py       how an operation is timed, the clock of a GPU
collectives.py  collectives over ranks, timed and fitted
merge.py        from what was measured, or the cache has, to the profile; notes on what disturbed it
catalog/        datasheets of chips and links
"""

if __name__ != "autoplan.probes":
    raise ImportError(
        "this folder is part of autoplan and is imported as 'autoplan.probes', not as '"
        + __name__
        + "'. Write 'import autoplan.probes', and start Python outside the repository or install autoplan."
    )
