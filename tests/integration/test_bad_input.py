"""What a person can get wrong ends the job soon, with a message that says what to do."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import textwrap
from pathlib import Path

import pytest

from resilient.observability.event_log import read_events
from tests.integration.harness import CHAIN, Run, command, run_job, started

JOBS = Path(__file__).parent / "jobs"


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a ``resilient`` command that is to end by itself."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=100)


def words(text: str) -> str:
    """Return a text without its line breaks: the console wraps where it likes."""
    return re.sub(r"\s+", " ", text)


def write_script(folder: Path, text: str) -> Path:
    script = folder / "job.py"
    script.write_text(textwrap.dedent(text))
    return script


def check_failed(run: Run, *parts: str) -> None:
    """Check that the job failed with one message that holds all the parts."""
    assert run.exit_code == 1
    assert run.losses == {}
    for part in parts:
        assert part in run.reason


def test_batch_that_cannot_be_cut_names_those_that_can(tmp_path: Path) -> None:
    run = run_job(tmp_path, "--batch", "30", "--microbatch", "4", nodes=4)
    check_failed(run, "global_batch must be a multiple of microbatch 4", "got 30; use 28 or 32")


def test_fewer_microbatches_than_pipelines(tmp_path: Path) -> None:
    run = run_job(tmp_path, "--batch", "4", "--microbatch", "4", nodes=4)
    check_failed(run, "one microbatch for each of 2 pipelines", "got 4; use 8")


def test_pipelines_longer_than_the_model(tmp_path: Path) -> None:
    run = run_job(tmp_path, "--layers", "3", "--min-pipeline-nodes", "4", nodes=8)
    check_failed(run, "min_pipeline_nodes")


def test_unknown_model_family(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        from transformers import T5Config
        import resilient as rs
        rs.MultimodalModule(encoders={}, language_model=T5Config(num_layers=1))
        """,
    )
    run = run_job(tmp_path / "run", script=script, nodes=2)
    check_failed(run, "t5", "llama")


def test_node_with_other_weights_is_refused_and_the_file_is_named(tmp_path: Path) -> None:
    """As if the folder lay on each node's own disk: of equal sizes, at the same place for all that the job knows."""
    script = write_script(
        tmp_path,
        """
        import os, sys
        from pathlib import Path
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        import resilient as rs

        class Texts:
            def __len__(self):
                return 8

            def __getitem__(self, index):
                return {"input_ids": torch.arange(4), "labels": torch.arange(1, 5)}

            def num_targets(self, index):
                return 4

        node = int(os.environ["RESILIENT_NODE"])
        folder = Path(sys.argv[1]) / str(node) / "weights"
        torch.manual_seed(node)
        sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
        LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2)).save_pretrained(folder)
        model = rs.MultimodalModule(encoders={}, language_model=folder)
        trainer = rs.Trainer(model, Texts(), optimizer=rs.AdamW(lr=0.1), global_batch=4, microbatch=1, device="cpu")
        trainer.fit(num_steps=2)
        """,
    )
    run = run_job(tmp_path / "run", str(tmp_path), script=script, nodes=2)
    message = (
        r"node (\d): files and job must be the same on all nodes, got language_model/model\.safetensors [0-9a-f]{12} "
        r"on node \1 \(\S+\) and [0-9a-f]{12} on node \d \(\S+\); model [0-9a-f]{12} on node \1 \(\S+\) and "
        r"[0-9a-f]{12} on node \d \(\S+\); copy the same files to all nodes"
    )
    assert run.exit_code == 1
    assert re.fullmatch(message, run.reason), run.reason


def test_sample_whose_features_and_placeholders_do_not_match_is_named(tmp_path: Path) -> None:
    arguments = ("--steps", "4", "--batch", "16", "--microbatch", "4")
    with started(tmp_path, *arguments, nodes=4, script=JOBS / "mismatched.py") as job:
        run = job.wait()
    assert run.exit_code == 1
    message = (
        r"SampleError: sample \d+ of Mismatched: vision gives (\d+) features but input_ids holds (\d+) placeholder"
    )
    for text in (run.reason, job.output):
        found = re.search(message, words(text))
        assert found is not None, text
        assert int(found[1]) == int(found[2]) - 1


