"""Every setting of a run, simulated or real, checked in one place.

Flag, TOML key and field share one name: `--max-num-seqs`, `max_num_seqs = 8`, `settings.max_num_seqs`.
`settings_file` reads them.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import msgspec

from ..errors import SettingError, did_you_mean
from ..policy.cache_size import parse_bandwidth
from ..policy.model_spec import EXPERT_DTYPES, ExpertDtype
from .slo import parse_slo

#: dense weights and KV cache on device 0, or on every device, each with the KV cache of its own requests
Dense = Literal["device0", "replicated"]
DENSE: tuple[Dense, ...] = get_args(Dense)
#: what activations take between devices
PeerLink = Literal["nvlink", "pcie"]
PEER_LINKS: tuple[PeerLink, ...] = get_args(PeerLink)


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one run or grid; a SettingError names option, value and remedy."""

    trace: str  # path of a request trace
    model: str = "mixtral-8x7b"  # a name, or the path of a config.json
    hardware: tuple[str, ...] = ("rtx3090x6",)  # names, or paths of profiles
    set: tuple[str, ...] = ()  # figures of the profiles, changed: "link.bandwidth=55GB/s"
    host_memory: str | None = None  # in place of the profile's own; what does not fit is on the SSD
    dense: Dense = "device0"  # where dense weights and KV cache are
    peer_link: PeerLink = "nvlink"  # what activations take between devices
    policy: tuple[str, ...] = ("finemoe",)  # names of systems, or ("all",)
    expert_cache: tuple[str, ...] = ("24GB",)  # over all devices: bytes, a fraction of all experts, or slots
    expert_dtype: ExpertDtype = "bf16"
    routing: str = "synthetic"  # or the path of a routing trace
    backend: str = "sim"
    prompts: str | None = None  # file of prompts
    history: str | None = None  # routing trace of the same model: what policies know before the run
    source: Literal["file", "host"] = "file"  # where experts are read from
    bandwidth_limit: str | None = None  # of each device's loads: "2GB/s"
    pinned_memory: str | None = None  # at most so much host memory is pinned; None: all experts

    num_requests: int | Literal["all"] = 256
    sort: bool = False  # accept time stamps that go backward
    start: int = 0  # requests of the trace left out at its beginning
    sample: int | None = None  # draw that many of them at random
    time_scale: float = 1.0  # factor on the gaps between arrivals
    rate: tuple[float, ...] = ()  # requests per second, in place of the trace's own; excludes time_scale
    prompt_tokens: int | None = None  # in place of the trace's own
    output_tokens: int | None = None
    max_num_seqs: int = 8
    token_budget: int = 8192  # prompt tokens of one prefill step
    offline: bool = False  # one prompt after another, the store filled from 70 % of the requests
    warmup: int = 0  # requests served and not counted
    slo: str | None = None  # limits on latencies: "ttft_p90<2s,tpot_p90<0.2s"
    seed: int = 0

    prefetch_distance: int | None = None  # None: the model's own
    store_capacity: int = 1000  # expert maps
    frequency: Literal["run", "residency"] = "run"
    frequency_decay: float = 1.0
    preempt_scope: Literal["device", "all"] = "device"
    rank_prefill_by_tokens: bool = False

    decisions: int | Literal["all"] = 1000  # iterations whose events and commands are kept
    assumed: tuple[str, ...] = ()  # settings that nobody gave: their defaults are ASSUMED

    def __post_init__(self) -> None:
        for name in _FILES:
            given = getattr(self, name)
            for path in given if isinstance(given, tuple) else (given,):
                problem = None if path is None else path_problem(path)
                if problem:
                    raise _bad(name, repr(path[:60]), problem)
        for name in LISTS:
            values = [str(value) for value in getattr(self, name)]
            if (not values and name not in _EMPTY) or not all(values):
                raise _bad(name, ",".join(values), "Give one or more values with commas between them.")
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise _bad(name, ",".join(values), f"{twice[0]} stands there twice; name it once.")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise _bad(name, value, f"Choose {' or '.join(choices)}.{did_you_mean(value, choices)}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise _bad(name, value, f"Give a whole number of {least} or more.")
            most = MOST.get(name, MAX_INTEGER)
            if isinstance(value, int) and value > most:
                raise _bad(name, value, f"Give a whole number of at most {most}.")
        for name, numbers in (("time_scale", (self.time_scale,)), ("rate", self.rate)):
            for number in numbers:
                if not (math.isfinite(number) and number > 0):
                    raise _bad(name, number, "Give a number above 0.")
        if not 0 < self.frequency_decay <= 1:
            raise _bad("frequency_decay", self.frequency_decay, "Give a number above 0 and at most 1.")
        if self.rate and self.time_scale != 1:
            raise _bad("rate", ",".join(map(str, self.rate)), "It excludes --time-scale: give one of them.")
        if self.slo is not None:
            parse_slo(self.slo)
        if self.bandwidth_limit is not None:
            parse_bandwidth(self.bandwidth_limit, name="--bandwidth-limit")
        if self.pinned_memory is not None and (self.backend == "cpu" or self.source == "file"):
            raise SettingError(
                "--pinned-memory is of --backend cuda with --source host: nothing else is pinned. "
                "Leave it out."
            )
        if self.offline and (self.rate or self.time_scale != 1):
            raise SettingError(
                "--offline serves one prompt after another, so --rate and --time-scale mean nothing there. "
                "Leave them out."
            )


CHOICES: dict[str, tuple[str, ...]] = {
    "backend": ("sim", "cpu", "cuda"),
    "dense": DENSE,
    "expert_dtype": EXPERT_DTYPES,
    "frequency": ("run", "residency"),
    "peer_link": PEER_LINKS,
    "preempt_scope": ("device", "all"),
    "source": ("file", "host"),
}
#: Settings of the simulated world, and of real models: each means nothing in the other.
SIMULATED_ONLY = (
    "hardware",
    "set",
    "host_memory",
    "dense",
    "peer_link",
    "expert_dtype",
    "routing",
)
REAL_ONLY = ("prompts", "history", "source", "bandwidth_limit", "pinned_memory")
LEAST = {
    "num_requests": 1,
    "start": 0,
    "sample": 1,
    "prompt_tokens": 1,
    "output_tokens": 1,
    "max_num_seqs": 1,
    "token_budget": 1,
    "warmup": 0,
    "seed": 0,
    "prefetch_distance": 1,
    "store_capacity": 1,
    "decisions": 0,
}
MAX_INTEGER = 2**31 - 1
#: largest values; of other whole numbers 2³¹ - 1
MOST = {"store_capacity": 1_000_000, "prefetch_distance": 4096, "seed": 2**63 - 1}
# Settings whose defaults say something about the world; the defaults of the others change nothing.
ASSUMABLE = (
    "model",
    "hardware",
    "dense",
    "peer_link",
    "policy",
    "expert_cache",
    "expert_dtype",
    "routing",
    "source",
    "num_requests",
    "max_num_seqs",
    "token_budget",
    "seed",
    "prefetch_distance",
    "store_capacity",
    "frequency",
    "preempt_scope",
)
FIELDS: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(RunSettings)}
LISTS = ("policy", "expert_cache", "hardware", "rate", "set")
_EMPTY = ("rate", "set")  # lists that need no entry
_FILES = ("trace", "model", "hardware", "routing", "prompts", "history")  # names, or paths of files


def meaningless(backend: str) -> tuple[str, ...]:
    """Settings that mean nothing with this backend."""
    return REAL_ONLY if backend == "sim" else SIMULATED_ONLY


def settings_dict(settings: RunSettings) -> dict[str, Any]:
    """The settings that mean something, as plain values."""
    values: dict[str, Any] = msgspec.to_builtins(settings)
    return {name: value for name, value in values.items() if name not in meaningless(settings.backend)}


def flag(name: str) -> str:
    """The flag of a setting: `max_num_seqs` → `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def path_problem(path: str) -> str | None:
    """What makes a text no path, as a sentence, or None."""
    if not path:
        return "Give a name or a path."
    if "\0" in path:
        return "A path has no NUL character; correct it."
    try:
        parts = path.encode("utf-8").split(b"/")
    except UnicodeEncodeError:
        return "It is not UTF-8; rename the file."
    if max(map(len, parts)) > 255 or len(path) > 4095:
        return "That is too long for the name of a file; give a shorter path."
    return None


def _bad(name: str, value: object, remedy: str) -> SettingError:
    return SettingError(f"{flag(name)} is {value}. {remedy}")
