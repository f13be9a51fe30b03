"""The commands around the autoscaler: sizes that are kept from it, `plan`, `advise` and `move`."""

import json

from tests.unit.cluster.command_line import baton, environment, router

__all__ = ["baton", "environment", "router"]  # fixtures


PLAN = {
    "enabled": False,
    "pools": {
        "prefill": {
            "before": 2, "target": 3, "wanted": 3, "direction": "up", "reason": "load", "utilisation": 1.25,
            "attainment": {"interactive": 0.5, "batch": 1.0}, "texts": ["prefill 2 → 3: too much to do."],
        },
        "decode": {
            "before": 1, "target": 1, "wanted": 1, "direction": "hold", "reason": "enough", "utilisation": 0.25,
            "attainment": {}, "texts": ["decode stays at 1: enough."],
        },
    },
    "limits": {"prefill": {"min": 1, "max": 8}, "decode": {"min": 1, "max": 8}},
    "move_obstacle": "other caches.",
}  # fmt: skip


def test_a_manual_size_disables_the_autoscaler_until_it_is_released(baton, router):
    router.pins = True
    router.admin_answers["/admin/plan"] = PLAN
    status, _, err = baton("scale", "prefill=2", "decode=auto", router=router)
    assert status == 0
    assert router.bodies == [{"prefill": 2, "decode": "auto"}]
    assert "prefill stays at that size until `baton scale prefill=auto` returns it to the autoscaler" in err
    assert "decode keeps" not in err
    assert "decode is returned to the autoscaler; its next step: decode stays at 1: enough.\n`baton plan` shows" in err
    assert "prefill is returned" not in err


def test_a_pool_is_released_even_without_a_plan(baton, router):
    status, out, err = baton("scale", "decode=auto", router=router)
    assert (status, out) == (0, "prefill: 1, decode: 1\n")
    assert "the autoscaler's plan cannot be shown: There is no /admin/plan." in err
    assert "decode is returned to the autoscaler.\n" in err


def test_a_manual_size_needs_no_plan(baton, router):
    assert baton("scale", "prefill=2", router=router)[2].count("baton plan") == 0


def test_the_plan_is_shown_with_its_reasons(baton, router):
    router.admin_answers["/admin/plan"] = PLAN
    status, out, _ = baton("plan", router=router)
    assert status == 0
    assert "3 of 1-8" in out
    assert "125 %" in out
    assert "• prefill 2 → 3: too much to do." in out
    assert "The autoscaler is off" in out
    assert "No worker can change its role: other caches." in out
    assert json.loads(baton("plan", "--json", router=router)[1]) == PLAN


def test_advice_shows_the_capacity_of_each_option(baton, router):
    option = {"prefill": 2, "decode": 2, "local_share": 0.1, "capacity": 12.5}
    router.admin_answers["/admin/advise"] = {
        "rate": 4.0, "num_requests": 80, "missing": "", "now": option, "best": option, "aggregated": option,
        "texts": ["Ratio: keep it."],
        "disaggregation": {"verdict": "worth_it", "text": "It pays.", "figures": [
            {"name": "Hand-off of its KV", "value": 3.14159, "unit": "ms", "source": "predicted"},
            {"name": "Work", "value": 0.25, "unit": "share", "source": "measured"},
            {"name": "TPOT", "value": None, "unit": "ms", "source": "predicted"},
        ]},
    }  # fmt: skip
    status, out, _ = baton("advise", router=router)
    assert status == 0
    assert "observed: 4 requests/s in the last minute or less, 80 requests in the last five minutes" in out
    assert "12.5" in out
    assert "• Ratio: keep it." in out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    for row in ("Hand-off of its KV 3.14 ms predicted", "Work 25 % measured", "TPOT cannot keep up predicted"):
        assert row in rows


def test_without_traffic_there_is_no_advice(baton, router):
    router.admin_answers["/admin/advise"] = {
        "missing": "not enough traffic yet",
        "texts": ["No advice: none seen"],
    }
    answered = (0, "• No advice: none seen\n\nDrafts: no worker has drafted yet.\n")
    assert baton("advise", router=router)[:2] == answered


DRAFTS = {
    "worker": "decode-1", "method": "eagle3", "mode": "used", "num_drafts": 900, "acceptance": [0.7, 0.6],
    "alpha": 0.66, "cost": 0.15, "batch": "1", "costs": {"1": 0.15}, "length": 2.4, "best_by_formula": 3,
    "best_measured": 2, "speedup_by_formula": 1.6, "speedup_measured": 1.5,
    "advice": "Draft three.", "warnings": ["It is large."], "formula_errors": ["It falls with depth."],
}  # fmt: skip


def test_advice_on_drafts_shows_each_worker_and_method(baton, router):
    entries = [DRAFTS, {**DRAFTS, "method": "ngram", "best_by_formula": None, "best_measured": None, "alpha": None}]
    router.admin_answers["/admin/advise"] = {"missing": "none", "texts": [], "speculation": entries}
    status, out, _ = baton("advise", router=router)
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["decode-1", "eagle3", "0.66", "0.15", "2.4", "3", "(1.60)", "2", "(1.50)"] in rows
    assert ["decode-1", "ngram", "-", "0.15", "2.4", "-", "-"] in rows
    assert "• decode-1, eagle3: Draft three." in out
    assert out.count("• decode-1: It is large.") == out.count("• decode-1: It falls with depth.") == 1
    assert json.loads(baton("advise", "--json", router=router)[1])["speculation"] == entries


def test_the_formula_needs_no_cluster(baton):
    status, out, _ = baton("advise", "--alpha", "0.7", "--draft-cost", "0.15")
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["3", "2.53", "1.75", "←", "best"] in rows
    assert ["16", "3.33", "0.98", "←", "cliff"] in rows
    assert "with c = 0.15 the formula's best is k = 3, 1.75 times as fast" in " ".join(out.split())
    answer = json.loads(baton("advise", "--alpha", "0.7,0.7,0.1", "--draft-cost", "0.15", "--json")[1])
    assert (answer["acceptance"], answer["best"]) == ([0.7, 0.7, 0.1], 2)


def test_figures_that_cannot_be_are_refused_with_an_example(baton):
    for options, message in (
        (("--alpha", "1.5", "--draft-cost", "0.1"), "between 0 and 1, got 1.5"),
        (("--alpha", "half", "--draft-cost", "0.1"), "could not convert string to float: 'half'"),
        (("--alpha", "0.5", "--draft-cost", "-1"), "from 0 on, got -1"),
        (("--alpha", "0.5"), "belong together"),
    ):
        status, _, err = baton("advise", *options)
        assert status == 1
        assert message in err


def test_a_worker_is_moved_to_the_other_pool(baton, router):
    status, out, _ = baton("move", "prefill", "decode", router=router)
    assert status == 0
    assert router.bodies == [{"from": "prefill", "to": "decode"}]
    assert "prefill: 1, decode: 1" in out
