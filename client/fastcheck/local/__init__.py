"""A whole FastCheck cluster on one machine, in real processes: for trying, for tests, for the demo."""

from .cluster import LocalCluster
from .files import LocalClusterError

__all__ = ["LocalCluster", "LocalClusterError"]
