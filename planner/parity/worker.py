"""The parity check as its ranks run it: the reference in one process, or the candidate as `prepare` builds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoplan.planner.parity.candidate import run_candidate
from autoplan.planner.parity.recorder import Recorder
from autoplan.planner.parity.records import ParityMeasurement, ParityRequest
from autoplan.planner.parity.reference import Check, TimeLimit, run_reference
from autoplan.planner.trials.ranks import RENDEZVOUS_TIMEOUT_S, pick_device
from autoplan.strategies.techniques.mesh import build_mesh
from autoplan.strategies.workloads.optimizers import with_lasting_schedule
from autoplan.strategies.workloads.randomness import with_seeded_batches
from autoplan.strategies.workloads.sources import load_workload

if TYPE_CHECKING:
    from autoplan.processes import RankContext


def run_parity_rank(context: RankContext, request: ParityRequest) -> ParityMeasurement:
    """One run of the check in a rank; the sampled elements go to a file in the task's folder."""
    context.phase("build")
    device = pick_device(context, request.device)
    mesh = None
    if context.world_size > 1:
        context.init_process_group("cpu:gloo,cuda:nccl" if request.device == "cuda" else "gloo", RENDEZVOUS_TIMEOUT_S)
        mesh = build_mesh(request.config, request.device)
    recorder = Recorder(mesh)
    check = Check(
        workload=with_seeded_batches(with_lasting_schedule(load_workload(request.spec))),
        config=request.config,
        device=device,
        recorder=recorder,
        phase=context.phase,
        limit=TimeLimit(request.time_s, mesh),
        own_shapes=request.own_shapes,
        rung=request.rung,
        sample_s=request.sample_s,
    )
    measurement = run_reference(check) if request.reference is None else run_candidate(check, request.reference)
    recorder.save_samples(context.directory / f"elements.{context.rank}.npz")
    return measurement
