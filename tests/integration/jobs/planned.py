"""A small model with two encoders, whose samples a planner may place: images, sounds and texts of all lengths.

It may have a generator, too, and pictures to draw on some samples.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, ViTConfig

import resilient as rs
from resilient.errors import ArgumentError
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.own import planner as own
from resilient.planners.own.candidates import one_stage
from resilient.planners.planner import Assignment, Configuration, Encoders, Parallelism, Replica, Setting
from resilient.planners.published.baselines.balanced import EncoderFirst
from resilient.planners.published.baselines.mean_microbatch import in_order
from resilient.planners.published.cornstarch import planner as cornstarch
from resilient.planners.published.disttrain import planner as disttrain
from resilient.planners.published.orchmllm import planner as orchmllm
from resilient.planners.stages.expected_step import virtual_stages
from resilient.planners.stages.one_pipeline import is_asked_for

PATCH, VOCABULARY, DRAWN, PICTURE, SOUND = 4, 40, 37, 38, 39


class Mixed:
    """Samples of up to four images and three sounds; some are text alone. Nothing is learnt of them.

    Args:
        broken: The sample whose images are not finite.
        slowly_while: While this file is there, samples take long to read: so that a job does few steps meanwhile.
        draws: Whether some samples have up to two pictures to draw.
    """

    def __init__(self, broken: int | None = None, slowly_while: Path | None = None, *, draws: bool = False) -> None:
        self.broken = broken
        self.draws = draws
        self._slowly_while = slowly_while

    def __len__(self) -> int:
        return 200

    def lengths(self, index: int) -> dict[str, list[int]]:
        """Return the tokens of each sequence."""
        chosen = random.Random(index)
        images = [chosen.choice([1, 2, 2, 6]) for _ in range(chosen.choice([0, 1, 1, 2, 4]))]
        sounds = [chosen.choice([1, 3]) for _ in range(chosen.choice([0, 0, 1, 3]))]
        num_words = chosen.randint(2, 20)
        drawn = [chosen.choice([1, 4]) for _ in range(chosen.choice([0, 1, 1, 2]))] if self.draws else []
        tokens = sum(images) + sum(sounds) + num_words + sum(drawn)
        return {"vision": images, "audio": sounds, "llm": [tokens], **({"image": drawn} if self.draws else {})}

    def num_targets(self, index: int) -> int:
        """Return the tokens that are predicted, and the patches that are drawn."""
        lengths = self.lengths(index)
        return lengths["llm"][0] - sum(lengths["vision"]) - sum(lengths["audio"])

    def __getitem__(self, index: int) -> dict[str, Tensor | list[Tensor]]:
        if self._slowly_while is not None and self._slowly_while.exists():
            time.sleep(0.03)
        lengths = self.lengths(index)
        drawn = torch.Generator().manual_seed(index)

        def pictures(unit: str, channels: int) -> list[Tensor]:
            factor = math.nan if (unit, index) == ("vision", self.broken) else 1.0
            return [factor * torch.randn(channels, PATCH, PATCH * n, generator=drawn) for n in lengths[unit]]

        num_pictures, num_sounds = sum(lengths["vision"]), sum(lengths["audio"])
        num_drawn = sum(lengths.get("image", []))
        words = torch.randint(3, 30, (self.num_targets(index) - num_drawn,), generator=drawn)
        read = torch.cat((torch.full((num_pictures,), PICTURE), torch.full((num_sounds,), SOUND)))
        ids = torch.cat((read, words[:1], torch.full((num_drawn,), DRAWN), words[1:]))
        labels = torch.full_like(ids, -100)
        labels[(ids != PICTURE) & (ids != SOUND) & (ids != DRAWN)] = words.roll(-1)
        return {
            "input_ids": ids,
            "labels": labels,
            "vision.pixels": pictures("vision", 3),
            "audio.pixels": pictures("audio", 1),
            **({"image.pixels": pictures("image", 2)} if self.draws else {}),
        }


class Interleaved(disttrain.DistTrain):
    """DistTrain with one device for each encoder, and two stages of the language model on each of the others."""

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        layers = {unit.name: len(unit.layers) for unit in setting.costs.units}
        rows = setting.num_devices - len(layers) + 1
        if rows < 2 or 2 * rows > layers[LLM]:
            raise ArgumentError("num_nodes", "leave two stages for each", setting.num_nodes, "use another number")
        spreads = {name: Parallelism(dp=1, pp=1, stage_layers=(count,)) for name, count in layers.items()}
        language = Parallelism(dp=1, pp=rows)
        spreads[LLM] = virtual_stages(setting.costs.by_name[LLM], samples.units[LLM], language, 2)
        count = -(-setting.global_batch // setting.microbatch)
        return Configuration(units=spreads, num_microbatches=count)


class Together(orchmllm.OrchMLLM):
    """OrchMLLM with all units on the same devices, as when that is fastest: it then balances each by itself."""

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        return EncoderFirst(name=self.name).configure(setting, samples)


class Everywhere(cornstarch.Cornstarch):
    """Cornstarch with encoders in every stage of the language model."""

    def __init__(self) -> None:
        super().__init__(encoders=(Encoders.REPLICATED,))


class Sharded(own.ResilientPlanner):
    """Our planner where the devices of a node divide all units, whatever is faster."""

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        found = (each for each in one_stage(setting) if each.shard > 1 and is_asked_for(setting, each))
        return next(found, None) or super().configure(setting, samples)


class Rounds(Sharded):
    """The same with samples in the order in which they come: as many cells as there are microbatches."""

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        return Assignment(units=dict.fromkeys(batch.units, in_order(len(batch), replicas)))


def transformer(channels: int, layers: int) -> ViTConfig:
    """Return a small transformer of patches in a row."""
    return ViTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        image_size=6 * PATCH,
        patch_size=PATCH,
        num_channels=channels,
        qkv_bias=False,  # a key's bias has no gradient but rounding errors
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--planner")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--max-failures", type=int, default=1)
    parser.add_argument("--min-pipeline-nodes", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--broken", type=int)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--slowly-while", type=Path, metavar="FILE")
    parser.add_argument("--draws", action="store_true")
    parser.add_argument("--read-ahead", type=int, default=0, help="steps that data processes read; 0: none")
    parser.add_argument(
        "--always",
        choices=("interleaved", "everywhere", "together", "sharded", "rounds"),
        help="what a planner else may answer",
    )
    parser.add_argument("--divided", action="store_true", help="a device of several is to take its part of the time")
    parser.add_argument(
        "--even", action="store_true", help="tokens are to take as long in all layers, whatever they do"
    )
    arguments = parser.parse_args()
    if arguments.divided or arguments.even:
        from believed_times import divide_times, even_times  # which lies beside this file: tests read its data set, too

        (divide_times if arguments.divided else even_times)()
    if arguments.always == "interleaved":
        disttrain.DistTrain = Interleaved
    elif arguments.always == "everywhere":
        cornstarch.Cornstarch = Everywhere
    elif arguments.always == "together":
        orchmllm.OrchMLLM = Together
    elif arguments.always == "sharded":
        own.ResilientPlanner = Sharded
    elif arguments.always == "rounds":
        own.ResilientPlanner = Rounds
    llm = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = rs.MultimodalModule(
        encoders={
            "vision": rs.EncoderModule(transformer(3, 3), placeholder_id=PICTURE, frozen=arguments.frozen),
            "audio": rs.EncoderModule(transformer(1, 2), placeholder_id=SOUND),
        },
        language_model=llm,
        generators={"image": rs.GeneratorModule(transformer(2, 2), placeholder_id=DRAWN)} if arguments.draws else {},
        labels="shifted",
    )
    optimizers = {"adamw": rs.AdamW(lr=1e-2), "sgd": rs.SGD(lr=1e-2, momentum=0.9)}
    rs.Trainer(
        model,
        Mixed(arguments.broken, arguments.slowly_while, draws=arguments.draws),
        optimizer=optimizers[arguments.optimizer],
        global_batch=arguments.batch,
        microbatch=arguments.microbatch,
        max_failures=arguments.max_failures,
        checkpoint_every=arguments.checkpoint_every,
        min_pipeline_nodes=arguments.min_pipeline_nodes,
        precision="fp64",
        clip_grad_norm=1.0,
        schedule=arguments.schedule,
        planner=arguments.planner,
        num_workers=1 if arguments.read_ahead else 0,
        read_ahead=arguments.read_ahead or 1,
    ).fit(arguments.steps)


if __name__ == "__main__":
    main()
