"""Makes the Plan of a finished search.

In: a `Session` and its verified winner. Out: a `Plan` with the measurement, the speed-up, the reason for each knob's
value, and the alternatives.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata

from autoplan.planner.plan import Alternative, Environment, HandSetting, Measurement, Plan
from autoplan.planner.records import Parity, Trial
from autoplan.planner.search.claim import Comparison, compare
from autoplan.planner.search.reasons import explain_choices, tie_reason
from autoplan.planner.search.selection import (
    CandidateRuns,
    collect_runs,
    match_rounds,
    measured_spread,
    rank,
    speed_ratio,
)
from autoplan.planner.search.session import Session
from autoplan.planner.trace.input_benchmark import describe_input
from autoplan.planner.trials.measure import Spread, invert
from autoplan.probes.profile import Device
from autoplan.strategies.analysis.training_facts import own_checkpointing_text

PEAK_DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}

# The environment variables that a plan keeps: those that change how training runs. By name, since others with the same
# beginning may be secrets (TORCH_TOKEN).
SHOWN_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_SCHEDULE", "OMP_DYNAMIC", "OMP_WAIT_POLICY"),
    *("MKL_NUM_THREADS", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_SERVICE_FORCE_INTEL"),
    *("KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_HW_SUBSET", "KMP_SETTINGS", "KMP_TPAUSE"),
    *("OPENBLAS_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("MALLOC_ARENA_MAX", "MALLOC_CONF", "LD_PRELOAD"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CUDNN_V8_API_DISABLED"),
    *("TORCH_COMPILE_DISABLE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_HIGH_PRIORITY"),
    *("TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_FREEZING", "TORCHINDUCTOR_CPP_WRAPPER"),
    *("TORCHINDUCTOR_COORDINATE_DESCENT_TUNING", "TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_COMPILE_THREADS"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"),
    *("CUDA_MODULE_LOADING", "CUDA_FORCE_PTX_JIT", "CUDA_CACHE_DISABLE", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE", "NCCL_NTHREADS"),
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_IB_DISABLE", "NCCL_IB_HCA"),
    *("NCCL_NET_GDR_LEVEL", "NCCL_CROSS_NIC", "NCCL_TOPO_FILE", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"),
    *("NCCL_DEBUG", "NCCL_LAUNCH_MODE", "NCCL_CUMEM_ENABLE", "GLOO_DEVICE_TRANSPORT"),
)
MAX_ALTERNATIVES = 5


def make_plan(session: Session, winner: CandidateRuns, parity: Parity, baseline: Trial) -> Plan:
    """The plan for a verified winner."""
    context = session.context
    candidates = collect_runs(session.store.trials)
    winner = _runs_of(winner.first, candidates)  # with the runs of the claim
    spread = measured_spread(session.store.trials)
    chosen_from = len(candidates)
    against = compare(winner, _runs_of(baseline, candidates), spread, chosen_from=chosen_from)
    hand = None if session.hand is None else _runs_of(session.hand, candidates)
    return Plan(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        study=session.store.identity,
        workload=context.spec,
        config=winner.config,
        accumulation=winner.config.accumulation(context.spec.global_batch),
        device=context.device,
        hardware=context.hardware,
        prediction=session.predict(winner.config),
        measurement=measurement_of(session, against.candidate),
        baseline=with_all_runs(session, against.reference),
        speedup=against.speedup,
        claim=against.claim,
        hand=None if hand is None else _against_hand(session, compare(winner, hand, spread, chosen_from=chosen_from)),
        alternatives=tuple(_alternatives(session, winner, candidates, spread)),
        parity=parity,
        choices=tuple(explain_choices(session, winner, candidates)),
        left_out=context.left_out,
        evidence=session.store.trials,
        attempts=session.store.attempts,
        notes=(
            *session.notes,
            *_attempt_notes(session),
            *_input_notes(session, winner),
            *_model_notes(session, winner),
        ),
        environment=read_environment(),
        training=context.facts.training,
    ).sealed()


def _runs_of(first: Trial, candidates: Sequence[CandidateRuns]) -> CandidateRuns:
    """A configuration with all its runs; with its first alone if one of its repeats failed."""
    found = next((candidate for candidate in candidates if candidate.config == first.config), None)
    return found or CandidateRuns(config=first.config, first=first)


def _against_hand(session: Session, against: Comparison) -> HandSetting:
    return HandSetting(
        config=against.reference.config,
        measurement=measurement_of(session, against.reference),
        speedup=against.speedup,
        claim=against.claim,
    )


def measurement_of(session: Session, candidate: CandidateRuns) -> Measurement:
    """The measurement of a configuration, over all runs that count."""
    items = _items_per_step(session, candidate)
    flops = session.predict(candidate.config).model_flops
    peak, source = peak_rate(session.context.hardware.device(session.context.device), candidate.config.precision)
    step = candidate.step_time
    mfu = None
    if flops and peak:
        mfu = flops / step.median / (peak * candidate.config.world_size if session.context.device == "cuda" else peak)
    runs = candidate.runs
    return Measurement(
        step_time_s=step,
        tokens_per_s=invert(step, items),
        peak_memory_bytes=candidate.peak_memory_bytes or None,
        mfu=mfu,
        mfu_peak_source=source if mfu is not None else None,
        method=candidate.first.method or "whole_steps",
        trials=tuple(run.number for run in runs),
    )


def _items_per_step(session: Session, candidate: CandidateRuns) -> float:
    """Tokens, or samples, of a step: the mean over the runs; records of earlier versions do not have it."""
    spec = session.context.spec
    counted = [run.items_per_step for run in candidate.runs if run.items_per_step]
    return sum(counted) / len(counted) if counted else spec.global_batch * (spec.sequence_length or 1)


def _attempt_notes(session: Session) -> list[str]:
    """The runs that something outside ended, of this and earlier calls of the search."""
    return [f"something outside ended {one.describe()}; it does not count" for one in session.store.attempts]


def _model_notes(session: Session, winner: CandidateRuns) -> list[str]:
    """What the plan does otherwise than the model was set to."""
    training = session.context.facts.training
    own = training is not None and training.own_checkpointing
    return [own_checkpointing_text(winner.config.checkpointing)] if own else []


def _input_notes(session: Session, winner: CandidateRuns) -> list[str]:
    """What the time of making batches means for the step, if it is long enough to matter; trials do not time it."""
    load_s = session.predict(winner.config).time_parts_s.get("input", 0.0)
    ranks = winner.config.dp
    sentence = describe_input(load_s, winner.step_time.median, session.context.spec.global_batch // ranks, ranks)
    return [] if sentence is None else [sentence]


def peak_rate(device: Device, precision: str) -> tuple[float | None, str | None]:
    """The dense peak in FLOP/s that MFU is a share of, and its source: the datasheet, else measured here."""
    dtype = PEAK_DTYPES[precision]
    sheet = device.datasheet_peak_flops_per_s.get(dtype)
    if sheet is not None and sheet.value:
        return sheet.value, f"datasheet of {device.datasheet_name}, {dtype}, dense"
    measured = device.peak_flops_per_s.get(dtype)
    if measured is not None and measured.value:
        return measured.value, f"best {dtype} matmul measured on this machine"
    return None, None


def with_all_runs(session: Session, candidate: CandidateRuns) -> Trial:
    """A candidate's first trial with the figures of all its runs that count, which the speed-up is calculated from."""
    measured = measurement_of(session, candidate)
    return candidate.first.model_copy(
        update={"step_time_s": measured.step_time_s, "tokens_per_s": measured.tokens_per_s}
    )


