"""What a trainer says of a state that all ranks hold alike: this rank's part, and what it found in the whole. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..errors import InvalidRequestError
from ..registry import commands, model, shared_state


@dataclass(frozen=True)
class Shared:
    """A rank's part, and the digests that are compared with those of other ranks."""

    part: pb.SharedPart
    digests: tuple[pb.PartDigest, ...]

    @classmethod
    def of(cls, seal: tpb.SealSaveRequest | tpb.PushSeal) -> Shared | None:
        """As the trainer says when it seals; None if the state is the rank's own."""
        return cls(seal.shared, tuple(seal.shared_digests)) if seal.HasField("shared") else None

    def check(self, state_bytes: int) -> None:
        """Refuse now what the registry would refuse after everything was sent.

        Raises:
            InvalidRequestError: the part does not lie in the rank's state, or the digests are none.
        """
        try:
            commands.check_shared_part(self.part, state_bytes)
            shared_state.check_digests({each.part: each.digest for each in self.digests})
        except model.MalformedError as error:
            raise InvalidRequestError(str(error)) from None
