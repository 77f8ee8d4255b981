"""Imports of the template process before it forks the ranks of test worlds. None of them may start a thread."""

import gc

import hypothesis  # noqa: F401
import pyarrow.compute  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.distributed as dist  # noqa: F401
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor
import torch.distributed.tensor.parallel
import torch.nn.parallel
import torch.profiler  # noqa: F401

import bytecheckpoint.collectives.store_collective
import bytecheckpoint.dataloader
import bytecheckpoint.loading
import bytecheckpoint.manager
import bytecheckpoint.opening
import bytecheckpoint.saving
import bytecheckpoint.storage.testing
import bytecheckpoint.tools.verification  # noqa: F401

gc.freeze()  # no collection in a rank visits, and so copies, what was imported here
