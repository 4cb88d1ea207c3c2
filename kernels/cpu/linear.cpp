// y = x W^T + b for weights packed in panels of 16 output columns: [ceil(N / 16)][K][16], padded with zeros.
//
// A panel is read from memory once, by the first row tile of a block of rows, and from cache after it; the rows
// stream past it. Cutting K into cache blocks as well did not pay (measured, K up to 4096).
#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "floats.h"
#include "operators.h"
#include "pool.h"
#include "tile.h"

namespace sluicegate {
namespace {

struct Output {
    void* y;
    Dtype dtype;
    const float* bias;  // null for none
    int64_t columns;    // N, also the row stride of y
};

template <class T>
void store_columns(T* y, const vf (&acc)[PARTS], int64_t columns) {
    for (int part = 0; part < PARTS && columns > 0; part++, columns -= LANES) {
        if (columns >= LANES) store(y + part * LANES, acc[part]);
        else store_first(y + part * LANES, acc[part], columns);
    }
}

// One row's 16 columns of one panel: bias, rounding, store.
void finish(const Output& out, int64_t row, int64_t panel, vf* acc) {
    const int64_t first = panel * GROUP, columns = std::min<int64_t>(GROUP, out.columns - first);
    vf result[PARTS];
    for (int part = 0; part < PARTS; part++) result[part] = acc[part];
    if (out.bias) {
        for (int part = 0; part < PARTS; part++) {
            const int64_t left = std::clamp<int64_t>(columns - part * LANES, 0, LANES);
            result[part] += load_first(out.bias + first + part * LANES, left);
        }
    }
    const int64_t at = row * out.columns + first;
    with_type(out.dtype, [&](auto type) { store_columns(static_cast<decltype(type)*>(out.y) + at, result, columns); });
}

// Inputs that a tile multiplies between two requests for later weights.
constexpr int64_t STRETCH = 64;

// Asks for the next panels while these are multiplied, so that memory and arithmetic units work at the same
// time (8 rows of cold weights: 1.8 times the rate). The lines are spread evenly over the stretches of K of all
// row tiles, and go to the second-level cache: asked for at every step, or all at once, they hold up the tile.
class Ahead {
public:
    Ahead(const void* at, int64_t bytes, int64_t stretches)
        : at_(static_cast<const char*>(at)),
          end_(at_ + bytes),
          step_((bytes / LINE + stretches - 1) / stretches * LINE) {}

