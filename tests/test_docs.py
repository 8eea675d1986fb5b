"""What the documentation says exists: commands, options, files, links, rooms; and its worked example runs."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from resilient.cli.app import app
from resilient.models.multimodal.encoder import EncoderModule
from resilient.models.multimodal.generator import GeneratorModule
from resilient.models.multimodal.language import LANGUAGE_FAMILIES
from resilient.models.multimodal.module import MultimodalModule
from resilient.models.multimodal.vision_families import VISION_FAMILIES
from resilient.planners.registry import PLANNERS
from resilient.protocol.job_config import AUTO_SCHEDULE, SCHEDULES
from resilient.templates.schedules.kind import ScheduleKind
from resilient.trainer import Trainer
from tests.test_layering import ROOMS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
"""The changelog names what is no longer there."""
SCRIPTS = sorted(
    path for folder in ("examples", "benchmarks", "tests/integration") for path in (ROOT / folder).glob("*.py")
)
OTHERS = {"--rdzv-conf", "--hypothesis-profile", "--gpus", "--ipc", "--network", "--strict"}
"""Options of other people's commands."""


def commands(group: TyperGroup, *words: str) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Yield the words and the options of every command there is."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, *words, name)
        else:
            named = [option for each in command.params for option in (*each.opts, *each.secondary_opts)]
            yield (*words, name), {option for option in named if option.startswith("--")}


_APP = get_command(app)
assert isinstance(_APP, TyperGroup)
COMMANDS = dict(commands(_APP))


