"""From logs to figures: latencies, hit rates, stalls, load against capacity.

Definitions: TTFT = arrival to the end of the prefill step, service TTFT = start of the prefill step to its
end, TPOT = (t_last − t_first) / (n − 1) with n = 1 excluded, service time = start of the prefill step to the
last token, E2E = arrival to the last token = queue time + service time. Percentiles
interpolate linearly between the two nearest ranks (NumPy's `linear`). A figure without a single sample is
null, never NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from .cells import CellKey
from .logs import IterationLog, RequestLog
from .slo import Condition, SloResult, judge

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CellSummary", "Distribution", "IterationLog", "RequestLog", "distribution", "load", "summarize"]


class Distribution(msgspec.Struct, frozen=True):
    """Mean and percentiles of a sample; all null where the sample is empty."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Load(msgspec.Struct, frozen=True):
    """Offered load against what was served.

    `overload_factor` is the offered over the served rate. It is given only when the run was OVERLOADED: it is
    above 1, and when the last request arrived, at least one full batch (`max_num_seqs`) was still waiting.
    Without that rule the last request's own service time would look like overload in a short trace.
    """

    offered_requests_per_s: float | None = None
    served_requests_per_s: float | None = None
    waiting_at_last_arrival: int | None = None
    overload_factor: float | None = None


class CellSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a policy with one expert cache on one machine at one rate.

    Null: not defined or not run; `status` and `notes` say why.
    """

    policy: str
    expert_cache: str  # as asked for: "24GB", "0.25", "96slots"
    expert_cache_bytes: int | None
    hardware: str = ""  # name of the profile
    rate_per_s: float | None = None  # asked for; null: the trace's own
    status: str  # OK · OVERLOADED … · INACTIVE: … · DOES NOT FIT: … · NOT RUN: …
    requests: int = 0  # finished and counted
    iterations: int = 0  # counted steps
    ttft_s: Distribution = Distribution()
    ttft_service_s: Distribution = Distribution()
    queue_s: Distribution = Distribution()
    service_s: Distribution = Distribution()
    tpot_s: Distribution = Distribution()
    e2e_s: Distribution = Distribution()
    hit_rate: float | None = None
    hit_rate_prefill: float | None = None
    hit_rate_decode: float | None = None
    late_rate: float | None = None
    hit_rate_by_layer_prefill: tuple[float | None, ...] = ()
    hit_rate_by_layer_decode: tuple[float | None, ...] = ()
    prefetch_bytes: int | None = None
    prefetch_useful_bytes: int | None = None
    prefetch_wasted_bytes: int | None = None  # moved and not used: evicted, dropped, or left over at the end
    demand_bytes: int | None = None
    stall_share: float | None = None  # of the counted steps' time, compute waiting for demand loads
    search_wait_share: float | None = None
    compute_share: float | None = None
    link_busy_share: float | None = None
    search_late_share: float | None = None
    throughput_tokens_per_s: float | None = None  # output tokens
    load: Load = Load()
    slo: SloResult | None = None  # null: none was asked for
    peak_memory_bytes: int | None = None
    peak_memory_by_purpose: dict[str, int] = {}
    simulated_s: float | None = None
    wall_s: float | None = None
    counters: dict[str, int] = {}
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> CellKey:
        """What tells the cell from the others of its grid."""
        return CellKey(self.policy, self.expert_cache, self.hardware, self.rate_per_s)

    @property
    def ran(self) -> bool:
        """Whether the cell was run to its end."""
        return not self.status.startswith(("INACTIVE", "DOES NOT FIT", "NOT RUN"))


def distribution(sample: NDArray[np.float64] | None) -> Distribution:
    """Mean and linear percentiles of a one-dimensional sample, NaN left out; None: undefined."""
    if sample is None:
        return Distribution()
    sample = sample[~np.isnan(sample)]
    if sample.size == 0:
        return Distribution()
    p50, p90, p99 = np.percentile(sample, (50, 90, 99), method="linear")
    return Distribution(float(sample.mean()), float(p50), float(p90), float(p99))


def _share(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole > 0 else None


def load(requests: RequestLog, max_num_seqs: int) -> Load:
    """Offered load, served load and overload of the counted requests."""
    rows = requests.table()
    rows = rows[rows["counted"]]
    if len(rows) < 2:
        return Load()
    first, last = float(rows["arrival_s"].min()), float(rows["arrival_s"].max())
    makespan = float(rows["finished_s"].max()) - first
    # n requests span n − 1 gaps.
    offered = _share(len(rows) - 1, last - first)
    served = _share(len(rows), makespan)
    waiting = int(np.count_nonzero(rows["admitted_s"] > last))
    factor = _share(offered, served) if offered and served else None
    overloaded = factor is not None and factor > 1.0 and waiting >= max_num_seqs
    return Load(offered, served, waiting, factor if overloaded else None)


def summarize(
    *,
    key: CellKey,
    expert_cache_bytes: int,
    requests: RequestLog,
    iterations: IterationLog,
    counters: Mapping[str, int],
    per_layer: Mapping[str, NDArray[np.int64]],
    memory_bytes: Mapping[str, int],
    busy_s: Mapping[str, float],
    devices: int,
    simulated_s: float | None,
    counted_s: float,
    wall_s: float | None,
    max_num_seqs: int,
    hit_rate_defined: bool,
    offline: bool,
    ttft_defined: bool = True,
    slo: tuple[Condition, ...] = (),
    notes: tuple[str, ...] = (),
) -> CellSummary:
    """The figures of one finished run.

    `counters`, `per_layer` and `busy_s` are of the last `counted_s` seconds, without the warm-up.
    "wasted_bytes" includes what was left unused at the end; `per_layer` has "activated" and "hits", [2, L],
    prefill first; `memory_bytes` is the peak per purpose; `busy_s["link"]` sums the busy seconds of the
    links of all `devices`. Steps count from the admission of the first counted request on, so that a
    warm-up is left out of every rate. In an offline run there is no queue: queue time and load are null,
    and TTFT is service TTFT. `ttft_defined`: false where the routing has no prefill.
    """
    rows = requests.table()
    rows = rows[rows["counted"]]
    steps = iterations.table()
    begin = float(rows["admitted_s"].min()) if len(rows) else 0.0
    steps = steps[steps["start_s"] >= begin] if len(rows) else steps[:0]
    prefill = steps["phase"] == "prefill"
    span = float((steps["end_s"] - steps["start_s"]).sum())
    samples = _samples(rows, offline, ttft_defined)
    figures = {metric: distribution(sample) for metric, sample in samples.items()}
    first_s = begin if offline or not len(rows) else float(rows["arrival_s"].min())
    last_s = float(rows["finished_s"].max()) if len(rows) else 0.0
    offered = Load() if offline else load(requests, max_num_seqs)

    def total(name: str) -> float:
        return float(steps[name].sum())

    def hit_rate(chosen: Any = slice(None)) -> float | None:
        hits, activated = steps["hits"][chosen].sum(), steps["activated"][chosen].sum()
        return _share(hits, activated) if hit_rate_defined else None

    def by_layer(phase: int) -> tuple[float | None, ...]:
        if not hit_rate_defined:
            return ()
        pairs = zip(per_layer["hits"][phase].tolist(), per_layer["activated"][phase].tolist(), strict=True)
        return tuple(_share(hits, activated) for hits, activated in pairs)

    return CellSummary(
        policy=key.policy,
        expert_cache=key.expert_cache,
        expert_cache_bytes=expert_cache_bytes,
        hardware=key.hardware,
        rate_per_s=key.rate_per_s,
        status="OK" if offered.overload_factor is None else f"OVERLOADED {offered.overload_factor:.3g}x",
        requests=len(rows),
        iterations=len(steps),
        ttft_s=figures["ttft"],
        ttft_service_s=figures["ttft_service"],
        queue_s=figures["queue"],
        service_s=figures["service"],
        tpot_s=figures["tpot"],
        e2e_s=figures["e2e"],
        hit_rate=hit_rate(),
        hit_rate_prefill=hit_rate(prefill),
        hit_rate_decode=hit_rate(~prefill),
        late_rate=_share(total("late"), total("activated")) if hit_rate_defined else None,
        hit_rate_by_layer_prefill=by_layer(0),
        hit_rate_by_layer_decode=by_layer(1),
        prefetch_bytes=counters["prefetch_bytes"],
        prefetch_useful_bytes=counters["useful_bytes"],
        prefetch_wasted_bytes=counters["wasted_bytes"],
        demand_bytes=int(steps["demand_bytes"].sum()),
        stall_share=_share(total("stall_s"), span),
        search_wait_share=_share(total("search_wait_s"), span),
        compute_share=_share(total("compute_s"), span),
        link_busy_share=_share(busy_s["link"], counted_s * devices),
        search_late_share=_share(counters["late_searches"], counters["searches"]),
        throughput_tokens_per_s=_share(float(rows["output_tokens"].sum()), last_s - begin),
        load=offered,
        slo=judge(slo, figures, samples, len(rows), last_s - first_s) if slo else None,
        peak_memory_bytes=sum(memory_bytes.values()),
        peak_memory_by_purpose=dict(memory_bytes),
        simulated_s=simulated_s,
        wall_s=wall_s,
        counters=dict(counters),
        notes=notes,
    )


def _samples(rows: Any, offline: bool, ttft_defined: bool) -> dict[str, NDArray[np.float64] | None]:
    """Seconds per counted request and metric; NaN where a request has none, None where no request has."""
    arrival, admitted, first = rows["arrival_s"], rows["admitted_s"], rows["first_token_s"]
    finished, further = rows["finished_s"], rows["output_tokens"] - 1
    since = admitted if offline else arrival
    tpot = np.divide(finished - first, further, out=np.full(len(rows), np.nan), where=further > 0)
    return {
        "ttft": first - since if ttft_defined else None,
        "ttft_service": first - admitted if ttft_defined else None,
        "queue": None if offline else admitted - arrival,
        "service": finished - admitted,
        "tpot": tpot,
        "e2e": finished - since,
    }
