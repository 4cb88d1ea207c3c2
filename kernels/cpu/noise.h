// Gumbel noise as a pure function of (seed, position, token id): Philox4x32-10 (Salmon et al., SC'11)
// with key = the seed's low and high words and counter = (position, id, 0, 0), first output word.
#pragma once

#include "functions.h"

namespace sluicegate {

// Above the largest noise, -ln(-ln(1 - 2^-24)) = 16.6355.
constexpr float NOISE_BOUND = 16.64f;

struct Stream {
    uint32_t key_low, key_high, position;

    Stream(int64_t seed, int64_t at)
        : key_low((uint32_t)seed), key_high((uint32_t)((uint64_t)seed >> 32)), position((uint32_t)at) {}
};

// High and low words of the 64-bit products of each lane with a constant.
inline void multiply_wide(vu a, uint32_t constant, vu& high, vu& low) {
#ifdef __AVX512F__
    const __m512i c = _mm512_set1_epi32((int)constant);
    const __m512i even = _mm512_mul_epu32((__m512i)a, c);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), c);
    high = (vu)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
    low = (vu)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
#else
    const __m256i c = _mm256_set1_epi32((int)constant);
    const __m256i even = _mm256_mul_epu32((__m256i)a, c);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), c);
    high = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    low = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
#endif
}

inline vu noise_words(const Stream& stream, vu ids) {
    vu c0 = vu{} + stream.position, c1 = ids, c2 = {}, c3 = {};
    uint32_t k0 = stream.key_low, k1 = stream.key_high;
    for (int round = 0; round < 10; round++) {
        vu high0, low0, high1, low1;
        multiply_wide(c0, 0xD2511F53, high0, low0);
        multiply_wide(c2, 0xCD9E8D57, high1, low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return c0;
}

// -ln(-ln u) for u = (w >> 8) * 2^-24 + 2^-25, at most 1 - 2^-24. u has 25 bits, one more than float32:
// near 1, where they matter, the logarithm is taken of 1 - u, which is exact.
inline vf gumbel(vu words) {
    const vi n = (vi)(words >> 8);
    const vf rest = to_float(0xFFFFFF - n) * 0x1p-24f + 0x1p-25f;  // 1 - u
    const vf above = max(rest, splat(0x1p-24f));
    const vf uniform = to_float(n) * 0x1p-24f + 0x1p-25f;
    const vf near_one = log_reduced(-above, vi{});
    const vf minus_log = -(above < 0.29f ? near_one : log(uniform));
    return -log(minus_log);
}

}  // namespace sluicegate
