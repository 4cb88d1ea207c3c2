"""How much memory this machine has to give, and what of it a KV pool gets on a CPU."""

from __future__ import annotations

from pathlib import Path

from engine.plan import LoadError

#: Of the memory that is free, when nothing else is asked: a quarter, at most 2 GiB.
_DEFAULT_SHARE = 4
_DEFAULT_MOST = 2 * 2**30

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def default_kv_memory_bytes(weight_bytes: int) -> int:
    """The smaller of 2 GiB and a quarter of the memory that weights not yet loaded will leave free."""
    return min(_DEFAULT_MOST, max(0, free_memory_bytes() - weight_bytes) // _DEFAULT_SHARE)


def free_memory_bytes() -> int:
    """What the machine has to give, or the process's control group if that is less."""
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            machine = int(line.split()[1]) * 1024
            break
    else:
        raise LoadError(f"{_MEMINFO} does not say MemAvailable; set --kv-cache-memory-bytes.")
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    return machine if limit is None or used is None else min(machine, max(0, limit - used))


def _number(file: Path) -> int | None:
    """The number in a control group's file; None without such a group or limit ("max")."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
