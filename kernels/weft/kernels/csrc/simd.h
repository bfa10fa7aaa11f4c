/* Vectors of floats as wide as the machine has them, bfloat16 conversion, exp. */
#ifndef WEFT_SIMD_H
#define WEFT_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX__)
#define VL 8
#else
#define VL 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

typedef uint16_t bf16;
typedef float vf __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * VL), aligned(2), may_alias));
typedef uint8_t vbyte __attribute__((vector_size(VL), aligned(1), may_alias));

/* `x - 0` is x and takes no instruction; `0 + x` would take one, since it turns -0 into 0. */
INLINE vf vf_splat(float x) { return x - (vf){0}; }
INLINE vf vf_select(vi mask, vf yes, vf no) {
  return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}
/* a * b + c, rounded once where the machine can. It is written out and never left to the compiler,
 * which would choose separately for each number of rows, so that a row's bits would depend on the
 * rows beside it. */
INLINE vf vf_fma(vf a, vf b, vf c) {
#if VL == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
/* b where either is NaN. */
INLINE vf vf_max(vf a, vf b) {
#if VL == 16
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return vf_select((vi)(a > b), a, b);
#endif
}

INLINE float vf_sum(vf x) {
#if VL == 16
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int i = 0; i < VL; i++) total += x[i];
  return total;
#endif
}

INLINE float vf_highest(vf x) {
#if VL == 16
  return _mm512_reduce_max_ps((__m512)x);
#else
  float highest = x[0];
  for (int i = 1; i < VL; i++) highest = x[i] > highest ? x[i] : highest;
  return highest;
#endif
}

INLINE float bf16_to_float(bf16 x) {
  union { uint32_t bits; float value; } u = {.bits = (uint32_t)x << 16};
  return u.value;
}

/* Round to nearest, ties to even; NaN stays NaN. */
INLINE bf16 float_to_bf16(float x) {
  union { float value; uint32_t bits; } u = {.value = x};
  if (x != x) return (bf16)((u.bits >> 16) | 0x40);
  return (bf16)((u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16);
}

INLINE vf vf_load_bf16(const bf16 *p) {
  return (vf)(__builtin_convertvector(*(const vh *)p, vu) << 16);
}

INLINE void vf_store_bf16(bf16 *p, vf x) {
#if defined(__AVX512BF16__)
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  memcpy(p, &rounded, sizeof rounded);
#else
  vu bits = (vu)x;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vu quiet = (bits >> 16) | 0x40;
  vu is_nan = (vu)(x != x);
  *(vh *)p = __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), vh);
#endif
}

/* exp(x) to 2 ulp; 0 below -87.3, infinity above 88.7; NaN stays NaN. Cody and Waite 1980. */
INLINE vf vf_exp(vf x) {
  const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  vi low = (vi)(x < -87.3f), high = (vi)(x > 88.7f);
  vf y = vf_select(low | high, vf_splat(0.0f), x);
  vf n = vf_fma(y, vf_splat(1.44269504088896341f), vf_splat(shift)) - shift;
  vf r = vf_fma(n, vf_splat(-0.693359375f), y);
  r = vf_fma(n, vf_splat(2.12194440e-4f), r);
  vf p = vf_fma(r, vf_splat(1.9875691500e-4f), vf_splat(1.3981999507e-3f));
  p = vf_fma(p, r, vf_splat(8.3334519073e-3f));
  p = vf_fma(p, r, vf_splat(4.1665795894e-2f));
  p = vf_fma(p, r, vf_splat(1.6666665459e-1f));
  p = vf_fma(p, r, vf_splat(5.0000001201e-1f));
  p = vf_fma(p, r * r, r) + 1.0f;
  /* In two steps: 2^n itself overflows at n = 128. */
  vi whole = __builtin_convertvector(n, vi), half = whole >> 1;
  p = p * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
  p = vf_select(low, vf_splat(0.0f), p);
  return vf_select(high, vf_splat(INFINITY), p);
}

/* 2^x for x <= 0; 0 below -126 (where a softmax weight no longer counts); NaN stays NaN. Taylor's
 * series to 2 ulp, or to 2.5e-6 when `rough`. */
INLINE vf vf_exp2_nonpositive(const int rough, vf x) {
#if VL == 16
  /* The second operand wins if there is a NaN. At -200 scaling gives an exact 0. */
  vf y = (vf)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
  vf n = (vf)_mm512_roundscale_ps((__m512)y, 0);
#else
  vi low = (vi)(x < -126.0f);
  vf y = vf_select(low, vf_splat(0.0f), x);
  const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  vf n = (y + shift) - shift;
#endif
  vf r = y - n;
  vf p = vf_splat(1.3333558146428443e-3f);
  if (!rough) {
    const vf first = vf_splat(1.5252733804059838e-5f);
    p = vf_fma(vf_fma(r, first, vf_splat(1.5403530393381608e-4f)), r, p);
  }
  p = vf_fma(p, r, vf_splat(9.6181291076284770e-3f));
  p = vf_fma(p, r, vf_splat(5.5504108664821580e-2f));
  p = vf_fma(p, r, vf_splat(2.4022650695910072e-1f));
  p = vf_fma(p, r, vf_splat(6.9314718055994531e-1f));
  p = vf_fma(p, r, vf_splat(1.0f));
#if VL == 16
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  p = p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
  return vf_select(low, vf_splat(0.0f), p);
#endif
}

INLINE vf vf_silu(vf x) { return x / (1.0f + vf_exp(-x)); }

/* Loads and stores of n <= VL elements of either type. */
INLINE vf load_some(const void *p, int is_bf16, long offset, int n) {
  if (is_bf16) {
    const bf16 *source = (const bf16 *)p + offset;
    if (n == VL) return vf_load_bf16(source);
    bf16 part[VL] = {0};
    memcpy(part, source, (size_t)n * sizeof *part);
    return vf_load_bf16(part);
  }
  const float *source = (const float *)p + offset;
  if (n == VL) return *(const vf *)source;
  float part[VL] = {0};
  memcpy(part, source, (size_t)n * sizeof *part);
  return *(const vf *)part;
}

INLINE void store_some(void *p, int is_bf16, long offset, int n, vf x) {
  if (is_bf16) {
    bf16 *target = (bf16 *)p + offset;
    if (n == VL) {
      vf_store_bf16(target, x);
      return;
    }
    bf16 part[VL];
    vf_store_bf16(part, x);
    memcpy(target, part, (size_t)n * sizeof *part);
    return;
  }
  float *target = (float *)p + offset;
  if (n == VL) {
    *(vf *)target = x;
    return;
  }
  float part[VL];
  *(vf *)part = x;
  memcpy(target, part, (size_t)n * sizeof *part);
}

INLINE float load_one(const void *p, int is_bf16, long offset) {
  return is_bf16 ? bf16_to_float(((const bf16 *)p)[offset]) : ((const float *)p)[offset];
}

INLINE void store_one(void *p, int is_bf16, long offset, float x) {
  if (is_bf16)
    ((bf16 *)p)[offset] = float_to_bf16(x);
  else
    ((float *)p)[offset] = x;
}

INLINE int at_most(long n, int limit) { return n < limit ? (int)n : limit; }

#endif
