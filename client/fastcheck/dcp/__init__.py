"""torch.distributed.checkpoint into other nodes' RAM: docs/dcp.md.

    writer = FastCheckWriter(job="gpt")
    dcp.save(state_dict, checkpoint_id="step-100", storage_writer=writer)
    dcp.load(state_dict, checkpoint_id="step-100", storage_reader=FastCheckReader(job="gpt"))

`import fastcheck` does not import this package: torch.distributed.checkpoint takes its time.
"""

from .reader import FastCheckReader
from .writer import FastCheckWriter

__all__ = ["FastCheckReader", "FastCheckWriter"]
