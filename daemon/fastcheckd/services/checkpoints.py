"""A job's steps as an operator sees them, provisional ones included. Pure.

The registry knows committed steps and those that are reported; what was replicated while it did not answer only the
nodes know. Without the registry a step counts as committed if the last view said so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..restore.survey import complete_steps


def with_provisional(
    job: str,
    view: rpb.ClusterView,
    listed: Sequence[rpb.StepSummary] | None,
    held: Mapping[str, Sequence[peer_pb2.Replica]],
) -> list[rpb.StepSummary]:
    """All steps, oldest first.

    Args:
        view: the newest that could be had.
        listed: the registry's answer; None: it does not answer.
        held: node id → what it says it holds of the job.
    """
    kept = {step for known in view.jobs if known.job == job for step in known.kept_steps}
    found = {step.step: step for step in complete_steps(job, held)}
    if listed is None:
        return [
            found[number].summary(rpb.STEP_STATE_COMMITTED if number in kept else rpb.STEP_STATE_PROVISIONAL)
            for number in sorted(found)
        ]
    steps = {summary.step: summary for summary in listed}
    newest = max((s.step for s in listed if s.state == rpb.STEP_STATE_COMMITTED), default=-1)
    for number, step in found.items():
        if step.provisional and number > newest:
            steps[number] = step.summary(rpb.STEP_STATE_PROVISIONAL)
    return [steps[number] for number in sorted(steps)]
