"""A script that another launcher started several times does not train several times."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from resilient.cli.app import app
from resilient.protocol.foreign_launchers import check_started_once

SCRIPT = ["train.py", "--lr", "{3}"]
JOB = """
import torch, resilient as rs

class Ones:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"input": torch.ones(2)}

model = rs.Chain([lambda: torch.nn.Linear(2, 1)], loss=lambda output, batch: output.square().sum())
rs.Trainer(model, Ones(), optimizer=rs.SGD(lr=0.1), global_batch=2, microbatch=1, device="cpu").fit(1)
"""


def message(got: str, num_copies: int, fix: str, variable: str) -> str:
    return (
        f"the script must be started once, got {got}, whose {num_copies} processes would each train a job alone; "
        f"{fix} (docs/operator_guide.md), or unset {variable} if it is left over"
    )


HERE = "use `resilient run --nodes 4 train.py --lr '{3}'`"
OTHERS = "on one machine and `resilient agent --join HOST:PORT` on the others"


@pytest.mark.parametrize(
    ("variables", "got", "fix"),
    [
        (
            "RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=none",
            "WORLD_SIZE=4 of torchrun",
            HERE,
        ),
        (
            "RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=none",
            "WORLD_SIZE=8 of torchrun",
            f"{HERE} {OTHERS}",
        ),
        (
            "RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=none ACCELERATE_MIXED_PRECISION=no",
            "WORLD_SIZE=4 of accelerate launch",
            HERE,
        ),
        ("RANK=0 WORLD_SIZE=4 CROSS_RANK=0 LOCAL_SIZE=4", "WORLD_SIZE=4 of deepspeed", HERE),
        ("LOCAL_RANK=0 WORLD_SIZE=4", "WORLD_SIZE=4 of a launcher like torchrun", f"{HERE} {OTHERS}"),
        (
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 PMI_SIZE=4 PMI_RANK=0",
            "SLURM_STEP_NUM_TASKS=4 of srun",
            f"{HERE} on one machine and `srun resilient agent --join HOST:PORT` on the others",
        ),
        (
            "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=4",
            "OMPI_COMM_WORLD_SIZE=4 of Open MPI",
            HERE,
        ),
        ("PMI_SIZE=4 PMI_RANK=3 MPI_LOCALNRANKS=4", "PMI_SIZE=4 of MPI", HERE),
    ],
)
def test_launcher_is_named_with_its_variable_and_the_command_to_use_instead(variables: str, got: str, fix: str) -> None:
    environment = dict(each.split("=") for each in variables.split())
    variable, num_copies = got.split(" ")[0].split("=")
    expected = message(got, int(num_copies), fix, variable)
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        check_started_once(environment, SCRIPT, is_script=True)


@pytest.mark.parametrize(
    "variables",
    [
        "",
        "RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 TORCHELASTIC_RUN_ID=none",
        "WORLD_SIZE=4",  # what no launcher sets alone
        "RANK=0 WORLD_SIZE=many",
        "SLURM_PROCID=0 SLURM_NTASKS=4",  # of a batch script, which Slurm starts once
        "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1",
    ],
)
def test_a_process_without_copies_may_train(variables: str) -> None:
    check_started_once(dict(each.split("=") for each in variables.split()), SCRIPT, is_script=True)


def environment(folder: Path, **others: str) -> dict[str, str]:
    return {**os.environ, "RESILIENT_RUN_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1", **others}


def write_job(folder: Path) -> Path:
    (folder / "job.py").write_text(JOB)
    return folder / "job.py"


def test_torchrun_does_not_train_copies(tmp_path: Path) -> None:
    script = write_job(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    two, one = (
        subprocess.run([*torchrun, n, script, "--lr", "3"], env=environment(tmp_path), capture_output=True, text=True)
        for n in ("2", "1")
    )
    expected = message("WORLD_SIZE=2 of torchrun", 2, f"use `resilient run --nodes 2 {script} --lr 3`", "WORLD_SIZE")
    assert f"resilient.errors.ArgumentError: {expected}\n" in two.stderr
    assert two.returncode == 1
    assert one.returncode == 0, one.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_srun_does_not_train_copies(tmp_path: Path) -> None:
    script = write_job(tmp_path)
    of_srun = environment(tmp_path, SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2")
    done = subprocess.run([sys.executable, script], env=of_srun, capture_output=True, text=True)
    others = "on one machine and `srun resilient agent --join HOST:PORT` on the others"
    fix = f"use `resilient run --nodes 2 {script}` {others}"
    expected = message("SLURM_STEP_NUM_TASKS=2 of srun", 2, fix, "SLURM_STEP_NUM_TASKS")
    assert done.stderr.splitlines()[-1] == f"resilient.errors.ArgumentError: {expected}"
    assert not (tmp_path / "run").exists()


def test_run_is_no_copy_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    result = CliRunner().invoke(app, ["run", "--run-dir", str(tmp_path / "run"), str(write_job(tmp_path))])
    assert result.exit_code == 2
    assert result.output == (
        "error: `resilient run` must be started once, got SLURM_STEP_NUM_TASKS=2 of srun, whose 2 processes would each "
        "train a job alone; start it by itself on one machine and `srun resilient agent --join HOST:PORT` on the "
        "others (docs/operator_guide.md), or unset SLURM_STEP_NUM_TASKS if it is left over\n"
    )
    assert not (tmp_path / "run").exists()


def test_workers_of_an_agent_may_be_several_though_srun_started_it(tmp_path: Path) -> None:
    """They carry torchrun's names themselves, and inherit what started their agent."""
    script = write_job(tmp_path)
    command = [str(Path(sys.executable).with_name("resilient")), "run", "--plain", "--nodes", "2"]
    inherited = environment(tmp_path, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1", WORLD_SIZE="1", RANK="0")
    done = subprocess.run(
        [*command, "--run-dir", tmp_path / "job", script], env=inherited, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
