"""The layout algebra: how caches lie in memory, and which bytes to move between two of them. Pure."""

from __future__ import annotations

from kvmsgr.layout.bounds import check_bounds
from kvmsgr.layout.context import context_template, describe_context
from kvmsgr.layout.cursor import PageCursor, PageWrites, page_array
from kvmsgr.layout.geometry import DescribedGroup, describe_cache, describe_group, number_signals
from kvmsgr.layout.match import check_contexts, check_groups
from kvmsgr.layout.pairing import build_templates
from kvmsgr.layout.regions import RegionRange
from kvmsgr.layout.sharding import Balance, Share, check_covered, common_part, divide, head_share
from kvmsgr.layout.template import PageSteps, Template

__all__ = [
    "Balance",
    "DescribedGroup",
    "PageCursor",
    "PageSteps",
    "PageWrites",
    "RegionRange",
    "Share",
    "Template",
    "build_templates",
    "check_bounds",
    "check_contexts",
    "check_covered",
    "check_groups",
    "common_part",
    "context_template",
    "describe_cache",
    "describe_context",
    "describe_group",
    "divide",
    "head_share",
    "number_signals",
    "page_array",
]
