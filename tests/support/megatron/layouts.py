"""Layouts of Megatron-Core that share a model, by family; the first of each is one process."""

from __future__ import annotations

from dataclasses import replace

from tests.support.megatron.models import Layout

DENSE = (
    Layout(),
    Layout(tp=2, sequence=True),
    Layout(dp=2, distributed=False),
    Layout(pp=2),
    Layout(dp=4, buckets=300),
    Layout(tp=2, dp=2, buckets=500),
    Layout(pp=2, vpp=2, dp=2),
    Layout(tp=2, pp=2, distributed=False),
)
MOE = (
    Layout(moe=True),
    Layout(moe=True, tp=2, sequence=True),
    Layout(moe=True, ep=2, dp=2),
    Layout(moe=True, ep=2, dp=2, distributed=False),
    Layout(moe=True, ep=2, dp=4, buckets=400),
    Layout(moe=True, ep=4, dp=4),
    Layout(moe=True, pp=2, ep=2, dp=2),
    Layout(moe=True, tp=2, ep=2, dp=2, sequence=True, etp=1),
)
HALF = (
    Layout(bf16=True),
    Layout(bf16=True, tp=2, sequence=True, distributed=False),
    Layout(bf16=True, dp=2),
    Layout(bf16=True, pp=2, dp=2, overlap=True),
    Layout(bf16=True, tp=2, pp=2),
    Layout(bf16=True, dp=4, buckets=300, overlap=True),
)
HALF_MOE = (
    Layout(bf16=True, moe=True),
    Layout(bf16=True, moe=True, ep=2, dp=2),
    Layout(bf16=True, moe=True, ep=2, dp=4, overlap=True),
    Layout(bf16=True, moe=True, ep=4, dp=4, distributed=False),
    Layout(bf16=True, moe=True, tp=2, ep=2, dp=2, sequence=True, etp=1),
)
# SGD with momentum, which Megatron's distributed optimizer does not take.
_SGD = Layout(optimizer="sgd", distributed=False)
SGD = (
    _SGD,
    replace(_SGD, tp=2, sequence=True),
    replace(_SGD, dp=2),
    replace(_SGD, pp=2),
    # With two stages Megatron takes virtual ones only where communication is overlapped: its messages both ways are between
    # the same two ranks. As long as there are no more micro-batches than stages none of them pass each other.
    replace(_SGD, pp=2, vpp=2, dp=2),
    replace(_SGD, tp=2, pp=2),
)
SGD_MOE = (replace(_SGD, moe=True, ep=2, dp=2), replace(_SGD, moe=True, ep=4, dp=4))
SGD_HALF = (replace(_SGD, bf16=True, tp=2), replace(_SGD, bf16=True, dp=2))
