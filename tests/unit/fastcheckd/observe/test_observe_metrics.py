"""What is told is what was counted, in names and text that Prometheus takes."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.fastcheckd.observe.observe_facts import (
    agent_families,
    all_families,
    data_facts,
    job,
    voter_facts,
)

from fastcheckd.counters import NAMES, Counters
from fastcheckd.durations import BOUNDS_S, DATA, Durations
from fastcheckd.observe import data_metrics, registry_metrics
from fastcheckd.observe.families import JOBS_MAX, OTHERS, exposition


def told(families):
    """(name, labels) → value, as a scraper reads the text."""
    text = exposition(families).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_name_has_prefix_and_unit_and_comes_from_one_process():
    by_process = all_families()
    names = [family.name for families in by_process.values() for family in families]
    assert len(set(names)) == len(names)
    for families in by_process.values():
        for family in families:
            assert re.fullmatch(r"fastcheck_[a-z][a-z_]*[a-z]", family.name), family.name
            assert family.documentation.endswith("."), family.name
            assert not re.search(r"_(ms|s|kb|mb|total)$|_bytes_", family.name), family.name
            if family.type == "histogram":
                assert family.name.endswith("_seconds")


def test_every_counter_is_told_in_base_units():
    counted = Counters()
    for number, name in enumerate(NAMES):
        counted.add(name, number + 1)
    found = told(data_metrics.families(data_facts(counters=counted.snapshot())))
    values = sorted(v for (name, *_), v in found.items() if name.endswith("_total"))
    numbers = {name: number + 1 for number, name in enumerate(NAMES)}
    expected = [numbers[n] / 1000 if n.endswith("_ms") else numbers[n] for n in NAMES]
    assert values == sorted(expected)
    assert found["fastcheck_encode_cpu_seconds_total",] == numbers["encode_cpu_ms"] / 1000
    assert found["fastcheck_sent_bytes_total",] == numbers["bytes_sent"]
    assert found["fastcheck_repair_bytes_total",] == numbers["repair_bytes"]


def test_buckets_are_cumulative_and_an_end_belongs_to_its_bucket():
    measured = Durations(DATA)
    for seconds in (0.0, 0.001, 0.0011, BOUNDS_S[-1] + 1):
        measured.add("restore", seconds)
    found = told(data_metrics.families(data_facts(durations=measured.families())))
    buckets = [
        found["fastcheck_restore_seconds_bucket", ("le", le)] for le in ("0.001", "0.0025", "600.0", "+Inf")
    ]
    assert buckets == [2, 3, 3, 4]
    assert found["fastcheck_restore_seconds_count",] == 4
    assert found["fastcheck_restore_seconds_sum",] == pytest.approx(601.0021)


def test_a_name_that_is_not_declared_is_an_error():
    with pytest.raises(KeyError):
        Durations(DATA).add("registry_commit", 1.0)


def test_jobs_have_labels_up_to_a_bound_and_the_rest_shows_its_worst():
    jobs = [
        job(f"j{n:03}", staged_age_s=float(n), staged_step=1000 - n, committed_step=500 - n)
        for n in range(40)
    ]
    jobs[35] = job("j035", staged_age_s=35.0, staged_step=965, committed_step=None, committed_age_s=77.0)
    found = told(data_metrics.families(data_facts(jobs=jobs)))
    labels = {labels[0][1] for (name, *labels) in found if name == "fastcheck_job_staged_step"}
    assert labels == {f"j{n:03}" for n in range(JOBS_MAX)} | {OTHERS}
    others = ("training_job", OTHERS)
    assert found["fastcheck_job_staged_step", others] == 1000 - 39
    assert found["fastcheck_job_staged_age_seconds", others] == 39
    assert found["fastcheck_job_committed_step", others] == 500 - 39
    assert found["fastcheck_job_committed_age_seconds", others] == 77
    assert found["fastcheck_job_saves_in_flight", others] == 40 - JOBS_MAX


def test_the_memory_of_jobs_is_bounded_by_name_and_none_of_it_is_left_out():
    sizes = {f"j{n:03}": 1000 - n for n in range(40)}
    found = told(data_metrics.families(data_facts(job_ram_bytes=sizes)))
    shown = {
        labels[0][1]: v for (name, *labels), v in found.items() if name == "fastcheck_job_ram_used_bytes"
    }
    assert set(shown) == {f"j{n:03}" for n in range(JOBS_MAX)} | {OTHERS}
    assert sum(shown.values()) == sum(sizes.values()) and shown["j000"] == 1000
    assert found["fastcheck_job_ram_budget_bytes",] == 60
    without = told(data_metrics.families(data_facts(job_ram_bytes={}, job_budget_bytes=0)))
    assert not [name for name, *_ in without if name.startswith("fastcheck_job_ram")]


def test_what_is_not_known_is_absent_rather_than_zero():
    unknown = job(replicated_step=None, committed_step=None, committed_age_s=None, interval_s=None)
    names = {name for name, *_ in told(data_metrics.families(data_facts(scrub_age_s=None, jobs=[unknown])))}
    assert "fastcheck_job_staged_step" in names
    assert not names & {
        "fastcheck_scrub_age_seconds",
        "fastcheck_job_committed_step",
        "fastcheck_job_committed_age_seconds",
        "fastcheck_job_replicated_step",
        "fastcheck_job_save_interval_seconds",
    }
    assert "fastcheck_certificate_expiry_timestamp_seconds" not in {
        name for name, *_ in told(agent_families(certificate_ends_at_s=None))
    }


def test_only_the_leader_tells_of_the_cluster():
    leader = told(registry_metrics.families(voter_facts()))
    follower = told(registry_metrics.families(voter_facts(leads=False)))
    assert leader["fastcheck_registry_is_leader",] == 1 and follower["fastcheck_registry_is_leader",] == 0
    assert not [name for name, *_ in follower if name.startswith("fastcheck_cluster_")]
    assert leader["fastcheck_cluster_nodes", ("state", "UP")] == 2
    assert leader["fastcheck_cluster_nodes", ("state", "SUSPECT")] == 0
    assert leader["fastcheck_cluster_heartbeat_age_seconds_max",] == 0.12  # the node that is DOWN is no news
    assert leader["fastcheck_cluster_job_committed_step", ("training_job", "gpt")] == 5
    assert leader["fastcheck_cluster_job_shards_short", ("training_job", "gpt")] == 3
    assert leader["fastcheck_cluster_shards_short",] == 3


def test_the_leaders_jobs_are_bounded_too():
    facts = voter_facts()
    del facts.leading.view.jobs[:]
    for number in range(40):
        facts.leading.view.jobs.add(job=f"j{number:03}", kept_steps=[number + 1])
    found = told(registry_metrics.families(facts))
    of_jobs = {labels[0][1]: v for (name, *labels), v in found.items() if name.endswith("job_committed_step")}
    assert len(of_jobs) == JOBS_MAX + 1 and of_jobs[OTHERS] == JOBS_MAX + 1


def test_label_values_are_escaped():
    found = told(agent_families(node_id='a"b\\c\nd'))
    assert ("fastcheck_node_info", ("cluster_id", "c"), ("node_id", 'a"b\\c\nd')) in found
