"""What differs between vision encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resilient.models.tensor_parallel.linears import COLUMNS, ROWS


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between vision encoders, by the names transformers gives it.

    Args:
        module: Its folder in ``transformers.models``.
        embeddings, block, pretrained: Names of its classes.
        patch, positions, class_token: Attributes of its embeddings.
        pre_norm, post_norm: Norms of its model before and after the blocks.
        blocks: Name of its list of blocks in checkpoints.
        renames: Parts of tensor names in version 5 -> in checkpoints.
        arguments: What its blocks need in version 4 besides hidden state and mask.
        rows: The linear layer of its attention, in a block of version 5, whose inputs are the heads.
        attention_dropout: Its config's name of what says how much of attention is dropped.
    """

    module: str
    embeddings: str
    block: str
    pretrained: str
    patch: str
    positions: str
    class_token: str | None = None
    pre_norm: str | None = None
    post_norm: str | None = None
    rows: str = "self_attn.out_proj"
    attention_dropout: str = "attention_dropout"
    blocks: str = "encoder.layers"
    renames: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def rules(self) -> dict[str, str]:
        """Return how tensor-parallel devices divide the linear layers of a block, by their paths in it."""
        attention = self.rows.rpartition(".")[0]
        columns = (*(f"{attention}.{name}_proj" for name in "qkv"), "mlp.fc1")
        return {**dict.fromkeys(columns, COLUMNS), **dict.fromkeys((self.rows, "mlp.fc2"), ROWS)}


VISION_FAMILIES = {
    "vit": Family(
        module="vit",
        embeddings="ViTEmbeddings",
        block="ViTLayer",
        pretrained="ViTPreTrainedModel",
        patch="patch_embeddings.projection",
        positions="position_embeddings",
        class_token="cls_token",
        post_norm="layernorm",
        rows="attention.o_proj",
        attention_dropout="attention_probs_dropout_prob",
        blocks="encoder.layer",
        renames={
            "attention.q_proj": "attention.attention.query",
            "attention.k_proj": "attention.attention.key",
            "attention.v_proj": "attention.attention.value",
            "attention.o_proj": "attention.output.dense",
            "mlp.fc1": "intermediate.dense",
            "mlp.fc2": "output.dense",
        },
    ),
    "siglip_vision_model": Family(
        module="siglip",
        embeddings="SiglipVisionEmbeddings",
        block="SiglipEncoderLayer",
        pretrained="SiglipPreTrainedModel",
        patch="patch_embedding",
        positions="position_embedding.weight",
        post_norm="post_layernorm",
    ),
    "clip_vision_model": Family(
        module="clip",
        embeddings="CLIPVisionEmbeddings",
        block="CLIPEncoderLayer",
        pretrained="CLIPPreTrainedModel",
        patch="patch_embedding",
        positions="position_embedding.weight",
        class_token="class_embedding",
        pre_norm="pre_layrnorm",
        arguments={"causal_attention_mask": None},
    ),
}
"""model_type -> how to cut it."""
