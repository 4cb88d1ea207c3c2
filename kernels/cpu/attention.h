// The arithmetic of attention: one tile of queries against the keys of one split, and the merge.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "float8.h"
#include "floats.h"
#include "functions.h"
#include "tile.h"

namespace sluicegate {

constexpr int64_t SPLIT = 256, TILE = 64;

struct Problem {
    const void* q;
    int64_t q_stride;
    Dtype dtype;  // of q and out
    int64_t num_tokens, num_heads, head_dim;
    const void *k_cache, *v_cache;
    Dtype cache_dtype;
    int64_t num_blocks, num_kv_heads, block_size, value_dim;
    const int32_t *block_tables, *seq_index, *positions;
    int64_t num_seqs, max_blocks;
    float scale;
    int64_t window;
    float soft_cap;
    float value_scale;  // of the pool's values; that of its keys is a part of `scale`
    void* out;

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t first_key(int64_t token) const {
        return window > 0 ? std::max<int64_t>(0, positions[token] - window + 1) : 0;
    }
};

// Consecutive queries of one sequence, and the keys that any of them sees: [low, high].
struct QueryTile {
    int64_t token, count, low, high;

    int64_t first_split() const { return low / SPLIT; }
    int64_t num_splits() const { return high / SPLIT - first_split() + 1; }
};

// Online softmax of some rows: weighted values [rows][value_dim], sum of exponentials, largest score.
struct State {
    float *out, *total, *top;

    // Floats that a State takes, a multiple of 16 so that one beside another is aligned too.
    static int64_t floats(int64_t rows, int64_t value_dim) {
        return (rows * (value_dim + 2) + GROUP - 1) / GROUP * GROUP;
    }
    State(float* memory, int64_t rows, int64_t value_dim)
        : out(memory), total(memory + rows * value_dim), top(total + rows) {}
    void clear(int64_t rows) {
        std::fill(out, top, 0.0f);
        std::fill(top, top + rows, -std::numeric_limits<float>::infinity());
    }
};

// Scores of one row's 64 keys become weights relative to its largest score so far; what the row has
// is brought to that scale. Keys outside [begin, end) of the tile weigh 0.
inline void weigh(float* scores, int64_t begin, int64_t end, float soft_cap, float& top, float& total, float& decay) {
    for (int64_t key = 0; key < begin; key++) scores[key] = -std::numeric_limits<float>::infinity();
    for (int64_t key = end; key < TILE; key++) scores[key] = -std::numeric_limits<float>::infinity();
    vf highest[PARTS];
    for (int part = 0; part < PARTS; part++) highest[part] = splat(top);
    for (int64_t i = 0; i < TILE; i += LANES) {
        vf score = load(scores + i);
        if (soft_cap > 0) {
            // Masked keys stay masked.
            score = score == -std::numeric_limits<float>::infinity() ? score : soft_capped(score, soft_cap);
            store(scores + i, score);
        }
        vf& lane = highest[i / LANES % PARTS];
        lane = max(score, lane);
    }
    const float new_top = max_group(highest);
    vf sums[PARTS] = {};
    for (int64_t i = 0; i < TILE; i += LANES) {
        const vf weight = exp(load(scores + i) - new_top);
        store(scores + i, weight);
        sums[i / LANES % PARTS] += weight;
    }
    decay = exp(top - new_top);
    total = total * decay + sum_group(sums);
    top = new_top;
}

template <class C>
class Worker {
public:
    Worker(const Problem& problem, const QueryTile& tile, int64_t kv_head)
        : p_(problem),
          tile_(tile),
          kv_head_(kv_head),
          group_(problem.group()),
          rows_(tile.count * group_),
          table_(problem.block_tables + problem.seq_index[tile.token] * problem.max_blocks),
          queries_(rows_ * problem.head_dim),
          scores_(rows_ * TILE),
          decay_(rows_) {
        with_type(p_.dtype, [&](auto type) {
            const auto* q = static_cast<const decltype(type)*>(p_.q);
            for (int64_t row = 0; row < rows_; row++)
                for (int64_t d = 0; d < p_.head_dim; d++)
                    queries_[row * p_.head_dim + d] =
                        widen(q[token(row) * p_.q_stride + head(row) * p_.head_dim + d]) * p_.scale;
        });
    }

