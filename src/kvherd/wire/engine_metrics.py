"""Metrics of many engines as one page, in Prometheus' text format."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from kvherd.core.ids import WorkerId

LABEL = "worker"


def merge_metrics(pages: Mapping[WorkerId, bytes]) -> bytes:
    """Every sample of every page, with one more label: its worker. An engine's own label of that name is kept as
    `exported_worker`. A page that is not of this format is left out.
    """
    families: dict[tuple[str, str], Metric] = {}
    for worker, page in pages.items():
        for family in _families(page):
            fresh = Metric(family.name, family.documentation, family.type)
            kept = families.setdefault((family.name, family.type), fresh)
            for sample in family.samples:
                own = {f"exported_{name}" if name == LABEL else name: value for name, value in sample.labels.items()}
                kept.samples.append(sample._replace(labels={LABEL: worker, **own}))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(families.values()))
    return generate_latest(registry)


def _families(page: bytes) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(page.decode()))
    except (ValueError, UnicodeDecodeError):
        return []


class _Page(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._families
