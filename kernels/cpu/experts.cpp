// Mixture of experts: which experts a row goes to, and the sum of what they answer.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "floats.h"
#include "functions.h"
#include "operators.h"
#include "pool.h"

namespace sluicegate {
namespace {

// The order of experts: larger logits first, NaN before all; equal ones keep theirs.
bool before(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// Sum of e^(logit - top) over `count` logits: 16 lanes, lane i taking elements i, i + 16, ..., then across them.
float sum_of_exponentials(const float* logits, int64_t count, float top) {
    alignas(64) float group[GROUP];
    vf lanes[PARTS] = {};
    for (int64_t i = 0; i < count; i += GROUP) {
        std::fill(std::copy_n(logits + i, std::min<int64_t>(GROUP, count - i), group), group + GROUP,
                  -std::numeric_limits<float>::infinity());
        for (int part = 0; part < PARTS; part++) lanes[part] += exp(load(group + part * LANES) - top);
    }
    return sum_group(lanes);
}

void route_row(const float* logits, int64_t num_experts, int64_t top_k, bool renormalize, int32_t* chosen,
               float* weights) {
    int64_t count = 0;  // the best so far, in order
    for (int32_t expert = 0; expert < num_experts; expert++) {
        int64_t place = count;
        while (place > 0 && before(logits[expert], logits[chosen[place - 1]])) place--;
        if (place == top_k) continue;
        count = std::min(count + 1, top_k);
        std::copy_backward(chosen + place, chosen + count - 1, chosen + count);
        chosen[place] = expert;
    }
    const float top = logits[chosen[0]];
    for (int64_t place = 0; place < top_k; place++) weights[place] = exp(logits[chosen[place]] - top);
    const float total = renormalize ? std::accumulate(weights, weights + top_k, 0.0f)
                                    : sum_of_exponentials(logits, num_experts, top);
    for (int64_t place = 0; place < top_k; place++) weights[place] /= total;
}

// Pairs (row * top_k + place) in the order of their experts, and of rows within one.
struct Grouped {
    std::vector<int64_t> starts;     // of each expert in `pairs`, and the end
    std::vector<int64_t> pairs, at;  // pairs[at[pair]] == pair

    Grouped(const int32_t* chosen, int64_t num_pairs, int64_t num_experts)
        : starts(num_experts + 1), pairs(num_pairs), at(num_pairs) {
        for (int64_t pair = 0; pair < num_pairs; pair++) starts[chosen[pair] + 1]++;
        std::partial_sum(starts.begin(), starts.end(), starts.begin());
        std::vector<int64_t> next(starts);
        for (int64_t pair = 0; pair < num_pairs; pair++) {
            at[pair] = next[chosen[pair]]++;
            pairs[at[pair]] = pair;
        }
    }
};

// A layer's experts: gate and up, then down, each expert's in panels as sluicegate_linear takes them.
struct Experts {
    const void *gate_up, *down;
    Dtype dtype;
    int64_t hidden, inner;

    const void* gate_up_of(int64_t expert) const { return panels(gate_up, expert, 2 * inner, hidden); }
    const void* down_of(int64_t expert) const { return panels(down, expert, hidden, inner); }

private:
    const void* panels(const void* first, int64_t expert, int64_t columns, int64_t depth) const {
        const int64_t size = (columns + GROUP - 1) / GROUP * depth * GROUP;
        return static_cast<const char*>(first) + expert * size * (dtype == FLOAT32 ? 4 : 2);
    }
};

// The rows of x that `pairs` name, widened: [count, width].
template <class T>
void gather(const T* x, int64_t stride, int64_t width, const int64_t* pairs, int64_t count, int64_t top_k, float* to) {
    parallel_ranges(count, 16, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const T* from = x + pairs[i] / top_k * stride;
            float* row = to + i * width;
            int64_t k = 0;
            for (; k + LANES <= width; k += LANES) store(row + k, load(from + k));
            for (; k < width; k++) row[k] = widen(from[k]);
        }
    });
}

// y[row] = the answers of the row's experts times their weights, added in the order of `weights`.
template <class T>
void add_up(const float* answers, const Grouped& grouped, const float* weights, int64_t num_rows, int64_t top_k,
            int64_t width, T* y) {
    parallel_ranges(num_rows, 4, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            for (int64_t k = 0; k < width; k += LANES) {
                const int64_t count = std::min<int64_t>(LANES, width - k);
                vf sum = {};
                for (int64_t pair = row * top_k; pair < (row + 1) * top_k; pair++) {
                    const float* answer = answers + grouped.at[pair] * width + k;
                    sum = fma(splat(weights[pair]), count == LANES ? load(answer) : load_first(answer, count), sum);
                }
                if (count == LANES) store(y + row * width + k, sum);
                else store_first(y + row * width + k, sum, count);
            }
        }
    });
}

