"""Records a table of a case: candidates of its real space, each run for real in several processes.

    python -m benchmarks.search_tables --case gpt --ranks 1 [--minutes 20]
    python -m benchmarks.search_tables --case gpt --ranks 1 --again      (what was disturbed is measured again)

The cases: gpt, llama_lora, vision, encoder_decoder; on CPU with up to 1 or 2 ranks. The candidates are drawn by a seed
from the space that `autoplan search` makes: each value of each knob that varies occurs, and pairs of values are spread
evenly. A pass runs all of them through the trial runner of a search, in an order of its own; there are PROCESSES of
them, whose difference is what no search can tell apart. Each trial is kept with the time of each of its steps. The
first pass starts with an empty compile cache.

Every finished trial is a line of JSON on disk before the next one starts, so an ended recording goes on where it was:
give the same command again. Record on a quiet machine: each line says whether something disturbed the trial. A table
of 64 candidates and three processes takes some 30 minutes on two quiet cores. `make bench-search` replays the tables.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import shutil
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from autoplan.errors import AutoplanError, UsageError
from autoplan.files import replace_file
from autoplan.planner.records.trials import Trial
from autoplan.planner.search.inspection import Means
from autoplan.planner.search.options import SearchObserver, SearchOptions
from autoplan.planner.search.preload import preload_for
from autoplan.planner.search.setup import prepare_search
from autoplan.planner.space.bounds import parse_bound
from autoplan.planner.store.journal import RecordFile
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.probes.run import read_host_profile, run_probes
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.digests import installed_versions
from autoplan.strategies.workloads.spec import WorkloadSpec
from benchmarks.recorded import (
    LIMIT_BYTES,
    SETUP,
    TRIALS,
    choose,
    hardware_of,
    only_used,
    processes_of,
    read_setup,
)
from benchmarks.search_cases import CASES, case_spec

TABLES = Path(__file__).parent / "results" / "search_tables"
CANDIDATES, COMPILED, PROCESSES = 64, 8, 3
DEADLINE_S = 300.0
"""Of one trial: a whole model that is compiled on one core takes two minutes."""


def begin(
    spec: WorkloadSpec, zygote: Zygote, asked: dict[str, Any], candidates: int, compiled: int, scratch: Path
) -> dict[str, Any]:
    """The document of a new table: the machine, the model's profile, the candidates. `asked` is kept as it is."""
    ranks = asked["ranks"]
    hardware = run_probes(zygote, device="cpu", fresh=True, collective_ranks=ranks)
    if hardware.disturbed is not None:
        print(f"not quiet: {hardware.disturbed}", file=sys.stderr)
    probed = scratch / "hardware.json"
    probed.write_text(hardware.model_dump_json())
    options = SearchOptions(
        spec=spec,
        device="cpu",
        nproc=ranks,
        memory_limit=LIMIT_BYTES,
        bound=dict(parse_bound(text) for text in asked["bounds"]),
    )
    context = prepare_search(Means(options=options, zygote=zygote, observer=SearchObserver(), saved=probed))
    chosen = choose(context.candidates, candidates - compiled, compiled, asked["seed"])
    return {
        **asked,
        "legal": len(context.space.candidates),
        "global_batch": context.spec.global_batch,
        "versions": installed_versions() | {"python": ".".join(map(str, sys.version_info[:3]))},
        "cpu": hardware.host.cpu_model,
        "disturbed": hardware.disturbed,
        "hardware": json.loads(hardware.model_dump_json()),
        "profile": json.loads(only_used(context.estimator.profile, chosen).model_dump_json(exclude_defaults=True)),
        "candidates": [config.model_dump(mode="json", exclude_defaults=True) for config in chosen],
    }


