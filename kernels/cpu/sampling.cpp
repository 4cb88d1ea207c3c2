// Choosing tokens from rows of logits, and their logprobs. Each row on its own, in an order fixed by
// the vocabulary alone. The rules are in kernels/sampling.py.
#include <algorithm>
#include <limits>
#include <vector>

#include "noise.h"
#include "pool.h"

namespace sluicegate {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float GREEDY_BELOW = 1e-5f;

struct Ranked {
    float value;
    int32_t id;

    // The one order of tokens: likelier first, ties to the lowest id.
    bool operator<(const Ranked& other) const {
        return value > other.value || (value == other.value && id < other.id);
    }
};

const Ranked NOTHING{-INF, std::numeric_limits<int32_t>::max()};

vi lane_ids() {
    vi ids;
    for (int lane = 0; lane < LANES; lane++) ids[lane] = lane;
    return ids;
}

// Loads at the end of a row: lanes past it hold -inf.
vf load_row(const float* row, int64_t i, int64_t size) {
    if (i + LANES <= size) return load(row + i);
    alignas(64) float buffer[LANES];
    std::fill(buffer, buffer + LANES, -INF);
    std::copy(row + i, row + size, buffer);
    return load(buffer);
}

// The most likely token; id -1 for a row with a NaN or +inf, or with nothing but -inf.
Ranked largest(const float* row, int64_t size) {
    vf top = splat(-INF);
    vi unordered = {};
    for (int64_t i = 0; i < size; i += LANES) {
        const vf value = load_row(row, i, size);
        unordered |= value != value;
        top = max(value, top);
    }
    float value = top[0];
    for (int lane = 1; lane < LANES; lane++) value = std::max(value, top[lane]);
    if (any(unordered) || value == INF || value == -INF) return {value, -1};
    return {value, (int32_t)(std::find(row, row + size, value) - row)};
}

// Sum of e^(row - top): 1024 tokens at a time in 16 float32 lanes, those sums in float64.
double sum_exp(const float* row, int64_t size, float top) {
    constexpr int64_t STRETCH = 1024;
    double total = 0;
    for (int64_t begin = 0; begin < size; begin += STRETCH) {
        vf lanes[PARTS] = {};
        for (int64_t i = begin; i < std::min(begin + STRETCH, size); i += LANES)
            lanes[i / LANES % PARTS] += exp(load_row(row, i, size) - top);
        total += sum_group(lanes);
    }
    return total;
}

// All tokens of at least `floor`, in order of id.
void collect(const float* row, int64_t size, float floor, std::vector<Ranked>& found) {
    found.clear();
    for (int64_t i = 0; i < size; i += LANES) {
        if (!any(load_row(row, i, size) >= floor)) continue;
        for (int64_t id = i; id < std::min(i + LANES, size); id++)
            if (row[id] >= floor) found.push_back({row[id], (int32_t)id});
    }
}

// How far below the largest to look for the most likely tokens: seldom beyond the first.
constexpr float DEPTHS[] = {4.0f, 12.0f, INF};

// The `count` most likely tokens, in order.
void rank_most_likely(const float* row, int64_t size, float top, int64_t count, std::vector<Ranked>& found) {
    for (const float depth : DEPTHS) {
        collect(row, size, top - depth, found);
        if ((int64_t)found.size() >= count) break;
    }
    count = std::min(count, (int64_t)found.size());
    if (count == 0) return;
    std::nth_element(found.begin(), found.begin() + count - 1, found.end());
    found.resize(count);
    std::sort(found.begin(), found.end());
}

// Puts the most likely of `tokens` in order, up to the one with which their probability, of `total`,
// reaches top_p, and drops the others. False when all of them together do not reach it. Orders a few
// at a time: seldom more are needed, and a flat row has tens of thousands.
bool keep_top_p(std::vector<Ranked>& tokens, float top, float top_p, double total) {
    double reached = 0;
    auto from = tokens.begin();
    for (int64_t stretch = 64; from != tokens.end(); stretch *= 4) {
        const auto to = from + std::min<int64_t>(stretch, tokens.end() - from);
        if (to != tokens.end()) std::nth_element(from, to, tokens.end());
        std::sort(from, to);
        for (; from != to; ++from) {
            reached += exp(from->value - top);
            if (reached < (double)top_p * total) continue;
            tokens.erase(from + 1, tokens.end());
            return true;
        }
    }
    return false;
}

struct Filters {
    int64_t top_k;
    float top_p, min_p;

