"""Targets spread over two processes write what they write whole, drafted or not."""

import json
import sys
from pathlib import Path

import pytest
import sharded
from helpers import tiny_llama
from ranks import run_ranks
from sharded import CASES

from mlx_eagle.target_model.sharding import find_stage, is_pipelined, is_sharded

FEW = "tensor, llama/few"  # ways of writing


def reports(folder: Path, case: str) -> list:
    """What ``sharded.py`` says in each process."""
    outputs = run_ranks([sys.executable, sharded.__file__, case], folder)
    return [json.loads(out.splitlines()[-1]) for out in outputs]


@pytest.mark.exhaustive  # two processes each
@pytest.mark.parametrize("case", [FEW, *CASES])
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
    assert (stage.start, stage.end, stage.num_layers) == (0, 2, 2)
    assert stage.is_whole and not is_pipelined(model) and not is_sharded(model)
