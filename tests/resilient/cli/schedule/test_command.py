"""``resilient schedule``: what is shown, drawn and written is the schedule that the executor would run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from resilient.cli.app import app
from resilient.cli.schedule import report
from resilient.cli.schedule.report import ScheduleReport, profiled_work, schedule_report
from resilient.cli.schedule.tables import show_timeline
from resilient.observability.figures.bars import Bar, Chart, simulated_chart
from resilient.observability.figures.gantt import draw_charts
from resilient.observability.trace_events import Trace
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.inputs.derive import derive_profile
from resilient.templates.inputs.devices import DEVICES, cluster_of
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.graph import Backward, Flow, LaneName, StepGraph, UnitLane
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.schedule import Schedule
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.schedules.unit_generator import generate_units

SMALL = ("--stages", "4", "--microbatches", "8")
A40 = ("--model", "gpt3-2.7b", "--device", "a40")


def run(*arguments: object, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["schedule", *map(str, arguments)])


def shown(*arguments: object, columns: int = 80) -> list[str]:
    ended = run(*SMALL, *arguments, columns=columns)
    assert ended.exit_code == 0, ended.output
    return [line.rstrip() for line in ended.output.splitlines()]


def test_one_schedule_is_shown_with_what_it_costs_each_worker() -> None:
    assert (
        shown("--kind", "zb-h1")
        == """\
zb-h1: 27 ms, 11.1 % bubble
0 F0F1F2F3······I0W0F4I1W1F5I2W2F6I3W3F7I4W4I5W5I6W6I7W7
1 ··F0F1F2····I0F3I1W0F4I2W1F5I3W2F6I4W3F7I5W4I6W5I7W6W7
2 ····F0F1··I0F2I1F3I2W0F4I3W1F5I4W2F6I5W3F7I6W4I7W5W6W7
3 ······F0I0F1I1F2I2F3I3W0F4I4W1F5I5W2F6I6W3F7I7W4W5W6W7
 F  forward   I  backward for inputs   W  backward for weights  · waiting

iteration  27 ms
ideal      24 ms, if the busiest worker never waited
bubble     11.1 % of the workers' time

worker  busy ms  bubble ms  bubble  in flight
     0       24          3  11.1 %          4
     1       24          3  11.1 %          4
     2       24          3  11.1 %          4
     3       24          3  11.1 %          4""".splitlines()
    )


def test_bars_are_as_wide_as_they_last_and_labelled_where_there_is_room() -> None:
    assert shown("--stages", "2", "--microbatches", "3", "--forward-ms", "2", "--backward-weight-ms", "2")[:3] == [
        "1f1b: 20 ms, 25.0 % bubble",
        "0 F0─────F1─────··········B0─────────F2─────B1────────·······B2─────────",
        "1 ·······F0─────B0────────F1─────B1─────────F2─────B2────────···········",
    ]
    wide = shown("--microbatches", "12", columns=150)
    assert wide[1].startswith("0 F0─F1─F2─F3─")
    assert "F11" in wide[1]
    assert "B11───" in wide[1]
    narrow = shown("--microbatches", "12", columns=100)
    assert "FF" in narrow[1], "no room for two digits"


def test_many_short_bars_are_mixed_by_their_part_of_the_time() -> None:
    lines = shown("--stages", "16", "--microbatches", "64")
    rows = [line[3:] for line in lines[1:17]]
    assert {len(row) for row in rows} == {77}
    for row in rows:
        assert abs(row.count("F") - 64 * 77 / 237) <= 1
        assert abs(row.count("B") - 128 * 77 / 237) <= 1
    assert "BFBBFBBFBBF" in rows[0]


def test_chunks_alternate_between_capital_and_small_letters() -> None:
    lines = shown("--kind", "interleaved-1f1b")
    assert lines[0] == "interleaved-1f1b, 2 stages on each worker: 28.5 ms, 15.8 % bubble"
    assert lines[1].startswith("0 FFFFffffFFF")
    assert lines[5].endswith("small: every other stage")
    assert "     0       24        4.5  15.8 %        5.5" in lines
    halved = shown("--kind", "interleaved-1f1b", "--chunks", "4")
    assert halved[0] == "interleaved-1f1b, 4 stages on each worker: 26.2 ms, 8.6 % bubble"


def test_small_letters_of_units_are_those_of_encoders() -> None:
    names = LaneName("vision"), LaneName("llm")
    lanes = (UnitLane(name=name, rows=(row,), cells=(0,), backwards=(Backward.ALL,)) for row, name in enumerate(names))
    graph = StepGraph(lanes=tuple(lanes), flows=(Flow(names[0], 0, names[1], 0),), num_rows=2)
    timeline = simulate(generate_units(graph), ActionCosts(forward_ms=1, backward_input_ms=1))
    console = Console(width=60, record=True, color_system=None)
    show_timeline(simulated_chart("units", timeline), console)
    assert console.export_text().rstrip().endswith("· waiting  small: vision")


def test_several_kinds_are_compared() -> None:
    lines = shown("--kind", "all", "--send-ms", "0.1")
    assert (
        lines[-10:]
        == """\