    bool none(int64_t size) const { return !limits(size) && top_p >= 1 && min_p <= 0; }
    bool limits(int64_t size) const { return top_k >= 1 && top_k < size; }
};

// Tokens that top_k, then top_p, then min_p leave.
void filter(const float* row, int64_t size, float top, const Filters& filters, std::vector<Ranked>& kept) {
    if (filters.limits(size)) {
        rank_most_likely(row, size, top, filters.top_k, kept);
        double total = 0;
        for (const Ranked& token : kept) total += exp(token.value - top);
        if (filters.top_p < 1) keep_top_p(kept, top, filters.top_p, total);
    } else if (filters.top_p < 1) {
        const double total = sum_exp(row, size, top);
        for (const float depth : DEPTHS) {
            collect(row, size, top - depth, kept);
            if (keep_top_p(kept, top, filters.top_p, total)) break;
        }
    } else {
        // e^-87 is the least that is not 0.
        collect(row, size, top + std::max(-87.0f, log(std::max(filters.min_p, 1.2e-38f)) - 0.01f), kept);
    }
    std::erase_if(kept, [&](const Ranked& token) { return exp(token.value - top) < filters.min_p; });
}

void take_better(Ranked& best, vf values, vi ids, int64_t count) {
    for (int64_t lane = 0; lane < count; lane++) best = std::min(best, Ranked{values[lane], ids[lane]});
}

// Largest of value + noise over the whole row. A token whose value is further below the best so far
// than any noise reaches is passed over: rounding is monotonic, so it could not have won.
int64_t noisy_largest(const float* row, int64_t size, const Ranked& likeliest, const Stream& stream) {
    Ranked best{likeliest.value + gumbel(noise_words(stream, vu{} + (uint32_t)likeliest.id))[0], likeliest.id};
    for (int64_t i = 0; i < size; i += LANES) {
        const vf value = load_row(row, i, size);
        if (!any(value + NOISE_BOUND >= best.value)) continue;
        const vi ids = lane_ids() + (int32_t)i;
        const vf noisy = value + gumbel(noise_words(stream, (vu)ids));
        if (any(noisy >= best.value)) take_better(best, noisy, ids, std::min<int64_t>(LANES, size - i));
    }
    return best.id;
}

int64_t noisy_largest(const std::vector<Ranked>& tokens, const Stream& stream) {
    Ranked best = NOTHING;
    for (size_t i = 0; i < tokens.size(); i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, tokens.size() - i);
        vf values = splat(-INF);
        vi ids = {};
        for (int64_t lane = 0; lane < count; lane++) {
            values[lane] = tokens[i + lane].value;
            ids[lane] = tokens[i + lane].id;
        }
        take_better(best, values + gumbel(noise_words(stream, (vu)ids)), ids, count);
    }
    return best.id;
}

int64_t sample_row(const float* logits, int64_t size, float temperature, const Filters& filters,
                   const Stream& stream) {
    const Ranked likeliest = largest(logits, size);
    if (likeliest.id < 0 || temperature < GREEDY_BELOW) return likeliest.id;
    thread_local std::vector<float> scaled;
    scaled.resize(size);
    for (int64_t i = 0; i < size; i += LANES) {
        const vf value = load_row(logits, i, size) / temperature;
        store_first(&scaled[i], value, std::min<int64_t>(LANES, size - i));
    }
    // Division keeps the order but may make unequal logits equal: the lowest id of those is likeliest.
    const Ranked first = largest(scaled.data(), size);
    if (first.id < 0) return -1;
    if (filters.none(size)) return noisy_largest(scaled.data(), size, first, stream);
    thread_local std::vector<Ranked> kept;
    filter(scaled.data(), size, first.value, filters, kept);
    return noisy_largest(kept, stream);
}

void logprobs_row(const float* row, int64_t size, int64_t id, int64_t k, float* own, int64_t* rank, int64_t* top_ids,
                  float* top) {
    const float highest = largest(row, size).value;
    const float log_total = log((float)sum_exp(row, size, highest));
    const Ranked chosen{row[id], (int32_t)id};
    int64_t better = 0;
    for (int64_t i = 0; i < size; i++) better += Ranked{row[i], (int32_t)i} < chosen;
    *own = row[id] - highest - log_total;
    *rank = better + 1;
    if (k < 1) return;
    thread_local std::vector<Ranked> ranked;
    rank_most_likely(row, size, highest, k, ranked);
    std::fill(top_ids, top_ids + k, -1);
    for (size_t i = 0; i < ranked.size(); i++) {
        top_ids[i] = ranked[i].id;
        top[i] = ranked[i].value - highest - log_total;
    }
}

}  // namespace

// logits float32 [B, V] contiguous; everything else [B].
extern "C" void sluicegate_sample(const float* logits, int64_t num_rows, int64_t vocab_size, const float* temperature,
                                  const int64_t* top_k, const float* top_p, const float* min_p, const int64_t* seeds,
                                  const int64_t* positions, int64_t* ids) {
    parallel(num_rows, [&](int64_t row) {
        ids[row] = sample_row(logits + row * vocab_size, vocab_size, temperature[row],
                              {top_k[row], top_p[row], min_p[row]}, Stream(seeds[row], positions[row]));
    });
}

// own, rank [B]; top_ids, top [B, k] with 0 <= k <= V; ids within the vocabulary. A row with a NaN or
// +inf has no meaning, and -1 in top_ids.
extern "C" void sluicegate_logprobs(const float* logits, int64_t num_rows, int64_t vocab_size, const int64_t* ids,
                                    int64_t k, float* own, int64_t* rank, int64_t* top_ids, float* top) {
    parallel(num_rows, [&](int64_t row) {
        logprobs_row(logits + row * vocab_size, vocab_size, ids[row], k, own + row, rank + row, top_ids + row * k,
                     top + row * k);
    });
}

// Noise of every token id: float32 [B, V].
extern "C" void sluicegate_gumbel_noise(const int64_t* seeds, const int64_t* positions, int64_t num_rows,
                                        int64_t vocab_size, float* noise) {
    parallel(num_rows, [&](int64_t row) {
        const Stream stream(seeds[row], positions[row]);
        for (int64_t i = 0; i < vocab_size; i += LANES)
            store_first(noise + row * vocab_size + i, gumbel(noise_words(stream, (vu)(lane_ids() + (int32_t)i))),
                        std::min<int64_t>(LANES, vocab_size - i));
    });
}

}  // namespace sluicegate
