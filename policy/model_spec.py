"""What a simulation or an engine must know of a Mixture-of-Experts model: counts, no weights."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from ..errors import SettingError

ExpertDtype = Literal["bf16", "fp8", "int4", "mxfp4"]
EXPERT_DTYPES: tuple[ExpertDtype, ...] = get_args(ExpertDtype)

# Eighths of a bit per parameter, scales included. bf16: 16 bits. fp8: 8 bits (one scale per tensor, not
# counted). int4: 4 bits and an fp16 scale per group of 128, 4.125 bits. mxfp4: 4 bits and an 8-bit scale per
# block of 32, 4.25 bits.
_EIGHTH_BITS: dict[ExpertDtype, int] = {"bf16": 128, "fp8": 64, "int4": 33, "mxfp4": 34}
BF16_BYTES = 2


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one MoE model. Counts are parameters unless a name says otherwise.

    `layers` (L) are the layers that have routed experts; `decoder_layers` are all of them. "Dense" is what is
    always resident: attention, norms, routers, shared experts, layers without experts, embedding, head.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    hidden_size: int
    expert_intermediate_size: int
    #: matrices of one routed expert (biases of experts, where a model has them, count as dense)
    expert_parameters: int
    #: everything but the matrices of the routed experts, exactly
    dense_parameters: int
    decoder_layers: int
    #: read by one MoE layer before its routed experts: attention, norms, router, shared experts
    moe_layer_parameters: int
    #: read by one layer without experts: attention, norms, feed-forward; 0 where the model has none
    dense_layer_parameters: int
    embedding_parameters: int
    #: read to produce logits; the same matrix as the embedding where `tied_head`
    head_parameters: int
    tied_head: bool
    #: FLOPs of one layer per query-key pair, scores and values: 2·heads·(key width + value width)
    attention_pair_flops: int
    #: bf16 keys and values (or the compressed MLA row) of one token, all decoder layers
    kv_bytes_per_token: int
    #: layers looked ahead (d)
    prefetch_distance: int
    prefetch_distance_evidence: str
    source: str
    #: what this description leaves out or takes as given; to be shown to the user
    notes: tuple[str, ...] = ()

    def expert_bytes(self, dtype: ExpertDtype) -> int:
        """Bytes of one routed expert in `dtype`, scales included, rounded up to a byte."""
        if dtype not in _EIGHTH_BITS:
            raise SettingError(
                f"expert dtype {dtype!r} is unknown. Choose one of {', '.join(EXPERT_DTYPES)}."
            )
        return -(-self.expert_parameters * _EIGHTH_BITS[dtype] // 64)

    def dense_bytes(self) -> int:
        """Bytes of the dense weights, always bf16."""
        return self.dense_parameters * BF16_BYTES

    def routed_experts(self) -> int:
        """Routed experts of the whole model, L·J."""
        return self.layers * self.experts

    def total_parameters(self) -> int:
        """All parameters."""
        return self.dense_parameters + self.routed_experts() * self.expert_parameters

    def active_parameters(self, *, input_embedding: bool = True) -> int:
        """Parameters that one token touches.

        Publishers differ on the input embedding, of which a token reads a single row: Mixtral, Qwen, Phi and
        OLMoE count all of it, DeepSeek-V2-Lite and gpt-oss none. A tied embedding is the head, and counts.
        """
        active = self.dense_parameters + self.layers * self.top_k * self.expert_parameters
        return active if input_embedding or self.tied_head else active - self.embedding_parameters
