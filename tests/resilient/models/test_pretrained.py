"""What a checkpoint folder holds is part of the model, wherever it lies."""

from __future__ import annotations

from pathlib import Path

from transformers import SiglipVisionConfig

from resilient.models.multimodal.encoder import EncoderModule
from resilient.models.multimodal.module import MultimodalModule
from tests.resilient.models.test_multimodal import LANGUAGE_MODELS, VISION, saved, vlm


def test_digest_tells_weights_of_equal_size_apart(tmp_path: Path) -> None:
    encoder = {"vision": EncoderModule(SiglipVisionConfig(**VISION), placeholder_id=3)}
    for folder in ("one", "same", "other"):
        saved(*LANGUAGE_MODELS["llama"], tmp_path / folder)
    file = tmp_path / "other" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    one, same, other = (
        MultimodalModule(encoders=encoder, language_model=tmp_path / folder) for folder in ("one", "same", "other")
    )
    assert one.digest() == same.digest() != other.digest()
    assert list(one.contents()) == ["language_model/model.safetensors"]
    assert one.contents() == same.contents() != other.contents()
    assert vlm().contents() == {}
