"""torch.distributed.checkpoint into other nodes' RAM: docs/dcp.md.

    writer = FastCheckWriter(job="gpt")
    dcp.save(state_dict, checkpoint_id="step-100", storage_writer=writer)
    dcp.load(state_dict, checkpoint_id="step-100", storage_reader=FastCheckReader(job="gpt"))

Only this package imports torch.distributed; `import fastcheck` does not import this package.
"""

from .reader import FastCheckReader
from .writer import FastCheckWriter

__all__ = ["FastCheckReader", "FastCheckWriter"]
