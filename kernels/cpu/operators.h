// The C interface of the operators that a program may call; `library.py` says the same to ctypes. Shapes stand
// at the definitions.
#pragma once

#include "vec.h"

namespace sluicegate {

extern "C" {

void sluicegate_linear(const void* x, Dtype x_dtype, int64_t x_stride, int64_t num_rows, int64_t depth,
                       const void* weight, Dtype weight_dtype, const float* bias, int64_t columns, void* y,
                       Dtype y_dtype);

void sluicegate_rms_norm(const void* x, int64_t x_stride, const void* residual, int64_t residual_stride,
                         const void* weight, Dtype weight_dtype, float eps, int64_t num_rows, int64_t width,
                         void* total, void* y, Dtype dtype);

void sluicegate_head_norm(void* x, int64_t stride, int64_t num_heads, int64_t head_dim, int64_t num_rows,
                          const void* weight, Dtype weight_dtype, float eps, Dtype dtype);

bool sluicegate_rope(void* x, int64_t stride, int64_t num_heads, int64_t head_dim, const int32_t* positions,
                     int64_t num_rows, const float* table, int64_t num_positions, int64_t rotary_dim, Dtype dtype);

void sluicegate_silu_and_mul(const void* x, int64_t stride, int64_t num_rows, int64_t width, void* y, Dtype dtype);

void sluicegate_gelu_and_mul(const void* x, int64_t stride, int64_t num_rows, int64_t width, void* y, Dtype dtype);

bool sluicegate_write_kv(const void* k, int64_t k_stride, const void* v, int64_t v_stride, Dtype dtype,
                         const int64_t* slots, int64_t num_rows, void* k_cache, void* v_cache, Dtype cache_dtype,
                         float k_scale, float v_scale, int64_t num_blocks, int64_t num_heads, int64_t head_dim,
                         int64_t block_size, int64_t value_dim);

bool sluicegate_attention(const void* q, int64_t q_stride, Dtype dtype, int64_t num_tokens, int64_t num_heads,
                          int64_t head_dim, const void* k_cache, const void* v_cache, Dtype cache_dtype,
                          int64_t num_blocks, int64_t num_kv_heads, int64_t block_size, int64_t value_dim,
                          const int32_t* block_tables, int64_t num_seqs, int64_t max_blocks,
                          const int32_t* seq_index, const int32_t* positions, float scale, int64_t window,
                          float soft_cap, float value_scale, void* out);

void sluicegate_route(const float* logits, int64_t num_rows, int64_t num_experts, int64_t top_k, int32_t renormalize,
                      int32_t* chosen, float* weights);

bool sluicegate_experts(const void* x, Dtype dtype, int64_t x_stride, int64_t num_rows, int64_t hidden,
                        const int32_t* chosen, const float* weights, int64_t top_k, const void* gate_up,
                        const void* down, Dtype weight_dtype, int64_t num_experts, int64_t inner, void* y);
}

}  // namespace sluicegate
