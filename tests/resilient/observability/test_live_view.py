"""What the person sees while a job runs."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from resilient.observability.job_status import JobStatus
from resilient.observability.live_view import LiveView, PlainView, make_view, sparkline
from tests.resilient.observability.made_up_runs import Run, fail_twice_with_late_steps, failure_and_join


def console(width: int = 100, height: int = 30, terminal: bool = False) -> Console:
    return Console(record=True, width=width, height=height, file=io.StringIO(), force_terminal=terminal)


def shown(view: LiveView | PlainView, screen: Console, events: list[dict[str, Any]]) -> str:
    with view:
        for event in events:
            view.on_event(event)
    return screen.export_text()


def live_text(events: list[dict[str, Any]], width: int = 100, height: int = 30) -> str:
    screen = console(width, height, terminal=True)
    return shown(LiveView(screen), screen, events)


def plain_text(events: list[dict[str, Any]], width: int = 200) -> str:
    screen = console(width)
    return shown(PlainView(screen), screen, events)


def every_kind() -> list[dict[str, Any]]:
    """A run with every kind of event."""
    run = failure_and_join()
    run.add(5000, "node_leaving", node=1, reason="spot notice: 120 s")
    run.add(5000, "waiting", nodes=[3, 4], num_missing=1, waited_s=60)
    run.add(5000, "too_few", num_missing=2, coming=[], wait_s=10.0)
    run.add(5000, "too_few", num_missing=1, coming=[6], wait_s=10.0)
    run.add(5000, "checkpoint_failed", step=38, node=3, error="/c cannot be written", newest=None)
    run.add(5000, "checkpoint_failed", step=39, node=None, error="/d cannot be written", newest="/b")
    run.add(5000, "interrupted", reason="SIGTERM", grace_s=120.0)
    run.add(5000, "boundary", joining=[], leaving=[1])
    run.generation(5010, 4, "leave", 40, [0, 3, 4], standby=[5])
    run.installed(5020, 5030)
    run.step(5100, 41)
    run.add(5105, "node_failed", node=3, error="OSError: disk gone", traceback="line 3, in f")
    run.detected(5110, [], 5, cause="communication failed: peer closed")
    run.generation(5120, 5, "failure", 41, [0, 3, 4])
    run.installed(5130, 5140)
    run.step(5200, 42)
    run.add(5250, "failed", node=4, error="ValueError: sample 17 has no image", traceback="line 3, in f")
    run.add(5300, "stopped", exit_code=3, reason="2 nodes are missing", path=None)
    return run.events


@pytest.mark.parametrize("size", [(80, 24), (150, 45), (40, 10)])
def test_live_view_renders_every_kind_of_event(size: tuple[int, int]) -> None:
    text = live_text(every_kind(), *size)
    assert "digits_vlm.py" in text
    assert "stopped with exit code 3" in text


def test_live_view_shows_job_nodes_pipelines_and_events() -> None:
    text = live_text(failure_and_join().events)
    last = text[text.rindex("resilient  digits_vlm.py") :]
    for expected in (
        "generation 3  step 40/40",
        "node 5   training  pipeline 1  llm.block.0 – llm.head",
        "node 2   lost",
        " 1 ▪▪▪▪▪▪▪▪",
        "node 5 joined, training paused for 60 ms",
        "finished after 40 steps",
    ):
        assert expected in last


def test_live_view_fits_a_small_terminal_with_many_nodes() -> None:
    run = Run(num_nodes=40)
    run.generation(0, 1, "start", 0, list(range(40)))
    run.step(100, 1)
    text = live_text(run.events, 80, 24)
    last = text[text.rindex("resilient  digits_vlm.py") :]
    assert len(last.rstrip("\n").splitlines()) <= 23
    assert max(len(line) for line in last.splitlines()) <= 80
    assert "more nodes" in last


def test_live_view_prints_the_output_of_the_script() -> None:
    assert "held-out accuracy 0.10" in live_text(failure_and_join().events)


def test_plain_view_writes_a_line_for_each_notable_event() -> None:
    text = plain_text(failure_and_join().events)
    for expected in (
        "job digits_vlm.py: 40 steps of 64 samples, 7 layers, 5 nodes, survives 1 failure at a time",
        "generation 1: 2 pipelines (0-1-2 x8, 3-4 x8 microbatches)",
        "node 2 was killed on purpose in phase backward",
        "node 2 failed: node lost",
        "recovered from the loss of node 2 in 250 ms, 1 step redone "
        "(detect 2 ms, agree 18 ms, regroup 40 ms, copy 70 ms, redo 120 ms)",
        "node 5 joined, training paused for 60 ms",
        "accuracy = 0.93",
        "finished after 40 steps",
    ):
        assert text.count(expected) == 1, expected


def test_plain_view_tells_of_failures_that_were_never_caused() -> None:
    run = failure_and_join()
    run.not_injected(9000, 7, step=12)
    run.not_injected(9000, 2, step=15, phase="commit")
    run.not_injected(9000, 2, step=15, worker=1)
    text = plain_text(run.events)
    assert "node 7 was never killed in step 12, as was wanted: the job ended before it came to that" in text
    assert "node 2 was never killed in phase commit of step 15, as was wanted: the job ended before" in text
    assert "worker 1 of node 2 was never killed in step 15, as was wanted: the job ended before" in text


def test_plain_view_reads_records_of_versions_that_killed_first_workers_only() -> None:
    run = failure_and_join()
    for worker_only in (False, True):
        run.add(9000, "not_injected", node=2, phase=None, step=15, worker_only=worker_only)
    text = plain_text(run.events)
    assert text.count("node 2 was never killed in step 15, as was wanted") == 2
    assert "worker 0 of node 2 was never killed in step 15, as was wanted" in text


def test_plain_view_tells_how_another_machine_joins_and_who_is_slow() -> None:
    run = Run()
    run.add(0, "listening", address="10.0.0.5:29400")
    run.generation(10, 1, "start", 0, [0, 1, 2], slowdowns={"2": 1.5})
    text = plain_text(run.events)
    assert (
        "another machine joins with: resilient agent --join 10.0.0.5:29400 --run RUN "
        "(RUN is the folder of the run; or --token-file, see there)"
    ) in text
    assert "what workers send each other is not encrypted: the network of 10.0.0.5 must be private" in text
    assert "node 2 is slower than others, 1.5 times: its pipeline gets less to do" in text


def test_live_view_names_all_layers_of_a_node_with_several_stages() -> None:
    run = Run(num_nodes=2)
    bounds = [(0, 2), (2, 3), (3, 5), (5, 7)]
    stages = [
        {"node": i % 2, "local_rank": 0, "first_layer": first, "end_layer": end}
        for i, (first, end) in enumerate(bounds)
    ]
    run.generation(10, 1, "start", 0, [0, 1], pipelines=[{"nodes": [0, 1], "num_microbatches": 4, "stages": stages}])
    text = live_text(run.events, 120)
    assert "vision.embed – vision.block.0, llm.embed – llm.block.0" in text
    assert "projector, llm.block.1 – llm.head" in text
    (bar,) = [line for line in text.splitlines() if "▪▪▪▪" in line]
    assert bar.count("node 0") == bar.count("node 1") == 2


@pytest.mark.parametrize(
    ("version", "lost_steps", "words"),
    [(2, 1, ", redoes step 3\n"), (3, 0, ", goes on with step 4\n"), (4, 0, ", all steps are done\n")],
)
def test_plain_view_says_where_a_recovery_goes_on(version: int, lost_steps: int, words: str) -> None:
    run = Run(num_steps=4)
    run.generation(0, 1, "start", 0, [0, 1, 2])
    run.detected(250, [1], 2)
    run.generation(260, 2, "failure", version, [0, 2], lost_steps=lost_steps)
    assert words in plain_text(run.events)


@pytest.mark.parametrize("suspected", [True, False])
def test_plain_view_tells_of_both_failures_though_the_steps_between_are_heard_of_late(suspected: bool) -> None:
    run = Run()
    run.generation(0, 1, "start", 0, [0, 1, 2])
    run.step(100, 1)
    run.step(200, 2)
    fail_twice_with_late_steps(run, suspected=suspected)
    told = [line.split("recovered from ")[1] for line in plain_text(run.events).splitlines() if "recovered" in line]
    assert told == [
        "the loss of node 1 in 130 ms, 1 step redone (detect 10 ms, agree 10 ms, regroup 5 ms, copy 5 ms, redo 100 ms)",
        "the loss of node 2 in 155 ms, 1 step redone "
        "(detect 5 ms, agree 20 ms, regroup 10 ms, copy 20 ms, redo 100 ms)",
    ]


def test_plain_view_prints_output_verbatim() -> None:
    run = Run()
    run.add(0, "output", text="[bold]0.5[/bold] " + "x" * 300)
    assert plain_text(run.events, width=80).splitlines()[-1] == "[bold]0.5[/bold] " + "x" * 300


def test_views_show_codes_for_the_terminal_and_do_not_send_them() -> None:
    """Of what the script prints and of what it raises; a progress bar's lines follow each other."""
    run = Run()
    run.add(0, "output", text="\x1b]0;mine\x07 1 %\r 2 %")
    run.add(0, "node_connected", node=0, host="h\x1b[2J", pid=1, domain="")
    run.add(1, "node_failed", node=0, error="OSError: \x1b[2J", traceback="")
    shown = plain_text(run.events)
    assert "\\x1b]0;mine\\x07 1 %\n 2 %\n" in shown
    assert "OSError: \\x1b[2J" in shown
    assert "\x1b" not in shown
    redrawn = live_text(run.events)
    assert "node 0 failed: OSError: \\x1b[2J" in redrawn
    assert "\x1b" not in redrawn


