"""Plans with anything in them: each verb gives a clear error or a right answer, runs nothing, writes nothing elsewhere.

The witness is an audit hook: whatever a verb imports from outside the installed packages, compiles, starts or writes
is seen. The plans are changed by structure (types, missing, extra, huge, nested, texts, paths, pickles) and by bytes.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoplan.cli import app
from autoplan.planner.export.run import TARGETS, load_target
from autoplan.strategies.analysis.training_facts import GroupFacts, ScheduleFacts, TrainingFacts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.recorded import make_plan
from tests.strategies.tiny import GPT2, LLAMA

MARK, MARKS = "touch MARK", ("MARK", "touch")
PICKLE = base64.b64encode(pickle.dumps((os.system, (MARK,)))).decode()
CODE = "__import__('os').system('touch MARK')"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 10**4000, 0.5, -0.0, 1e-320, 1e308, -1e308),
    *(float("nan"), float("inf"), "", "x", "0", "1e5", "nan", "é" * 50, "\ud800", "\x00", "\x1b[2J", "a\nb\r\u2028c"),
    *("x" * 100_000, "../../../etc/passwd", "/dev/zero", "/dev/stdin", "file:/etc/passwd", f"inline:{PICKLE}"),
    *('"""', "'''", "\\", f"'''+{CODE}+'''", f'"""\n{CODE}\n"""', f"x\n{CODE}", "%s%(x)s", "{0}{x}", "[bold]x[/]"),
    *("gpt2", "train.py:workload", "./evil.py:workload", "evil.py", "<script>alert(1)</script>", "coding: utf-7"),
    *([], {}, [[]], [None], {"": {}}, {"__class__": "x"}, {"payload": f"inline:{PICKLE}"}, [1, 2, 3], ["x"] * 1000),
)


def base_documents(folder: Path, device: str = "cpu") -> list[dict[str, Any]]:
    """Sound plans: of a built-in model, of a config.json, and of a file that leaves a mark where it runs."""
    model = LLAMA if device == "cuda" else GPT2 | {"n_embd": 16, "n_layer": 2, "n_head": 2}
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "evil.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('MARK').touch()\n\n\ndef workload():\n    pass\n"
    )
    rates = ((0.1,), (0.05,))
    schedule = ScheduleFacts(kind="torch.optim.lr_scheduler.StepLR", options={"step_size": 1}, learning_rates=rates)
    group = GroupFacts(
        tensors=4, elements=100, options={"lr": 0.1, "weight_decay": 0.01, "betas": [0.9, 0.99], "eps": 1e-8}
    )
    facts = TrainingFacts(
        optimizer="torch.optim.adamw.AdamW", groups=(group,), max_grad_norm=1.0, schedule=schedule, seed=0
    )
    config = TrainingConfig(micro_batch=4)
    of_file = make_spec(model=str(folder / "config.json"), sequence_length=16, global_batch=16)
    of_code = make_spec(model=f"{folder / 'evil.py'}:workload", global_batch=16)
    plans = [
        make_plan(training=facts, device=device),
        make_plan(config, workload=of_file, training=facts, device=device),
        make_plan(config, workload=of_code, device=device),
    ]
    return [json.loads(plan.model_dump_json()) for plan in plans]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value of a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def mutate(document: dict[str, Any], chance: random.Random) -> None:
    """One change of the structure, in place."""
    place = chance.choice(list(places(document)))
    parent: Any = document
    for key in place[:-1]:
        parent = parent[key]
    key, value = place[-1], parent[place[-1]]
    match chance.randrange(8):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[str(chance.choice(VALUES))] = value
        case 2:
            parent[key] = [value]
        case 3 if isinstance(value, int | float) and not isinstance(value, bool):
            parent[key] = chance.choice((-value, value + 1, value * 1e6, value * 10**40, str(value), value / 3))
        case 4 if isinstance(value, list):
            parent[key] = value * chance.choice((0, 2, 50))
        case 5:
            for _ in range(chance.choice((1, 10, 60))):
                value = {"x": value} if chance.random() < 0.5 else [value]
            parent[key] = value
        case _:
            parent[key] = chance.choice(VALUES)


def mutated_file(documents: list[dict[str, Any]], chance: random.Random) -> bytes:
    """A plan's file with one to four changes, of its structure or of its bytes."""
    document = json.loads(json.dumps(chance.choice(documents)))
    if chance.random() < 0.5:
        document.pop("seal", None)  # as an earlier version wrote it
    if chance.random() < 0.75:
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            mutate(document, chance)
        return json.dumps(document).encode("utf-8", errors="surrogatepass")
    data = bytearray(json.dumps(document).encode())
    for _ in range(chance.choice((1, 2, 8))):
        start = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                del data[start : start + chance.choice((1, 2, 100))]
            case 1:
                data[start:start] = chance.randbytes(chance.choice((1, 4)))
            case 2:
                data[start : start + 1] = bytes([chance.choice(b'0123456789-+.eE{}[]",:\\ ntf')])
            case 3:
                data[start:] = data[: chance.randrange(len(data) + 1)]
    return bytes(data)


CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.symlink", "os.chmod", "shutil.rmtree")


def _place(path: Any) -> str:
    """The real path; of a handle of an open file, the file's."""
    return os.path.realpath(f"/proc/self/fd/{path}" if isinstance(path, int) else os.fsdecode(path))


class Witness:
    """Sees, by an audit hook, what runs and what is written while it watches. A hook cannot be taken away again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.watches, self.seen = str(folder.resolve()), False, Counter[str]()
        sys.addaudithook(self.hear)

    def hear(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.watches:
            return
        if event in ("os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "subprocess.Popen", "pty.spawn"):
            checks_syntax = event == "subprocess.Popen" and list(given[1]) == [given[0], "-n"]  # bash -n of an export
            if not checks_syntax and (event != "pickle.find_class" or "torch" not in str(given)):
                self.note(f"{event} {str(given)[:200]}")
        elif event == "exec":
            code = given[0]
            library = "site-packages" in code.co_filename  # imported for the first time
            words = str(code.co_consts + code.co_names)
            if self.is_ours(code.co_filename) or (not library and any(word in words for word in MARKS)):
                self.note(f"ran {code.co_filename}")
        elif event == "open" and isinstance(given[0], str | bytes | os.PathLike):
            path, mode, flags = os.fsdecode(given[0]), given[1], given[2]
            writes = any(letter in (mode or "") for letter in "wax+") or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))
            place = os.path.realpath(path)
            if writes and not self.may_write(place):
                self.note(f"wrote {place}")
        elif event in CHANGES and not self.may_write(_place(given[0])):
            self.note(f"{event} {given[0]}")

    def is_ours(self, file: str) -> bool:
        """Whether code is from the plan's folder. Code without a file is known by the words of the plans."""
        return not file.startswith("<") and os.path.realpath(file).startswith(self.folder)

    def may_write(self, place: str) -> bool:
        return place.startswith((self.folder, "/dev/null", "/dev/tty"))

    def note(self, text: str) -> None:
        self.seen[text] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.watches = True
        try:
            yield
        finally:
            self.watches = False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def witness(folder: Path) -> Witness:
    return Witness(folder)


def run(witness: Witness, *arguments: str) -> tuple[int, str]:
    """One command in this process, watched: its exit code and what it printed."""
    printed = io.StringIO()
    before = sys.argv
    sys.argv = ["autoplan", *arguments]
    try:
        with redirect_stdout(printed), redirect_stderr(printed), witness.watching():
            code = app.run()
    finally:
        sys.argv = before
    return code, printed.getvalue()


