"""What the machine can do: readings with units and provenance. Knows nothing of models or plans.

run.py          all probes in order, within a budget, with a cache: `run_probes`, `read_host_profile`, `probe_shapes`
profile.py      the records: HardwareProfile, Device, Host, Link, OperationReading, CollectiveReading
host.py         CPU, memory, versions: read, not measured
cgroup.py       the limits of a container or a batch system
gpu.py          the GPUs that are visible, through the driver
nvml.py         the one place that calls the driver (NVML)
topology.py     links between GPUs and to the host
worker.py       what runs in the rank that measures
timing.py       how one operation is timed
matmul.py       matrix products: the operations to time
attention.py    attention
memory.py       memory bandwidth, copies between host and GPU
launch.py       the host time of starting one operation
collectives.py  collectives over ranks, timed and fitted
merge.py        measured figures into the profile, notes on what disturbed them
cache.py        profiles kept per machine
catalog/        datasheets of chips and links
"""

if __name__ != "autoplan.probes":
    raise ImportError(
        "this folder is part of autoplan and is imported as 'autoplan.probes', not as '"
        + __name__
        + "'. Write 'import autoplan.probes', and start Python outside the repository or install autoplan."
    )
