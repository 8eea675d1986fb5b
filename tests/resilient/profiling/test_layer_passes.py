"""A model can be run at those tensor-parallel degrees at which all of its layers can."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from resilient.models.multimodal.module import MultimodalModule
from resilient.profiling.layer_passes import tensor_degrees
from tests.resilient.small import make_job


def text_config(**changes: Any) -> LlamaConfig:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 16}
    return LlamaConfig(**{**sizes, **heads, "bos_token_id": None, "eos_token_id": None, **changes})


@pytest.mark.parametrize(
    ("changes", "degrees", "undivided"),
    [
        ({}, (1, 2, 4), "8 devices cannot divide the 4 key-value heads of layer 'llm.block.0' evenly"),
        ({"num_key_value_heads": 8}, (1, 2, 4, 8), ""),
        ({"vocab_size": 3, "pad_token_id": 0}, (1, 2), "there is not a row for each of 4 devices in "
         "'embed_tokens.weight' of layer 'llm.embed'"),
        ({"attention_dropout": 0.1}, (1,), "devices cannot divide layer 'llm.block.0', whose attention has dropout "
         "(attention_dropout is not 0)"),
    ],
)  # fmt: skip
def test_degrees_are_those_that_all_layers_can_be_run_at(
    changes: dict[str, Any], degrees: tuple[int, ...], undivided: str
) -> None:
    job = make_job(model=MultimodalModule(encoders={}, language_model=text_config(**changes)))
    assert tensor_degrees(job.model, job.layouts()) == (degrees, undivided)


def test_model_without_rules_has_one_device_for_each_microbatch() -> None:
    job = make_job()
    told = "no rule is known by which devices divide layer 'embed'"
    assert tensor_degrees(job.model, job.layouts()) == ((1,), told)