def stay_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a verb writes by itself goes into this folder."""
    monkeypatch.chdir(folder)
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(folder / "home"))
    (folder / "home").mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(folder / "home"))


@pytest.fixture(autouse=True)
def own_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in(folder, monkeypatch)


ALLOWED = {0: "right", 2: "refused", 3: "refused", 4: "refused", 6: "refused"}


def wrong_end(code: int, text: str) -> str | None:
    """What is wrong with an end; None: it is a right answer or a clear error."""
    lines = text.strip().splitlines() or [""]
    if code not in ALLOWED or "Traceback" in text or "bug in autoplan" in text:
        return f"exit code {code}: {' | '.join(lines[:2] + lines[-3:])[:600]}"
    if code and not any(line.startswith("error: ") and len(line) < 2000 for line in lines):
        return f"exit code {code} without a clear error: {lines[-1][:300]}"
    if any(ord(character) < 32 and character not in "\n\t" for character in text):
        return f"control characters: {text[:300]!r}"
    return None


def fuzz(witness: Witness, folder: Path, count: int, seed: int, *verb: str, device: str = "cpu") -> Counter[str]:
    """Runs a verb on so many changed plans; every end is a right answer or a clear error."""
    chance, ends, wrong = random.Random(seed), Counter[str](), Counter[str]()
    documents = base_documents(folder, device)
    path = folder / "plan.json"
    run(witness, "show", str(path))  # what is imported at the first call is imported before
    witness.seen.clear()
    for number in range(count):
        data = mutated_file(documents, chance)
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code, text = run(witness, verb[0], str(path), *verb[1:])
        ends[ALLOWED.get(code, "wrong")] += 1
        reason = wrong_end(code, text)
        if reason is not None:
            wrong[reason] += 1
            (folder / f"wrong-{number}.json").write_bytes(data)
    print(f"{count} x autoplan {' '.join(verb)}: {dict(ends)}")
    assert not wrong, f"{wrong.total()} wrong ends, their plans are in {folder}: {wrong.most_common(6)}"
    assert not witness.seen, witness.seen.most_common(5)
    assert not (folder / "MARK").exists()
    return ends


SHOWS = (("show", "--trials"), ("show", "--json"), ("explain",), ("report", "--out", "report.html"))


def test_the_witness_sees_what_it_must(witness: Witness, folder: Path) -> None:
    base_documents(folder)
    with witness.watching():
        import runpy

        runpy.run_path(str(folder / "evil.py"))
        os.system("true")
        (folder.parent / "elsewhere").touch()
    kinds = {text.split()[0] for text in witness.seen}
    assert {"ran", "os.system"} <= kinds and any("elsewhere" in text for text in witness.seen)
    (folder / "MARK").unlink()
    witness.seen.clear()


@pytest.mark.parametrize("verb", SHOWS, ids=" ".join)
def test_a_plan_with_anything_in_it_is_shown_or_refused(witness: Witness, folder: Path, verb: tuple[str, ...]) -> None:
    ends = fuzz(witness, folder, 60, 1, *verb)
    assert ends["right"] > 2 and ends["refused"] > 20


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ten_thousand_loads_and_shows(witness: Witness, folder: Path) -> None:
    ends = sum((fuzz(witness, folder, 2500, 100 + number, *verb) for number, verb in enumerate(SHOWS)), Counter())
    assert ends.total() == 10_000 and ends["right"] > 500


def test_exports_of_data(witness: Witness, folder: Path) -> None:
    for number, to in enumerate(("json", "yaml")):
        ends = fuzz(witness, folder, 40, number, "export", "--to", to, "--force", "--out", str(folder / "out"))
        assert ends["refused"] > 10


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("to", list(TARGETS))
def test_two_hundred_of_each_export(witness: Witness, folder: Path, to: str, monkeypatch) -> None:
    _keep_to_this_process(monkeypatch)
    out = folder / f"out{load_target(to).suffix}"
    device = "cuda" if to in ("megatron", "torchtitan") else "cpu"
    ends = fuzz(witness, folder, 200, 7, "export", "--to", to, "--force", "--out", str(out), device=device)
    assert ends["right"] > 2, "where all are refused for one reason, nothing was tried"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_hundred_runs(witness: Witness, folder: Path, monkeypatch) -> None:
    """A plan that is right so far would be built. Verify and prepare: test_plan_fuzz_calls.py."""
    from autoplan.cli import run
    from autoplan.errors import NoFeasiblePlanError
    from autoplan.strategies.workloads import sources

    def not_built(*given: Any, **named: Any) -> Any:
        raise NoFeasiblePlanError("it would run here")

    loads = sources.load_workload
    monkeypatch.setattr(run, "start", not_built)
    monkeypatch.setattr(sources, "load_workload", lambda spec: (not_built if spec.kind == "model" else loads)(spec))
    fuzz(witness, folder, 200, 9, "run", "--steps", "1")


def _keep_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks that start Python with our own source: the model of the config, and what a tool's parser reads."""
    import importlib

    from autoplan.planner.export import accelerate as accelerate_config
    from autoplan.planner.export import launch, transformers
    from autoplan.planner.export import pytorch as pytorch_script

    def read_here(target: str, args: tuple[Any, ...], **given: Any) -> Any:
        module, _, function = target.partition(":")
        return getattr(importlib.import_module(module), function)(SimpleNamespace(directory=Path.cwd()), *args)

    monkeypatch.setattr(accelerate_config, "read_by_tool", read_here)
    monkeypatch.setattr(pytorch_script, "summarize_model", lambda spec: pytorch_script.ModelSummary(has_blocks=True))
    monkeypatch.setattr(transformers, "read_back_arguments", lambda text, tool: json.loads(text))
    monkeypatch.setattr(launch, "parse_torchrun", lambda words: launch.parse_in_rank(None, words))  # type: ignore[arg-type]
