"""Texts of a user's: lone surrogates, control characters and colours reach neither a file nor a screen."""

from __future__ import annotations

import json
from pathlib import Path

from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.store.optuna_study import load_study
from autoplan.planner.store.store import Store
from autoplan.processes.files import read_json, write_json
from autoplan.report.facts import trial_rows
from autoplan.strategies.config import TrainingConfig
from autoplan.text import all_writable, printable, writable

BAD = "lone \udc80 and \ud800, bell \x07, red \x1b[31mtext\x1b[0m, title \x1b]0;x\x07, nul \x00, c1 \x9b, ok é 模"


def test_writable_escapes_lone_surrogates_alone() -> None:
    text = writable(BAD)
    assert text.encode() and "\\udc80" in text and "\\ud800" in text
    assert "\x07" in text and "é 模" in text and writable("plain") == "plain"
    assert all_writable({"a\udc80": [BAD, 1, None, ("x\udfff",)]})["a\\udc80"][3] == ("x\\udfff",)


def test_printable_shows_what_a_terminal_would_obey() -> None:
    text = printable(BAD)
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text)
    assert "red text," in text and "\\x07" in text and "\\x00" in text and "\\x9b" in text
    assert printable("step 1\rstep 2\r\nend\tx\n") == "step 1\nstep 2\nend\tx\n"


def test_a_file_of_a_rank_reads_back_writable(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"name": BAD, "deep": [{"k\udc80": 1}]})
    value = read_json(tmp_path / "x.json")
    assert json.dumps(value, ensure_ascii=False).encode()
    assert value["deep"] == [{"k\\udc80": 1}]


def test_a_trial_with_any_text_is_stored_told_shown_and_read_back(tmp_path: Path) -> None:
    trial = Trial(
        number=0,
        purpose="search",
        config=TrainingConfig(micro_batch=2),
        outcome=Outcome.CRASHED,
        reason=BAD,
        phase="build\udc80",
        last_lines=BAD,
        warnings=(BAD,),
        seconds_spent=1.0,
    )
    assert trial.model_dump_json().encode()
    with Store(tmp_path / "s", "0" * 16, summary={"model": BAD}) as store:
        store.add(trial)
        assert load_study(store.folder).trials
    with Store(tmp_path / "s", "0" * 16, summary={"model": BAD}) as store:
        assert store.trials == (trial.model_copy(update={"resumed": True}),)
    assert trial_rows([trial], "samples").rows
