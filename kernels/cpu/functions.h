// exp and log in float32 as fixed sequences of exactly rounded operations: a value's result does not
// depend on the lane it is in, nor on a mathematics library. Coefficients: least maximum relative
// error over the reduced range, each rounded to float32 with the later ones fitted again.
#pragma once

#include "vec.h"

namespace sluicegate {

constexpr float LN2_HIGH = 0.693359375f;  // 10 bits, so that its products with small integers are exact
constexpr float LN2_LOW = -2.12194440e-4f;

// e^x within 1 ulp for -87 <= x <= 88; 0 below (-inf included), as if at 88 above; NaN for NaN.
inline vf exp(vf x) {
    const vf bounded = x > 88.0f ? splat(88.0f) : x;
    const vi n = round_to_int(bounded * 1.44269504f);
    vf r = fma(to_float(n), splat(-LN2_HIGH), bounded);
    r = fma(to_float(n), splat(-LN2_LOW), r);  // |r| <= ln(2) / 2
    vf p = splat(0x1.9df76cp-13f);
    p = fma(p, r, splat(0x1.6d4cc6p-10f));
    p = fma(p, r, splat(0x1.11131p-7f));
    p = fma(p, r, splat(0x1.5554e8p-5f));
    p = fma(p, r, splat(0x1.555554p-3f));
    p = fma(p, r, splat(0.5f));
    const vf y = fma(r * r, p, r) + 1.0f;
    const vf scaled = (vf)((vi)y + (n << 23));
    return x < -87.0f ? vf{} : scaled;
}

inline float exp(float x) { return exp(splat(x))[0]; }

// ln(2^k (1 + f)) for f in [sqrt(1/2) - 1, sqrt(2) - 1].
inline vf log_reduced(vf f, vi k) {
    vf p = splat(-0.07636439055204391f);
    p = fma(p, f, splat(0.12762217223644257f));
    p = fma(p, f, splat(-0.13159610331058502f));
    p = fma(p, f, splat(0.14201579988002777f));
    p = fma(p, f, splat(-0.166234090924263f));
    p = fma(p, f, splat(0.2000124156475067f));
    p = fma(p, f, splat(-0.2500081956386566f));
    p = fma(p, f, splat(0.3333333134651184f));
    const vf square = f * f;
    vf tail = fma(p * f, square, to_float(k) * LN2_LOW);
    tail = fma(splat(-0.5f), square, tail);
    return fma(to_float(k), splat(LN2_HIGH), f + tail);
}

// ln x for a normal positive x, within 2 ulp.
inline vf log(vf x) {
    constexpr int32_t SQRT_HALF = 0x3F3504F3;
    const vi offset = (vi)x - SQRT_HALF;
    const vf mantissa = (vf)((offset & 0x7FFFFF) + SQRT_HALF);
    return log_reduced(mantissa - 1.0f, offset >> 23);
}

inline float log(float x) { return log(splat(x))[0]; }

// cap * tanh(x / cap), by tanh(u) = 1 - 2 / (e^2u + 1).
inline vf soft_capped(vf x, float cap) { return cap * (1.0f - 2.0f / (exp(x * (2.0f / cap)) + 1.0f)); }

}  // namespace sluicegate