def test_plain_view_tells_of_an_error_of_one_node_once() -> None:
    run = failure_and_join()
    run.add(5000, "node_failed", node=4, error="OSError: disk gone", traceback="line 3, in f")
    run.detected(5000, [4], 4, cause="OSError: disk gone")
    run.add(5010, "node_lost", node=4, cause="OSError: disk gone")
    (told,) = [line for line in plain_text(run.events).splitlines() if "disk gone" in line]
    assert told.endswith("node 4 failed: OSError: disk gone; the others go on without it")


def test_node_that_cannot_join_is_told_of_and_in_no_table() -> None:
    run = failure_and_join()
    run.add(5000, "node_connected", node=9, host="h", pid=9, domain="")
    run.add(5010, "not_joined", node=9, cause="devices must be larger")
    status = JobStatus()
    told = [message.text for event in run.events for message in status.apply(event)]
    assert told[-1] == "node 9 cannot join: devices must be larger"
    assert 9 not in status.nodes


def test_step_tells_the_losses_of_several_units() -> None:
    run = Run(num_steps=4)
    run.generation(0, 1, "start", 0, [0, 1, 2])
    told = {"grad_norm": 1.0, "num_samples": 64, "step_ms": 100.0, "learning_rate": 3e-4}
    run.add(2000, "step", step=1, loss=0.75, losses={"llm": 0.5, "image": 0.25}, **told)
    run.add(4000, "step", step=2, loss=None, losses={"llm": 0.5, "image": None}, skipped=True, **told)
    lines = [line.split("  ", 1)[1] for line in plain_text(run.events).splitlines()]
    assert lines[-3] == "step 1/4  loss 0.7500 (llm 0.5000, image 0.2500)"
    assert lines[-2] == "step 2/4  loss nan (llm 0.5000, image nan)  32 samples/s"