    int64_t rows() const { return rows_; }

    // The rows' softmax over the keys of one split.
    void attend(int64_t split, State& state) {
        state.clear(rows_);
        const int64_t end = std::min((split + 1) * SPLIT, tile_.high + 1);
        for (int64_t key = std::max(split * SPLIT, tile_.low / TILE * TILE); key < end; key += TILE) {
            locate(key);
            score_rows(key);
            for (int64_t first = 0; first < tile_.count;) {
                // Queries that see the same part of this tile go on together; all do, but at the edges.
                const auto [begin, stop] = seen(tile_.token + first, key);
                int64_t next = first + 1;
                while (next < tile_.count && seen(tile_.token + next, key) == std::pair(begin, stop)) next++;
                if (begin < stop) add_values(first * group_, next * group_, begin, stop, state);
                first = next;
            }
        }
    }

    // Join a later split's softmax to what the rows have.
    void merge(State& all, const State& split) {
        for (int64_t row = 0; row < rows_; row++) {
            // A row that saw nothing of the split stays exactly as it is.
            if (split.top[row] == -std::numeric_limits<float>::infinity() && split.total[row] == 0) continue;
            const float top = all.top[row] > split.top[row] ? all.top[row] : split.top[row];
            const float old_scale = exp(all.top[row] - top), new_scale = exp(split.top[row] - top);
            all.total[row] = all.total[row] * old_scale + split.total[row] * new_scale;
            all.top[row] = top;
            float* to = all.out + row * p_.value_dim;
            const float* from = split.out + row * p_.value_dim;
            for (int64_t d = 0; d < p_.value_dim; d += LANES)
                store(to + d, load(to + d) * old_scale + load(from + d) * new_scale);
        }
    }

    void finish(const State& all) {
        with_type(p_.dtype, [&](auto type) {
            using T = decltype(type);
            for (int64_t row = 0; row < rows_; row++) {
                T* out = static_cast<T*>(p_.out) + (token(row) * p_.num_heads + head(row)) * p_.head_dim;
                for (int64_t d = 0; d < p_.head_dim; d += LANES)
                    store_first(out + d, load(all.out + row * p_.value_dim + d) / all.total[row] * p_.value_scale,
                                std::min<int64_t>(LANES, p_.head_dim - d));
            }
        });
    }

private:
    int64_t token(int64_t row) const { return tile_.token + row / group_; }
    int64_t head(int64_t row) const { return kv_head_ * group_ + row % group_; }

    // Part [begin, end) of the 64 keys from `key` on that a query sees.
    std::pair<int64_t, int64_t> seen(int64_t token, int64_t key) const {
        const int64_t begin = std::clamp<int64_t>(p_.first_key(token) - key, 0, TILE);
        return {begin, std::clamp<int64_t>(p_.positions[token] + 1 - key, begin, TILE)};
    }

    // Where the groups of 16 keys of the tile at `key` lie; a group is within one block. Groups that no
    // row sees may be in no block, and are not looked up.
    void locate(int64_t key) {
        for (int64_t group = 0; group < TILE / GROUP; group++, key += GROUP) {
            if (key + GROUP <= tile_.low || key > tile_.high) continue;
            const int64_t offset = key % p_.block_size;
            const int64_t at = table_[key / p_.block_size] * p_.num_kv_heads + kv_head_;
            keys_[group] = static_cast<const C*>(p_.k_cache) + at * p_.head_dim * p_.block_size + offset;
            values_[group] = static_cast<const C*>(p_.v_cache) + (at * p_.block_size + offset) * p_.value_dim;
        }
    }

