"""Labels of both conventions give transformers' loss, and as many targets as it has terms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from resilient.errors import SampleError
from resilient.models.multimodal.module import MultimodalModule
from resilient.runtime.batches import check_num_targets
from tests.resilient.small import assemble

CONFIG = LlamaConfig(
    vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def text_model(labels: Literal["shifted", "unshifted"] | None, model: Any = CONFIG) -> MultimodalModule:
    return MultimodalModule(encoders={}, language_model=model, labels=labels)


@pytest.mark.parametrize("convention", ["shifted", "unshifted"])
def test_loss_is_that_of_transformers(convention: Literal["shifted", "unshifted"], tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = LlamaForCausalLM(CONFIG).eval()
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(0, 20, (2, 9))
    labels = tokens.clone()
    labels[0, :4] = labels[1, 7:] = -100
    ours = labels if convention == "unshifted" else torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    model = text_model(convention, tmp_path)
    num_targets = sum(model.num_targets({"labels": each}) or 0 for each in ours)
    assert num_targets == 5 + 6
    with torch.no_grad():
        loss = assemble(model, seed=0).loss({"input_ids": tokens, "labels": ours})
        torch.testing.assert_close(loss / num_targets, reference(tokens, labels=labels).loss)


def test_unshifted_label_of_the_first_token_is_no_target() -> None:
    sample = {"input_ids": torch.tensor([4, 5]), "labels": torch.tensor([4, -100])}
    assert text_model("unshifted").num_targets(sample) == 0
    with pytest.raises(SampleError, match=r"^a: must have at least one target, got labels of -100 only; leave it out$"):
        text_model("unshifted").check(sample, "a")
    text_model("shifted").check(sample, "a")
    assert text_model(None).num_targets(sample) == 1


def test_digest_tells_what_is_computed_and_not_how_it_was_said() -> None:
    default, shifted, unshifted = (text_model(labels).digest() for labels in (None, "shifted", "unshifted"))
    assert default == shifted != unshifted


def test_unknown_convention_is_refused() -> None:
    message = r"^labels must be 'shifted', 'unshifted' or None, got 'both'; pass one of them$"
    with pytest.raises(ValueError, match=message):
        text_model("both")  # pyright: ignore[reportArgumentType]


def test_targets_of_labels_that_nobody_said_are_unshifted_may_be_counted_as_transformers_does() -> None:
    class Copies:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.arange(5), "labels": torch.arange(5)}

        def num_targets(self, index: int) -> int:
            return 4

    told = "a: num_targets(0) must be 5, the targets in the sample, got 4; have Copies.num_targets return 5 for it"
    fix = '; or, if labels are not shifted, as transformers wants them, pass MultimodalModule(labels="unshifted")'
    for model, message in ((text_model(None), told + fix), (text_model("shifted"), told)):
        with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
            check_num_targets(model, Copies(), 0, Copies()[0], "a")
    check_num_targets(text_model("unshifted"), Copies(), 0, Copies()[0], "a")
