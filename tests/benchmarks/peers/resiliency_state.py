"""A state of CPU tensors for nvidia-resiliency-ext; in a module of its own, since pickle looks for it by name."""

from __future__ import annotations

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict

from .candidate import State


class CpuState(BasicTensorAwareStateDict):  # type: ignore[misc]  # the library is not in the dev environment
    """The library's own, without the demand that tensors are on a GPU, and without a device to return to."""

    def __init__(self, state: State) -> None:
        # Deliberately not the parent's: all that it does beyond this is to refuse.
        self.state_dict = state
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """They are where they belong."""
