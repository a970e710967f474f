// What is done to each row of activations between the products: norms, activations, rope and the store into pages.
//
// Values are rounded to the model's dtype wherever transformers' operations, one after the other, round them.
#pragma once

#include "threads.h"
#include "vector.h"

// Fewer elements than this aren't worth waking other threads for.
constexpr long ALONE = 8192;

// Rows of n elements that a thread takes at a time.
inline long some_rows(long n) { return std::max(1L, ALONE / std::max(1L, n)); }

template <typename T> inline float inverse_rms(const T *x, long n, float eps) {
    f32x16 squares = {};
    for (long i = 0; i < n; i += LANES) {
        f32x16 value = load_some(x + i, (int)(n - i));
        squares = fma(value, value, squares);
    }
    return 1.0f / std::sqrt(sum_of(squares) / (float)n + eps);
}

// out[r] = x[r] / rms(x[r]) * weight[r % weight_rows]; rows of n elements, those of x x_stride apart.
template <typename T>
void rms_norm(const T *x, long x_stride, const T *weight, long weight_rows, T *out, long rows, long n, float eps) {
    each(rows, some_rows(n), [&](long r) {
        const T *from = x + r * x_stride, *scale = weight + r % weight_rows * n;
        T *to = out + r * n;
        const f32x16 factor = splat(inverse_rms(from, n, eps));
        for (long i = 0; i < n; i += LANES) {
            const int count = (int)(n - i);
            f32x16 value = rounded(load_some(from + i, count) * factor, from);
            store_some(to + i, value * load_some(scale + i, count), count);
        }
    });
}

// out[r] = silu(gate) * up, where row r of x holds gate, then up, n elements each.
template <typename T> void silu_product(const T *x, T *out, long rows, long n) {
    each(rows, some_rows(n), [&](long r) {
        const T *gate = x + r * 2 * n, *up = gate + n;
        for (long i = 0; i < n; i += LANES) {
            const int count = (int)(n - i);
            f32x16 value = load_some(gate + i, count);
            f32x16 active = rounded(value / (exp_of(-value) + 1.0f), gate);
            store_some(out + r * n + i, active * load_some(up + i, count), count);
        }
    });
}

// One head through its norm (or none) and the rotation of half-split pairs of its first `turning` dimensions; the rest
// is copied. sin has its first half negated.
template <typename T>
inline void norm_and_rotate(const T *x, const T *weight, const T *cos, const T *sin, T *out, long dim, long turning,
                            float eps) {
    T normed[1024];
    if (weight) {
        const f32x16 factor = splat(inverse_rms(x, dim, eps));
        for (long i = 0; i < dim; i += LANES) {
            const int count = (int)(dim - i);
            f32x16 value = rounded(load_some(x + i, count) * factor, x);
            store_some(normed + i, value * load_some(weight + i, count), count);
        }
        x = normed;
    }
    memcpy((void *)(out + turning), (const void *)(x + turning), (dim - turning) * sizeof(T));
    const long half = turning / 2;
    for (int side = 0; side < 2; side++)
        for (long i = 0; i < half; i += LANES) {
            const int count = (int)(half - i);
            const long own = side * half + i, other = (1 - side) * half + i;
            f32x16 straight = rounded(load_some(x + own, count) * load_some(cos + own, count), x);
            f32x16 crossed = rounded(load_some(x + other, count) * load_some(sin + own, count), x);
            store_some(out + own, straight + crossed, count);
        }
}

struct Heads {
    long tokens, heads, kv_heads, dim, turning;
    float eps;
};

// The joint projection x [tokens, heads + 2 * kv_heads, dim] (rows x_stride apart) into queries q [tokens, heads, dim]
// and the pages' slots; norm [heads + kv_heads, dim] or null; cos and sin [tokens, turning]; muted [tokens] or null:
// those tokens are written as zeros. A slot is page * page_tokens + offset; the strides of pages and tokens are in
// elements.
template <typename T>
void rope_and_store(const Heads &h, const T *x, long x_stride, const T *norm, const T *cos, const T *sin, T *q,
                    T *k_pages, T *v_pages, const int64_t *slots, const uint8_t *muted, long slot_stride) {
    const long rotated = h.heads + h.kv_heads, all = rotated + h.kv_heads;
    each(h.tokens, some_rows(all * h.dim), [&](long t) {
        for (long head = 0; head < all; head++) {
            const T *from = x + t * x_stride + head * h.dim;
            T *to = head < h.heads ? q + (t * h.heads + head) * h.dim
                    : head < rotated ? k_pages + slots[t] * slot_stride + (head - h.heads) * h.dim
                                     : v_pages + slots[t] * slot_stride + (head - rotated) * h.dim;
            if (muted && muted[t] && head >= h.heads)
                memset((void *)to, 0, h.dim * sizeof(T));
            else if (head < rotated)
                norm_and_rotate(from, norm ? norm + head * h.dim : nullptr, cos + t * h.turning,
                                sin + t * h.turning, to, h.dim, h.turning, h.eps);
            else
                memcpy((void *)to, (const void *)from, h.dim * sizeof(T));
        }
    });
}