def told_commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command line of a page, in blocks and in the text."""
    text = page.read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", outside)]
    for line in lines:
        for part in re.split(r"&&|\|", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # code, but no command
                continue
            if words:
                yield words


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--\w", word)]


def script_options(script: Path) -> set[str]:
    return set(re.findall(r"\"(--[\w-]+)\"", script.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in told_commands(page):
        if words[0] != "resilient" or len(words) == 1:
            continue
        count = 2 if words[1] == "inject" and len(words) > 2 else 1
        command = tuple(words[1 : 1 + count])
        if command == ("inject",):
            continue
        assert command in COMMANDS, f"{page.name}: {shlex.join(words)}"
        rest = words[1 + count :]
        scripts = [i for i, word in enumerate(rest) if word.endswith(".py")]
        own, after = (rest[: scripts[0]], rest[scripts[0] :]) if scripts else (rest, [])
        unknown = [each for each in options(own) if each not in COMMANDS[command]]
        assert unknown == [], f"{page.name}: {shlex.join(words)}"
        if after and (ROOT / after[0]) in SCRIPTS:
            assert set(options(after)) <= script_options(ROOT / after[0]), f"{page.name}: {shlex.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_named_in_the_text_exist(page: Path) -> None:
    known = set[str]().union(*COMMANDS.values(), *map(script_options, SCRIPTS), OTHERS)
    named = {option for words in told_commands(page) if words[0].startswith("--") for option in options(words)}
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_exist(page: Path) -> None:
    folders = "|".join(each.name for each in ROOT.iterdir() if each.is_dir() and not each.name.startswith("."))
    text = re.sub(r"^```text.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(rf"(?<![\w/.-])(?:{folders})/[\w/]+\.(?:py|md|png|txt)", text))
    assert sorted(each for each in named if not each.startswith("runs/") and not (ROOT / each).exists()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert sorted(each for each in targets if not (page.parent / each).exists()) == []


def test_test_files_named_exist() -> None:
    there = {path.name for path in (ROOT / "tests").rglob("*.py")}
    named = {each for page in PAGES for each in re.findall(r"\btest_\w+\.py", page.read_text())}
    assert sorted(named - there - {"test_train.py"}) == []


def test_every_planner_is_documented() -> None:
    text = (ROOT / "docs" / "planners.md").read_text()
    assert [each for each in PLANNERS if f"`{each}`" not in text and each not in text] == []


LANGUAGE_MODELS = {name.lower() for name in LANGUAGE_FAMILIES.values()}
ENCODERS = {each.removesuffix("_vision_model") for each in VISION_FAMILIES}


def families(listed: str) -> set[str]:
    return {each.lower() for each in re.split(r",\s+|\s+and\s+", listed)}


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("README.md", r"\(([\w,\s]+) as language models;\s+([\w,\s]+)\s+as vision encoders\)"),
        ("docs/user_guide.md", r"\n([\w, ]+) are known as language models, ([\w, ]+) as vision encoders"),
    ],
)
def test_families_of_models_listed_are_those_there_are(page: str, sentence: str) -> None:
    found = re.search(sentence, (ROOT / page).read_text())
    assert found is not None
    assert (families(found[1]), families(found[2])) == (LANGUAGE_MODELS, ENCODERS)


def test_types_of_models_listed_for_arguments_are_those_there_are() -> None:
    listed = {
        each: re.findall(r"A transformers (?:vision )?config \(([\w, ]+)\)", inspect.getdoc(each) or "")
        for each in (MultimodalModule, EncoderModule, GeneratorModule)
    }
    vision = [", ".join(VISION_FAMILIES)]
    assert listed == {
        MultimodalModule: [", ".join(LANGUAGE_FAMILIES)],
        EncoderModule: vision,
        GeneratorModule: vision,
    }


def test_schedules_listed_are_those_a_job_can_choose() -> None:
    found = re.search(r"\*\*A step\*\* runs ([^;]+);", (ROOT / "README.md").read_text())
    assert found is not None
    assert set(re.findall(r"`([\w-]+)`", found[1])) == set(SCHEDULES)
    (argument,) = re.findall(r"^    schedule: (.+?)^    \w+: ", inspect.getdoc(Trainer) or "", re.MULTILINE | re.DOTALL)
    assert set(re.findall(r'"([\w-]+)"', argument)) == {*SCHEDULES, AUTO_SCHEDULE}
    table = (ROOT / "docs" / "schedules.md").read_text().partition("## The kinds")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w[\w-]*)` \|.*\|([^|]*)\|$", table, re.MULTILINE))
    assert set(rows) == {kind.value for kind in ScheduleKind}
    assert {kind for kind, jobs in rows.items() if jobs.strip()} == set(SCHEDULES)


def test_every_option_of_the_trainer_is_explained() -> None:
    named = {name for page in PAGES for name in re.findall(r"\b(\w+)=", page.read_text())}
    options = {each.name for each in inspect.signature(Trainer).parameters.values() if each.default is not each.empty}
    assert options - named == set()


def test_every_command_is_documented() -> None:
    told = {tuple(words[1:3]) for page in PAGES for words in told_commands(page) if words[0] == "resilient"}
    named = told | {words[:1] for words in told}
    assert {words for words in COMMANDS if words not in named} == set()


def test_the_map_shows_every_room_and_what_it_may_import() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .+ \| ([\w, ]*)\|$", text, flags=re.MULTILINE)
    shown = {room: sorted(names.replace(",", " ").split()) for room, names in rows}
    assert shown == {room: sorted(names.split()) for room, names in ROOMS.items()}


def test_plans_and_replays_shown_are_those_that_the_commands_make() -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    shown = re.findall(r"^```bash\nresilient ([^\n]*)\n```\n\n```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert [command.split()[0] for command, _ in shown] == ["plan", "simulate", "simulate"]
    for command, text in shown:
        options = re.sub(r"--png \S+", "", command).split()
        said = {line.rstrip() for line in CliRunner().invoke(app, options).output.splitlines()}
        assert [line for line in text.splitlines() if line not in said and line.strip() != "..."] == [], command


def test_extras_named_exist() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    extras = set(re.findall(r"^(\w+) = \[", pyproject.partition("[project.optional-dependencies]")[2], re.MULTILINE))
    for page in [*PAGES, ROOT / ".ci" / "run"]:
        for named in re.findall(r"pip install .*?\[([\w,]+)\]", page.read_text()):
            assert set(named.split(",")) <= extras, page.name


def test_the_two_commands_of_the_readme_are_what_ci_runs() -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    typed = [shlex.split(line, comments=True) for line in blocks[0].splitlines()]
    assert typed == [
        ["pip", "install", "-e", ".[demo]", "&&", "resilient", "demo"],
        ["pip", "install", "-e", ".[test]", "&&", "pytest"],
    ]
    ci = [line.split() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert ["pytest", "-q"] in ci
    assert any(words[:2] == ["resilient", "demo"] for words in ci)
    # what the tests install brings what the demo needs
    assert re.search(r"^test = .*resilient-train\[demo,", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)


def test_the_worked_example_of_layers_learns(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "user_guide.md").read_text()
    found = re.search(r"^```python\n(# tied_model.py\n.*?)^```", guide, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    script = tmp_path / "tied_model.py"
    script.write_text(found[1])
    # Of several threads each waits for the others in every small operation: where cores are shared, seconds a step.
    alone = {"PYTHONPATH": str(ROOT), "RESILIENT_RUN_DIR": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        check=False,
    )
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", ended.stderr)]
    assert (ended.returncode, len(losses)) == (0, 30), ended.stderr
    assert losses[-1] < 0.1 < 1 < losses[0]
