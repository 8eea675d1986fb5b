"""A model can be run at those tensor-parallel degrees at which all of its layers can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from resilient.models.multimodal.module import MultimodalModule
from resilient.profiling.degree_passes import tensor_degrees
from resilient.profiling.profiler import draw_samples, measure
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.plan import PlanningProblem
from resilient.templates.search.partition import plan_templates
from tests.resilient.profiling.test_profiler import flops
from tests.resilient.small import make_job


class Texts:
    """Of four tokens each."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.arange(1, 5), "labels": torch.arange(2, 6)}

    def num_targets(self, index: int) -> int:
        return 4


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


@pytest.mark.parametrize(("latency_ms", "degrees"), [(0.0, {4}), (1e4, {1})], ids=["fast", "slow"])
def test_stages_have_several_devices_where_exchanges_are_fast(latency_ms: float, degrees: set[int]) -> None:
    """Pipelines of a node of four devices, and of little to do at a time."""
    model = MultimodalModule(encoders={}, language_model=text_config(num_hidden_layers=4))
    job, link = make_job(model=model, dataset=Texts()), Link(latency_ms=latency_ms)
    profile = measure(job, job.layouts(), draw_samples(job), on_layer=lambda _: None, timed=flops, link=link)
    problem = PlanningProblem(profile=profile, num_microbatches=2, cluster=Cluster(devices_per_node=4), max_failures=1)
    templates = plan_templates(problem, 2).of(1)
    assert {stage.num_devices for template in templates for stage in template.stages} == degrees
