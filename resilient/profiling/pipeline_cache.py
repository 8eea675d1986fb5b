"""Keeps planners' pipelines beside the costs they were planned by, since planning takes seconds.

What a planner answers is a function of its arguments and of this package, and these are the key. Pipelines that cannot
be kept or read are planned again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import msgspec

from resilient.common.files import write_whole
from resilient.common.sources import package_digest
from resilient.common.user_cache import cache_folder, one_at_a_time
from resilient.planners.costs.samples import SampleTable
from resilient.planners.planner import Setting
from resilient.templates.template import PipelineTemplate

logger = logging.getLogger(__name__)

Pipelines = tuple[PipelineTemplate, ...]


class _File(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    pipelines: Pipelines


def kept_pipelines(
    planner: str, setting: Setting, samples: SampleTable, sizes: range, plan: Callable[[], Pipelines]
) -> Pipelines:
    """Return a planner's pipelines, planned now if they never were; of several processes that ask at once one plans.

    Args:
        planner: Its name.
        setting: What it is given.
        samples: Likewise.
        sizes: Numbers of nodes.
        plan: Asks it.

    Raises:
        ValueError: What ``plan`` raises; that is not kept.
    """
    lengths = [(name, each.tokens.tolist(), each.squares.tolist()) for name, each in samples.units.items()]
    parts = (package_digest(), planner, lengths, list(sizes))
    key = hashlib.sha256(msgspec.json.encode((parts, setting))).hexdigest()
    path = cache_folder("pipelines") / f"{key}.json"
    with one_at_a_time(path):
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_File)
            if file.key == key:
                return file.pipelines
            logger.warning("%s holds the pipelines of something else; they are planned again", path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, msgspec.DecodeError) as error:
            logger.warning("%s cannot be read, pipelines are planned again: %s", path, error)
        pipelines = plan()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, msgspec.json.encode(_File(key=key, pipelines=pipelines)))
        except OSError as error:
            logger.warning("the pipelines are not kept, the next run plans them again: %s", error)
        return pipelines