    void ask() {
        for (const char* stop = std::min(at_ + step_, end_); at_ < stop; at_ += LINE) _mm_prefetch(at_, _MM_HINT_T1);
    }

private:
    static constexpr int64_t LINE = 64;
    const char *at_, *end_;
    int64_t step_;
};

template <int ROWS, int PANELS, class T>
void tile(const float* x, int64_t depth, const T* weight, const Output& out, int64_t row, int64_t panel,
          Ahead& ahead) {
    vf acc[ROWS][PANELS * PARTS] = {};
    for (int64_t k = 0; k < depth; k += STRETCH) {
        ahead.ask();
        const T* panels[PANELS];
        for (int p = 0; p < PANELS; p++) panels[p] = weight + (p * depth + k) * GROUP;
        multiply<ROWS, PANELS, T>(x + row * depth + k, depth, panels, GROUP, std::min(STRETCH, depth - k), acc);
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) finish(out, row + r, panel + p, acc[r] + p * PARTS);
}

// Rows [row, row + ROWS) times the `count` panels that lie at `weight`, for output panels from `panel` on.
template <int ROWS, class T>
void tiles_of(const float* x, int64_t depth, const T* weight, const Output& out, int64_t row, int64_t panel,
              int64_t count, Ahead& ahead) {
    constexpr int AT_ONCE = panels_of(ROWS);
    int64_t p = 0;
    for (; p + AT_ONCE <= count; p += AT_ONCE)
        tile<ROWS, AT_ONCE, T>(x, depth, weight + p * depth * GROUP, out, row, panel + p, ahead);
    if constexpr (AT_ONCE > 1)
        for (; p < count; p++) tile<ROWS, 1, T>(x, depth, weight + p * depth * GROUP, out, row, panel + p, ahead);
}

template <class T>
using TilesOf = void (*)(const float*, int64_t, const T*, const Output&, int64_t, int64_t, int64_t, Ahead&);

template <class T, int... ROWS>
constexpr std::array<TilesOf<T>, sizeof...(ROWS)> tiles_table(std::integer_sequence<int, ROWS...>) {
    return {tiles_of<ROWS + 1, T>...};
}

// All rows of a block times the panels at `weight`, in tiles of almost equal height: 8 rows as 4 + 4
// keep the units busier than 6 + 2.
template <class T>
void row_tiles(const float* x, int64_t depth, const T* weight, const Output& out, int64_t first_row, int64_t rows,
               int64_t panel, int64_t count, Ahead& ahead) {
    static constexpr auto table = tiles_table<T>(std::make_integer_sequence<int, MAX_ROWS>());
    const int64_t num_tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t t = 0; t < num_tiles; t++) {
        const int64_t row = rows * t / num_tiles, height = rows * (t + 1) / num_tiles - row;
        table[height - 1](x, depth, weight, out, first_row + row, panel, count, ahead);
    }
}

// Rows of x that pass over a panel before the next panel's turn. The more they are, the less it costs to widen the
// panel; that they stay in the second-level cache matters less, since they are read in order (256 rows, Zen 3,
// against as many as fit there: 1.04 times the rate at K = 576, 1.25 at 1536, 1.45 at 4096).
constexpr int64_t ROWS_AT_ONCE = 288;

// With so many row tiles it pays to widen a panel once for all of them, if it then stays in the cache.
constexpr int64_t WIDEN_ROWS = 4 * MAX_ROWS, MAX_WIDENED = 256 * 1024 / sizeof(float);

template <class T>
void product(const float* x, int64_t num_rows, int64_t depth, const T* weight, const Output& out) {
    const int64_t num_panels = (out.columns + GROUP - 1) / GROUP, panel_size = depth * GROUP;
    const int64_t num_blocks = (num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    // Some 8 tasks a thread, so that one thread held up does not hold up the call; whole tiles each.
    const int64_t at_once = panels_of((int)std::min<int64_t>(std::max<int64_t>(num_rows, 1), MAX_ROWS));
    const int64_t share = std::clamp<int64_t>(num_panels / (8 * num_threads()), at_once, 64) / at_once * at_once;
    parallel_ranges(num_panels, share, [&](int64_t begin, int64_t end) {
        thread_local Floats wide;
        for (int64_t block = 0; block < num_blocks; block++) {
            const int64_t from = num_rows * block / num_blocks, rows = num_rows * (block + 1) / num_blocks - from;
            const int64_t step = panels_of((int)std::min<int64_t>(rows, MAX_ROWS));
            const int64_t stretches = (rows + MAX_ROWS - 1) / MAX_ROWS * ((depth + STRETCH - 1) / STRETCH);
            for (int64_t panel = begin; panel < end; panel += step) {
                const int64_t count = std::min(step, end - panel), size = count * panel_size;
                const T* panels = weight + panel * panel_size;
                const int64_t next = std::min(step, num_panels - panel - count);
                Ahead ahead(panels + size, next * panel_size * (int64_t)sizeof(T), stretches);
                if (std::is_same_v<T, float> || rows < WIDEN_ROWS || size > MAX_WIDENED) {
                    row_tiles(x, depth, panels, out, from, rows, panel, count, ahead);
                } else {
                    float* widened = wide.reserve(size);
                    for (int64_t i = 0; i < size; i += LANES) store(widened + i, load(panels + i));
                    row_tiles(x, depth, widened, out, from, rows, panel, count, ahead);
                }
            }
        }
    });
}

template <class T>
void widen_rows(const T* x, int64_t num_rows, int64_t stride, int64_t depth, float* wide) {
    parallel_ranges(num_rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const T* from = x + row * stride;
            float* to = wide + row * depth;
            int64_t i = 0;
            for (; i + LANES <= depth; i += LANES) store(to + i, load(from + i));
            for (; i < depth; i++) to[i] = widen(from[i]);
        }
    });
}

}  // namespace

// x [M, K] with a row stride; bias float32 [N] or null; y [M, N] contiguous.
extern "C" void sluicegate_linear(const void* x, Dtype x_dtype, int64_t x_stride, int64_t num_rows, int64_t depth,
                                  const void* weight, Dtype weight_dtype, const float* bias, int64_t columns, void* y,
                                  Dtype y_dtype) {
    thread_local Floats wide;
    const float* rows = static_cast<const float*>(x);
    if (x_dtype != FLOAT32 || x_stride != depth) {
        float* widened = wide.reserve(num_rows * depth);
        with_type(x_dtype, [&](auto type) {
            widen_rows(static_cast<const decltype(type)*>(x), num_rows, x_stride, depth, widened);
        });
        rows = widened;
    }
    const Output out{y, y_dtype, bias, columns};
    with_type(weight_dtype, [&](auto type) {
        product(rows, num_rows, depth, static_cast<const decltype(type)*>(weight), out);
    });
}

}  // namespace sluicegate