schedule                         iteration ms  bubble  most in flight
gpipe                                    33.6  28.6 %               8
1f1b                                     34.6  30.6 %               4
eager-1f1b                               33.6  28.6 %               7
interleaved-1f1b, 2 stages each          29.9  19.7 %             5.5
split-1f1b                               30.6  21.6 %               4
zb-h1                                    28.2  14.9 %               4
zb-h2                                    27.3  12.1 %               7
interleaved-zb, 2 stages each            27.1  11.4 %               4
zb-v, 2 stages each                      26.8  10.4 %               4""".splitlines()
    )
    two = shown("--kind", "zb-h1", "--kind", "1f1b", "--kind", "zb-h1")
    assert [line.partition(":")[0] for line in two if "% bubble" in line] == ["zb-h1", "1f1b"], "each once"


def test_evaluation_has_forwards_alone() -> None:
    lines = shown("--kind", "forward-only")
    assert lines[0] == "forward-only: 11 ms, 27.3 % bubble"


def test_actions_are_those_that_the_executor_gets() -> None:
    ended = run(*SMALL, "--kind", "zb-h1", "--kind", "gpipe", "--text")
    expected = [generate(kind, 4, 8) for kind in (ScheduleKind.ZB_H1, ScheduleKind.GPIPE)]
    rows = ended.output.splitlines()
    assert [Schedule.parse("\n".join(rows[:4])), Schedule.parse("\n".join(rows[4:]))] == expected


@pytest.mark.parametrize("options", [[], ["--text"]])
def test_schedule_that_cannot_run_is_not_shown(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Schedule.parse("0F0 0SEND_F0 0B0 0RECV_B0\n1RECV_F0 1F0 1B0 1SEND_B0")
    monkeypatch.setattr(report, "generate", lambda *_, **__: broken)
    ended = run("--stages", 2, "--microbatches", 1, *options)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert "0B0 must come after 0RECV_B0\n" in ended.stderr


def test_trace_and_picture_are_written_where_told(tmp_path: Path) -> None:
    trace_file, png_file = tmp_path / "new" / "trace.json", tmp_path / "new" / "gantt.png"
    shown("--kind", "zb-h1", "--kind", "1f1b", "--trace-json", trace_file, "--png", png_file)
    trace = Trace.from_json(trace_file.read_bytes())
    assert trace.processes == {0: "zb-h1", 1: "1f1b"}
    timeline = simulate(
        generate(ScheduleKind.ZB_H1, 4, 8), ActionCosts(forward_ms=1, backward_input_ms=1, backward_weight_ms=1)
    )
    assert max(each.end_ns for each in trace.slices if each.process == 0) == timeline.iteration_ns
    events = json.loads(trace_file.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    image = matplotlib.image.imread(png_file)
    assert image.shape[0] > 600
    assert image.shape[1] == 1575
    for colour in ("#4a90d9", "#2b8a3e", "#e8890c", "#8fce8f", "#e4e7eb"):
        rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(image[..., :3] - rgb).max(axis=-1) < 0.01).sum() > 1000, f"{colour} is to be seen"


def test_picture_of_a_large_pipeline_is_no_larger_than_a_page(tmp_path: Path) -> None:
    timeline = simulate(generate(ScheduleKind.ONE_F_ONE_B, 64, 128), ActionCosts(forward_ms=1, backward_input_ms=2))
    draw_charts([simulated_chart("large", timeline)], tmp_path / "large.png")
    assert matplotlib.image.imread(tmp_path / "large.png").shape[0] < 2500


def test_step_that_takes_no_time_is_drawn_and_shown(tmp_path: Path) -> None:
    shown("--forward-ms", "0", "--backward-input-ms", "0", "--backward-weight-ms", "0", "--png", tmp_path / "p.png")
    assert (tmp_path / "p.png").exists()


def test_other_parts_of_a_real_step_are_drawn_but_not_printed(tmp_path: Path) -> None:
    bars = (
        Bar(row=0, kind="F", start_ns=0, end_ns=40, label="0"),
        Bar(row=0, kind="load", start_ns=0, end_ns=10),
        Bar(row=0, kind="commit", start_ns=80, end_ns=100),
    )
    chart = Chart(title="step", rows=("node 0\npipeline 0, stage 0",), length_ns=100, bars=bars)
    assert chart.busy == (0.4,)
    console = Console(width=27, record=True, quiet=False, force_terminal=False)
    with console.capture() as capture:
        show_timeline(chart, console)
    assert capture.get().splitlines()[1] == "node 0 F0──────············"
    draw_charts([chart], tmp_path / "p.png")
    assert (tmp_path / "p.png").exists()


# ---------------------------------------------------------------- costs of a model


def model_report(kind: ScheduleKind, num_chunks: int = 1, **options: Any) -> ScheduleReport:
    profile, cluster = derive_profile("gpt3-2.7b", "a40"), cluster_of("a40", 1)
    return schedule_report(
        kind, 4, 12, num_chunks, lambda stages: profiled_work(profile, cluster, stages, 12), **options
    )


def test_model_is_cut_as_evenly_as_templates_are_and_its_memory_is_known() -> None:
    report = model_report(ScheduleKind.ONE_F_ONE_B)
    profile = derive_profile("gpt3-2.7b", "a40")
    total_ms = 12 * sum(layer.costs[0].forward_ms + layer.backward_ms() for layer in profile.layers)
    assert sum(report.busy_ms) == pytest.approx(total_ms, rel=1e-6)
    assert report.ideal_ms < 1.1 * total_ms / 4
    held = sum(layer.state_bytes + layer.gradient_bytes for layer in profile.layers)
    activations = sum(layer.costs[0].activation_bytes for layer in profile.layers)
    assert held + activations < sum(report.memory_bytes) < held + 4 * activations
    assert report.in_flight == (4, 3, 2, 1)
    assert report.stages[0].startswith("llm.embed - llm.block.")
    assert report.stages[3].endswith(" - llm.head")


def test_worker_with_chunks_holds_the_states_of_all_its_stages() -> None:
    plain, interleaved = model_report(ScheduleKind.ONE_F_ONE_B), model_report(ScheduleKind.INTERLEAVED, 2)
    assert interleaved.num_chunks == 2
    assert sum(interleaved.busy_ms) == pytest.approx(sum(plain.busy_ms), rel=1e-6)
    assert [text.count(" - ") for text in interleaved.stages] == [2, 2, 2, 2]
    assert interleaved.in_flight == (5.5, 4.5, 3.5, 2.5)
    assert sum(interleaved.memory_bytes) > sum(plain.memory_bytes)


def test_eager_schedule_keeps_in_flight_what_memory_holds() -> None:
    free = model_report(ScheduleKind.EAGER)
    assert free.in_flight == (7, 5, 3, 1)
    tight = model_report(ScheduleKind.EAGER, memory_bytes=32_000_000_000)
    assert tight.in_flight == (5, 4, 3, 1)
    assert max(tight.memory_bytes) <= 32_000_000_000 < max(free.memory_bytes)
    assert model_report(ScheduleKind.EAGER, max_in_flight=2).in_flight == (2, 2, 2, 1)


def test_messages_cost_what_the_border_carries() -> None:
    def layer(index: int, input_bytes: int) -> LayerProfile:
        return LayerProfile(
            name=f"l{index}", costs=(LayerCost(forward_ms=1, backward_input_ms=1),), input_bytes=input_bytes
        )

    profile = ModelProfile(layers=(layer(0, 7), layer(1, 1000), layer(2, 3000)))
    work = profiled_work(profile, Cluster(inter_node=Link(latency_ms=0.5, bytes_per_s=1e6)), 3, 4)
    assert (work.costs.latency_ms, work.costs.transfer_ms) == (0.5, [1.0, 3.0])


def test_frozen_layers_have_no_backward_that_nobody_needs() -> None:
    profile = derive_profile("qwen2-vl-7b", "a100-80gb", frozen=("vision",))
    costs = profiled_work(profile, Cluster(), 8, 4).costs
    inputs = [layer.costs[0].backward_input_ms for layer in profile.layers if layer.input_gradient]
    weights = [layer.costs[0].backward_weight_ms for layer in profile.layers if layer.trainable]
    first, second = np.asarray(costs.backward_input_ms), np.asarray(costs.backward_weight_ms)
    assert (first + second).sum() == pytest.approx(sum(inputs) + sum(weights))
    assert len(inputs) < len(profile.layers)
    behind = int((second > 0).argmax())
    assert (first[: behind + 1] == 0).all(), "nobody waits for what the first one that trains differentiates"
    assert (first[behind + 1 :] > 0).all()


def test_schedules_that_do_not_fit_are_named() -> None:
    lines = shown("--microbatches", "12", "--kind", "all", *A40)
    assert lines[-4:] == [
        "gpipe does not fit: worker 0 holds 53.8 GB, 46.4 GB are to use; take more stages",
        "or smaller microbatches",
        "zb-h2 does not fit: worker 3 holds 50.2 GB, 46.4 GB are to use; take more stages",
        "or smaller microbatches",
    ]
    assert "gpipe                                    3844  24.1 %              12     53.8" in lines
    fitting = shown("--microbatches", "12", *A40)
    assert "     0     3126        656  17.3 %          4  28.1  llm.embed - llm.block.8" in fitting
    too_small = shown("--kind", "eager-1f1b", "--model", "gpt3-6.7b", "--device", "l4")
    assert too_small[-2] == "eager-1f1b does not fit: worker 0 holds 41.6 GB, 23.2 GB are to use; take more"


def test_measured_profile_is_read(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(derive_profile("gpt3-2.7b", "a40").to_json())
    assert shown("--profile", tmp_path / "p.json", "--device", "a40") == shown(*A40)
    unlimited = shown("--profile", tmp_path / "p.json", "--kind", "gpipe", "--microbatches", "64")
    assert not any("does not fit" in line for line in unlimited)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--kind", "zb"),
            "--kind must be one of gpipe, 1f1b, eager-1f1b, interleaved-1f1b, split-1f1b, zb-h1, zb-h2, "
            "interleaved-zb, zb-v, forward-only, all, got 'zb'; did you mean 'zb-h1' or 'zb-h2' or "
            "'zb-v'?",
        ),
        (
            ("--chunks", "3"),
            "--chunks must come with --kind interleaved-1f1b, interleaved-zb, got 3 for 1f1b; leave it out",
        ),
        (
            ("--kind", "interleaved-1f1b", "--chunks", "1"),
            "--chunks must be >= 2 for interleaved-1f1b, got 1; 1f1b is the schedule with one stage per row",
        ),
        (
            ("--kind", "gpipe", "--kind", "zb-h1", "--max-in-flight", "3"),
            "--max-in-flight must come with --kind eager-1f1b, got 3 for gpipe, zb-h1; leave it out",
        ),
        (
            ("--kind", "eager-1f1b", "--max-in-flight", "0"),
            "--max-in-flight must be >= 1 for each of the 4 rows, got [0, 0, 0, 0]; a row whose memory holds no "
            "microbatch cannot run",
        ),
        (
            ("--microbatches", "4167", "--kind", "all"),
            "--stages times --microbatches (times --chunks) of all kinds must be at most 200000, got 200016; lower "
            "--microbatches",
        ),
        (("--send-ms", "-1"), "--send-ms must be 0 to 1e+09, got -1; give milliseconds"),
        (("--backward-weight-ms", "inf"), "--backward-weight-ms must be 0 to 1e+09, got inf; give milliseconds"),
        (("--backward-input-ms", "inf"), "--backward-input-ms must be 0 to 1e+09, got inf; give milliseconds"),
        (("--forward-ms", "-1"), "--forward-ms must be 0 to 1e+09, got -1; give milliseconds"),
        (("--forward-ms", "nan"), "--forward-ms must be 0 to 1e+09, got nan; give milliseconds"),
        (
            ("--microbatches", "50001"),
            "--stages times --microbatches (times --chunks) of all kinds must be at most 200000, got 200004; lower "
            "--microbatches",
        ),
        (("--model", "gpt3-2.7b"), f"--device must be given with --model, got none; it can be {', '.join(DEVICES)}"),
        (("--device", "a40"), "--device must come with --model or --profile, got a40 alone; leave it out"),
        (
            (*A40, "--send-ms", "1", "--forward-ms", "2"),
            "--model must come without --forward-ms and --send-ms, which it says, got gpt3-2.7b; leave one of them out",
        ),
        (
            ("--stages", "40", *A40),
            "--stages must be <= 34, one for each layer of the model, got 40; use fewer",
        ),
    ],
)
def test_bad_options_are_refused_with_the_fix(options: tuple[str, ...], message: str) -> None:
    ended = run(*SMALL, *options)
    assert (ended.exit_code, ended.output) == (2, f"error: {message}\n")


def test_evaluation_keeps_no_activations() -> None:
    work = profiled_work(derive_profile("gpt2-medium", "a40"), cluster_of("a40", 1), 2, 5)
    training, evaluation = (
        schedule_report(kind, 2, 5, 1, lambda _: work) for kind in (ScheduleKind.GPIPE, ScheduleKind.FORWARD_ONLY)
    )
    assert (training.in_flight, evaluation.in_flight) == ((5, 5), (0, 0))
    assert evaluation.memory_bytes == work.held_bytes < training.memory_bytes


def test_profile_and_model_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(derive_profile("gpt3-2.7b", "a40").to_json())
    ended = run(*SMALL, *A40, "--profile", path)
    assert (ended.exit_code, ended.output) == (
        2,
        f"error: --profile must come without --model, which it says, got {path}; leave one of them out\n",
    )


def test_folders_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = run(*SMALL, "--png", tmp_path / "file" / "p.png")
    assert ended.exit_code == 2
    assert str(tmp_path / "file") in ended.output
