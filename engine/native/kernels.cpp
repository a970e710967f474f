// The C interface: one function a kernel and dtype, called from engine/native/native_kernels.py.

#include "attention.h"
#include "block_gemm.h"
#include "gemm.h"
#include "int8_gemm.h"
#include "low_rank.h"
#include "recurrence.h"
#include "rows.h"
#include "tile_gemm.h"

#define FOR_DTYPE(T, name)                                                                                            \
    void rms_norm_##name(const T *x, long x_stride, const T *weight, long weight_rows, T *out, long rows, long n,     \
                         float eps) {                                                                                 \
        rms_norm(x, x_stride, weight, weight_rows, out, rows, n, eps);                                                \
    }                                                                                                                 \
    void silu_product_##name(const T *x, T *out, long rows, long n) { silu_product(x, out, rows, n); }                \
    void rope_and_store_##name(const Heads *h, const T *x, long x_stride, const T *norm, const T *cos, const T *sin,  \
                               T *q, T *k_pages, T *v_pages, const int64_t *slots, const uint8_t *muted,              \
                               long slot_stride) {                                                                    \
        rope_and_store(*h, x, x_stride, norm, cos, sin, q, k_pages, v_pages, slots, muted, slot_stride);              \
    }                                                                                                                 \
    void attend_##name(const AttentionShape *a, long sequences, const T *q, const Pages *pages,                       \
                       const int32_t *tables, const int32_t *first_pages, const int32_t *starts,                      \
                       const int32_t *offsets, const float *sinks, T *out) {                                          \
        attend(*a, sequences, q, *pages, tables, first_pages, starts, offsets, sinks, out);                           \
    }

#define FOR_CONV(T, name)                                                                                             \
    void conv_##name(const ConvShape *s, const ConvState<T> *states, const T *x, long x_stride, const float *weight,  \
                     const float *bias, T *out, const Slots *step) {                                                  \
        conv(*s, states, x, x_stride, weight, bias, out, *step);                                                      \
    }

#define FOR_ADAPTERS(T, name)                                                                                         \
    void add_low_rank_##name(const LowRank<T> *table, long layers, long panels, const int32_t *order,                 \
                             const AdaptedRows *groups, long count, const T *x, long x_stride, long k, T *out,        \
                             long out_stride, float *scratch, long width) {                                           \
        add_low_rank(table, layers, panels, order, groups, count, x, x_stride, k, out, out_stride, scratch, width);   \
    }

#define FOR_BLOCKS(T, name, block_product)                                                                            \
    void block_product_##name(const Blocks *b, const T *x, long x_stride, const float *bias, T *out,                  \
                              long out_stride, long m) {                                                              \
        block_product(*b, x, x_stride, bias, out, out_stride, m);                                                     \
    }                                                                                                                 \
    long block_rows_##name(const Blocks *b, const int64_t *rows, long count, T *out) {                                \
        return block_rows(*b, rows, count, out);                                                                      \
    }

#define FOR_INT8(T, name)                                                                                             \
    void int8_product_##name(const Blocks *b, const T *x, long x_stride, const float *bias, T *out, long out_stride,  \
                             long m, long by_row) {                                                                   \
        int8_product(*b, x, x_stride, bias, out, out_stride, m, by_row);                                              \
    }                                                                                                                 \
    long int8_rows_##name(const Blocks *b, const int64_t *rows, long count, T *out) {                                 \
        return int8_rows(*b, rows, count, out);                                                                       \
    }

#define FOR_PRODUCT(T, name, packed_elements, pack, product)                                                          \
    long packed_elements_##name(long n, long k) { return packed_elements(n, k); }                                     \
    void pack_##name(const T *weight, T *packed, long n, long k) { pack(weight, packed, n, k); }                      \
    void product_##name(const T *x, long x_stride, const T *packed, const float *bias, T *out, long out_stride,       \
                        long m, long n, long k) {                                                                     \
        product(x, x_stride, packed, bias, out, out_stride, m, n, k);                                                 \
    }

// All else stays in the library: builds for other processors may be in the same process.
#pragma GCC visibility push(default)
extern "C" {
void set_threads(int count) { omp_set_num_threads(count); }
FOR_DTYPE(float, float32)
FOR_DTYPE(bf16, bfloat16)
FOR_CONV(float, float32)
FOR_CONV(bf16, bfloat16)
void scan_float32(const ScanShape *s, const ScanRows *x, const Slots *step) { scan(*s, *x, *step); }
FOR_ADAPTERS(float, float32)
FOR_ADAPTERS(bf16, bfloat16)
FOR_BLOCKS(float, float32, block_product)
FOR_BLOCKS(bf16, bfloat16, block_tile_product)
void pack_codes(const uint8_t *codes, uint8_t *packed, long n, long k, int bits) {
    pack_blocks(codes, packed, n, k, bits);
}
FOR_INT8(float, float32)
FOR_INT8(bf16, bfloat16)
void pack_int8_codes(const uint8_t *codes, uint8_t *packed, long n, long k, int bits) {
    pack_int8(codes, packed, n, k, bits);
}
FOR_PRODUCT(float, float32, packed_elements<float>, pack, product)
#if defined(PAIR_DOTS)
FOR_PRODUCT(bf16, bfloat16, packed_elements<bf16>, pack, product)
#else
FOR_PRODUCT(bf16, bfloat16, tile_elements, tile_pack, dense_tile_product)
#endif
}
#pragma GCC visibility pop