def _alternatives(
    session: Session, winner: CandidateRuns, candidates: Sequence[CandidateRuns], spread: Spread
) -> list[Alternative]:
    """The next best configurations, how they compare with the plan, and why they are not the plan."""
    found = []
    for candidate in rank(candidates, spread):
        if candidate.config == winner.config:
            continue
        ratio = speed_ratio(candidate, winner, spread)
        candidate, _ = match_rounds(candidate, winner)
        parity = session.store.parity_of(candidate.config)
        if parity is not None and not parity.passed:
            why = "it fails parity: it would not train the same thing"
            if not parity.finished:
                why = f"its parity check did not come to its end: {parity.note}"
        elif not session.options.allows(candidate.config):
            why = "the plain baseline; it does not keep what was fixed or bounded"
        elif ratio.low > 1.0:
            why = "measured faster in a single run, but not among the finalists"
        elif ratio.high >= 1.0:
            why = tie_reason(winner, candidate)
        else:
            why = f"{_percent_slower(ratio.median)} slower"
        measurement = measurement_of(session, candidate)
        found.append(Alternative(config=candidate.config, measurement=measurement, speed_ratio=ratio, why=why))
    return found[:MAX_ALTERNATIVES]


def _percent_slower(ratio: float) -> str:
    return f"{(1 - ratio) * 100:.0f} %" if ratio > 0.5 else f"{1 / ratio:.1f} times"


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """The installed versions and the environment variables that change how training runs."""
    source = os.environ if variables is None else variables
    return Environment(
        autoplan=_version("autoplan") or "source",
        torch=_version("torch") or "not installed",
        python=platform.python_version(),
        transformers=_version("transformers"),
        platform=platform.platform(),
        variables={name: source[name] for name in sorted(SHOWN_VARIABLES) if name in source},
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
