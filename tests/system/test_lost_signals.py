"""Ctrl-C while MLX looks for a compiler, for which C's ``system`` has the process ignore it."""

import os
import subprocess
import sys

import pytest

COMPILER = """#!/bin/sh
echo >> asked
if [ -e listening ]; then echo >> sent; kill -INT $(cat listening); fi
"""
SCRIPT = """
import os
import mlx.core as mx
{imports}

mx.set_default_device(mx.cpu)
with {listening} as stop:
    with open("listening", "w") as file:
        file.write(str(os.getpid()))
    mx.compile(lambda array: array)(mx.array(0))
    print(len(open("asked").readlines()), int(os.path.exists("sent")), int({has_seen}))
"""
LISTENERS = {
    "server": ("from mlx_eagle.server.signals import *", "StopSignals()", "stop.wait(0.5)"),
    "trainer": ("from mlx_eagle.train.stopping import *", "stopping()", "stop.is_asked"),
    "chat": (
        "from mlx_eagle.commands.interrupts import *; interrupt = Interrupt()",
        "interrupt.listening()",
        "interrupt.is_wanted",
    ),
}


@pytest.mark.parametrize("name", LISTENERS)
def test_who_listens_misses_no_ctrl_c_while_a_compiler_is_looked_for(name, tmp_path):
    """A compiler that is asked while somebody listens sends one: what was sent was seen."""
    compiler = tmp_path / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    imports, listening, has_seen = LISTENERS[name]
    script = SCRIPT.format(imports=imports, listening=listening, has_seen=has_seen)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    line = [sys.executable, "-c", script]
    done = subprocess.run(
        line, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    num_asked, num_sent, num_seen = map(int, done.stdout.split())
    assert num_asked == 1 and num_seen == num_sent
