"""Models, their parts and losses that are none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import LlamaConfig

import resilient as rs
from tests.resilient.mistaken_jobs import (
    LLAVA,
    VISION,
    Adapted,
    linear,
    of_encoders,
    of_language,
    of_layers,
    of_loss,
    squared,
    train,
)

LAYERS = "model must be cut into layers, got"
TO_LAYERS = "make it a resilient.Chain of modules or a resilient.MultimodalModule"
LOSS = "loss must be a function of (output, batch), got"
TO_LOSS = 'write lambda output, batch: torch.nn.functional.mse_loss(output, batch["target"], reduction="sum")'
FOLDER = "must be a folder with config.json and safetensors files, got"
LANGUAGES = "llama, mistral, qwen2, qwen3"

MODELS: dict[str, tuple[Callable[[], object], str]] = {
    "module": (lambda: train(linear()), f"{LAYERS} a Linear; {TO_LAYERS}"),
    "adapted module": (lambda: train(Adapted()), f"{LAYERS} an Adapted; {TO_LAYERS}"),
    "hub's name": (lambda: train("meta-llama/Llama-3-8B"), f"{LAYERS} a str; {TO_LAYERS}"),
    "class": (lambda: train(rs.Chain), f"{LAYERS} the class Chain; make one of it"),
    "encoder's folder": (
        of_encoders({"vision": "path/to/vit"}),
        "encoders['vision'] must be an EncoderModule, got 'path/to/vit'; write "
        '{"vision": resilient.EncoderModule(..., placeholder_id=...)} around it',
    ),
    "encoder's config": (
        of_encoders({"vision": VISION}),
        "encoders['vision'] must be an EncoderModule, got a ViTConfig; write "
        '{"vision": resilient.EncoderModule(..., placeholder_id=...)} around it',
    ),
    "encoders without names": (
        of_encoders([rs.EncoderModule(VISION, placeholder_id=2)]),
        'encoders must map names to EncoderModules, got a list; write {"vision": resilient.EncoderModule(...)}, or {} '
        "for a language model alone",
    ),
    "placeholder's text": (
        lambda: rs.EncoderModule(VISION, placeholder_id="<image>"),  # pyright: ignore[reportArgumentType]
        "placeholder_id must be a whole number >= 0, got '<image>'; look it up: "
        "tokenizer.convert_tokens_to_ids('<image>')",
    ),
    "language model on the hub": (
        of_language("meta-llama/Llama-3-8B"),
        f"language_model {FOLDER} 'meta-llama/Llama-3-8B', which is no folder here; check the path, or download it "
        "before: huggingface_hub.snapshot_download('meta-llama/Llama-3-8B') returns the folder",
    ),
    "encoder on the hub": (
        lambda: rs.EncoderModule("google/vit-base", placeholder_id=2),
        f"encoder {FOLDER} 'google/vit-base', which is no folder here; check the path, or download it before: "
        "huggingface_hub.snapshot_download('google/vit-base') returns the folder",
    ),
    "whole model as language model": (
        of_language(LLAVA),
        f"language_model must be of a supported family ({LANGUAGES}), got llava (LlavaConfig), a model of several "
        "parts; pass a config or a checkpoint folder of its language model alone",
    ),
    "whole model as encoder": (
        lambda: rs.EncoderModule(LLAVA, placeholder_id=2),
        "encoder must be of a supported family (clip_vision_model, siglip_vision_model, vit), got llava (LlavaConfig), "
        "a model of several parts; pass a config or a checkpoint folder of its encoder alone",
    ),
    "live language model": (
        of_language(Adapted()),
        "language_model must be a transformers config or a checkpoint folder, got a live Adapted; pass its .config, or "
        f"the folder of its save_pretrained(folder) to keep its weights (families: {LANGUAGES})",
    ),
    "config's class": (
        of_language(LlamaConfig),
        "language_model must be a transformers config or a checkpoint folder, got the class LlamaConfig; pass a config "
        f"of a supported family ({LANGUAGES})",
    ),
    "chain of one": (
        lambda: rs.Chain(linear(), squared),  # pyright: ignore[reportArgumentType]
        "layers must be a list of modules or of functions that build them, got a Linear; pass a list, of one layer if "
        "need be",
    ),
    "chain of texts": (
        of_layers("linear"),
        "layers[0] must be a module or build one, got 'linear'; pass factories such as lambda: nn.Linear(8, 8)",
    ),
    "chain of classes": (
        of_layers(linear, nn.Linear),
        "layers[1] must be a module or build one without arguments, got the class Linear; write lambda: Linear(...)",
    ),
    "chain of functions": (
        of_layers(torch.relu),
        "layers[0] must be a module or build one without arguments, got relu, which wants arguments; make a module of "
        "it",
    ),
    "factory of no module": (
        lambda: train(rs.Chain([lambda: 3], squared)),  # pyright: ignore[reportArgumentType]
        "the factory of layer 'layer.0' must return a module, got an int; have it build one",
    ),
    "module with two outputs": (
        lambda: train(rs.Chain([lambda: nn.LSTM(2, 1)], squared)),
        "LSTM in a chain must return a tensor, got a tuple; wrap it in a module that returns one of them",
    ),
    "loss left out": (of_loss(None), f"{LOSS} None; {TO_LOSS}"),
    "loss's name": (of_loss("mse"), f"{LOSS} 'mse'; {TO_LOSS}"),
    "loss's class": (of_loss(nn.MSELoss), f"{LOSS} the class MSELoss; {TO_LOSS}"),
    "torch's loss": (of_loss(nn.MSELoss(reduction="sum")), f"{LOSS} torch's MSELoss; {TO_LOSS}"),
    "torch's function": (of_loss(nn.functional.cross_entropy), f"{LOSS} torch's cross_entropy; {TO_LOSS}"),
    "loss of the output": (of_loss(lambda output: output.sum()), f"{LOSS} <lambda>(output); {TO_LOSS}"),
    "loss for each target": (
        of_loss(lambda output, batch: output - batch["target"]),
        "loss must return one number, summed over the microbatch's targets, got a tensor of shape [2, 1]; end it with "
        ".sum()",
    ),
    "loss that is no tensor": (
        of_loss(lambda output, batch: 0.5),
        "loss must return a tensor, got 0.5; have it return the sum of the targets' losses, without .item()",
    ),
    "loss that forgets to return": (
        of_loss(lambda output, batch: None),
        "loss must return a tensor, got None; have it return the sum of the targets' losses, without .item()",
    ),
    "loss cut off": (
        of_loss(lambda output, batch: squared(output, batch).detach()),
        "loss must depend on the model's output by operations with a gradient, got one without; leave out .detach(), "
        "torch.no_grad() and whatever has no gradient, such as argmax",
    ),
}
