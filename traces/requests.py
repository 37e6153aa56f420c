"""Request traces: when each request arrives, and how many prompt and output tokens it has.

    trace = open_requests("AzureLLMInferenceTrace_conv.csv")
    chosen = select_requests(trace, num_requests=256)
    print(len(chosen), chosen.span_s)
    for request in chosen: ...

Formats are told apart by their columns (`request_formats`), containers by their first bytes
(`request_files`); docs/request-formats.md describes them.
Everything streams, except with `sort=True`, which keeps the columns in memory (32 bytes a request, and the
prompts where they are read).
"""

from __future__ import annotations

from .request_selection import Request, RequestSelection, select_requests
from .request_stream import MAX_SPAN_S
from .request_trace import RequestBatch, RequestTrace, open_requests

__all__ = [
    "MAX_SPAN_S",
    "Request",
    "RequestBatch",
    "RequestSelection",
    "RequestTrace",
    "open_requests",
    "select_requests",
]
