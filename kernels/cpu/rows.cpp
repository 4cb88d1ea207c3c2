// Operators on one row at a time: norm, rope, gated activation, writing K and V into the pool.
#include <algorithm>
#include <type_traits>

#include "float8.h"
#include "functions.h"
#include "operators.h"
#include "pool.h"

namespace sluicegate {
namespace {

// Elements a task should have: under it, handing work to another thread costs more than it saves.
constexpr int64_t TASK_ELEMENTS = 16384;

int64_t rows_a_task(int64_t width) { return std::max<int64_t>(1, TASK_ELEMENTS / width); }

// body(offset, count) for a row's vectors; count is LANES but for the last.
template <class Body>
void for_vectors(int64_t width, const Body& body) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) body(i, std::integral_constant<int64_t, LANES>());
    if (i < width) body(i, width - i);
}

template <class T>
vf load_some(const T* p, std::integral_constant<int64_t, LANES>) { return load(p); }
template <class T>
vf load_some(const T* p, int64_t count) { return load_first(p, count); }
template <class T>
void store_some(T* p, vf x, std::integral_constant<int64_t, LANES>) { store(p, x); }
template <class T>
void store_some(T* p, vf x, int64_t count) { store_first(p, x, count); }

// Squares are summed in 16 lanes, lane i taking elements i, i + 16, ..., then across them as a tree.
template <class T>
float mean_square(const T* x, int64_t width) {
    vf lanes[PARTS] = {};
    for_vectors(width, [&](int64_t i, auto count) {
        const vf value = load_some(x + i, count);
        vf& lane = lanes[i / LANES % PARTS];
        lane = fma(value, value, lane);
    });
    return sum_group(lanes) / (float)width;
}

// A weight of type T scales what was rounded to T (Llama), a float32 one what was not yet (Gemma). y may be x.
template <class T, class W>
void rms_norm_row(const T* x, const T* residual, const W* weight, float eps, int64_t width, T* total, T* y) {
    if (residual) {
        for_vectors(width, [&](int64_t i, auto count) {
            store_some(total + i, load_some(x + i, count) + load_some(residual + i, count), count);
        });
        x = total;
    }
    const vf scale = 1.0f / sqrt(splat(mean_square(x, width) + eps));
    for_vectors(width, [&](int64_t i, auto count) {
        const vf normed = load_some(x + i, count) * scale;
        store_some(y + i, load_some(weight + i, count) * (std::is_same_v<T, W> ? rounded<T>(normed) : normed), count);
    });
}

// One head: x[i] and x[i + half] turn by the angle of column i.
template <class T>
void rotate(T* x, const float* cosines, const float* sines, int64_t half) {
    for_vectors(half, [&](int64_t i, auto count) {
        const vf low = load_some(x + i, count), high = load_some(x + half + i, count);
        const vf cosine = load_some(cosines + i, count), sine = load_some(sines + i, count);
        store_some(x + i, low * cosine - high * sine, count);
        store_some(x + half + i, high * cosine + low * sine, count);
    });
}

// body(row, T{}, W{}) for the storage types of x and of its weight, which is x's or float32.
template <class Body>
void with_norm_types(Dtype dtype, Dtype weight_dtype, const Body& body) {
    with_type(dtype, [&](auto type) {
        if (weight_dtype == FLOAT32) body(type, float{});
        else body(type, type);
    });
}

constexpr auto silu = [](vf x) { return x / (1.0f + exp(-x)); };

// x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), as x times the logistic function of 2u.
constexpr auto gelu_tanh = [](vf x) {
    const vf twice_u = x * fma(x * x, splat(2 * 0.7978845608f * 0.044715f), splat(2 * 0.7978845608f));
    return x / (1.0f + exp(-twice_u));
};

// activation(gate) * up, x [M, 2 * width] with a row stride; y [M, width] contiguous.
template <class Activation>
void activate_and_mul(const void* x, int64_t stride, int64_t num_rows, int64_t width, void* y, Dtype dtype,
                      const Activation& activation) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        parallel_ranges(num_rows, rows_a_task(2 * width), [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++) {
                const T* gate = static_cast<const T*>(x) + row * stride;
                T* to = static_cast<T*>(y) + row * width;
                for_vectors(width, [&](int64_t i, auto count) {
                    const vf active = rounded<T>(activation(load_some(gate + i, count)));
                    store_some(to + i, active * load_some(gate + width + i, count), count);
                });
            }
        });
    });
}

}  // namespace

// x, residual (or null), total, y [M, width]; x and residual with row strides, total and y contiguous.
extern "C" void sluicegate_rms_norm(const void* x, int64_t x_stride, const void* residual, int64_t residual_stride,
                                    const void* weight, Dtype weight_dtype, float eps, int64_t num_rows,
                                    int64_t width, void* total, void* y, Dtype dtype) {
    with_norm_types(dtype, weight_dtype, [&](auto type, auto weight_type) {
        using T = decltype(type);
        using W = decltype(weight_type);
        parallel_ranges(num_rows, rows_a_task(width), [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++)
                rms_norm_row(static_cast<const T*>(x) + row * x_stride,
                             residual ? static_cast<const T*>(residual) + row * residual_stride : nullptr,
                             static_cast<const W*>(weight), eps, width, static_cast<T*>(total) + row * width,
                             static_cast<T*>(y) + row * width);
        });
    });
}