def test_views_tell_of_skipped_steps() -> None:
    run = Run(num_steps=4)
    run.generation(0, 1, "start", 0, [0, 1, 2])
    for step, loss in enumerate((4.0, float("nan"), 3.0, float("nan")), start=1):
        run.step(2000 * step, step, loss=loss)
    lines = [line.split("  ", 1)[1] for line in plain_text(run.events).splitlines()]
    assert lines[-6:] == [
        "step 1/4  loss 4.0000",
        "step 2/4  loss nan  32 samples/s",
        "step 2 was skipped, as its loss or gradient is not finite: 1 so far",
        "step 3/4  loss 3.0000  32 samples/s",
        "step 4/4  loss nan  32 samples/s",
        "step 4 was skipped, as its loss or gradient is not finite: 2 so far",
    ]
    assert "step 4/4  loss nan  2 skipped  32 samples/s" in live_text(run.events)


def test_plain_view_writes_at_most_a_step_a_second_and_the_last() -> None:
    run = Run(num_steps=25)
    run.generation(0, 1, "start", 0, [0, 1, 2])
    for step in range(1, 26):
        run.step(100 * step, step)
    steps = [line.split("step ")[1].split("/")[0] for line in plain_text(run.events).splitlines() if "  step " in line]
    assert steps == ["1", "11", "21", "25"]


def test_plain_view_renders_every_kind_of_event() -> None:
    text = plain_text(every_kind())
    assert "node 1 left, training paused for" in text
    assert "failure suspected: communication failed: peer closed" in text
    going_on = "there is no checkpoint"
    assert f"no checkpoint of step 38 on node 3: /c cannot be written; {going_on}" in text
    going_on = "the newest checkpoint is /b"
    assert f"no checkpoint of step 39: /d cannot be written; {going_on}" in text
    assert "too few nodes are left: waiting 10 s for 2 more nodes\n" in text
    assert "too few nodes are left: waiting 10 s for 1 more node (node 6 getting ready)\n" in text
    assert "line 3, in f" in text
    assert "the script failed on node 4: ValueError: sample 17 has no image" in text


def test_make_view_is_live_only_on_a_terminal() -> None:
    assert isinstance(make_view(None, console(terminal=True)), LiveView)
    assert isinstance(make_view(None, console(terminal=False)), PlainView)
    assert isinstance(make_view(True, console(terminal=True)), PlainView)
    assert isinstance(make_view(False, console(terminal=False)), LiveView)


def test_status_tells_nodes_apart() -> None:
    status = JobStatus()
    for event in every_kind():
        status.apply(event)
    assert {node.node: node.state for node in status.nodes.values()} == {
        0: "training",
        1: "left",
        2: "lost",
        3: "training",
        4: "training",
        5: "left",
    }
    assert (status.phase, status.generation, status.step) == ("stopped", 5, 42)


def test_sparkline_spans_low_to_high_and_ignores_nan() -> None:
    assert sparkline([8, float("nan"), 1], 10) == "█▁"
    assert sparkline([1.0], 10) == ""
    assert len(sparkline(list(range(100)), 10)) == 10
