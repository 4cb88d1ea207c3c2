"""What a server costs its machine: processor time and memory of its process tree, read from /proc."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Memory:
    """In MiB. PSS counts a page shared by n processes as 1/n, so it may be added up."""

    rss: float
    pss: float
    peak_rss: float  # since the process started


@dataclass(frozen=True, slots=True)
class ProcessSample:
    pid: int
    name: str
    cpu_s: float  # user + system, without children
    memory: Memory


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The server's process tree and the machine at a moment; `client_cpu_s` is this process."""

    at: float
    tree: dict[int, ProcessSample]
    machine_cpu_s: float
    client_cpu_s: float


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process over a run, its memory at the end. Processor time has the resolution of a clock tick, 10 ms."""

    pid: int
    name: str
    cpu_s: float
    memory_mib: Memory


@dataclass(frozen=True, slots=True)
class ServerUse:
    """A process tree over a run, and how busy the machine was without it and the client.

    `others_share` is the share of all cores that foreign processes took: compare runs only where it is near 0.
    """

    wall_s: float
    cpu_s: float
    rss_mib: float
    pss_mib: float
    processes: list[ProcessUse]
    others_share: float


def take_snapshot(pids: Sequence[int]) -> Snapshot:
    """Of the trees rooted at `pids`.

    Raises ProcessLookupError naming a pid that does not run, PermissionError for a process of another user.
    """
    stats = _read_stats()
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    tree, todo = dict[int, ProcessSample](), list(pids)
    for pid in pids:
        if pid not in stats:
            raise ProcessLookupError(f"server pid {pid}: no such process")
    while todo:
        pid = todo.pop()
        todo += (child for child in children.get(pid, ()) if child not in tree)
        memory = _read_memory(pid)
        if memory is not None:
            tree[pid] = ProcessSample(pid, stats[pid].name, stats[pid].cpu_s, memory)
    return Snapshot(time.perf_counter(), tree, _read_machine_cpu_s(), time.process_time())


def use_between(before: Snapshot, after: Snapshot) -> ServerUse:
    """A process that started in between counts from its start; one that ended in between is not in the list."""
    processes = []
    for pid, sample in sorted(after.tree.items()):
        earlier_s = before.tree[pid].cpu_s if pid in before.tree else 0.0
        processes.append(ProcessUse(pid, sample.name, sample.cpu_s - earlier_s, sample.memory))
    wall_s = after.at - before.at
    cpu_s = sum(process.cpu_s for process in processes)
    others_s = after.machine_cpu_s - before.machine_cpu_s - cpu_s - (after.client_cpu_s - before.client_cpu_s)
    return ServerUse(
        wall_s=wall_s,
        cpu_s=cpu_s,
        rss_mib=sum(process.memory_mib.rss for process in processes),
        pss_mib=sum(process.memory_mib.pss for process in processes),
        processes=processes,
        others_share=max(0.0, others_s) / wall_s / (os.cpu_count() or 1),
    )


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    name: str
    cpu_s: float


def _read_stats() -> dict[int, _Stat]:
    stats = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text()
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
            # proc(5): pid (name) state ppid ... utime is field 14, stime 15; the name may hold blanks and brackets.
            name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
            stats[int(entry)] = _Stat(int(fields[1]), name, (int(fields[11]) + int(fields[12])) / TICKS_PER_S)
    return stats


def _read_memory(pid: int) -> Memory | None:
    """None if the process ended: a process waiting to be reaped has no memory."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text() + Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    mib = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key in ("Rss", "Pss", "VmHWM"):
            mib[key] = int(value.split()[0]) / 1024
    return Memory(mib["Rss"], mib["Pss"], mib["VmHWM"])


def _read_machine_cpu_s() -> float:
    """Time that all cores were busy: everything in the first line of /proc/stat but idle and waiting for disks."""
    first_line = Path("/proc/stat").read_text().split("\n", 1)[0]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first_line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S