// Every expert multiplies all of its rows at once; its answers stay in float32 until they are added up.
template <class T>
void mix(const T* x, int64_t stride, int64_t num_rows, const int32_t* chosen, const float* weights, int64_t top_k,
         int64_t num_experts, const Experts& experts, Dtype dtype, T* y) {
    thread_local Floats gathered, both, active, answers;
    const int64_t hidden = experts.hidden, inner = experts.inner;
    const Grouped grouped(chosen, num_rows * top_k, num_experts);
    float* const all = answers.reserve(num_rows * top_k * hidden);
    for (int64_t expert = 0; expert < num_experts; expert++) {
        const int64_t first = grouped.starts[expert], count = grouped.starts[expert + 1] - first;
        if (count == 0) continue;
        float* rows = gathered.reserve(count * hidden);
        void* gate_up = both.reserve(count * 2 * inner);
        void* gated = active.reserve(count * inner);
        gather(x, stride, hidden, grouped.pairs.data() + first, count, top_k, rows);
        sluicegate_linear(rows, FLOAT32, hidden, count, hidden, experts.gate_up_of(expert), experts.dtype, nullptr,
                          2 * inner, gate_up, dtype);
        sluicegate_silu_and_mul(gate_up, 2 * inner, count, inner, gated, dtype);
        sluicegate_linear(gated, dtype, inner, count, inner, experts.down_of(expert), experts.dtype, nullptr, hidden,
                          all + first * hidden, FLOAT32);
    }
    add_up(all, grouped, weights, num_rows, top_k, hidden, y);
}

// Answers of experts that wait to be added up: 64 MiB at most, however long a prompt is.
constexpr int64_t MAX_ANSWERS = 64 * 1024 * 1024 / sizeof(float);

}  // namespace

// logits [M, num_experts] contiguous; chosen and weights [M, top_k].
extern "C" void sluicegate_route(const float* logits, int64_t num_rows, int64_t num_experts, int64_t top_k,
                                 int32_t renormalize, int32_t* chosen, float* weights) {
    parallel_ranges(num_rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++)
            route_row(logits + row * num_experts, num_experts, top_k, renormalize, chosen + row * top_k,
                      weights + row * top_k);
    });
}

// x [M, hidden] with a row stride; chosen, weights [M, top_k] and y [M, hidden] contiguous; of each expert gate_up
// [2 * inner, hidden] and down [hidden, inner] in panels. Answers false, having written nothing, for an expert that
// is not there.
extern "C" bool sluicegate_experts(const void* x, Dtype dtype, int64_t x_stride, int64_t num_rows, int64_t hidden,
                                   const int32_t* chosen, const float* weights, int64_t top_k, const void* gate_up,
                                   const void* down, Dtype weight_dtype, int64_t num_experts, int64_t inner, void* y) {
    if (!std::all_of(chosen, chosen + num_rows * top_k, [&](int32_t e) { return 0 <= e && e < num_experts; }))
        return false;
    const Experts experts{gate_up, down, weight_dtype, hidden, inner};
    const int64_t at_once = std::max<int64_t>(1, MAX_ANSWERS / (top_k * hidden));
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        for (int64_t row = 0; row < num_rows; row += at_once)
            mix(static_cast<const T*>(x) + row * x_stride, x_stride, std::min(at_once, num_rows - row),
                chosen + row * top_k, weights + row * top_k, top_k, num_experts, experts, dtype,
                static_cast<T*>(y) + row * hidden);
    });
    return true;
}

}  // namespace sluicegate
