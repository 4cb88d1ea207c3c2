// Weights into the panels that `linear.cpp` reads: [N, K] to [ceil(N / 16)][K][16].
#include <algorithm>
#include <cstdint>

#include "pool.h"
#include "vec.h"

namespace sluicegate {
namespace {

// A stretch of all rows of a panel is read and written before the next: a line of each row, and as much of the panel.
constexpr int64_t LINE_BYTES = 64;

// Eight rows of eight elements, transposed by interleaving them three times: row i and row i + 4 each time.
void transpose(const uint16_t* from, int64_t stride, uint16_t* to) {
    __m128i rows[8], mixed[8];
    for (int r = 0; r < 8; r++) rows[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + r * stride));
    for (int round = 0; round < 3; round++) {
        for (int r = 0; r < 4; r++) {
            mixed[2 * r] = _mm_unpacklo_epi16(rows[r], rows[r + 4]);
            mixed[2 * r + 1] = _mm_unpackhi_epi16(rows[r], rows[r + 4]);
        }
        for (int r = 0; r < 8; r++) rows[r] = mixed[r];
    }
    for (int r = 0; r < 8; r++) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + r * GROUP), rows[r]);
}

// A stretch of 16 whole rows of 2 bytes an element (0.4 of the time of one element after the other).
void pack_whole(const uint16_t* from, int64_t depth, uint16_t* to) {
    for (int64_t i = 0; i < LINE_BYTES / 2; i += 8)
        for (int64_t half = 0; half < GROUP; half += 8)
            transpose(from + half * depth + i, depth, to + i * GROUP + half);
}

// Rows [begin, end) of the weight into lanes [lane, ...) of a panel.
template <class Bits>
void pack_panel(const Bits* weight, int64_t begin, int64_t end, int64_t depth, Bits* panel, int64_t lane) {
    constexpr int64_t STRETCH = LINE_BYTES / sizeof(Bits);
    for (int64_t k = 0; k < depth; k += STRETCH) {
        const int64_t count = std::min(STRETCH, depth - k);
        const Bits* from = weight + begin * depth + k;
        Bits* to = panel + k * GROUP + lane;
        // The rows' next lines, or 16 misses in a row are waited for one by one.
        for (int64_t row = 0; row < end - begin; row++) _mm_prefetch(from + row * depth + STRETCH, _MM_HINT_T0);
        if constexpr (sizeof(Bits) == 2) {
            if (end - begin == GROUP && count == STRETCH) {
                pack_whole(from, depth, to);
                continue;
            }
        }
        for (int64_t row = 0; row < end - begin; row++)
            for (int64_t i = 0; i < count; i++) to[i * GROUP + row] = from[row * depth + i];
    }
}

template <class Bits>
void pack(const void* weight, int64_t num_rows, int64_t depth, void* panels, int64_t first) {
    const int64_t first_panel = first / GROUP, end = first + num_rows;
    parallel((end + GROUP - 1) / GROUP - first_panel, [&](int64_t index) {
        const int64_t start = (first_panel + index) * GROUP;
        const int64_t from = std::max(start, first), to = std::min(start + GROUP, end);
        pack_panel(static_cast<const Bits*>(weight), from - first, to - first, depth,
                   static_cast<Bits*>(panels) + start * depth, from - start);
    });
}

}  // namespace

// weight: contiguous [num_rows, depth], elements of 2 or 4 bytes; they become rows [first, first + num_rows) of
// what is packed in `panels`.
extern "C" void sluicegate_pack(const void* weight, int32_t element_bytes, int64_t num_rows, int64_t depth,
                                void* panels, int64_t first) {
    if (element_bytes == 2) pack<uint16_t>(weight, num_rows, depth, panels, first);
    else pack<uint32_t>(weight, num_rows, depth, panels, first);
}

}  // namespace sluicegate
