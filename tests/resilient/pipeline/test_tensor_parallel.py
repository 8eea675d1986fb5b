"""Stages of tensor-parallel devices compute what one process does, in pipelines of any mixture of degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SiglipVisionConfig,
    ViTConfig,
)

from resilient.models.multimodal.encoder import EncoderModule
from resilient.models.multimodal.generator import GeneratorModule
from resilient.models.multimodal.module import MultimodalModule
from resilient.runtime.batches import Batches
from resilient.runtime.job import Job
from resilient.templates.common.byte_intervals import NO_BYTES
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.resilient.pipeline.test_executor_ranks import (
    LIMIT,
    in_one_process,
    installed,
    one_step,
    three_steps,
    write_initial,
)
from tests.resilient.pipeline.test_sharded_stage import held_gradient
from tests.resilient.ranks import as_threads
from tests.resilient.small import make_job, make_plan, make_profile

VOCABULARY = 19
"""No degree divides it."""

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 26,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**TEXT, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(**TEXT, tie_word_embeddings=True),
    "llama, biased": LlamaConfig(**TEXT, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "mistral, with a window": MistralConfig(**TEXT, sliding_window=3),
    "qwen2": Qwen2Config(**TEXT),
    "qwen3": Qwen3Config(**TEXT, head_dim=6),
}


VISION: dict[str, Any] = {
    "hidden_size": 12,
    "intermediate_size": 18,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 1,
    "initializer_range": 0.2,
}
PLACEHOLDER = VOCABULARY - 1
ENCODERS: dict[str, PretrainedConfig] = {
    "vit": ViTConfig(**VISION, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "siglip": SiglipVisionConfig(**VISION),
    "clip": CLIPVisionConfig(**VISION),
}


class Pictures:
    """A picture of one to six patches, or none, before a few tokens.

    Args:
        drawn: It is to be made, so its patches are targets as well.
    """

    def __init__(self, *, drawn: bool = False) -> None:
        self._drawn = drawn

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rows, columns = (index % 4, 1 + index % 2)
        text = torch.tensor([(5 * index + k) % (VOCABULARY - 2) + 1 for k in range(4)])
        tokens = torch.cat([torch.full((rows * columns,), PLACEHOLDER), text])
        sample = {"input_ids": tokens[:-1], "labels": tokens[1:].where(tokens[1:] != PLACEHOLDER, -100)}
        if not rows:
            return sample
        pixels = torch.randn(1, 4 * rows, 4 * columns, generator=torch.Generator().manual_seed(index))
        return {**sample, "vision.pixels": pixels.double()}

    def num_targets(self, index: int) -> int:
        num_patches = index % 4 * (1 + index % 2)
        return (4 if index % 4 else 3) + self._drawn * num_patches


class Texts:
    """Sequences of several lengths: those of a microbatch are padded.

    Args:
        unshifted: The labels are the tokens that are read.
    """

    def __init__(self, *, unshifted: bool) -> None:
        self._unshifted = unshifted

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.tensor([(7 * index + 3 * k * k) % (VOCABULARY - 1) + 1 for k in range(4 + index % 4)])
        return {"input_ids": tokens[:-1], "labels": tokens[:-1] if self._unshifted else tokens[1:]}

    def num_targets(self, index: int) -> int:
        return 3 + index % 4 - self._unshifted


def job_of(config: PretrainedConfig, *, unshifted: bool = False, **changes: Any) -> Job:
    labels = "unshifted" if unshifted else "shifted"
    model = MultimodalModule(encoders={}, language_model=config, labels=labels)
    return make_job(model=model, dataset=Texts(unshifted=unshifted), **changes)


def pipeline(
    cuts: Sequence[int], num_microbatches: int, first_node: int, *degrees: int, shard: int = 1, recomputed: int = 0
) -> Pipeline:
    """A pipeline with a node for each stage, of so many tensor-parallel devices each."""
    stages = tuple(
        StageSpec(
            first_layer=first, end_layer=end, node_index=index, num_devices=degree * shard, shard=shard,
            recomputed_layers=min(recomputed, end - first), forward_ms=0.3, backward_ms=0.7,
        )
        for index, ((first, end), degree) in enumerate(zip(pairwise(cuts), degrees, strict=True))
    )  # fmt: skip
    template = PipelineTemplate(num_nodes=len(stages), stages=stages)
    nodes = tuple(range(first_node, first_node + len(stages)))
    return Pipeline(template=template, nodes=nodes, num_microbatches=num_microbatches)


def pictures_job(config: PretrainedConfig, **changes: Any) -> Job:
    encoder = EncoderModule(config, placeholder_id=PLACEHOLDER)
    model = MultimodalModule(encoders={"vision": encoder}, language_model=FAMILIES["llama"], labels="shifted")
    return make_job(model=model, dataset=Pictures(), **changes)


PLANS = {
    "1 stage of 2": Plan(pipelines=(pipeline((0, 6), 8, 0, 2),)),
    "2 stages of 2, and 1": Plan(pipelines=(pipeline((0, 2, 6), 5, 0, 2, 2), pipeline((0, 6), 3, 2, 1))),
    "stages of 1, 2 and 1, and of 2 and 1": Plan(
        pipelines=(pipeline((0, 1, 4, 6), 5, 0, 1, 2, 1), pipeline((0, 3, 6), 3, 3, 2, 1))
    ),
    "layers that run again": Plan(pipelines=(pipeline((0, 3, 6), 8, 0, 2, 2, recomputed=3),)),
    "2 tensor parallel, 2 sharded": Plan(pipelines=(pipeline((0, 6), 3, 0, 2), pipeline((0, 6), 5, 1, 1, shard=2))),
    "a sharded node, 2 tensor-parallel nodes": Plan(
        pipelines=(pipeline((0, 6), 4, 0, 1, shard=2), pipeline((0, 3, 6), 4, 1, 2, 2))
    ),
}


def check_gradients(job: Job, plan: Plan, path: Path) -> None:
    expected, expected_loss = in_one_process(job, Batches(job))
    write_initial(job, path)
    results = as_threads(
        len(plan.slots), lambda rank, address: one_step(installed(job, plan, rank, address, path), Batches(job))
    )
    assert sum(loss for loss, _ in results) == pytest.approx(expected_loss, rel=1e-11)
    for _, states in results:
        for name, state in states.items():
            whole = torch.zeros(state.layout.num_trainable, dtype=torch.float64)
            for entry in state.layout.entries:
                if entry.trainable:
                    gradient = expected.layer(name).get_parameter(entry.name).grad
                    assert gradient is not None
                    whole[entry.offset : entry.offset + entry.numel] = entry.stored(gradient)
            torch.testing.assert_close(state.grad, held_gradient(state, whole), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
def test_gradients_of_all_families_equal_those_of_one_process(config: PretrainedConfig, tmp_path: Path) -> None:
    check_gradients(job_of(config), PLANS["1 stage of 2"], tmp_path)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_gradients_of_mixtures_equal_those_of_one_process(plan: Plan, tmp_path: Path) -> None:
    check_gradients(job_of(FAMILIES["llama, tied"], unshifted=True), plan, tmp_path)


@pytest.mark.parametrize("config", ENCODERS.values(), ids=ENCODERS.keys())
def test_gradients_of_encoders_equal_those_of_one_process(config: PretrainedConfig, tmp_path: Path) -> None:
    check_gradients(pictures_job(config), Plan(pipelines=(pipeline((0, 10), 8, 0, 2),)), tmp_path)


@pytest.mark.parametrize(
    "cuts", [(0, 2, 10), (0, 4, 10), (0, 5, 10)], ids=["in the encoder", "behind it", "behind the embedding"]
)
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
def test_pictures_go_from_one_degree_to_another(
    cuts: tuple[int, ...], degrees: tuple[int, ...], tmp_path: Path
) -> None:
    """Between blocks of the encoder, behind its projector, and behind the embedding."""
    check_gradients(pictures_job(ENCODERS["vit"]), Plan(pipelines=(pipeline(cuts, 8, 0, *degrees),)), tmp_path)


DRAWING = {
    "one stage": Plan(pipelines=(pipeline((0, 10), 8, 0, 2),)),
    "behind the language model, and in the generator": Plan(
        pipelines=(pipeline((0, 6, 10), 5, 0, 2, 1), pipeline((0, 8, 10), 3, 2, 1, 2))
    ),
}


@pytest.mark.parametrize("plan", DRAWING.values(), ids=DRAWING.keys())
def test_gradients_of_a_generator_equal_those_of_one_process(plan: Plan, tmp_path: Path) -> None:
    generator = GeneratorModule(ENCODERS["vit"], placeholder_id=PLACEHOLDER)
    parts: dict[str, Any] = {"encoders": {}, "generators": {"vision": generator}}
    model = MultimodalModule(**parts, language_model=FAMILIES["llama"], labels="shifted")
    check_gradients(make_job(model=model, dataset=Pictures(drawn=True)), plan, tmp_path)


@pytest.mark.parametrize("tp_chunks", [1, 2])
def test_four_devices_of_which_some_have_no_token(tp_chunks: int, tmp_path: Path) -> None:
    config = LlamaConfig(**{**TEXT, "num_key_value_heads": 4}, tie_word_embeddings=True)
    check_gradients(job_of(config, tp_chunks=tp_chunks), Plan(pipelines=(pipeline((0, 6), 8, 0, 4),)), tmp_path)


CHUNKED = {
    "biased, in layers that run again": (job_of(FAMILIES["llama, biased"], tp_chunks=3), "layers that run again"),
    "beside sharded ones": (job_of(FAMILIES["llama, tied"], tp_chunks=2), "a sharded node, 2 tensor-parallel nodes"),
    "in an encoder": (pictures_job(ENCODERS["vit"], tp_chunks=2), None),
}


@pytest.mark.parametrize(("job", "plan"), CHUNKED.values(), ids=CHUNKED.keys())
def test_gradients_are_those_of_one_process_where_tokens_are_exchanged_in_chunks(
    job: Job, plan: str | None, tmp_path: Path
) -> None:
    """There may be more chunks than tokens on a device."""
    check_gradients(job, PLANS[plan] if plan else Plan(pipelines=(pipeline((0, 10), 8, 0, 2),)), tmp_path)


def test_every_node_of_a_mixture_has_every_element() -> None:
    profile = make_profile(job_of(FAMILIES["llama, tied"]))
    assert PLANS["2 tensor parallel, 2 sharded"].redundancy(profile) == 2
    holders = PLANS["1 stage of 2"].holders(profile)["llm.block.0"]
    whole = profile.layers[1].whole
    assert holders[0] | holders[1] == whole
    assert 0 < (holders[0] & holders[1]).size < whole.size / 10, "norms alone"


@pytest.mark.parametrize("tp_chunks", [1, 2])
def test_devices_round_no_worse_than_one_does_in_lower_precision(tp_chunks: int, tmp_path: Path) -> None:
    job = job_of(FAMILIES["llama, tied"], precision="bf16", tp_chunks=tp_chunks)
    write_initial(job, tmp_path)

    def losses(plan: Plan) -> float:
        results = as_threads(
            len(plan.slots), lambda rank, address: one_step(installed(job, plan, rank, address, tmp_path), Batches(job))
        )
        assert all(state.grad.isfinite().all() for _, states in results for state in states.values())
        return sum(loss for loss, _ in results)

    assert losses(PLANS["1 stage of 2"]) == pytest.approx(losses(make_plan(((0, 6), 8))), rel=1e-2)


@pytest.mark.parametrize(("kind", "tp_chunks"), [("gpipe", 1), ("zb-h1", 1), ("1f1b", 1), ("zb-h1", 2)])
def test_every_schedule_trains_to_the_same_parameters(kind: str, tp_chunks: int, tmp_path: Path) -> None:
    job = job_of(FAMILIES["llama, tied"], clip_grad_norm=LIMIT, tp_chunks=tp_chunks)
    write_initial(job, tmp_path)
    expected = three_steps(installed(job, make_plan(((0, 6), 8)), 0, "", tmp_path), Batches(job))
    plan = replace(PLANS["2 stages of 2, and 1"], schedule_kind=ScheduleKind(kind))
    results = as_threads(
        len(plan.slots), lambda rank, address: three_steps(installed(job, plan, rank, address, tmp_path), Batches(job))
    )
    found = dict.fromkeys(expected, NO_BYTES)
    for states in results:
        for name, state in states.items():
            found[name] |= state.held
            wanted = expected[name].held_bytes(state.held).view(torch.float64)
            torch.testing.assert_close(state.buffer, wanted, rtol=1e-9, atol=1e-12)
    assert found == {name: state.held for name, state in expected.items()}
