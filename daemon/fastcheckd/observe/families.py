"""Numbers → Prometheus' metric families, and those → text. Pure; no registry, nothing global.

Names are `fastcheck_` + what is measured + the unit: seconds or bytes, and `_total` for what only grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric

#: Values of the label `training_job`; `job` is what Prometheus itself calls a scrape. So many have one of their
#: own; the others are one. A node has one job at a time, or a few.
JOBS_MAX = 32
#: Label of all the others; no job may be called so.
OTHERS = "(other)"

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
PREFIX = "fastcheck_"
#: One value, or several by the values of the labels.
Values = float | Mapping[tuple[str, ...], float]


class _Families:
    """What `generate_latest` takes: something that collects."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(families: Iterable[Metric]) -> bytes:
    """The text that Prometheus scrapes."""
    return generate_latest(_Families(families))


def gauge(name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> Metric:
    """Something that goes up and down."""
    return _filled(GaugeMetricFamily(PREFIX + name, text, labels=labels), values)


def counter(name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> Metric:
    """Something that only grows; `name` without `_total`."""
    return _filled(CounterMetricFamily(PREFIX + name, text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    by_labels = values if isinstance(values, Mapping) else {(): values}
    for label_values, value in by_labels.items():
        family.add_metric(label_values, value)
    return family


def counters(values: Mapping[str, int], texts: Mapping[str, str]) -> list[Metric]:
    """All of `counters.py`; `texts` says what each one counts."""
    return [
        counter(
            _in_base_units(name),
            f"{texts[name].capitalize()}.",
            value / 1000 if name.endswith("_ms") else value,
        )
        for name, value in values.items()
    ]


def _in_base_units(name: str) -> str:
    """`bytes_sent` → `sent_bytes`, `encode_cpu_ms` → `encode_cpu_seconds`: units last, and base units only."""
    if name.startswith("bytes_"):
        return name.removeprefix("bytes_") + "_bytes"
    return name.removesuffix("_ms") + "_seconds" if name.endswith("_ms") else name
