"""Choosing tokens from logits, and their logprobs. The rules are those of the protocol's sampling page:
temperature, top_k, top_p, min_p, Gumbel noise hashed from (seed, position, token id), ties to the lowest id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import native

#: A temperature under this is greedy; nothing is divided by it.
_GREEDY_BELOW = 1e-5

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Logprobs of chosen tokens and of the k most likely ones, ties to the lowest id."""

    own: Tensor  # float32 [B]
    rank: Tensor  # int64 [B], 1 is the most likely
    top_ids: Tensor  # int64 [B, k]
    top: Tensor  # float32 [B, k]


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """One token id for each row of float32 `logits` [B, V] (bias, penalties and masks applied): int64 [B].

    `temperature`, `top_p`, `min_p` float32 [B]; `top_k`, `seeds`, `positions` int64 [B]. A top_k
    below 1 is no limit. `positions` is the index the sampled token will have in its whole sequence.
    -inf masks a token. A row that has a NaN or +inf, or no finite value, gets -1.
    """
    columns = (temperature, top_k, top_p, min_p, seeds, positions)
    library = native()
    if library is None:
        return sample_reference(logits, *columns)
    _check_columns(
        logits, (torch.float32, torch.int64, torch.float32, torch.float32, torch.int64, torch.int64), columns
    )
    ids = torch.empty(logits.shape[0], dtype=torch.int64)
    library.sample(
        logits.data_ptr(), logits.shape[0], logits.shape[1], *(c.data_ptr() for c in columns), ids.data_ptr()
    )
    return ids


def logprobs(logits: Tensor, ids: Tensor, k: int) -> TokenLogprobs:
    """Log-softmax of float32 `logits` [B, V] at `ids` int64 [B], rank of those, and the k (>= 0) most likely."""
    num_rows, vocab_size = logits.shape
    if not 0 <= k <= vocab_size:
        raise ValueError(f"k must be between 0 and the vocabulary size {vocab_size}, got {k}.")
    if num_rows and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise IndexError(f"ids must be in 0..{vocab_size - 1}, got {int(ids.min())}..{int(ids.max())}.")
    library = native()
    if library is None:
        return logprobs_reference(logits, ids, k)
    _check_columns(logits, (torch.int64,), (ids,))
    found = TokenLogprobs(
        own=torch.empty(num_rows),
        rank=torch.empty(num_rows, dtype=torch.int64),
        top_ids=torch.empty(num_rows, k, dtype=torch.int64),
        top=torch.empty(num_rows, k),
    )
    library.logprobs(
        *(logits.data_ptr(), num_rows, vocab_size, ids.data_ptr(), k),
        *(found.own.data_ptr(), found.rank.data_ptr(), found.top_ids.data_ptr(), found.top.data_ptr()),
    )
    return found


def mask_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """`logits` [B, V] with -inf for ids that are not allowed: the reference of what samplers on a GPU do themselves.

    `allowed` int32 [B, ceil(V / 32)]: of id i bit i % 32 of word i // 32, so that -1 allows 32 ids. A logit that is not
    allowed may be anything, NaN included.
    """
    bits = (allowed.unsqueeze(-1) >> torch.arange(32, device=allowed.device)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise for int64 `seeds`, `positions` [B] and every token id: float32 [B, vocab_size]."""
    library = native()
    if library is None:
        return gumbel_noise_reference(seeds, positions, vocab_size)
    assert seeds.dtype == positions.dtype == torch.int64
    assert seeds.shape == positions.shape
    noise = torch.empty(seeds.shape[0], vocab_size)
    library.gumbel_noise(
        *(seeds.contiguous().data_ptr(), positions.contiguous().data_ptr(), seeds.shape[0], vocab_size),
        noise.data_ptr(),
    )
    return noise


def _check_columns(logits: Tensor, dtypes: tuple[torch.dtype, ...], columns: tuple[Tensor, ...]) -> None:
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    for column, dtype in zip(columns, dtypes, strict=True):
        assert column.dtype == dtype
        assert column.is_contiguous()
        assert column.shape == (logits.shape[0],)


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    greedy = temperature < _GREEDY_BELOW
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    kept = torch.where(greedy.unsqueeze(1), scaled, _filtered(scaled, top_k, top_p, min_p))
    noise = gumbel_noise_reference(seeds, positions, logits.shape[1])
    ids = torch.where(greedy.unsqueeze(1), kept, kept + noise).argmax(dim=1)
    broken = torch.isnan(logits).any(dim=1) | ~torch.isfinite(logits.amax(dim=1))
    return torch.where(broken, -1, ids)


def _filtered(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`scaled` [B, V] with -inf for what top_k, then top_p, then min_p leaves out."""
    # A stable sort keeps equal values in order of id.
    ordered, order = torch.sort(scaled, dim=1, descending=True, stable=True)
    places = torch.arange(scaled.shape[1])
    limit = torch.where(top_k < 1, scaled.shape[1], top_k).unsqueeze(1)
    weights = torch.exp(ordered - ordered[:, :1]).masked_fill(places >= limit, 0.0)
    running = torch.cumsum(weights.to(torch.float64), dim=1)  # in order along a row
    before = torch.nn.functional.pad(running[:, :-1], (1, 0))
    unlimited = (top_p >= 1.0).unsqueeze(1)
    keep = unlimited | (before < top_p.to(torch.float64).unsqueeze(1) * running[:, -1:])
    keep &= (places < limit) & (weights >= min_p.unsqueeze(1))
    return torch.full_like(scaled, -torch.inf).scatter(1, order, ordered.masked_fill(~keep, -torch.inf))


def logprobs_reference(logits: Tensor, ids: Tensor, k: int) -> TokenLogprobs:
    ordered, order = torch.sort(logits, dim=1, descending=True, stable=True)
    shifted = ordered - ordered[:, :1]
    total = torch.cumsum(torch.exp(shifted).to(torch.float64), dim=1)[:, -1:]
    values = shifted - torch.log(total).to(torch.float32)
    place = (order == ids.unsqueeze(1)).to(torch.int64).argmax(dim=1)
    own = values.gather(1, place.unsqueeze(1)).squeeze(1)
    return TokenLogprobs(own, place + 1, order[:, :k].contiguous(), values[:, :k].contiguous())


def gumbel_noise_reference(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    words = noise_words(seeds, positions, vocab_size)
    # u = (w >> 8) * 2^-24 + 2^-25 needs 25 bits: exact in float64, and clamped to the largest float32 below 1.
    uniform = ((words >> 8).to(torch.float64) * 2.0**-24 + 2.0**-25).clamp(max=1.0 - 2.0**-24)
    return (-torch.log(-torch.log(uniform))).to(torch.float32)


def noise_words(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """First word of Philox4x32-10 (Salmon et al., SC'11) for key = seed and counter = (position, id, 0, 0).

    int64 [B, vocab_size] holding unsigned 32-bit words. Products wrap in int64, which keeps both
    32-bit halves right once masked.
    """
    k0, k1 = (seeds & _MASK32).unsqueeze(1), ((seeds >> 32) & _MASK32).unsqueeze(1)
    c0 = (positions & _MASK32).unsqueeze(1).expand(-1, vocab_size)
    c1 = torch.arange(vocab_size).expand_as(c0)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & _MASK32) ^ c1 ^ k0, p1 & _MASK32
        c2, c3 = ((p0 >> 32) & _MASK32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0
