// The 8-bit storage type of the KV pool, FLOAT8: torch's float8_e4m3fn, a sign, 4 bits of exponent biased
// by 7, 3 of mantissa, no infinity, and NaN where all bits but the sign are set.
#pragma once

#include "vec.h"

namespace sluicegate {

struct fp8 {
    uint8_t bits;
};

// The code's bits, moved, are a float16 of 2^-8 times the value: float16 biases its exponent by 15. So are
// subnormal ones; every value is exact.
inline vf load(const fp8* p) {
    typedef int16_t halves __attribute__((vector_size(2 * LANES)));
#ifdef __AVX512F__
    const halves code = (halves)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
    const halves code = (halves)_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
#endif
    const halves sign_and_size = (code << 7) & (int16_t)0xBF80;
    const halves nan = (code & 0x7F) == 0x7F;
    const halves half = sign_and_size | (nan & 0x7E00);
#ifdef __AVX512F__
    return (vf)_mm512_cvtph_ps((__m256i)half) * 256.0f;
#else
    return (vf)_mm256_cvtph_ps((__m128i)half) * 256.0f;
#endif
}

// Nearest, ties to even, as torch rounds; what is larger than the largest value, 448, becomes that.
inline void store(fp8* p, vf x) {
    const vu sign = (vu)x >> 24 & 0x80;
    const vf size = (vf)((vu)x & 0x7FFFFFFF), bounded = size > 448.0f ? splat(448.0f) : size;
    const vu bits = (vu)bounded;
    // From 2^-6 on: 3 bits of the mantissa stay, the exponent's bias goes from 127 to 7.
    const vu normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    // Below, values are multiples of 2^-9, to which adding 2^14 rounds.
    const vu subnormal = (vu)(bounded + 0x1p14f) - 0x46800000;
    const vu code = (vu)(x == x) ? (bounded < 0x1p-6f ? subnormal : normal) : vu{} + 0x7F;
    const vu all = code | sign;
    for (int i = 0; i < LANES; i++) p[i].bits = (uint8_t)all[i];
}

// body(T{}) for the storage type of a pool.
template <class Body>
inline void with_pool_type(Dtype dtype, const Body& body) {
    if (dtype == FLOAT8) body(fp8{});
    else with_type(dtype, body);
}

}  // namespace sluicegate
