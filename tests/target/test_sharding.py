"""Targets spread over two processes write what they write whole, drafted or not."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import sharded
from grids import thorough
from helpers import tiny_llama
from sharded import CASES

from mlx_eagle.target.sharding import find_stage, is_pipelined, is_sharded

NUM_PROCESSES = 2
FEW = "tensor, llama/few"  # ways of writing


def free_ports(num: int) -> list[int]:
    sockets = [socket.socket() for _ in range(num)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def reports(folder: Path, case: str) -> list:
    """What ``sharded.py`` says in each process, as ``mlx.launch --backend ring`` runs it."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{p}"] for p in free_ports(NUM_PROCESSES)]))
    processes = []
    for rank in range(NUM_PROCESSES):
        changes = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
        processes.append(
            subprocess.Popen(
                [sys.executable, sharded.__file__, case],
                env={**os.environ, **changes},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.parametrize("case", thorough([FEW, *CASES], FEW))
def test_parts_write_what_the_whole_writes(tmp_path, case):
    for report in reports(tmp_path, case):
        assert len(report) >= (5 if case == FEW else 8)
        assert [what for what, right in report.items() if not right] == []


@pytest.mark.exhaustive
def test_recurrent_pipelines_are_refused_in_every_process(tmp_path):
    for sentence in reports(tmp_path, "refusal"):
        assert "split in a pipeline and has recurrent layers" in sentence


def test_a_whole_target_is_one_stage():
    model = tiny_llama()
    stage = find_stage(model)
    assert (stage.start, stage.end, stage.num_layers) == (0, 6, 6)
    assert stage.is_whole and not is_pipelined(model) and not is_sharded(model)
