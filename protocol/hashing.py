"""The chain of block hashes that names a prefix: prefix cache and router compute the same one.

A block's hash is BLAKE2b-128 over (hash of the block before, its token ids). The chain starts
from a root that separates tenants (`salt`) and adapters. Nothing in it depends on the process,
so hashes agree between processes and restarts; 128 bits of a cryptographic hash make a
collision, chosen or by chance, not a concern.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

HASH_BYTES = 16


def root(salt: str = "", adapter: str | None = None) -> bytes:
    """Start of the chain. Lengths are hashed too, so (salt, adapter) pairs cannot run together."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"sluicegate-root")
    for part in (salt, adapter or ""):
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(4, "little"))
        digest.update(raw)
    return digest.digest()


def chain(ids: array[int], block_size: int, start: bytes) -> list[bytes]:
    """Hashes of the full blocks of `ids` (u32), first to last, after the block hashed to `start`."""
    raw, width = ids.tobytes(), block_size * ids.itemsize
    names, parent = [], start
    # One call a block: a prompt of 8,192 ids has 512 of them.
    for begin in range(0, len(raw) - width + 1, width):
        parent = blake2b(parent + raw[begin : begin + width], digest_size=HASH_BYTES).digest()
        names.append(parent)
    return names
