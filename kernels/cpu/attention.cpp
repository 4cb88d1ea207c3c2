// Attention over the paged pool, one path for prefill and decode. The contract is in kernels/attention.py.
//
// Queries of one sequence that follow one another share the keys they read: up to TILE_ROWS rows of
// (query, head of a group). Every row has its own arithmetic: its keys run from its first to its own
// position, in tiles of 64 and splits of 256 counted from position 0, whatever rows are beside it.
#include "attention.h"

#include <vector>

#include "operators.h"
#include "pool.h"

namespace sluicegate {
namespace {

constexpr int64_t TILE_ROWS = 48;

// Partial results of splits computed apart take at most this much memory; beyond, splits are walked.
constexpr int64_t MAX_PARTIAL_FLOATS = 4 << 20;

QueryTile tile_of(const Problem& p, int64_t begin, int64_t end) {
    QueryTile tile{begin, end - begin, p.first_key(begin), p.positions[begin]};
    for (int64_t token = begin + 1; token < end; token++) {
        tile.low = std::min(tile.low, p.first_key(token));
        tile.high = std::max<int64_t>(tile.high, p.positions[token]);
    }
    return tile;
}

// Cuts the queries into tiles, those of one sequence into tiles of almost equal size; false when one names a sequence,
// position or block that does not exist.
bool cut(const Problem& p, std::vector<QueryTile>& tiles) {
    const int64_t most = std::max<int64_t>(1, TILE_ROWS / p.group());
    for (int64_t begin = 0, end; begin < p.num_tokens; begin = end) {
        const int64_t seq = p.seq_index[begin];
        for (end = begin; end < p.num_tokens && p.seq_index[end] == seq; end++)
            if (p.positions[end] < 0 || p.positions[end] >= p.max_blocks * p.block_size) return false;
        if (seq < 0 || seq >= p.num_seqs) return false;
        const int64_t count = end - begin, num_tiles = (count + most - 1) / most;
        for (int64_t i = 0; i < num_tiles; i++)
            tiles.push_back(tile_of(p, begin + count * i / num_tiles, begin + count * (i + 1) / num_tiles));
    }
    return std::all_of(tiles.begin(), tiles.end(), [&](const QueryTile& tile) {
        const int32_t* table = p.block_tables + p.seq_index[tile.token] * p.max_blocks;
        return std::all_of(table + tile.low / GROUP * GROUP / p.block_size, table + tile.high / p.block_size + 1,
                           [&](int32_t block) { return 0 <= block && block < p.num_blocks; });
    });
}

// Each (tile, head) walks its splits from left to right.
template <class C>
void walk_splits(const Problem& p, const std::vector<QueryTile>& tiles) {
    parallel((int64_t)tiles.size() * p.num_kv_heads, [&](int64_t unit) {
        const QueryTile& tile = tiles[unit / p.num_kv_heads];
        Worker<C> worker(p, tile, unit % p.num_kv_heads);
        const int64_t rows = worker.rows(), floats = State::floats(rows, p.value_dim);
        Floats memory(2 * floats);
        State all(memory.data(), rows, p.value_dim), split(memory.data() + floats, rows, p.value_dim);
        all.clear(rows);
        for (int64_t i = 0; i < tile.num_splits(); i++) {
            worker.attend(tile.first_split() + i, split);
            worker.merge(all, split);
        }
        worker.finish(all);
    });
}

// The same result, bit for bit: the splits of each (tile, head) apart, so that a few long sequences
// keep all threads busy, then merged from left to right.
template <class C>
void spread_splits(const Problem& p, const std::vector<QueryTile>& tiles, int64_t num_splits, int64_t floats) {
    const int64_t units = (int64_t)tiles.size() * p.num_kv_heads;
    Floats memory(units * (num_splits + 1) * floats);
    const auto state = [&](int64_t unit, int64_t split, int64_t rows) {
        return State(memory.data() + (unit * (num_splits + 1) + split) * floats, rows, p.value_dim);
    };
    parallel(units * num_splits, [&](int64_t task) {
        const int64_t unit = task / num_splits, i = task % num_splits;
        const QueryTile& tile = tiles[unit / p.num_kv_heads];
        if (i >= tile.num_splits()) return;
        Worker<C> worker(p, tile, unit % p.num_kv_heads);
        State split = state(unit, i, worker.rows());
        worker.attend(tile.first_split() + i, split);
    });
    parallel(units, [&](int64_t unit) {
        const QueryTile& tile = tiles[unit / p.num_kv_heads];
        Worker<C> worker(p, tile, unit % p.num_kv_heads);
        State all = state(unit, num_splits, worker.rows());
        all.clear(worker.rows());
        for (int64_t i = 0; i < tile.num_splits(); i++) worker.merge(all, state(unit, i, worker.rows()));
        worker.finish(all);
    });
}

}  // namespace

// Shapes and meanings as in kernels/attention.py; q with a row stride, out contiguous. Answers false,
// having written nothing, when a query names a sequence, position or block that does not exist.
extern "C" bool sluicegate_attention(const void* q, int64_t q_stride, Dtype dtype, int64_t num_tokens,
                                     int64_t num_heads, int64_t head_dim, const void* k_cache, const void* v_cache,
                                     Dtype cache_dtype, int64_t num_blocks, int64_t num_kv_heads, int64_t block_size,
                                     int64_t value_dim, const int32_t* block_tables, int64_t num_seqs,
                                     int64_t max_blocks, const int32_t* seq_index, const int32_t* positions,
                                     float scale, int64_t window, float soft_cap, float value_scale, void* out) {
    const Problem p{q,           q_stride,   dtype,        num_tokens, num_heads, head_dim,     k_cache,   v_cache,
                    cache_dtype, num_blocks, num_kv_heads, block_size, value_dim, block_tables, seq_index, positions,
                    num_seqs,    max_blocks, scale,        window,     soft_cap,  value_scale,  out};
    std::vector<QueryTile> tiles;
    if (!cut(p, tiles)) return false;
    int64_t num_splits = 0, rows = 0;
    for (const QueryTile& tile : tiles) {
        num_splits = std::max(num_splits, tile.num_splits());
        rows = std::max(rows, tile.count * p.group());
    }
    const int64_t units = (int64_t)tiles.size() * num_kv_heads, floats = State::floats(rows, value_dim);
    const bool spread = num_threads() > 1 && num_splits > 1 && units < 4 * num_threads() &&
                        units * (num_splits + 1) * floats <= MAX_PARTIAL_FLOATS;
    with_pool_type(cache_dtype, [&](auto type) {
        using C = decltype(type);
        if (spread) spread_splits<C>(p, tiles, num_splits, floats);
        else walk_splits<C>(p, tiles);
    });
    return true;
}

}  // namespace sluicegate
