"""``resilient compare``: every planner on the same batches."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner, Result

from resilient.cli.app import app
from resilient.cli.compare.report import Comparison
from resilient.cli.compare.tables import show_bad
from resilient.planners.costs.samples import SampleTable
from resilient.planners.planner import Configuration, Setting
from resilient.planners.published.baselines.uniform import Uniform
from resilient.planners.workloads.records import Bad

_JOB = ("--model", "qwen2-vl-7b", "--device", "a100-80gb", "--nodes", "2", "--global-batch", "32", "--batches", "2")


def _compare(*options: str) -> Result:
    return CliRunner().invoke(app, ["compare", *_JOB, *options], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("compared")
    files = ("--json", str(folder / "all.json"), "--png", str(folder / "all.png"))
    return _compare("--workload", "coco", "--planners", "uniform,dip", *files), folder


def test_compare_prints_a_row_for_each_planner_and_the_best(compared: tuple[Result, Path]) -> None:
    result, folder = compared
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "all.json").read_text())
    assert [row["planner"] for row in found["planners"]] == ["uniform", "dip"]
    assert found["planners"][0]["speed_up"] == 1.0
    steps = [row["iteration_ms"] for row in found["planners"]]
    assert found["planners"][1]["speed_up"] == pytest.approx(steps[0] / steps[1])
    assert found["best"] == ["uniform", "dip"][steps.index(min(steps))]
    assert found["reason"] in result.output
    assert [row["of_bound"] for row in found["planners"]] == [ms / found["bound_ms"] for ms in steps]
    assert found["bound_ms"] < min(steps)
    assert f"bound: {found['bound_ms']:.0f} ms, all work over all devices with nothing else\n" in result.output


@pytest.mark.parametrize("name", ["laion+coco", "mixed"])
def test_more_batches_only_add_some(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[SampleTable, list[SampleTable]]] = []

    def noting(
        planners: object, setting: Setting, samples: SampleTable, batches: list[SampleTable], **_: object
    ) -> Comparison:
        seen.append((samples, batches))
        return Comparison(rows=(), refused={}, bound_ms=1.0, baseline="uniform")

    monkeypatch.setattr("resilient.cli.compare.report.compare_planners", noting)
    model = ("--model", "siglip-so400m+whisper-large-v3+qwen2.5-7b", "--workload", name, "--planners", "uniform")
    for count in ("2", "40"):
        _compare(*model, "--batches", count)
    (known, few), (known_again, many) = seen
    assert (len(few), len(many)) == (2, 40)
    for one, other in zip((known, *few), (known_again, *many), strict=False):
        assert one.names == other.names
        for unit, lengths in one.units.items():
            assert lengths.tokens.tolist() == other.units[unit].tokens.tolist()
    assert not set(known.names) & {each for batch in many for each in batch.names}


def test_what_is_written_as_json_is_documented(compared: tuple[Result, Path]) -> None:
    found = json.loads((compared[1] / "all.json").read_text())
    row = found["planners"][0]
    documented = set(re.findall(r"`(\w+)`", (Path(__file__).parents[4] / "docs" / "planners.md").read_text()))
    assert {*found, *found["job"], *row, *row["units"]["llm"], "name", "reason", "dropped"} <= documented


def test_compare_draws_bars_and_steps(compared: tuple[Result, Path]) -> None:
    _, folder = compared
    for name in ("all.png", "all-steps.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_compare_goes_on_with_the_nodes_that_are_left(compared: tuple[Result, Path], tmp_path: Path) -> None:
    path = tmp_path / "lost.json"
    result = _compare("--workload", "coco", "--planners", "uniform", "--lost-nodes", "1", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "2 nodes with 8 devices each, 1 of them lost" in result.output
    whole = json.loads((compared[1] / "all.json").read_text())["planners"][0]
    assert json.loads(path.read_text())["planners"][0]["iteration_ms"] > whole["iteration_ms"]


def test_compare_promises_that_lost_nodes_lose_no_state(compared: tuple[Result, Path], tmp_path: Path) -> None:
    path = tmp_path / "redundant.json"
    options = ("--workload", "coco", "--planners", "uniform,dip", "--max-failures", "1", "--json", str(path))
    assert _compare(*options).exit_code == 0
    found = json.loads(path.read_text())
    assert found["job"]["max_failures"] == 1
    whole = json.loads((compared[1] / "all.json").read_text())
    assert [row["peak_bytes"] for row in found["planners"]] > [row["peak_bytes"] for row in whole["planners"]]


def without_times(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    for row in found["planners"]:
        del row["configure_ms"], row["assign_ms"]
    return found


def test_compare_finds_the_same_again_under_short_names(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for device, frozen in (("a100", "encoder,llm"), ("a100-80gb", "vision, llm")):
        path = tmp_path / f"{device}.json"
        options = ("--planners", "uniform,entrain", "--frozen", frozen, "--device", device, "--json", str(path))
        ended = _compare("--workload", "laion+coco", *options)
        assert ended.exit_code == 0
        assert ended.stderr == "note: --device a100 is taken as a100-80gb; there is a100-40gb, too\n" * (
            device == "a100"
        )
        found.append(without_times(path))
    sources = [each["job"].pop("costs") for each in found]
    assert sources == [
        f"derived: qwen2-vl-7b, a100-80gb, frozen {frozen}" for frozen in ("encoder, llm", "llm, vision")
    ]
    assert found[0] == found[1]


def test_compare_shows_three_units_whole_in_80_columns() -> None:
    job = (
        "--model",
        "siglip-so400m+whisper-large-v3+llama3.2-1b",
        "--workload",
        "mixed",
        "--planners",
        "uniform,static-cp",
    )
    result = CliRunner().invoke(app, ["compare", *_JOB, *job], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "static-cp " in result.output
    assert "\u2026" not in result.output


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [
        {"id": f"p{row}", "width": 300 + 20 * row, "height": 300, "text": "five words that say little"}
        for row in range(9)
    ]
    rows += [{"id": "gone-é", "width": 1, "height": 1, "text": "x"}, {"id": "negative", "width": -5, "height": 8}]
    path = tmp_path / "pictures.json"
    path.write_text(json.dumps(rows))
    return path


GONE, NEGATIVE = "a picture of 1 x 1 pixels, smaller than 14", "width -5, which is no number from 0 on"


def test_compare_names_bad_samples_and_leaves_them_to_the_user(pictures: Path, tmp_path: Path) -> None:
    refused = _compare("--workload", str(pictures), "--planners", "uniform")
    assert refused.exit_code == 2
    assert refused.stderr == (
        f"error: samples of --workload must fit the model, got 2 of 11 that do not ('gone-é': {GONE}; 'negative': "
        f"{NEGATIVE}); leave them out (--bad drop), or make them fit (--bad resize)\n"
    )
    for bad, title, dropped in (
        ("drop", "2 left out, 0 made to fit", [True, True]),
        ("resize", "1 left out, 1 made to fit", [False, True]),
    ):
        files = ("--json", str(tmp_path / "found.json"))
        result = _compare("--workload", str(pictures), "--planners", "uniform", "--bad", bad, *files)
        assert result.exit_code == 0, result.output
        became = ["left out" if each else "made to fit" for each in dropped]
        lines = [f"Bad samples: {title}", f"'gone-é': {GONE}; {became[0]}", f"'negative': {NEGATIVE}; {became[1]}"]
        assert "\n".join(lines) in result.output
        assert json.loads((tmp_path / "found.json").read_text())["job"]["bad_samples"] == [
            {"name": name, "reason": reason, "dropped": each}
            for name, reason, each in zip(("gone-é", "negative"), (GONE, NEGATIVE), dropped, strict=True)
        ]


def test_names_are_shown_on_any_terminal() -> None:
    found = (Bad(name="图\n\x1b[31m[red]", reason="no text", dropped=True),)
    for encoding, name in (("utf-8", "图"), ("ascii", "\\u56fe")):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
        show_bad(found * 12, Console(file=file))
        file.seek(0)
        lines = file.read().splitlines()
        assert lines[:2] == ["", "Bad samples: 12 left out, 0 made to fit"]
        assert lines[2:12] == [f"'{name}\\n\\x1b[31m[red]': no text; left out"] * 10
        assert lines[12:] == ["and 2 more, all in what --json writes"]


def test_compare_counts_texts_by_a_tokenizer_and_opens_pictures(tmp_path: Path) -> None:
    Image.new("RGB", (640, 480)).save(tmp_path / "a.png")
    rows = [{"image": "a.png", "text": "one two three four"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    options = ("--workload", str(tmp_path / "rows.json"), "--planners", "uniform", "--pictures", str(tmp_path))
    counted = _compare(*options, "--tokenizer", str(tmp_path), "--json", str(tmp_path / "counted.json"))
    assert counted.exit_code == 0, counted.output
    assert _compare(*options, "--json", str(tmp_path / "words.json")).exit_code == 0
    by_tokens, by_words = (
        without_times(tmp_path / f"{name}.json")["planners"][0]["iteration_ms"] for name in ("counted", "words")
    )
    assert by_tokens < by_words  # an unsplit text is one token, and four words are about six
    assert _compare(*options, "--tokenizer", str(tmp_path / "rows.json")).stderr.startswith(
        f"error: --tokenizer must be a tokenizer.json or its folder, got {tmp_path / 'rows.json'} ("
    )


def test_compare_shows_what_planners_note(monkeypatch: pytest.MonkeyPatch) -> None:
    configure = Uniform.configure

    def noting(self: Uniform, setting: Setting, samples: SampleTable) -> Configuration:
        return replace(configure(self, setting, samples), notes=("samples are few",))

    monkeypatch.setattr(Uniform, "configure", noting)
    assert "uniform: samples are few\n" in _compare("--workload", "coco", "--planners", "uniform").output


def test_compare_names_the_planners_there_are() -> None:
    result = _compare("--workload", "coco", "--planners", "unifrom")
    assert result.exit_code == 2
    assert "--planners must be one of uniform, uniform-sorted, random, fsdp, dip" in result.stderr
    assert "got 'unifrom'; did you mean 'uniform'?" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--network-gbit-s", "0"), "--network-gbit-s must be at least 0.001, got 0.0; leave it out for the usual "
         "network"),
        (("--lost-nodes", "2"), "--lost-nodes must be 0 to 1, got 2; leave a node"),
        (("--max-failures", "2"), "--max-failures must be less than --nodes 2, got 2; lower it, or raise --nodes"),
        (("--frozen", "vision,projector,llm"), "--frozen must leave a unit to train, got vision,projector,llm; leave "
         "one out"),
        (("--frozen", "visoin"), "--frozen must name units (vision, llm, encoder, projector) or layers (such as "
         "vision.embed), got 'visoin'; see their spelling"),
        (("--device", "a10"), "--device must be one of a40, a100-40gb, a100-80gb, h100, h200, v100-32gb, l4, got "
         "'a10'; did you mean 'a100-40gb' or 'a100-80gb'?"),
        (("--microbatch", "64"), "--microbatch must be at most --global-batch 32, got 64; lower it"),
        (("--batches", "312501"), "--global-batch times --batches must be at most 10000000, got 10000032; lower "
         "--batches"),
        (("--json", "/"), "--json must be a file that can be written, got / (Is a directory); choose another, or make "
         "this one writable"),
        (("--png", "all.jpg"), "--png must be a file that ends in .png, got all.jpg; choose another"),
    ],
)  # fmt: skip
def test_compare_refuses_what_cannot_be_before_it_computes(options: tuple[str, ...], message: str) -> None:
    result = _compare("--workload", "coco", "--planners", "uniform", *options)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {message}\n")


def test_compare_says_in_its_options_why_a_planner_found_no_plan() -> None:
    result = _compare("--workload", "coco", "--planners", "cornstarch", "--nodes", "1", "--gpus-per-node", "1")
    assert result.exit_code == 1
    assert (
        "cornstarch found no plan: --nodes must be enough for 'cornstarch', got 1 of 1 devices; use more nodes, a "
        "smaller microbatch, or another planner\n"
    ) in result.output


def test_compare_names_a_file_that_is_none_of_samples(tmp_path: Path) -> None:
    (tmp_path / "samples").touch()
    result = _compare("--workload", str(tmp_path / "samples"))
    message = f"--workload must end in .csv, .json, .jsonl, got '{tmp_path / 'samples'}'; rename or convert it"
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")
