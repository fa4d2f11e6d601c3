"""What the daemon counts, by name. One place, so that docs, admin output and tests agree on the names.

Counting is the other half of handling: an error that is retried, repaired or survived leaves a number here.
"""

from __future__ import annotations

import threading

#: Name → what it counts.
NAMES: dict[str, str] = {
    "saves_staged": "saves sealed by trainers",
    "bytes_staged": "bytes of those",
    "saves_committed": "saves that were committed",
    "saves_failed": "saves that ended in an error",
    "saves_refused": "saves refused before their trainers copied anything",
    "saves_superseded": "saves given up for a newer step",
    "saves_provisional": "saves that were replicated while the registry did not answer",
    "replicas_disagreed": "saves refused because ranks did not hold what they should hold alike",
    "save_waits": "saves that had to wait for an older step",
    "bytes_sent": "payload bytes sent to holders and readers",
    "bytes_received": "payload bytes received over the lane",
    "shards_received": "copies accepted as a holder",
    "shards_resent": "shards that went to another holder than first placed",
    "shards_fetched": "shards pulled from a holder for a restore",
    "chunks_resent": "chunks sent again because the reader found them bad",
    "chunks_encoded": "chunks encoded for sending",
    "copies_paced": "chunks of copies that waited for the cap, or gave way to other traffic",
    "copies_for_restore": "chunks of copies that waited for a restore",
    "repairs_for_restore": "chunks of copies being made anew elsewhere that waited here for a restore",
    "encode_cpu_ms": "milliseconds that threads spent on encoding",
    "bytes_replicated": "bytes of the copies of saves that holders acknowledged, before they were encoded",
    "bytes_saved": "bytes that the codec kept off the network: of acknowledged copies, raw minus sent",
    "deltas_made": "chunks of older steps that became reverse deltas",
    "own_steps_dropped": "times that own bytes of steps before the newest committed one went, for want of room",
    "corrupt_received": "chunks that arrived not matching their digest",
    "corrupt_found": "replicas here whose bytes did not match their digest",
    "corrupt_reported": "copies elsewhere that this node found bad while reading",
    "copies_missing": "copies that a commit named and a reader did not find",
    "provisional_dropped": "provisional copies that newer ones of the same shard replaced",
    "offers_refused": "offers of copies refused: fenced, over budget or malformed",
    "job_budget_refused": "copies and saves refused because their job has as much memory here as it may",
    "lane_rejected": "lane connections closed for breaking the protocol",
    "manifests_adopted": "shards found in the RAM directory at start",
    "manifests_dropped": "manifests found broken at start",
    "replicas_repaired": "copies that this node made for itself because others were lost",
    "repair_bytes": "bytes of those",
    "repair_pauses": "chunks of them that waited for saves, copies or restores of this node",
    "replicas_scrubbed": "replicas whose bytes were read and compared with their digests again",
    "inventory_reported": "replicas that this node told the registry of, held or lost",
    "restores": "loads answered with a step",
    "restores_failed": "loads that ended in an error which is not the asker's",
    "reads": "reads of parts of a step that were answered",
    "read_bytes": "bytes of the chunks that were brought together for them",
    "registry_retries": "registry calls repeated for lack of a leader",
    "peers_quarantined": "peers given a rest after a failure",
}


class Counters:
    """A thread-safe set of counters; asking for a name that is not declared is an error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(NAMES, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one counter."""
        with self._lock:
            self._values[name] += amount

    def get(self, name: str) -> int:
        """One counter's value."""
        with self._lock:
            return self._values[name]

    def snapshot(self) -> dict[str, int]:
        """All values at one moment."""
        with self._lock:
            return dict(self._values)
