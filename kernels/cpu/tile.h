// The one inner loop of all products: a tile of rows times panels of 16 columns, in registers.
#pragma once

#include "vec.h"

namespace sluicegate {

// Most rows a tile has: by vector registers with AVX2, by registers for addresses with AVX-512.
constexpr int MAX_ROWS = LANES == 8 ? 6 : 8;

// Panels a tile of `rows` rows takes at once: its accumulators and what it multiplies just fit the
// registers (16 of AVX2, 32 of AVX-512). Each accumulator is a chain of dependent operations; it takes
// at least 8 of them to hide the latency of one.
constexpr int panels_of(int rows) {
    if (LANES == 8) return rows == 1 ? 6 : rows == 2 ? 3 : rows == 3 ? 2 : 1;
    return rows <= 3 ? 8 : rows == 4 ? 6 : rows <= 6 ? 4 : 3;
}

// Without being told, the compiler leaves some of these loops rolled and the accumulators in memory.
#define UNROLL _Pragma("GCC unroll 16")

// acc[row][column] = fma(a[row][k], panel[k][column], acc[row][column]) for k = 0 .. depth - 1, in order.
// Row r of `a` begins at a + r * a_stride; row k of a panel's 16 columns at panel + k * panel_stride.
template <int ROWS, int PANELS, class T>
inline __attribute__((always_inline)) void multiply(const float* a, int64_t a_stride, const T* const (&panel)[PANELS],
                                                    int64_t panel_stride, int64_t depth,
                                                    vf (&acc)[ROWS][PANELS * PARTS]) {
    constexpr int COLUMNS = PANELS * PARTS;
    // A copy whose address nobody has: the compiler would store the caller's at every step.
    vf sum[ROWS][COLUMNS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int c = 0; c < COLUMNS; c++) sum[r][c] = acc[r][c];
    for (int64_t k = 0; k < depth; k++) {
        const auto column = [&](int c) {
            return load(panel[c / PARTS] + k * panel_stride + c % PARTS * LANES);
        };
        // Whichever are fewer stay in registers, the others pass by.
        if constexpr (ROWS < COLUMNS) {
            vf x[ROWS];
            UNROLL for (int r = 0; r < ROWS; r++) x[r] = splat(a[r * a_stride + k]);
            UNROLL for (int c = 0; c < COLUMNS; c++) {
                const vf w = column(c);
                UNROLL for (int r = 0; r < ROWS; r++) sum[r][c] = fma(x[r], w, sum[r][c]);
            }
        } else {
            vf w[COLUMNS];
            UNROLL for (int c = 0; c < COLUMNS; c++) w[c] = column(c);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const vf x = splat(a[r * a_stride + k]);
                UNROLL for (int c = 0; c < COLUMNS; c++) sum[r][c] = fma(x, w[c], sum[r][c]);
            }
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int c = 0; c < COLUMNS; c++) acc[r][c] = sum[r][c];
}

}  // namespace sluicegate
