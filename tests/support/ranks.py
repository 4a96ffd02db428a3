"""Several processes that work on one thing, as ``mlx.launch --backend ring`` starts them."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LIMIT = 300  # seconds


def free_ports(num: int) -> list[int]:
    sockets = [socket.socket() for _ in range(num)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def first_of_ports(num: int) -> int:
    """The first of so many free ports in a row: mlx.launch is told that one, and takes them."""
    while True:
        (first,) = free_ports(1)
        with suppress(OSError, OverflowError):
            for port in range(first, first + num):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
            return first


@contextmanager
def on_core(number: int) -> Iterator[None]:
    """What is started within runs on that core, where the system lets one say so.

    Ranks wait for each other as fast as they can, so each needs a core of its own.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {number % (os.cpu_count() or 1)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run_ranks(command: Sequence[str], folder: Path, num_ranks: int = 2) -> list[str]:
    """What each of so many processes prints; ``folder`` is for the file of hosts."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(num_ranks)]))
    processes = []
    for rank in range(num_ranks):
        changes = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
        with on_core(rank):
            process = subprocess.Popen(
                command,
                env={**os.environ, **changes},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        processes.append(process)
    try:
        outputs = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [out for out, _ in outputs]
