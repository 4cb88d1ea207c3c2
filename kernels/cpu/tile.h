// The one inner loop of all products: a tile of rows times panels of 16 columns, in registers.
#pragma once

#include "vec.h"

namespace sluicegate {

// Most rows a tile has: the accumulators of a tile, its panel and one broadcast fill the registers
// (16 of AVX2: 6 * 2 + 2 + 1; 32 of AVX-512: 12 * 2 + 2, its products broadcast from memory).
constexpr int MAX_ROWS = LANES == 8 ? 6 : 12;

// Panels a tile of `rows` rows takes at once, so that enough independent chains hide the latency.
constexpr int panels_of(int rows) {
    if (LANES == 8) return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
    return rows == 1 ? 8 : rows <= 6 ? 4 : 2;
}

// acc[row][column] = fma(a[row][k], panel[k][column], acc[row][column]) for k = 0 .. depth - 1, in order.
// Row r of `a` begins at a + r * a_stride; row k of a panel's 16 columns at panel + k * panel_stride.
template <int ROWS, int PANELS, class T>
inline __attribute__((always_inline)) void multiply(const float* a, int64_t a_stride, const T* const (&panel)[PANELS],
                                                    int64_t panel_stride, int64_t depth,
                                                    vf (&acc)[ROWS][PANELS * PARTS]) {
    for (int64_t k = 0; k < depth; k++) {
        vf column[PANELS * PARTS];
        for (int p = 0; p < PANELS; p++)
            for (int part = 0; part < PARTS; part++)
                column[p * PARTS + part] = load(panel[p] + k * panel_stride + part * LANES);
        for (int r = 0; r < ROWS; r++) {
            const vf x = splat(a[r * a_stride + k]);
            for (int c = 0; c < PANELS * PARTS; c++) acc[r][c] = fma(x, column[c], acc[r][c]);
        }
    }
}

}  // namespace sluicegate
