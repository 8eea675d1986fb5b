"""One pipeline on each number of nodes: what the plans of a job that runs are put together of.

As many nodes as there are have several of these pipelines, on as many nodes each as they add up to, and lose and gain
some: so a planner is asked what it does with one replica of the language model, on all devices of so many nodes. A step
takes what the slowest pipeline takes, which may be the one with the longest sample: planners that simulate simulate as
many alike.
"""

from __future__ import annotations

from dataclasses import replace

from resilient.errors import ArgumentError
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Configuration, Encoders, Planner, Setting
from resilient.planners.registry import check_generators
from resilient.planners.stages.device_layout import DeviceLayout, used_devices
from resilient.planners.stages.pipeline_memory import most_held
from resilient.planners.stages.redundancy import is_redundant

_MOST_TOGETHER = 16
"""Pipelines that are simulated together: the slowest of more takes little more, and simulating them takes long."""


def is_asked_for(setting: Setting, configuration: Configuration) -> bool:
    """Return whether a configuration is redundant, and of the pipelines that the job asks for, on all its devices.

    A pipeline has one replica of the language model, or those that divide a copy: the devices of a node, each with all
    units of its samples.
    """
    if not is_redundant(setting, configuration):
        return False
    if setting.num_pipelines is None:
        return True
    if configuration.shard > 1 and (
        setting.num_nodes != setting.num_pipelines
        or configuration.shard != setting.cluster.devices_per_node
        or configuration.encoders is not Encoders.REPLICATED
    ):
        return False
    return (
        configuration.units[LLM].dp == setting.num_pipelines * configuration.shard
        and used_devices(configuration) == setting.num_devices
        and not why_not_run(part_of(configuration, setting.num_pipelines), setting.cluster.devices_per_node)
    )


def why_not_run(configuration: Configuration, devices_per_node: int) -> str:
    """Return why a worker cannot run stages as they are spread over devices, in words; "" if they can.

    Devices that share a microbatch do so by tensor parallelism, each a part of every matrix. They are in one node, and
    all stages of a row have as many.

    Args:
        configuration: Of one pipeline.
        devices_per_node: Of the cluster.
    """
    spreads = configuration.units
    for name, spread in spreads.items():
        if spread.cp > 1:
            return f"{spread.cp} devices divide the tokens of samples in {name!r}"
        if spread.tp > 1 and configuration.shard > 1:
            return f"devices that divide a copy are {spread.tp} each in {name!r}"
        if spread.tp != spreads[LLM].tp and configuration.encoders is Encoders.REPLICATED:
            return f"of {spreads[LLM].tp} devices of {LLM!r} {spread.tp} are to run {name!r}"
    if all(spread.tp == 1 for spread in spreads.values()):
        return ""
    layout = DeviceLayout(configuration, 1)
    is_across = layout.firsts // devices_per_node != (layout.firsts + layout.sizes - 1) // devices_per_node
    return "devices of a stage are in two nodes" if is_across.any() else ""


def pipeline_configurations(
    planner: Planner, setting: Setting, samples: SampleTable, sizes: range
) -> dict[int, Configuration]:
    """Return a planner's configuration of one pipeline on each number of nodes.

    Those are consecutive, from the fewest that it answers for to the most. Between them, numbers that it does not
    answer for have the configuration of the next smaller one, which leaves nodes standing by. A pipeline has its part
    of the batch, and need not be redundant: others hold what it holds.

    Args:
        planner: Who is asked.
        setting: The job, with all its nodes.
        samples: A sample of the data set.
        sizes: Numbers of nodes, ascending one by one.

    Raises:
        ValueError: It has no answer; the message says why, of the most nodes.
    """
    check_generators(planner.name, setting.costs)
    found: dict[int, Configuration] = {}
    refusal: ValueError | None = None
    for size in sizes:
        try:
            answer = _within_memory(_of_one(setting, size), planner.configure(_of_one(setting, size), samples), samples)
        except ValueError as error:
            refusal = error
            continue
        found |= {between: found[max(found)] for between in range(max(found, default=size) + 1, size)}
        found[size] = answer
    if not found:
        raise ArgumentError(
            "planner",
            f"have an answer for one pipeline on {sizes[0]} to {sizes[-1]} nodes",
            f"{planner.name!r}, which has none: {refusal}",
            "choose another one, or other min_pipeline_nodes",
        ) from refusal
    return found


def _within_memory(setting: Setting, configuration: Configuration, samples: SampleTable) -> Configuration:
    """Return an answer with stages as far ahead of each other as memory holds.

    Raises:
        ArgumentError: It does not hold it at all.
    """
    memory = setting.cluster.memory_bytes
    if memory is None or why_not_run(configuration, setting.cluster.devices_per_node):
        return configuration
    needed = most_held(setting, configuration, samples)
    if needed > memory and configuration.lead > 1:
        return _within_memory(setting, replace(configuration, lead=configuration.lead - 1), samples)
    if needed > memory:
        constraint = f"be >= {needed}, what a device holds of a pipeline on {setting.num_nodes} nodes"
        raise ArgumentError("memory_bytes", constraint, memory, "use more nodes, or smaller microbatches")
    return configuration


def _of_one(setting: Setting, num_nodes: int) -> Setting:
    """Return the job of one pipeline among others."""
    num_pipelines = max(setting.num_nodes // num_nodes, 1)
    batch = -(-setting.global_batch // num_pipelines)
    return replace(
        setting,
        num_nodes=num_nodes,
        global_batch=max(batch, setting.microbatch),
        max_failures=0,
        num_pipelines=1,
        num_peers=min(num_pipelines, _MOST_TOGETHER) - 1,
    )


def several(configuration: Configuration, count: int) -> Configuration:
    """Return the configuration of so many times the pipelines that one is of."""
    units = {name: replace(each, dp=each.dp * count) for name, each in configuration.units.items()}
    return replace(configuration, units=units)


def part_of(configuration: Configuration, count: int) -> Configuration:
    """Return of what configuration one is :func:`several`."""
    units = {name: replace(each, dp=each.dp // count) for name, each in configuration.units.items()}
    return replace(configuration, units=units)
