"""Alerts are tested, each alert and health code has its runbook, and each runbook something that leads to it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.unit.fastcheckd.observe.observe_facts import all_families

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus" / "fastcheck.rules.yaml"
CASES = RULES.with_name("fastcheck.rules.test.yaml")
RUNBOOKS = ROOT / "docs" / "operating" / "runbooks"
DASHBOARD = ROOT / "deploy" / "grafana" / "fastcheck.json"
HEALTH_SOURCES = (ROOT / "daemon" / "fastcheckd" / "services").glob("health_*.py")


def alerts():
    return {r["alert"]: r for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"]}


def health_codes():
    return set(re.findall(r'code="([A-Z_]+)"', "".join(source.read_text() for source in HEALTH_SOURCES)))


def runbooks():
    """Name → what it is for."""
    return {
        path.name: set(re.findall(r"`(\w+)`", path.read_text().splitlines()[1]))
        for path in RUNBOOKS.glob("*.md")
        if path.name != "README.md"
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (apt install prometheus)")
def test_the_rules_pass_promtool_and_their_own_cases():
    for command in (["check", "rules", "--lint-fatal", str(RULES)], ["test", "rules", str(CASES)]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not():
    fires, quiet = set(), set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for check in case["alert_rule_test"]:
            (fires if check.get("exp_alerts") else quiet).add(check["alertname"])
    assert fires == quiet == set(alerts())


def test_every_alert_says_how_bad_what_and_what_to_do():
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in {"warning", "critical"}, name
        assert rule["annotations"]["summary"].endswith("."), name
        book = ROOT / rule["annotations"]["runbook"]
        assert book.parent == RUNBOOKS and name in runbooks()[book.name], name


def test_every_alert_and_health_code_has_one_runbook_and_none_is_for_nothing():
    reasons = [reason for book in runbooks().values() for reason in book]
    assert sorted(reasons) == sorted({*alerts(), *health_codes()})


def test_every_runbook_says_what_it_means_what_to_check_and_what_to_do():
    for path in RUNBOOKS.glob("*.md"):
        text = path.read_text()
        if path.name == "README.md":
            continue
        assert re.match(r"# .+\nFor: .+\n\n.{40,}", text), path.name
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Check", "Do"], path.name
        assert re.search(r"^## Check\n1\. ", text, re.MULTILINE), path.name
        assert re.search(r"^## Do\n- ", text, re.MULTILINE), path.name


def test_the_index_of_runbooks_has_them_all_with_what_they_are_for():
    rows = re.findall(r"^\| \[.+?\]\((.+?)\) \|(.*)$", (RUNBOOKS / "README.md").read_text(), re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", row)) for name, row in rows} == runbooks()


def test_every_metric_that_is_named_exists():
    families = [family for told in all_families().values() for family in told]
    known = {sample.name for family in families for sample in family.samples}
    known |= {family.name for family in families if family.type == "histogram"}
    pages = [RULES, CASES, DASHBOARD, *(ROOT / "docs" / "operating").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"\bfastcheck_[a-z_]+[a-z]\b", page.read_text())}
    assert len(named) > 50
    assert named - known == set()


def test_every_panel_says_what_it_shows_and_goes_by_the_chosen_cluster():
    panels = [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row"]
    assert len(panels) > 15 and len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        for target in panel["targets"]:
            for metric in re.findall(r"fastcheck_\w+(.?[^,}]*)", target["expr"]):
                assert metric.startswith('{job=~"$cluster"'), target["expr"]