def open_setup(table: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The setup that a table was begun with; None: it was not begun.

    Raises:
        UsageError: it was begun with something else, on another machine or with other versions.
    """
    if not (table / SETUP).exists():
        return None
    setup = read_setup(table)
    same = asked | {"versions": installed_versions() | {"python": ".".join(map(str, sys.version_info[:3]))}}
    for name, value in same.items():
        there = processes_of(setup) if name == "processes" else setup[name]
        if there != value:
            raise UsageError(
                f"the table {table} was begun with {name} {there!r}, and now it is {value!r}",
                hint="Go on as it was begun, give another --folder, or start over with --fresh.",
            )
    begun = hardware_of(setup)
    if begun.fingerprint != read_host_profile().fingerprint:
        raise UsageError(
            f"the table {table} was begun on another machine ({setup['cpu']})",
            hint="Give another --folder, or start over with --fresh.",
        )
    return setup


def record(
    runner: TrialRunner, setup: dict[str, Any], trials: RecordFile, *, limit_s: float = math.inf, again: bool = False
) -> int:
    """Runs what is left (with `again` also what was disturbed the last time), and appends a line for each trial.

    Returns how many did not run within the time.

    What something outside ended each time leaves no line: it is run when the recording is started again.
    """
    ends_at = time.monotonic() + limit_s
    configs = [TrainingConfig.model_validate(config) for config in setup["candidates"]]
    processes = processes_of(setup)
    last = {(line["pass"], line["candidate"]): line["disturbed"] for line in trials.documents}
    left = []
    for number in range(processes):
        drawn = list(range(len(configs)))  # each pass has an order of its own, drawn by the seed
        random.Random(f"{setup['seed']}/pass/{number}").shuffle(drawn)
        left += [(number, one) for one in drawn if (number, one) not in last or (again and last[number, one])]
    skipped = 0
    for count, (number, candidate) in enumerate(left):
        if time.monotonic() > ends_at:
            return skipped + len(left) - count
        order = TrialOrder(
            number=1000 * number + candidate,
            purpose="search",
            config=configs[candidate],
            prediction=None,
            deadline_s=DEADLINE_S,
        )
        trial = runner.run(order)
        if trial.did_not_run:
            skipped += 1
        else:
            trials.append(line_of(number, candidate, trial))
        print(
            f"pass {number + 1} of {processes}, {count + 1} of {len(left)}: {trial.seconds_spent:5.1f} s "
            f"{trial.outcome.value} {'(disturbed) ' if trial.disturbed else ''}{trial.config.describe()}",
            file=sys.stderr,
            flush=True,
        )
    return skipped


def line_of(number: int, candidate: int, trial: Trial) -> dict[str, Any]:
    """The facts that are kept of a trial."""
    return {
        "pass": number,
        "candidate": candidate,
        "disturbed": trial.disturbed,
        "seconds": round(trial.seconds_spent, 3),
        "trial": json.loads(trial.model_dump_json(exclude_defaults=True)),
    }


def run(options: argparse.Namespace) -> int:
    """Begins or goes on with a table; returns how many of its trials are left."""
    table: Path = options.folder / f"{options.case}-{options.ranks}"
    if options.fresh and table.exists():
        shutil.rmtree(table)
    asked = {
        "case": options.case,
        "ranks": options.ranks,
        "seed": options.seed,
        "bounds": list(options.bound),
        "processes": options.processes,
    }
    setup = open_setup(table, asked)
    with tempfile.TemporaryDirectory(prefix="search-tables-") as folder:
        scratch = Path(folder)
        spec = case_spec(options.case, scratch)
        with Zygote(preload=preload_for(spec), env={"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}) as zygote:
            if setup is None:
                table.mkdir(parents=True, exist_ok=True)
                setup = begin(spec, zygote, asked, options.candidates, options.compiled, scratch)
                text = json.dumps(setup, separators=(",", ":"))
                replace_file(table / SETUP, gzip.compress(text.encode(), mtime=0))
            runner = TrialRunner(
                zygote,
                spec,
                device="cpu",
                memory_limit_bytes=LIMIT_BYTES,
                host_limit_bytes=LIMIT_BYTES,
                directory=scratch / "trials",
            )
            with closing(RecordFile(table / TRIALS)) as trials:
                limit_s = math.inf if options.minutes is None else 60 * options.minutes
                left = record(runner, setup, trials, limit_s=limit_s, again=options.again)
                last = {(line["pass"], line["candidate"]): line["disturbed"] for line in trials.documents}
                disturbed = sum(map(bool, last.values()))
    print(f"{table}: {len(setup['candidates'])} candidates, {left} trials left, {disturbed} were disturbed")
    return left


def main() -> None:
    """Records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="the most ranks of a candidate")
    parser.add_argument("--minutes", type=float, help="no trial starts later; give the command again to go on")
    parser.add_argument("--candidates", type=int, default=CANDIDATES)
    parser.add_argument("--compiled", type=int, default=COMPILED, help="of them: each costs a compilation")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="of each candidate")
    parser.add_argument("--seed", type=int, default=0, help="of the draw and of the orders")
    parser.add_argument("--bound", action="append", default=[], metavar="KNOB=VALUES", help="as autoplan search has it")
    parser.add_argument("--folder", type=Path, default=TABLES)
    parser.add_argument("--again", action="store_true", help="measure what was disturbed again")
    parser.add_argument("--fresh", action="store_true", help="throw the table away and start over")
    options = parser.parse_args()
    if not 0 <= options.compiled < options.candidates:
        parser.error(f"--compiled is {options.compiled}; it is at least 0 and below --candidates {options.candidates}")
    if options.processes < 2:
        parser.error(f"--processes is {options.processes}; one process of each shows no spread")
    try:
        run(options)
    except AutoplanError as error:
        sys.exit(f"{error.flag_message}\n  {error.flag_hint or ''}")


if __name__ == "__main__":
    main()
