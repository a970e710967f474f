#include "gemm.h"
extern "C" {
long gemm_elements_bf16(long n, long k) { return packed_elements<bf16>(n, k); }
void gemm_pack_bf16(const bf16 *w, bf16 *p, long n, long k) { pack(w, p, n, k); }
void gemm_bf16(const bf16 *x, long s, const bf16 *p, const float *b, bf16 *o, long m, long n, long k) { product(x, s, p, b, o, m, n, k); }
long gemm_elements_f32(long n, long k) { return packed_elements<float>(n, k); }
void gemm_pack_f32(const float *w, float *p, long n, long k) { pack(w, p, n, k); }
void gemm_f32(const float *x, long s, const float *p, const float *b, float *o, long m, long n, long k) { product(x, s, p, b, o, m, n, k); }
}
