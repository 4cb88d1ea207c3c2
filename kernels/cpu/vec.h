// Vectors as wide as this CPU has, and loads and stores of the three storage types.
//
// Code on top of this works on groups of GROUP = 16 elements, PARTS vectors each, so that nothing it
// computes depends on the width: AVX2 and AVX-512 give the same bits. The build forbids contraction
// (-ffp-contract=off): a multiplication and an addition are fused where fma() stands and nowhere else.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "the native operators need a CPU with AVX2, FMA and F16C"
#endif

namespace sluicegate {

constexpr int GROUP = 16;

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// Codes of the storage types, as kernels/backend.py passes them.
enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT8 = 3 };

#ifdef __AVX512F__

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));

inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline vf splat(float x) { return (vf)_mm512_set1_ps(x); }
inline vf sqrt(vf x) { return (vf)_mm512_sqrt_ps((__m512)x); }
// The second operand where either is NaN.
inline vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
inline vi round_to_int(vf x) { return (vi)_mm512_cvtps_epi32((__m512)x); }
inline vf to_float(vi x) { return (vf)_mm512_cvtepi32_ps((__m512i)x); }
inline bool any(vi mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0; }

inline vf load(const float* p) { return (vf)_mm512_loadu_ps(p); }
inline vf load(const bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return (vf)_mm512_slli_epi32(wide, 16);
}
inline vf load(const f16* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, (__m512)x); }
inline void store_low_halves(void* p, vu x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)x));
}
inline void store(f16* p, vf x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}

#else

constexpr int LANES = 8;
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint32_t vu __attribute__((vector_size(32)));

inline vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline vf splat(float x) { return (vf)_mm256_set1_ps(x); }
inline vf sqrt(vf x) { return (vf)_mm256_sqrt_ps((__m256)x); }
// The second operand where either is NaN.
inline vf max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
inline vi round_to_int(vf x) { return (vi)_mm256_cvtps_epi32((__m256)x); }
inline vf to_float(vi x) { return (vf)_mm256_cvtepi32_ps((__m256i)x); }
inline bool any(vi mask) { return !_mm256_testz_si256((__m256i)mask, (__m256i)mask); }

inline vf load(const float* p) { return (vf)_mm256_loadu_ps(p); }
inline vf load(const bf16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return (vf)_mm256_slli_epi32(wide, 16);
}
inline vf load(const f16* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store(float* p, vf x) { _mm256_storeu_ps(p, (__m256)x); }
inline void store_low_halves(void* p, vu x) {
    // Packing works within 128-bit halves; the permutation puts them side by side.
    const __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
inline void store(f16* p, vf x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}

#endif

constexpr int PARTS = GROUP / LANES;

// Nearest, ties to even, as torch rounds. A NaN becomes the quiet one torch writes.
inline void store(bf16* p, vf x) {
    const vu bits = (vu)x;
    const vu rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    store_low_halves(p, (vu)(x == x) ? rounded : vu{} + 0x7FC0);
}

// The first `count` (at most LANES) elements; the other lanes are 0.
template <class T>
inline vf load_first(const T* p, int64_t count) {
    T buffer[LANES] = {};
    memcpy(buffer, p, count * sizeof(T));
    return load(buffer);
}

template <class T>
inline void store_first(T* p, vf x, int64_t count) {
    T buffer[LANES];
    store(buffer, x);
    memcpy(p, buffer, count * sizeof(T));
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}
inline float widen(f16 x) { return _cvtsh_ss(x.bits); }

// What a value becomes when it is stored as T.
template <class T>
inline vf rounded(vf x) {
    T buffer[LANES];
    store(buffer, x);
    return load(buffer);
}

// body(T{}) for the storage type that `dtype` codes. FLOAT8 is of the pool alone (float8.h).
template <class Body>
inline void with_type(Dtype dtype, const Body& body) {
    switch (dtype) {
        case FLOAT32: return body(float{});
        case BFLOAT16: return body(bf16{});
        case FLOAT16: return body(f16{});
        case FLOAT8: return;
    }
}

// A group's 16 lanes joined as a tree, upper half onto lower half.
template <class Join>
inline float fold_group(const vf (&group)[PARTS], const Join& join) {
#ifdef __AVX512F__
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)group[0], 1));
    const __m256 eight = join(_mm512_castps512_ps256((__m512)group[0]), upper);
#else
    const __m256 eight = join((__m256)group[0], (__m256)group[1]);
#endif
    const __m128 four = join(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = join(four, _mm_movehl_ps(four, four));
    return join(two, _mm_movehdup_ps(two))[0];
}

inline float sum_group(const vf (&group)[PARTS]) {
    return fold_group(group, [](auto low, auto high) { return low + high; });
}

inline float max_group(const vf (&group)[PARTS]) {
    return fold_group(group, [](auto low, auto high) { return high > low ? high : low; });
}

}  // namespace sluicegate
