"""Save and load by torch.distributed.checkpoint, in the places of its FileSystemWriter and FileSystemReader.

dcp.save(state_dict, storage_writer=Writer("runs/a/step_00000100"))
dcp.load(state_dict, storage_reader=Reader("runs/a/step_00000100"))
"""

from bytecheckpoint.integrations.dcp.storage import DcpReader as Reader
from bytecheckpoint.integrations.dcp.storage import DcpWriter as Writer

__all__ = ["Reader", "Writer"]