    // Products of all rows with the keys of the tile at `key` that any row sees, by groups of 16.
    void score_rows(int64_t key) {
        const int64_t first = std::max<int64_t>(0, (tile_.low - key) / GROUP);
        const int64_t last = std::min(TILE - 1, tile_.high - key) / GROUP;
        for_row_tiles(0, rows_, [&](int64_t row, auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            constexpr int AT_ONCE = std::min<int>(panels_of(ROWS), TILE / GROUP);
            const float* queries = &queries_[row * p_.head_dim];
            float* scores = &scores_[row * TILE];
            int64_t group = first;
            for (; group + AT_ONCE <= last + 1; group += AT_ONCE)
                score_panels<ROWS, AT_ONCE>(queries, keys_ + group, scores + group * GROUP);
            if constexpr (AT_ONCE > 1)
                for (; group <= last; group++)
                    score_panels<ROWS, 1>(queries, keys_ + group, scores + group * GROUP);
        });
    }

    template <int ROWS, int PANELS>
    void score_panels(const float* queries, const C* const* panels, float* scores) {
        const C* taken[PANELS];
        std::copy(panels, panels + PANELS, taken);
        vf acc[ROWS][PANELS * PARTS] = {};
        multiply<ROWS, PANELS, C>(queries, p_.head_dim, taken, p_.block_size, p_.head_dim, acc);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < PANELS * PARTS; c++) store(scores + r * TILE + c * LANES, acc[r][c]);
    }

    // Rows [first, last) take keys [begin, end) of the tile into their softmax.
    void add_values(int64_t first, int64_t last, int64_t begin, int64_t end, State& state) {
        for (int64_t row = first; row < last; row++)
            weigh(&scores_[row * TILE], begin, end, p_.soft_cap, state.top[row], state.total[row], decay_[row]);
        for_row_tiles(first, last, [&](int64_t row, auto rows) {
            constexpr int ROWS = decltype(rows)::value;
            constexpr int AT_ONCE = std::min(panels_of(ROWS), 4);
            int64_t d = 0;
            for (; d + AT_ONCE * GROUP <= p_.value_dim; d += AT_ONCE * GROUP)
                value_panels<ROWS, AT_ONCE>(row, d, begin, end, state);
            if constexpr (AT_ONCE > 1)
                for (; d < p_.value_dim; d += GROUP) value_panels<ROWS, 1>(row, d, begin, end, state);
        });
    }

    template <int ROWS, int PANELS>
    void value_panels(int64_t row, int64_t d, int64_t begin, int64_t end, State& state) {
        float* out = state.out + row * p_.value_dim + d;
        vf acc[ROWS][PANELS * PARTS];
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < PANELS * PARTS; c++)
                acc[r][c] = load(out + r * p_.value_dim + c * LANES) * decay_[row + r];
        while (begin < end) {
            const int64_t run = std::min(end - begin, GROUP - begin % GROUP);
            const C* panels[PANELS];
            for (int p = 0; p < PANELS; p++)
                panels[p] = values_[begin / GROUP] + begin % GROUP * p_.value_dim + d + p * GROUP;
            multiply<ROWS, PANELS, C>(&scores_[row * TILE + begin], TILE, panels, p_.value_dim, run, acc);
            begin += run;
        }
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < PANELS * PARTS; c++) store(out + r * p_.value_dim + c * LANES, acc[r][c]);
    }

    // body(row, integral_constant<rows>) for tiles of at most MAX_ROWS rows, of almost equal height.
    template <class Body>
    static void for_row_tiles(int64_t first, int64_t last, const Body& body) {
        const int64_t rows = last - first, num_tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t t = 0; t < num_tiles; t++) {
            const int64_t row = first + rows * t / num_tiles;
            with_rows<MAX_ROWS>(first + rows * (t + 1) / num_tiles - row, row, body);
        }
    }

    template <int ROWS, class Body>
    static void with_rows(int64_t rows, int64_t row, const Body& body) {
        if (rows == ROWS) return body(row, std::integral_constant<int, ROWS>());
        if constexpr (ROWS > 1) with_rows<ROWS - 1>(rows, row, body);
    }

    const Problem& p_;
    const QueryTile& tile_;
    const int64_t kv_head_, group_, rows_;
    const int32_t* const table_;
    Floats queries_, scores_, decay_;
    const C *keys_[TILE / GROUP] = {}, *values_[TILE / GROUP] = {};
};

}  // namespace sluicegate
