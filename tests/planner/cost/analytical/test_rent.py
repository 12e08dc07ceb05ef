"""Advice on what to rent: prices that are read, options and their front, the fewest GPUs, the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import autoplan
from autoplan.errors import NoFeasiblePlanError, UsageError
from autoplan.planner.cost.analytical.rent import read_prices
from autoplan.report.html import render_rent

PRICES = {"H100": "2.5 USD/h", "A100 SXM 80GB": "1.6 USD / hour", "L4": ".6 USD/h"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return autoplan.estimate("llama2-7b", tokens=2e9, prices=PRICES)


def test_the_front_has_nothing_that_is_faster_and_cheaper(document: dict[str, Any]) -> None:
    options = document["rent"]["options"]
    assert {option["chip"] for option in options} == set(PRICES) and document["rent"]["currency"] == "USD"
    for option in options:
        better = [one for one in options if one["hours"] < option["hours"] and one["cost"] <= option["cost"]]
        assert option["on_front"] == (not better)
        assert option["hours_low"] < option["hours"] < option["hours_high"]
        assert option["cost_low"] < option["cost"] < option["cost_high"]


def test_an_option_is_what_an_estimate_of_that_cluster_says(document: dict[str, Any]) -> None:
    option = next(one for one in document["rent"]["options"] if (one["chip"], one["num_gpus"]) == ("H100", 64))
    batch = document["global_batch"]
    alone = autoplan.estimate("llama2-7b", "8x8xH100", tokens=2e9, prices=PRICES, global_batch=batch)
    assert option["layout"] == alone["best"][0]["layout"]
    assert option["hours"] == pytest.approx(2e9 / alone["best"][0]["tokens_per_s"] / 3600)
    assert option["cost"] == pytest.approx(option["hours"] * 64 * 2.5)
    assert alone["rent"]["options"][0]["num_gpus"] == 64, "a cluster is the most that is looked at"


def test_the_fewest_gpus_of_a_kind_are_the_smallest_cluster(document: dict[str, Any]) -> None:
    fewest = {one["chip"]: one["num_gpus"] for one in document["rent"]["options"] if one["smallest"]}
    assert set(fewest) == set(PRICES)
    alone = autoplan.estimate("llama2-7b", "8xH100", global_batch=document["global_batch"])
    assert fewest["H100"] == alone["smallest_cluster"]["num_gpus"]
    assert fewest["L4"] > fewest["H100"]


def test_without_prices_gpu_hours_count() -> None:
    rent = autoplan.estimate("gpt2", "8xA100", tokens=1e9, global_batch=64)["rent"]
    assert rent["currency"] is None and all(option["cost"] is None for option in rent["options"])
    assert [option["on_front"] for option in rent["options"]] == [
        all(other["gpu_hours"] > option["gpu_hours"] for other in rent["options"][:i])
        for i, option in enumerate(rent["options"])
    ]


@pytest.mark.parametrize(
    "prices, words",
    [
        ({"H100": 2.5}, "H100: 2.5 is no price with a unit"),
        ({"H100": "2.5 USD"}, "no price with a unit"),
        ({"H100": "2.5 USD/month"}, "no price with a unit"),
        ({"H100": "0 USD/h"}, "not above 0"),
        ({"H100": "2 USD/h", "A100": "2 EUR/h"}, "H100 is in USD and A100 is in EUR"),
        ({"H1000": "2 USD/h"}, "H1000: no chip"),
        ({"H100": "2 USD/h", "H100 SXM 80GB": "2 USD/h"}, "a price already"),
        ({}, "no price"),
    ],
)
def test_prices_that_do_not_say_enough_are_refused(prices: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_prices(prices)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UsageError, match="tokens"):
        autoplan.estimate("llama2-7b", prices=PRICES)
    with pytest.raises(UsageError, match="A100 SXM 80GB has no price"):
        autoplan.estimate("llama2-7b", "8xA100", tokens=1e9, prices={"H100": "2 USD/h"})
    with pytest.raises(NoFeasiblePlanError, match="fits none of L4"):
        autoplan.estimate("llama2-70b", tokens=1e9, prices={"L4": "1 USD/h"})


def test_the_command_reads_a_file_and_writes_the_page(tmp_path: Path) -> None:
    from autoplan.cli.app import build_app

    (tmp_path / "prices.yaml").write_text("H100: 2.5 USD/h\nA100: 1.6 USD/h  # spot\n")
    arguments = ["estimate", "--model", "llama2-7b", "--tokens", "2e9", "--prices", str(tmp_path / "prices.yaml")]
    shown = CliRunner().invoke(build_app(), [*arguments, "--out", str(tmp_path / "rent.html")])
    assert shown.exit_code == 0 and "fewest that hold it: 2 x H100" in shown.stdout
    page = (tmp_path / "rent.html").read_text()
    found = json.loads(CliRunner().invoke(build_app(), [*arguments, "--json"]).stdout)
    assert page == render_rent(found) and page.count("<circle") > 5 and "Time against cost" in page


def test_rows_that_no_whole_nodes_hold_are_named() -> None:
    row = {"model": "gpt2", "chip": "A100", "num_gpus": 12, "gpus_per_node": 8, "inter_gbits_per_s_per_gpu": 100}
    assert "12 GPUs are no whole nodes of 8" in autoplan.estimate(rows=[row])["reasons"]["1"]
