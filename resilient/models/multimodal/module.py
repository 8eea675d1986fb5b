"""A multimodal model from transformers parts: encoders with projectors, a language model, and what draws behind it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from resilient.common.arguments import described, kind_of
from resilient.data.multimodal import IGNORED_LABEL, LARGEST_PIXEL, collate_multimodal, images_of
from resilient.data.packing import pack_images, pack_texts
from resilient.data.sample_types import check_tensor
from resilient.errors import ArgumentError, SampleError, literal
from resilient.models.layer import Activations, Batch
from resilient.models.multimodal import language
from resilient.models.multimodal.encoder import EncoderModule, grid, num_patches, patch_size
from resilient.models.multimodal.generator import GeneratorModule, drawn_by, generator_layers, patch_losses
from resilient.models.multimodal.language import language_layers
from resilient.models.multimodal.vision import vision_layers
from resilient.models.multimodal.vision_families import VISION_FAMILIES
from resilient.models.packing import why_unpackable
from resilient.models.pretrained import Source, resolve
from resilient.models.tensor_parallel.exchanges import TOKEN_LOSSES


class MultimodalModule:
    """Encoders, their projectors, a language model and a generator as one chain of layers.

    A sample holds ``input_ids [seq]``, ``labels [seq]`` and, for each encoder and the generator, ``{name}.pixels``: one
    image ``[channels, height, width]`` of normalised values or a sequence of images, to be read or to be made. Samples
    are joined by :func:`resilient.data.collate_multimodal`, unless the data set has a ``collate`` of its own. Targets
    are the tokens that are predicted, and the patches that are made.

    Args:
        encoders: By name, in the order they run; empty for a plain language model.
        generators: By name, one at most: what makes images of the language model's last hidden states.
        language_model: A transformers config (llama, mistral, qwen2, qwen3) or a checkpoint folder.
        frozen_language_model: Keep the language model's parameters as they are.
        labels: "shifted": ``labels[t]`` is the token to predict after reading ``input_ids[: t + 1]``, or -100.
            "unshifted", as transformers wants them: ``labels[t]`` is ``input_ids[t]``, or -100, and the model shifts.
            None is "shifted", but labels that repeat the inputs are refused at the start.

    Raises:
        ValueError: For a model that is not supported, or names and placeholders that clash.
    """

    def __init__(
        self,
        *,
        encoders: Mapping[str, EncoderModule],
        language_model: PretrainedConfig | str | Path,
        generators: Mapping[str, GeneratorModule] | None = None,
        frozen_language_model: bool = False,
        labels: Literal["shifted", "unshifted"] | None = None,
    ) -> None:
        if labels not in ("shifted", "unshifted", None):
            raise ValueError(f"labels must be 'shifted', 'unshifted' or None, got {labels!r}; pass one of them")
        self.labels = labels
        self.encoders: dict[str, EncoderModule] = _named("encoders", encoders, EncoderModule)
        generators = {} if generators is None else generators
        self.generators: dict[str, GeneratorModule] = _named("generators", generators, GeneratorModule)
        if len(self.generators) > 1:
            fix = "have one make all images"  # of a sample, one gradient comes back to a cell
            raise ArgumentError("generators", "be one at most", ", ".join(self.generators), fix)
        self.language = resolve(language_model, "language_model", language.LANGUAGE_FAMILIES)
        config: Any = self.language.config
        self._check_names(config.vocab_size)
        specs = [
            spec
            for name, encoder in self.encoders.items()
            for spec in vision_layers(
                encoder.source,
                name,
                projector=encoder.options.projector,
                width=config.hidden_size,
                frozen=encoder.options.frozen,
                frozen_projector=encoder.options.frozen_projector,
            )
        ]
        specs += language_layers(
            self.language,
            frozen=frozen_language_model,
            unshifted=labels == "unshifted",
            placeholders={name: encoder.options.placeholder_id for name, encoder in self.encoders.items()},
            patch_sizes={name: patch_size(encoder.source) for name, encoder in self.encoders.items()},
            drawn={name: generator.options.placeholder_id for name, generator in self.generators.items()},
        )
        for name, generator in self.generators.items():
            specs += generator_layers(name, generator, config.hidden_size)
        self.layers = tuple(specs)
        self._frozen_language_model = frozen_language_model

    def loss(self, activations: Activations, batch: Batch) -> Tensor:
        """Return the cross entropy summed over all positions with a label, and the errors of all patches, as far as
        logits and patches are in the activations."""
        found = [
            patch_losses(name, generator, activations[drawn_by(name)], batch).sum()
            for name, generator in self.generators.items()
            if drawn_by(name) in activations
        ]
        if "logits" in activations:
            found.append(self._text_loss(activations["logits"], batch))
        if TOKEN_LOSSES in activations:  # of tensor-parallel devices, each has some tokens'
            found.append(activations[TOKEN_LOSSES].sum())
        return torch.stack(found).sum()

    def _text_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        logits = logits if logits.dtype is torch.float64 else logits.float()
        labels = batch["labels"]
        if "llm.segments" not in batch:
            labels = self._predicted(labels)
            logits = logits[:, : labels.shape[1]]
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Join samples to a microbatch, padded: :func:`resilient.data.collate_multimodal`."""
        return collate_multimodal(samples)

    @property
    def units(self) -> dict[str, tuple[str, ...]]:
        """The model's units in order, and of each those whose features it reads: ``llm`` reads every encoder's, and
        is read by the generator."""
        return {
            **dict.fromkeys(self.encoders, ()),
            "llm": tuple(self.encoders),
            **dict.fromkeys(self.generators, ("llm",)),
        }

    @property
    def unpackable(self) -> str | None:
        """Why samples must be padded, in words; None where :meth:`collate_unit` may pack them."""
        configs = {name: source.config for name, source in self._of_images.items()}
        return why_unpackable({**configs, "llm": self.language.config})

    def lengths(self, sample: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return the tokens of a sample's sequences by unit: of ``llm`` its one text, of others each image.

        Args:
            sample: One that passed :meth:`check`; its images need no values.
        """
        found = {"llm": [len(sample["input_ids"])]}
        for name, source in self._of_images.items():
            found[name] = [num_patches(image, source, name) for image in images_of(sample, name)]
        return {unit: found[unit] for unit in self.units}

    def collate_unit(self, unit: str, samples: Sequence[Mapping[str, Any]], keys: Sequence[int]) -> dict[str, Tensor]:
        """Pack what one unit reads of samples into one row without padding; several units' may be joined with ``|``.

        An encoder makes ``{unit}.features [tokens, width]`` of it, in the order of the samples, as many of each sample
        as :meth:`lengths` says. The activations of ``llm`` begin with those of its own samples, from wherever they were
        made; of none they are ``[0, width]``. It makes ``{unit}.states`` for a generator likewise: as many as that has
        patches.

        Args:
            unit: One of :attr:`units`.
            samples: Those of the cell, in any number, also none.
            keys: Of each sample, what its random numbers are drawn from: :func:`resilient.data.seeding.sample_key`.

        Returns:
            As :func:`resilient.data.packing.pack_texts` and :func:`~resilient.data.packing.pack_images` describe it.
            ``{unit}.segments`` is read on the host, so it is best left there.

        Raises:
            ArgumentError: The model is :attr:`unpackable`.
        """
        if self.unpackable is not None:
            got, fix = f"one whose {self.unpackable}", "change that in its config, or pad: collate(samples)"
            raise ArgumentError("model", "allow its samples to be packed", got, fix)
        if unit == "llm":
            return pack_texts(samples, [self._predicted(sample["labels"]) for sample in samples])
        source = self._of_images[unit]
        has_class_token = unit in self.encoders and VISION_FAMILIES[source.family].class_token is not None
        return pack_images(
            samples,
            keys,
            unit,
            num_channels=source.config.num_channels,
            patch_size=patch_size(source),
            num_columns=grid(source)[1],
            num_class_tokens=int(has_class_token),
        )

    def num_targets(self, sample: Mapping[str, Any]) -> int | None:
        """Return how many tokens of a sample are predicted and patches made; None without labels."""
        labels = sample.get("labels")
        if labels is None:
            return None
        made = {name: each.source for name, each in self.generators.items()}
        num_made = sum(num_patches(image, made[name], name) for name in made for image in images_of(sample, name))
        return int((self._predicted(labels) != IGNORED_LABEL).sum()) + num_made

    def check(self, sample: Mapping[str, Any], name: str) -> None:
        """Raise :class:`SampleError` if the sample cannot be trained on.

        Args:
            sample: What the data set returned, before it is collated.
            name: What to call it in the message (``sample 17 of DigitsDataset``).
        """
        for key in ("input_ids", "labels"):
            if key not in sample:
                raise SampleError(f"{name}: must hold {key!r}, got {sorted(sample)}; add it")
            check_tensor(sample[key], f"{name}: {key!r}", "[seq]")
            if sample[key].is_floating_point():
                raise SampleError(f"{name}: {key!r} must be whole numbers, got {sample[key].dtype}; use .long()")
        self._check_tokens(sample["input_ids"], sample["labels"], name)
        for unit, part in (self.encoders | self.generators).items():
            images = _images(sample, unit, name)
            num_features = sum(num_patches(image, part.source, f"{name}: {unit}") for image in images)
            token = part.options.placeholder_id
            num_placeholders = int((sample["input_ids"] == token).sum())
            if num_features != num_placeholders:
                entry, fix = f"{unit}.pixels", "make both equal"
                if entry not in sample:
                    fix = f"put its images into the entry {entry!r}, of which there is none beside {sorted(sample)}"
                has = "gives" if unit in self.encoders else "is to make"
                what = "features" if unit in self.encoders else "patches"
                raise SampleError(
                    f"{name}: {unit} {has} {num_features} {what} but input_ids holds {num_placeholders} placeholder "
                    f"tokens (id {token}); {fix}"
                )
        if self.num_targets(sample) == 0:
            raise SampleError(
                f"{name}: must have at least one target, got labels of {IGNORED_LABEL} only; leave it out"
            )

    def check_first(self, samples: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise :class:`SampleError` if labels are plainly not shifted though they should be, or images not normalised.

        Args:
            samples: Those of the first microbatches, by what to call them in the message.
        """
        if self.labels is None and all(_repeats_inputs(sample) for sample in samples.values()):
            raise SampleError(
                f"{next(iter(samples))}: labels must be the tokens that follow (labels[t] is predicted from "
                "input_ids[: t + 1]), got those of input_ids themselves, as in all samples looked at; pass "
                'MultimodalModule(labels="unshifted") to have the model shift them, as transformers does, or '
                'labels="shifted" if it is really to copy'
            )
        for name, sample in samples.items():
            for unit in self._of_images:
                largest = max((float(image.abs().max()) for image in images_of(sample, unit)), default=0.0)
                if largest > LARGEST_PIXEL:
                    raise SampleError(
                        f"{name}: {unit} image must be normalised, got values up to {largest:g}; divide by 255, then "
                        "subtract the mean and divide by the deviation that the encoder was trained with"
                    )

    def contents(self) -> dict[str, str]:
        """Return a digest of each checkpoint file's contents, by part and name: ``vision/model.safetensors``."""
        return {
            f"{part}/{file}": digest
            for part, source in {"language_model": self.language, **self._of_images}.items()
            if source.weights is not None
            for file, digest in source.weights.contents().items()
        }

    def digest(self) -> str:
        """Return a content hash of all configs, options and checkpoint files."""
        parts = {
            "language_model": self.language.describe(),
            "frozen_language_model": self._frozen_language_model,
            "unshifted": self.labels == "unshifted",
            "encoders": [[name, repr(e.options), e.source.describe()] for name, e in self.encoders.items()],
            "generators": [[name, repr(e.options), e.source.describe()] for name, e in self.generators.items()],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def _of_images(self) -> dict[str, Source]:
        """What reads images, and what makes some."""
        return {name: each.source for name, each in (self.encoders | self.generators).items()}

    def _predicted(self, labels: Tensor) -> Tensor:
        """Return the labels that something is read before."""
        return labels[..., 1:] if self.labels == "unshifted" else labels

    def _check_names(self, vocab_size: int) -> None:
        seen: dict[int, str] = {}
        for name, part in (*self.encoders.items(), *self.generators.items()):
            token, kind = part.options.placeholder_id, "encoder" if name in self.encoders else "generator"
            if name == "llm" or not name or "." in name:
                raise ValueError(f"{kind} names must hold no dot and not be 'llm', got {name!r}; rename it")
            if name in self.encoders and name in self.generators:
                fix = "both are read from the entry that is called after them"
                raise ArgumentError("names of generators", "differ from those of encoders", repr(name), fix)
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"placeholder_id of {name} must be a token below {vocab_size}, got {token}; choose another"
                )
            if token in seen:
                raise ValueError(
                    f"placeholder_id of {name} must differ from that of {seen[token]}, got {token}; choose another"
                )
            seen[token] = name

    def _check_tokens(self, input_ids: Tensor, labels: Tensor, name: str) -> None:
        config: Any = self.language.config
        if input_ids.shape != labels.shape or input_ids.ndim != 1:
            raise SampleError(
                f"{name}: input_ids and labels must have one shape [seq], got {tuple(input_ids.shape)} and "
                f"{tuple(labels.shape)}; make them equal"
            )
        longest = config.max_position_embeddings
        if len(input_ids) > longest:
            raise SampleError(f"{name}: must have at most {longest} tokens, got {len(input_ids)}; shorten it")
        targets = self._predicted(labels)
        targets = targets[targets != IGNORED_LABEL]
        for key, tokens in (("input_ids", input_ids), ("labels", targets)):
            if not len(tokens):
                continue
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= config.vocab_size:
                raise SampleError(
                    f"{name}: {key} must be tokens from 0 to {config.vocab_size - 1}, got {low if low < 0 else high}; "
                    "use the model's tokenizer"
                )


def _repeats_inputs(sample: Mapping[str, Any]) -> bool:
    """Whether what is to be predicted is everywhere what was read last."""
    targets = sample["labels"] != IGNORED_LABEL
    return bool(targets.any()) and torch.equal(sample["labels"][targets], sample["input_ids"][targets])


def _images(sample: Mapping[str, Any], unit: str, name: str) -> list[Tensor]:
    entry, form = f"{unit}.pixels", "[channels, height, width], or a list of such"
    value = sample.get(entry, ())
    for image in value if isinstance(value, list | tuple) else (value,):
        check_tensor(image, f"{name}: {entry!r}", form)
    return images_of(sample, unit)


def _named(argument: str, given: Any, kind: type[Any]) -> dict[str, Any]:
    form = f'{{"vision": resilient.{kind.__name__}(...)}}'
    if not isinstance(given, Mapping):
        got, fix = kind_of(given), f"write {form}, or {{}} for a language model alone"
        raise ArgumentError(argument, f"map names to {kind.__name__}s", got, literal(fix))
    for name, part in given.items():
        if not isinstance(part, kind):
            fix = f'write {{"{name}": resilient.{kind.__name__}(..., placeholder_id=...)}} around it'
            wanted = f"be {'an' if kind is EncoderModule else 'a'} {kind.__name__}"
            raise ArgumentError(f"{argument}[{name!r}]", wanted, described(part), literal(fix))
    return dict(given)
