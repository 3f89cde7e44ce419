"""What is made of measurements: budgets met or missed, tables, charts. Nothing is measured here."""

from __future__ import annotations

import xml.etree.ElementTree as xml

import pytest

import streamshim
from benchmarks import charts, tables
from benchmarks.budgets import BUDGETS, check
from benchmarks.measuring import Form, Result, Variant, installed, measure, spread


def result(variant, *samples, form="ctypes", group="launch", unit="ns"):
    return Result(group, form, variant, unit, list(samples)).to_dict()


def run(gpu, *results):
    listed = list(results)
    machine = {"gpu": "a GPU" if gpu else None, "cpu": "a CPU", "torch": "2"}
    settings = {"burst": 300, "rounds": 3}
    return {"machine": machine, "settings": settings, "missing": {}, "budgets": check(listed, gpu), "results": listed}


def test_a_ratio_is_taken_round_by_round():
    """A machine that is slow in one round is slow for both."""
    results = [result("bare", 1000, 9000, 1000), result("shim", 1050, 9450, 1050)]
    (budget,) = [b for b in check(results, gpu=True) if b["at_most"] == 1.10]
    assert (budget["value"], budget["p10"], budget["p90"], budget["met"]) == (1.05, 1.05, 1.05, True)
    results[1] = result("shim", 1150, 1150, 1150)
    assert not next(b for b in check(results, gpu=True) if b["at_most"] == 1.10)["met"]


def test_what_drowns_in_noise_is_compared_at_its_least():
    form = {"form": "a process that does nothing", "group": "process", "unit": "ms"}
    quiet, busy = [10.0] * 4, [10.0, 10.0, 18.0, 25.0]
    results = [result("bare", *quiet, **form), result("start-up file, inactive", *busy, **form)]
    (budget,) = check(results, gpu=True)
    assert (budget["value"], budget["met"]) == (1.0, True)
    results[1] = result("start-up file, inactive", 10.5, 10.5, 18.0, 25.0, **form)
    (budget,) = check(results, gpu=True)
    assert (budget["value"], budget["met"]) == (1.05, False)


def test_budgets_of_the_other_kind_of_machine_are_left_out():
    results = [result("bare", 100), result("shim", 340), result("hand-written", 4000)]
    assert {b["kind"] for b in check(results, gpu=True)} == {"ratio"}
    assert [(b["kind"], b["value"], b["met"]) for b in check(results, gpu=False)] == [("added", 240, True)]


def test_a_budget_without_its_measurement_is_left_out():
    assert check([result("shim", 100)], gpu=False) == []


def test_each_budget_is_there_once():
    assert len({(b.words, b.kind, b.gpu) for b in BUDGETS}) == len(BUDGETS)


def test_the_spread():
    assert spread([5]) == (5, 5, 5)
    assert spread(range(11)) == (1, 5, 9)


def test_the_table_marks_what_was_missed():
    measured = run(False, result("bare", 100), result("shim", 400))
    words = tables.text(measured)
    assert "ctypes: shim against bare  250 ns more  300 (300 to 300)  MISSED" in words
    assert "| ctypes | shim | 400 ns | 400 to 400 | 4.00 |" in tables.markdown(
        run(False, result("bare", 100), result("shim", 400))
    )


def test_a_table_in_a_document(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- table: cpu -->\nold\n<!-- end: cpu -->\nafter\n")
    tables.fill(document, "cpu", "new\n")
    assert document.read_text() == "before\n<!-- table: cpu -->\nnew\n<!-- end: cpu -->\nafter\n"
    with pytest.raises(ValueError, match="has no marks <!-- table: h200 --> and <!-- end: h200 -->"):
        tables.fill(document, "h200", "new\n")


def test_charts_are_well_formed():
    results = [
        result("bare", 100),
        result("shim", 400),
        result("shim", 5, form="1 thread <&>", group="threads", unit="1/s"),
    ]
    drawn = [charts.launches(run(True, *results)), charts.threads(run(True, *results))]
    for chart, bars in zip(drawn, (2, 1), strict=True):
        assert len(xml.fromstring(chart).findall("{http://www.w3.org/2000/svg}rect")) == bars


def test_every_variant_runs_in_its_state_in_every_round():
    seen, settled = [], []
    names = {"note": lambda name: seen.append((name, streamshim.status().mode))}
    variants = tuple(Variant(state, state, f"note({state!r})", names) for state in ("off", "bind", "strict"))
    results = measure([Form("launch", "a form", variants)], 3, lambda: settled.append(1), burst=2)
    assert [(r.variant, len(r.samples)) for r in results] == [("off", 3), ("bind", 3), ("strict", 3)]
    assert {(name, mode) for name, mode in seen} == {("off", "off"), ("bind", "bind"), ("strict", "strict")}
    assert len(settled) == 2 * 9
    assert not streamshim.status().installed


@pytest.mark.parametrize(("state", "watch", "redirect"), [("watch", True, False), ("redirect", False, True)])
def test_what_bind_mode_does_only_when_it_is_asked_to(state, watch, redirect):
    with installed(state):
        settings = streamshim.install().settings
        assert (settings.mode, settings.watches, settings.redirect) == ("bind", watch, redirect)
