"""Which tokens of a row top_k, top_p and min_p keep, without sorting it: above which value, and of its equals up to
which id.

One pass over the vocabulary holds the three best values of each of some thousand lanes in registers. All values
above the best one that a lane had no room for (`rest`) are held, a thousand of random logits, and searched
there. A nucleus that ends below is drawn together by some passes, and what lies at its end held in turn. Weights are
integers in units of 2^-44: their sums are exact, and the same over what is held and over the vocabulary.
"""

from __future__ import annotations

from kernels._triton import tl, triton
from kernels.gpu.launch import begin, wait

GREEDY_BELOW = tl.constexpr(1e-5)
LOWEST = tl.constexpr(-0x80000000)
KEY_OF_MINUS_INFINITY = tl.constexpr(-2139095041)

_ONE = tl.constexpr(float(2**44))  # a weight of 1; 2^18 of them are an int64
_WEIGHTLESS = tl.constexpr(31.0)  # a value so far below the top weighs nothing
_NARROW = tl.constexpr(0.02)  # held if logits are anything like normal; of 0.05, some lanes have no room for all


@triton.jit
def key_of(x):
    """int32 in the order of float32 x; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weight_of(key, top):
    """exp(value - top) in units of 2^-44."""
    return (tl.exp(value_of(key) - top) * _ONE).to(tl.int64)


@triton.jit
def allowed_block(row_ptr, words_ptr, first_word, ids, inside):
    """Logits of a row, -inf for ids whose bit in its words is 0 (`words_ptr` None: all are allowed)."""
    x = tl.load(row_ptr + ids, mask=inside, other=float("-inf"))
    if words_ptr is not None:
        word = tl.load(words_ptr + first_word + ids // 32, mask=inside, other=0)
        x = tl.where((word >> (ids % 32)) & 1 != 0, x, float("-inf"))
    return x


@triton.jit
def scaled_block(row, ids, inside):
    """Of a row, which is (logits, words of allowed ids or None, the row's first of them, temperature)."""
    x = allowed_block(row[0], row[1], row[2], ids, inside)
    return tl.div_rn(x, row[3] + tl.zeros_like(x))


@triton.jit
def count_from(row, lowest, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys of the row are at least `lowest`."""
    count = 0
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        key = key_of(scaled_block(row, ids, ids < VOCAB))
        count += tl.sum(((key >= lowest) & (ids < VOCAB)).to(tl.int32), 0)
    return count


@triton.jit
def weight_above(row, bound, top, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the weights of the row's keys above `bound`."""
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        key = key_of(scaled_block(row, ids, ids < VOCAB))
        total += tl.where(key > bound, weight_of(key, top), 0)
    return tl.sum(total, 0)


@triton.jit
def weights_above(row, lower, upper, top, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of the weights of the row's keys above `lower`, and above `upper`."""
    total = tl.zeros([BLOCK], tl.int64)
    total_upper = total
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        key = key_of(scaled_block(row, ids, ids < VOCAB))
        weight = weight_of(key, top)
        total += tl.where(key > lower, weight, 0)
        total_upper += tl.where(key > upper, weight, 0)
    return tl.sum(total, 0), tl.sum(total_upper, 0)


@triton.jit
def held_between(row, low, high, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The three best keys of each lane that are above `low` and at most `high`, and the best of those that a lane had
    no room for, or LOWEST."""
    best = tl.full([BLOCK], LOWEST, tl.int32)
    second, third, dropped = best, best, best
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        key = key_of(scaled_block(row, ids, ids < VOCAB))
        key = tl.where((key > low) & (key <= high), key, LOWEST)
        best, key = tl.maximum(best, key), tl.minimum(best, key)
        second, key = tl.maximum(second, key), tl.minimum(second, key)
        third, key = tl.maximum(third, key), tl.minimum(third, key)
        dropped = tl.maximum(dropped, key)
    return best, second, third, tl.max(dropped, 0)


@triton.jit
def held_from(best, second, third, lowest):
    """How many held keys are at least `lowest`."""
    count = (best >= lowest).to(tl.int32) + (second >= lowest).to(tl.int32) + (third >= lowest).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def held_above(best, second, third, bound, top):
    """Sum of the weights of held keys above `bound`."""
    total = tl.where(best > bound, weight_of(best, top), 0)
    total += tl.where(second > bound, weight_of(second, top), 0)
    total += tl.where(third > bound, weight_of(third, top), 0)
    return tl.sum(total, 0)


@triton.jit
def middle(low, high):
    """Between two int32, rounded down, without overflow."""
    return ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)


@triton.jit
def key_of_rank(row, best, second, third, rest, rank, highest, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key that at least `rank` keys reach, and how many are above it."""
    if held_from(best, second, third, rest + 1) >= rank:
        low, high = rest + 1, highest
        while low < high:
            at = middle(low, high) + 1
            if held_from(best, second, third, at) >= rank:
                low = at
            else:
                high = at - 1
        above = held_from(best, second, third, low + 1)
    else:
        low, high = highest * 0 + KEY_OF_MINUS_INFINITY, rest
        while low < high:
            at = middle(low, high) + 1
            if count_from(row, at, VOCAB, BLOCK) >= rank:
                low = at
            else:
                high = at - 1
        above = count_from(row, low + 1, VOCAB, BLOCK)
    return low, above


@triton.jit
def key_of_weight(
    row,
    best,
    second,
    third,
    rest,
    target,
    low,
    highest,
    top,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least key above `low` above which the weight is less than `target`, and that weight."""
    above = held_above(best, second, third, tl.maximum(rest, low), top)
    if above.to(tl.float64) >= target:
        high, above = key_among_held(best, second, third, above * 0, target, tl.maximum(rest, low), highest, top)
    else:
        low, high, above = few_between(row, above, target, low, rest, top, VOCAB, BLOCK)
        some, others, more, dropped = held_between(row, low, high, VOCAB, BLOCK)
        floor = tl.maximum(low, dropped)
        held = above + held_above(some, others, more, floor, top)
        if held.to(tl.float64) >= target:
            high, above = key_among_held(some, others, more, above, target, floor, high, top)
        else:
            high, above = floor, held
            while low + 1 < high:
                at = middle(low, high)
                weight = weight_above(row, at, top, VOCAB, BLOCK)
                is_less = weight.to(tl.float64) < target
                low, high = tl.where(is_less, low, at), tl.where(is_less, at, high)
                above = tl.where(is_less, weight, above)
    return high, above


@triton.jit
def key_among_held(best, second, third, base, target, low, high, top):
    """`key_of_weight` where all keys above `low`, up to `high`, are held; those above `high` weigh `base`."""
    while low + 1 < high:
        at = middle(low, high)
        if (base + held_above(best, second, third, at, top)).to(tl.float64) < target:
            high = at
        else:
            low = at
    return high, base + held_above(best, second, third, high, top)


@triton.jit
def few_between(row, above, target, low, high, top, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """(low, high, weight above high) drawn together around the key of weight, until few keys lie between them. Two
    bounds a pass, since a pass is division and exponentials."""
    low = tl.maximum(low, key_of(top - _WEIGHTLESS))
    while (low + 1 < high) & (value_of(high) - value_of(low) > _NARROW):
        third, two_thirds = key_between(low, high, 1 / 3), key_between(low, high, 2 / 3)
        lower, upper = tl.minimum(third, two_thirds), tl.maximum(third, two_thirds)
        above_lower, above_upper = weights_above(row, lower, upper, top, VOCAB, BLOCK)
        below_lower = above_lower.to(tl.float64) < target
        below_upper = above_upper.to(tl.float64) < target
        low = tl.where(below_lower, low, tl.where(below_upper, lower, upper))
        high = tl.where(below_lower, lower, tl.where(below_upper, upper, high))
        above = tl.where(below_lower, above_lower, tl.where(below_upper, above_upper, above))
    return low, high, above


@triton.jit
def key_between(low, high, share):
    """A key between two that are not neighbours, at that share of the way in value."""
    at = key_of(value_of(low) + (value_of(high) - value_of(low)) * share)
    return tl.where((at > low) & (at < high), at, middle(low, high))


@triton.jit
def key_of_min_p(min_p, low, high, top):
    """The least key above low, at most high, whose own weight is at least `min_p`."""
    while low + 1 < high:
        at = middle(low, high)
        if tl.exp(value_of(at) - top) >= min_p:
            high = at
        else:
            low = at
    return high


@triton.jit
def id_of_tie(row, bound, ties, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of the lowest `ties` ids whose key is `bound`."""
    seen = 0
    last = 0
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        key = key_of(scaled_block(row, ids, ids < VOCAB))
        equal = (key == bound) & (ids < VOCAB)
        place = seen + tl.cumsum(equal.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(equal & (place <= ties), ids, 0), 0))
        seen = tl.max(place, 0)
    return last


@triton.jit
def kept_by_nucleus(
    row,
    best,
    second,
    third,
    rest,
    top_p,
    bound,
    ties,
    highest,
    top,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(bound, ties) narrowed to the fewest tokens whose weight reaches `top_p` of what they kept before."""
    if bound > rest:
        above = held_above(best, second, third, bound, top)
        equals = held_from(best, second, third, bound) - held_from(best, second, third, bound + 1)
    else:
        above = weight_above(row, bound, top, VOCAB, BLOCK)
        equals = highest * 0
        if bound > KEY_OF_MINUS_INFINITY:  # what is not allowed weighs nothing
            equals = count_from(row, bound, VOCAB, BLOCK) - count_from(row, bound + 1, VOCAB, BLOCK)
    equals = tl.minimum(equals, ties)
    target = (above + equals.to(tl.int64) * weight_of(bound, top)).to(tl.float64) * top_p.to(tl.float64)
    if above.to(tl.float64) >= target:
        bound, above = key_of_weight(row, best, second, third, rest, target, bound, highest, top, VOCAB, BLOCK)
        ties = highest * 0 + VOCAB
    weight = tl.maximum(weight_of(bound, top), 1).to(tl.float64)
    room = tl.maximum(tl.ceil((target - above.to(tl.float64)) / weight), 1.0)
    return bound, tl.minimum(ties.to(tl.float64), room).to(tl.int32)


@triton.jit
def threshold_kernel(
    logits_ptr,
    words_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    lowest_ptr,
    last_id_ptr,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """lowest[row], last_id[row]: a token is kept whose key is above `lowest`, or equal with an id up to `last_id`."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    limited = (top_k >= 1) & (top_k < VOCAB)
    wait(PDL)
    tl.store(lowest_ptr + row, LOWEST)
    tl.store(last_id_ptr + row, VOCAB)
    if (temperature < GREEDY_BELOW) | ~(limited | (top_p < 1.0) | (min_p > 0.0)):
        return
    of_row = (logits_ptr + row * VOCAB, words_ptr, row * WORDS, temperature)
    best, second, third, rest = held_between(of_row, LOWEST, 0x7FFFFFFF, VOCAB, BLOCK)
    highest = tl.max(best, 0)
    top = value_of(highest)
    # The lowest kept key, and how many of its equals stay (VOCAB: all).
    bound = highest * 0 + KEY_OF_MINUS_INFINITY
    ties = highest * 0 + VOCAB
    if limited:
        bound, above = key_of_rank(of_row, best, second, third, rest, top_k, highest, VOCAB, BLOCK)
        ties = top_k - above
    if top_p < 1.0:
        bound, ties = kept_by_nucleus(of_row, best, second, third, rest, top_p, bound, ties, highest, top, VOCAB, BLOCK)
    if min_p > 0.0:
        enough = key_of_min_p(min_p, bound - 1, highest, top)
        ties = tl.where(enough > bound, VOCAB, ties)
        bound = tl.maximum(enough, bound)
    tl.store(lowest_ptr + row, bound)
    cut = ties < VOCAB
    if cut & (bound > rest):
        cut = ties < held_from(best, second, third, bound) - held_from(best, second, third, bound + 1)
    if cut:
        tl.store(last_id_ptr + row, id_of_tie(of_row, bound, ties, VOCAB, BLOCK))