// x [M, num_heads, head_dim] with a row stride, in place; weight [head_dim].
extern "C" void sluicegate_head_norm(void* x, int64_t stride, int64_t num_heads, int64_t head_dim, int64_t num_rows,
                                     const void* weight, Dtype weight_dtype, float eps, Dtype dtype) {
    with_norm_types(dtype, weight_dtype, [&](auto type, auto weight_type) {
        using T = decltype(type);
        using W = decltype(weight_type);
        parallel_ranges(num_rows, rows_a_task(num_heads * head_dim), [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++)
                for (int64_t head = 0; head < num_heads; head++) {
                    T* at = static_cast<T*>(x) + row * stride + head * head_dim;
                    rms_norm_row<T, W>(at, nullptr, static_cast<const W*>(weight), eps, head_dim, nullptr, at);
                }
        });
    });
}

// x [M, num_heads, head_dim] with a row stride, in place; table [num_positions, rotary_dim]. Answers
// false, having changed nothing, when a position is outside the table.
extern "C" bool sluicegate_rope(void* x, int64_t stride, int64_t num_heads, int64_t head_dim, const int32_t* positions,
                                int64_t num_rows, const float* table, int64_t num_positions, int64_t rotary_dim,
                                Dtype dtype) {
    if (!std::all_of(positions, positions + num_rows, [&](int32_t p) { return 0 <= p && p < num_positions; }))
        return false;
    const int64_t half = rotary_dim / 2;
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        parallel_ranges(num_rows, rows_a_task(num_heads * head_dim), [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++) {
                const float* cosines = table + positions[row] * rotary_dim;
                for (int64_t head = 0; head < num_heads; head++)
                    rotate(static_cast<T*>(x) + row * stride + head * head_dim, cosines, cosines + half, half);
            }
        });
    });
    return true;
}

extern "C" void sluicegate_silu_and_mul(const void* x, int64_t stride, int64_t num_rows, int64_t width, void* y,
                                        Dtype dtype) {
    activate_and_mul(x, stride, num_rows, width, y, dtype, silu);
}

extern "C" void sluicegate_gelu_and_mul(const void* x, int64_t stride, int64_t num_rows, int64_t width, void* y,
                                        Dtype dtype) {
    activate_and_mul(x, stride, num_rows, width, y, dtype, gelu_tanh);
}

// cap * tanh(x / cap) for `count` numbers that lie side by side, in place.
extern "C" void sluicegate_soft_cap(float* x, int64_t count, float cap) {
    // A unit is 16 vectors, so that no two threads write to one cache line.
    constexpr int64_t UNIT = 16 * LANES;
    parallel_ranges((count + UNIT - 1) / UNIT, TASK_ELEMENTS / UNIT, [&](int64_t begin, int64_t end) {
        float* from = x + begin * UNIT;
        for_vectors(std::min(count, end * UNIT) - begin * UNIT, [&](int64_t i, auto width) {
            store_some(from + i, soft_capped(load_some(from + i, width), cap), width);
        });
    });
}

// k, v [M, num_heads, head_dim] with row strides, divided by their scales, into key and value pools at
// slots[M]. Answers false, having written nothing, when a slot is outside the pool.
extern "C" bool sluicegate_write_kv(const void* k, int64_t k_stride, const void* v, int64_t v_stride, Dtype dtype,
                                    const int64_t* slots, int64_t num_rows, void* k_cache, void* v_cache,
                                    Dtype cache_dtype, float k_scale, float v_scale, int64_t num_blocks,
                                    int64_t num_heads, int64_t head_dim, int64_t block_size, int64_t value_dim) {
    const int64_t num_slots = num_blocks * block_size;
    if (!std::all_of(slots, slots + num_rows, [&](int64_t slot) { return 0 <= slot && slot < num_slots; }))
        return false;
    with_type(dtype, [&](auto type) {
        with_pool_type(cache_dtype, [&](auto cache_type) {
            using T = decltype(type);
            using C = decltype(cache_type);
            parallel_ranges(num_rows, rows_a_task(num_heads * head_dim), [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; row++) {
                    const int64_t block = slots[row] / block_size, offset = slots[row] % block_size;
                    for (int64_t head = 0; head < num_heads; head++) {
                        const int64_t at = block * num_heads + head;
                        const T* key = static_cast<const T*>(k) + row * k_stride + head * head_dim;
                        const T* value = static_cast<const T*>(v) + row * v_stride + head * head_dim;
                        C* keys = static_cast<C*>(k_cache) + at * head_dim * block_size + offset;
                        C* values = static_cast<C*>(v_cache) + (at * block_size + offset) * value_dim;
                        for_vectors(head_dim, [&](int64_t i, auto count) {
                            C column[LANES];
                            store(column, load_some(key + i, count) / k_scale);
                            for (int64_t d = 0; d < count; d++) keys[(i + d) * block_size] = column[d];
                            store_some(values + i, load_some(value + i, count) / v_scale, count);
                        });
                    }
                }
            });
        });
    });
    return true;
}

}  // namespace sluicegate
