"""Compute time of one iteration's parts: a roofline over a profile's peak figures and their efficiencies.

Every product is charged max(FLOPs / reachable FLOP/s, bytes read / reachable bytes/s); products that follow
one another are added. Dense weights and KV are bf16; experts are read in their own dtype and multiplied at
the bf16 rate. Times assume that no copy runs; the caller applies the profile's `copy_slowdown`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..calibration.profile import HardwareProfile
from ..errors import SettingError
from ..policy.models import BF16_BYTES, ExpertDtype, ModelSpec
from ..serving.settings import PeerLink

# Kernels of one layer beside its routed experts in a fused engine: two norms with their residual additions,
# query-key-value product, rotary embedding with the KV write, attention, output product, router product,
# top-k. Shared experts add none, and a dense layer has its feed-forward in place of the router. ASSUMED.
LAYER_LAUNCHES = 8
# Embedding look-up, final norm, head product, sampling.
ITERATION_LAUNCHES = 4


class ComputeModel:
    """Times in seconds for one model, expert dtype and profile. Pure: same arguments, same floats.

    Expert (layer, j) is on device (layer·J + j) mod G, devices work side by side. Dense work runs on device
    0, or on every device for its own requests; then the largest time counts, which is the caller's to take.
    """

    def __init__(
        self,
        model: ModelSpec,
        dtype: ExpertDtype,
        profile: HardwareProfile,
        *,
        peer_link: PeerLink = "nvlink",
    ) -> None:
        self._flop_s = 1.0 / (profile.peak_flops * profile.flops_efficiency)
        self._byte_s = 1.0 / (profile.memory_bandwidth * profile.memory_efficiency)
        self._launch_s = profile.kernel_launch_s
        self._model = model
        self._kv_layer_bytes = model.kv_bytes_per_token / model.decoder_layers
        self._shape = (model.layers, model.experts)
        self._dense_layers = model.decoder_layers - model.layers
        # Expert time for n > 0 tokens: max(n · flops, one read of the weights).
        self._expert_token_s = 2.0 * model.expert_parameters * self._flop_s
        self._expert_read_s = model.expert_bytes(dtype) * self._byte_s
        self._devices = profile.devices
        self._by_device, self._segments, self._layer_segments = _device_segments(
            model.layers, model.experts, profile.devices
        )
        # To the experts' devices and back, once per token and expert that is not on the token's own device.
        self._exchange_latency_s = self._exchange_token_s = 0.0
        if profile.devices > 1:
            latency_s, bandwidth = _way(profile, peer_link)
            remote_share = (profile.devices - 1) / profile.devices
            row_bytes = model.hidden_size * BF16_BYTES
            self._exchange_latency_s = 2.0 * latency_s
            self._exchange_token_s = 2.0 * model.top_k * remote_share * row_bytes / bandwidth

    def attention_s(self, tokens: int, context_tokens: int, *, score_pairs: int | None = None) -> float:
        """One MoE layer before its routed experts: attention, norms, router, shared experts.

        tokens: new tokens of the step, summed over requests.
        context_tokens: KV positions read from memory, summed over requests. Decode: Σ context length, the new
        token included. Prefill: Σ prompt length, since a fused kernel reads each key and value about once.
        score_pairs: query-key pairs. Decode: equal to `context_tokens`, the default. Prefill: Σ n·(n + 1)/2.
        """
        return self._layer_s(self._model.moe_layer_parameters, tokens, context_tokens, score_pairs)

    def iteration_overhead_s(
        self, tokens: int, sampled_rows: int, context_tokens: int = 0, *, score_pairs: int | None = None
    ) -> float:
        """What an iteration costs beside its MoE layers: embedding, layers without experts, head, sampling.

        sampled_rows: rows for which logits are computed, one per request. `context_tokens` and `score_pairs`
        are those of `attention_s`; they matter only to models that have layers without experts.
        """
        model = self._model
        embedding_s = 2.0 * tokens * model.hidden_size * BF16_BYTES * self._byte_s
        head_s = self._product_s(model.head_parameters, sampled_rows)
        dense_s = 0.0
        if self._dense_layers:
            layer_s = self._layer_s(model.dense_layer_parameters, tokens, context_tokens, score_pairs)
            dense_s = self._dense_layers * layer_s
        return embedding_s + head_s + dense_s + ITERATION_LAUNCHES * self._launch_s

    def expert_s(self, token_counts: NDArray[np.integer]) -> NDArray[np.float64]:
        """Routed experts of every layer, each layer as one grouped launch.

        token_counts: int[L, J], tokens routed to each expert. Returns float64[L]: the slowest device's sum,
        plus the launch; 0 for a layer without tokens.
        """
        if token_counts.shape != self._shape:
            raise ValueError(f"token counts have shape {token_counts.shape}, the model {self._shape}")
        times = np.minimum(token_counts, 1) * self._expert_read_s
        np.maximum(times, token_counts * self._expert_token_s, out=times)
        sums = np.add.reduceat(times.ravel().take(self._by_device), self._segments)
        slowest: NDArray[np.float64] = np.maximum.reduceat(sums, self._layer_segments)
        slowest += (slowest > 0.0) * self._launch_s
        return slowest

    def experts_time_s(self, layer: int, experts: Sequence[int], counts: Sequence[int]) -> float:
        """Some experts of one layer (a chunk) in one grouped launch; 0 when none has tokens.

        experts: numbers j within the layer; counts: their token counts, in the same order.
        """
        sums = [0.0] * self._devices
        first = layer * self._model.experts
        for j, count in zip(experts, counts, strict=True):
            if count > 0:
                sums[(first + j) % self._devices] += max(count * self._expert_token_s, self._expert_read_s)
        slowest = max(sums)
        return slowest + self._launch_s if slowest > 0.0 else 0.0

    def gate_s(self, tokens: int) -> float:
        """Another layer's router applied to this layer's hidden states: one product and its launch."""
        return self._product_s(self._model.hidden_size * self._model.experts, tokens) + self._launch_s

    def exchange_s(self, tokens: int) -> float:
        """Sending one layer's activations to the experts' devices and back; 0 with one device.

        tokens: of the device that sends the most: all with dense weights on device 0, else its own requests'.
        Each way costs one latency and, per token and activated expert, a bf16 row over the sender's peer link
        for the share (G − 1)/G of experts that live elsewhere. Over PCIe a row goes to the host and on from
        there: both hops cost the host link's latency and bandwidth, one after the other.
        """
        return self._exchange_latency_s + tokens * self._exchange_token_s

    def _layer_s(self, parameters: int, tokens: int, context_tokens: int, score_pairs: int | None) -> float:
        pairs = context_tokens if score_pairs is None else score_pairs
        kv_s = (
            (context_tokens + tokens) * self._kv_layer_bytes * self._byte_s
        )  # old rows read, new ones written
        scores_s = max(pairs * self._model.attention_pair_flops * self._flop_s, kv_s)
        return self._product_s(parameters, tokens) + scores_s + LAYER_LAUNCHES * self._launch_s

    def _product_s(self, parameters: int, rows: int) -> float:
        """One pass of `rows` rows through bf16 weights."""
        return max(2.0 * parameters * rows * self._flop_s, parameters * BF16_BYTES * self._byte_s)


def _way(profile: HardwareProfile, peer_link: PeerLink) -> tuple[float, float]:
    """Latency and bandwidth from one device to another."""
    if peer_link == "pcie":
        return 2.0 * profile.link_latency_s, profile.link_bandwidth / 2.0
    if profile.peer_latency_s is None or profile.peer_bandwidth is None:
        raise SettingError(
            f"profile {profile.name}: several devices need peer_latency_s and peer_bandwidth, "
            "or --peer-link pcie."
        )
    return profile.peer_latency_s, profile.peer_bandwidth


def _device_segments(
    layers: int, experts: int, devices: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Expert ids grouped by (layer, device), where each group starts, and where each layer's groups start.

    Groups without experts (J < G) are left out, as reduceat needs.
    """
    ids = np.arange(layers * experts)
    group = (ids // experts) * devices + ids % devices
    order = np.argsort(group, kind="stable")
    groups, starts = np.unique(group[order], return_index=True)
    layer_starts = np.searchsorted(groups // devices, np.arange(layers))
    return order.astype(np.intp), starts.astype(np.intp), layer_starts.astype(np.intp)
