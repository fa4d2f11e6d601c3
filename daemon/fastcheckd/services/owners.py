"""Whether the trainer that calls may use a job: asked before every call that touches one."""

from __future__ import annotations

from fastcheck_proto.v1 import registry_pb2 as rpb

from ..registry.client import RegistryClient
from ..registry.owners import check_use
from ..view import ViewFollower
from .admission import CALLER

LOOKUP_TIMEOUT_S = 10.0


class Owners:
    """Whose jobs are, by the newest view, and for jobs that it does not name by the registry.

    Args:
        enforced: whether there are identities at all; without certificates everybody is one.
    """

    def __init__(self, view: ViewFollower, registry: RegistryClient, *, enforced: bool) -> None:
        self._view = view
        self._registry = registry
        self._enforced = enforced

    async def check(self, job: str) -> None:
        """Go on if the caller may use the job, or nobody has it yet.

        An owner never changes while a job is known, so an old view is as good as a new one.

        Raises:
            DeniedError: the job is another one's.
            NoQuorumError: whose it is nobody can say now.
        """
        if not self._enforced:
            return
        owner = self._view.owner(job)
        if owner is None:
            found = await self._registry.lookup(rpb.LookupRequest(job=job, rank=0), LOOKUP_TIMEOUT_S)
            owner = found.owner
        if owner:
            check_use(str(CALLER.get()), owner, job)
