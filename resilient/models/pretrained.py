"""Where a transformers model comes from: a config, or a checkpoint folder whose weights are read layer by layer.

Owns resolving what the user passed, reading safetensors, and transformers' initial values. Families and their
layers are in :mod:`resilient.models.multimodal.vision` and :mod:`resilient.models.multimodal.language`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from resilient.common.arguments import kind_of
from resilient.common.file_digest import file_digest
from resilient.models.segments import ATTENTION, register_attention

_PREFIXES = ("", "model.", "vit.", "vision_model.", "language_model.", "model.vision_tower.", "model.language_model.")
"""What checkpoints of larger models put before the names of the part we read."""

_NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path")
"""Of what a config says: files count by their contents, wherever they lie."""


_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""How a hub calls a model: its owner and its name."""


@dataclass(frozen=True)
class Weights:
    """The safetensors files of a checkpoint folder, opened only for the tensors asked for."""

    folder: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file that holds each tensor."""
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            return {key: self.folder / name for key, name in json.loads(index.read_text())["weight_map"].items()}
        single = self.folder / "model.safetensors"
        if not single.exists():
            raise ValueError(
                f"checkpoint folder must hold model.safetensors, got {str(self.folder)!r} without it; "
                "write it with model.save_pretrained(folder)"
            )
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)

    def contents(self) -> dict[str, str]:
        """Return the digest of each file's contents, by file name."""
        return {path.name: file_digest(path) for path in sorted(set(self.files.values()))}

    def find(self, *names: str) -> str | None:
        """Return the key in the files of the first of these names that is there, under any known prefix."""
        return next((prefix + name for name in names for prefix in _PREFIXES if prefix + name in self.files), None)

    def read(self, key: str) -> Tensor:
        """Read one tensor."""
        with safe_open(self.files[key], "pt") as file:
            return file.get_tensor(key)


@dataclass(frozen=True)
class Source:
    """A transformers config, and the weights that belong to it if it came from a folder."""

    config: PretrainedConfig
    weights: Weights | None = None

    @property
    def family(self) -> str:
        """The config's ``model_type``."""
        return self.config.model_type

    def describe(self) -> dict[str, Any]:
        """Return what decides the model's structure and start, for a content hash."""
        config = {key: value for key, value in self.config.to_dict().items() if key not in _NOT_OF_THE_MODEL}
        return {"config": config, "files": {} if self.weights is None else self.weights.contents()}


def resolve(given: Any, argument: str, families: Collection[str]) -> Source:
    """Turn what the user passed into a source of a supported family.

    Args:
        given: A transformers config or the path of a local checkpoint folder.
        argument: Name of the argument, for messages.
        families: Supported ``model_type`` values.

    Raises:
        ValueError: For anything else, with the supported families and what to pass instead.
    """
    supported = ", ".join(sorted(families))
    if isinstance(given, nn.Module):
        raise ValueError(
            f"{argument} must be a transformers config or a checkpoint folder, got a live {type(given).__name__}; pass "
            f"its .config, or the folder of its save_pretrained(folder) to keep its weights (families: {supported})"
        )
    if isinstance(given, str | Path):
        source = _from_folder(given, argument)
    elif isinstance(given, PretrainedConfig):
        source = Source(copy.deepcopy(given))
    else:
        raise ValueError(
            f"{argument} must be a transformers config or a checkpoint folder, got {kind_of(given)}; pass a config "
            f"of a supported family ({supported})"
        )
    whole, part = source.family, getattr(source.config, "vision_config", None)
    if isinstance(part, PretrainedConfig) and part.model_type == f"{whole}_vision_model" in families:
        source = Source(part, source.weights)  # of a CLIP or SigLIP that reads texts, too
    if source.family not in families:
        got, fix = f"{whole} ({type(source.config).__name__})", "pass a config or a checkpoint folder of one of them"
        if isinstance(part, PretrainedConfig):
            got += ", a model of several parts"
            fix = f"pass a config or a checkpoint folder of its {argument.replace('_', ' ')} alone"
        raise ValueError(f"{argument} must be of a supported family ({supported}), got {got}; {fix}")
    source.config._attn_implementation = ATTENTION
    return source


def _from_folder(given: str | Path, argument: str) -> Source:
    folder = Path(given)
    if not (folder / "config.json").is_file():
        got, fix = repr(str(given)), "write one with model.save_pretrained(folder)"
        if (folder / "adapter_config.json").is_file():
            got += ", which holds an adapter"
            fix = "join it with its model: model.merge_and_unload().save_pretrained(folder)"
        elif not folder.is_dir():
            got += ", which is no folder here"
            fix = "check the path"
            if _HUB_NAME.fullmatch(str(given)):
                fix += f", or download it before: huggingface_hub.snapshot_download({str(given)!r}) returns the folder"
        raise ValueError(f"{argument} must be a folder with config.json and safetensors files, got {got}; {fix}")
    return Source(AutoConfig.from_pretrained(folder, local_files_only=True), Weights(folder))


def modeling(family: str, *names: str) -> tuple[Any, ...]:
    """Import classes from transformers' modeling file of a family, which is slow: only when a layer is built."""
    register_attention()
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    return tuple(getattr(module, name) for name in names)


def initializer(pretrained: Any, config: PretrainedConfig) -> Callable[[nn.Module], None]:
    """Return transformers' rule for initial values of one module, as ``Module.apply`` wants it.

    Args:
        pretrained: The family's ``PreTrainedModel`` subclass; none of its layers are built.
        config: Of the model.
    """
    shell = pretrained.__new__(pretrained)
    nn.Module.__init__(shell)
    shell.config = config
    return shell._init_weights


def load_pretrained(
    module: nn.Module, weights: Weights, names: Mapping[str, str], renames: Mapping[str, str] | None = None
) -> None:
    """Fill those tensors of a layer whose names begin with a key of ``names`` from a checkpoint.

    Args:
        module: The layer.
        weights: Its checkpoint.
        names: Beginning of a name in the layer -> what replaces it in the checkpoint.
        renames: Parts of names that differ between this version of transformers and the files it writes.

    Raises:
        ValueError: If the checkpoint lacks a tensor or holds it in another size.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        begin = next((begin for begin in names if name.startswith(begin)), None)
        if begin is None:
            continue
        wanted = names[begin] + name[len(begin) :]
        renamed = wanted
        for new, old in (renames or {}).items():
            renamed = renamed.replace(new, old)
        key = weights.find(wanted, renamed)
        if key is None:
            raise ValueError(
                f"checkpoint {str(weights.folder)!r} must hold {renamed!r}, got none; its config does not fit"
            )
        value = weights.read(key)
        if value.numel() != tensor.numel():
            shapes = f"shape {tuple(tensor.shape)}, got {tuple(value.shape)}"
            raise ValueError(f"{key!r} in {str(weights.folder)!r} must have {shapes}; its config does not fit")
        tensor.copy_(value.reshape(tensor.shape))


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return a transformers layer's hidden state: version 4 returns a tuple, version 5 the tensor."""
    return output[0] if isinstance(output, tuple) else output
