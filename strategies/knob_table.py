"""The table of knobs in docs/techniques.md, made from the metadata of the fields of TrainingConfig.

`python -m autoplan.strategies.knob_table` prints it; a test says where the page differs. Loads no torch.
"""

from __future__ import annotations

from autoplan.strategies.config import KNOBS, PLAIN, TrainingConfig, knob_values, knobs

HEADINGS = ("Knob", "Values", "What it does", "Numerics", "Left out when")


def knob_table() -> list[str]:
    """The lines of the Markdown table, one row per knob in the order of the fields."""
    rows = [_row(knob) for knob in KNOBS]
    return [_line(HEADINGS), "|" + "---|" * len(HEADINGS), *(_line(row) for row in rows)]


def _row(knob: str) -> tuple[str, ...]:
    return f"`{knob}`", _values(knob), _escape(_description(knob)), knobs()[knob].numerics, _escape(_left_out(knob))


def _values(knob: str) -> str:
    """The closed list, the plain value first, or the numbers that a search offers."""
    allowed, known = knob_values(knob), knobs()[knob]
    if allowed is not None:
        plain = getattr(PLAIN, knob)
        return ", ".join(f"`{value}`" for value in (plain, *(value for value in allowed if value != plain)))
    if known.role == "rank_count":
        return "factors of the number of ranks"
    return known.offered or f"`{getattr(PLAIN, knob)}`, and the numbers that you name"


def _description(knob: str) -> str:
    return TrainingConfig.model_fields[knob].description or ""


def _left_out(knob: str) -> str:
    known = knobs()[knob]
    texts = [] if known.searched else ["you neither fix nor bound it"]
    texts += {"cpu": ["CUDA"], "cuda": ["CPU"]}.get(known.device or "", [])
    texts += [f"without `{need.describe()}`" for need in known.needs]
    return "; ".join([*texts, known.left_out] if known.left_out else texts)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("\n".join(knob_table()))
