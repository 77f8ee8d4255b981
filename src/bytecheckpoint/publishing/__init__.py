"""Publish versions of a model as differences, and follow them in place: a trainer and its rollout engines."""

from __future__ import annotations

from bytecheckpoint.publishing.follower import Follower, FollowReport
from bytecheckpoint.publishing.publisher import Publisher

__all__ = ["FollowReport", "Follower", "Publisher"]