def test_script_that_raises_in_mid_training(tmp_path: Path) -> None:
    """Its message is shown, the traceback too; the other nodes end instead of waiting for it."""
    with started(tmp_path, "--raise-in", 4, nodes=4) as job:
        job.wait_for(lambda event: event["kind"] == "failed")
        run = job.wait()
    assert run.exit_code == 1
    assert max(run.losses) == 3
    assert re.search(r"RuntimeError: sample \d+ is not to be had", job.output)
    assert "chain.py" in job.output
    (failed,) = run.of_kind("failed")
    assert "__getitem__" in failed["traceback"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import a_module_that_nobody_has", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
        ("def train(:", "SyntaxError"),
        ("raise SystemExit(7)", "exit code 7; see "),
    ],
)
def test_script_that_does_not_get_as_far_as_to_train(text: str, message: str, tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", script=write_script(tmp_path, text), nodes=2)
    check_failed(run, message)


def test_script_that_does_not_train_at_all(tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", script=write_script(tmp_path, "print('hello')"), nodes=2)
    assert (run.exit_code, run.losses) == (0, {})
    log = run.directory / "logs" / "node-0" / "worker-0.log"
    assert run.reason == f"the script ended without Trainer.fit, so nothing is trained; see {log}"
    assert "hello" in log.read_text()


@pytest.mark.parametrize("text", ["node=x", "step=3", "node=1,phase=lunch", "node=1,when=now", ""])
def test_injection_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    done = run_command("run", "--run-dir", tmp_path / "run", "--inject", text, CHAIN)
    assert done.returncode == 2
    assert '--inject must look like "node=2,step=15,phase=backward[,worker[=1]]"' in words(done.stderr)
    assert not (tmp_path / "run").exists()


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_command("run", "--run-dir", tmp_path / "run", "--port", port, CHAIN)
    assert done.returncode == 1
    assert f"error: --host must be an address to listen on, together with --port, got 127.0.0.1:{port}" in words(
        done.stderr
    )


def test_store_that_does_not_answer_leaves_no_folder(tmp_path: Path) -> None:
    done = run_command("run", "--run-dir", tmp_path / "run", "--store", "etcd://127.0.0.1:1/job", CHAIN)
    assert done.returncode == 1
    assert "error: etcd must answer at 127.0.0.1:1, got " in words(done.stderr)
    assert not (tmp_path / "run").exists()


def test_resume_from_what_is_no_checkpoint(tmp_path: Path) -> None:
    done = run_command("run", "--run-dir", tmp_path / "run", "--resume", tmp_path / "nowhere", CHAIN)
    assert done.returncode == 1
    message = (
        f"error: --resume must be a finished checkpoint, a folder step-* with manifest.json, got {tmp_path}/nowhere "
        f"(nothing there); choose one from the checkpoints/ of a run"
    )
    assert words(done.stderr).strip() == message
    assert not (tmp_path / "run").exists()


def test_injection_of_a_node_that_is_not_there(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with started(tmp_path / "run", "--hold-in", 3, "--gate", gate, nodes=4) as job:
        job.wait_for_step(2)
        done = run_command("inject", "kill", "--node", 9, "--run", job.directory)
        unknown = run_command("inject", "kill", "--node", 1, "--at-phase", "lunch", "--run", job.directory)
        absent = run_command("inject", "kill", "--node", 1, "--worker", 1, "--run", job.directory)
        gate.touch()
        run = job.wait()
    assert done.returncode == 2
    assert "node must be one of the live nodes [0, 1, 2, 3], got 9" in words(done.stderr)
    assert unknown.returncode == 2
    assert "phase must be one of forward," in words(unknown.stderr)
    assert (absent.returncode, words(absent.stderr).strip()) == (2, "error: worker must be 0 to 0 on node 1, got 1")
    assert run.exit_code == 0
    assert not [event for event in read_events(run.directory / "events.jsonl") if event["kind"] == "injected"]


def test_injection_into_a_node_that_never_comes_is_told_at_the_end(tmp_path: Path) -> None:
    options = ("--run-dir", tmp_path / "run", "--nodes", 4, "--inject", "node=9,step=2", "--plain")
    done = run_command("run", *options, CHAIN)
    assert done.returncode == 0, done.stderr
    told = "node 9 was never killed in step 2, as was wanted: the job ended before it came to that"
    assert words(done.stdout).strip().endswith(told)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["not_injected"] == [{"node": 9, "phase": None, "step": 2, "worker_only": False, "worker": None}]
