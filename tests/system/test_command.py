"""Ctrl-C while MLX looks for a compiler, for which C's ``system`` has the process ignore it."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mlx_eagle.system.stop_signals import StopSignals

COMPILER = """#!/bin/sh
echo >> asked
if [ -e listening ]; then echo >> sent; kill -INT $(cat listening); fi
"""
SCRIPT = """
import os
import mlx.core as mx
from mlx_eagle.system.stop_signals import StopSignals

mx.set_default_device(mx.cpu)
with {listening} as stop:
    with open("listening", "w") as file:
        file.write(str(os.getpid()))
    mx.compile(lambda array: array)(mx.array(0))
    print(len(open("asked").readlines()), int(os.path.exists("sent")), int({has_seen}))
"""
LISTENERS = {
    "waiting": ("StopSignals()", "stop.wait(0.5)"),
    "looking": ("StopSignals(once=True)", "stop.is_asked"),
}


@pytest.mark.parametrize("name", LISTENERS)
@pytest.mark.exhaustive
def test_who_listens_misses_no_ctrl_c_while_a_compiler_is_looked_for(name, tmp_path):
    """A compiler that is asked while somebody listens sends one: what was sent was seen."""
    compiler = tmp_path / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    listening, has_seen = LISTENERS[name]
    script = SCRIPT.format(listening=listening, has_seen=has_seen)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    line = [sys.executable, "-c", script]
    done = subprocess.run(
        line, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    num_asked, num_sent, num_seen = map(int, done.stdout.split())
    assert num_asked == 1 and num_seen == num_sent


@pytest.fixture
def at_a_terminal() -> Iterator[None]:
    """Ctrl-C raises, as Python has it unless it was started to ignore it, in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_one_is_as_ever_where_only_the_first_is_asked_for(at_a_terminal):
    before = signal.getsignal(signal.SIGINT)
    with StopSignals((signal.SIGINT,), once=True) as stop:
        assert not stop.is_asked
        signal.raise_signal(signal.SIGINT)
        assert stop.is_asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_nothing_happens():
    def listen() -> None:
        with StopSignals() as stop:
            seen.append(stop.is_asked)

    seen: list[bool] = []
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [False]
