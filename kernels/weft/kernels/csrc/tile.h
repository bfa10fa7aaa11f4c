/* The matrix kernel: a few rows times a panel of 32 columns. (amx.h has the other one.)
 *
 * Everything is counted in 32-bit words: a float, or two bfloat16 neighbours along K. A row of A
 * is `steps` words; a panel of B is [steps][32 columns] words, so one step of one column is one
 * multiply-add of floats or one dot product of two bfloat16 pairs. Each result is summed over K in
 * the same order whatever the number of rows, so a row's result does not depend on which rows it
 * is computed with.
 */
#ifndef WEFT_TILE_H
#define WEFT_TILE_H

#include <limits.h>

#include "simd.h"

#define PANEL 32 /* columns */
#define CHUNK 32 /* steps of float32 summed by themselves: errors grow with the square root */
#if VL == 16
#define TILE_ROWS 12 /* 24 accumulators of 32 registers */
#define TILE_VECTORS 2
#elif VL == 8
#define TILE_ROWS 6 /* 12 accumulators of 16 registers */
#define TILE_VECTORS 2
#else
#define TILE_ROWS 4
#define TILE_VECTORS 2
#endif

/* One row or two go through more columns of a panel at once, in the order in which they lie: with
 * fewer sums each would wait for the one before it. */
#if VL == 4
#define FEW_ROW_VECTORS 4
#else
#define FEW_ROW_VECTORS (PANEL / VL)
#endif

/* Rows are cut into tiles that are as equal as they can be. */
static long tiles_of(long rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
static long tile_begin(long rows, long tile) { return rows * tile / tiles_of(rows); }

/* sum += a * b, one word a lane. */
INLINE vf multiply_add(int is_bf16, vf sum, vu a, vu b) {
  if (!is_bf16) return vf_fma((vf)a, (vf)b, sum);
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  const uint32_t upper = 0xffff0000u;
  sum = vf_fma((vf)(a << 16), (vf)(b << 16), sum);
  return vf_fma((vf)(a & upper), (vf)(b & upper), sum);
#endif
}

INLINE uint32_t load_word(const char *p) {
  uint32_t word;
  memcpy(&word, p, sizeof word);
  return word;
}

/* Without a dot product of bfloat16 pairs a tile turns its rows into floats once, so that its loop
 * only loads and repeats them. Turning them in the loop costs as many instructions as multiplying. */
#if defined(__AVX512BF16__)
#define WIDENS_ROWS 0
#else
#define WIDENS_ROWS 1
#endif
#define WIDE_STEPS 128 /* steps that are widened at a time: with their part of a panel in the cache */

/* Which numbers of pairs of bfloat16 are multiplied. */
typedef enum { BOTH, FIRST, SECOND } Halves;

/* The first and the second halves of pairs, as floats. */
typedef struct {
  ALIGNED float half[2][TILE_ROWS][WIDE_STEPS];
} WideRows;

/* Widens `steps` pairs of some rows. `odd`: and one more bfloat16, as a pair with 0. */
INLINE void widen_rows(int rows, long steps, int odd, const char *a, long a_stride, WideRows *wide) {
  for (int r = 0; r < rows; r++) {
    const char *row = a + r * a_stride;
    float *first = wide->half[0][r], *second = wide->half[1][r];
    long s = 0;
    for (; s + VL <= steps; s += VL) {
      const vu pairs = *(const vu *)(row + 4 * s);
      *(vu *)(first + s) = pairs << 16;
      *(vu *)(second + s) = pairs & 0xffff0000u;
    }
    for (; s < steps + odd; s++) {
      bf16 pair[2] = {0};
      memcpy(pair, row + 4 * s, s < steps ? sizeof pair : sizeof *pair);
      first[s] = bf16_to_float(pair[0]);
      second[s] = bf16_to_float(pair[1]);
    }
  }
}

/* Memory that will be read soon. A tile prefetches as much of it in each step as it reads of its
 * panel, between its arithmetic. If it asked for more at once, more lines than the core can have
 * under way would stop it. */
typedef struct {
  const char *begin, *end;
} Span;

typedef struct {
  Span now;
  const Span *later; /* what follows `now` */
  int num_later;
} Prefetch;

/* Prefetches so many cache lines of memory that will be read soon. */
INLINE void ask_ahead(Prefetch *ahead, int lines) {
  for (; lines > 0; lines--, ahead->now.begin += 64) {
    while (ahead->now.begin >= ahead->now.end) {
      if (ahead->num_later == 0) return;
      ahead->now = *ahead->later++;
      ahead->num_later--;
    }
    __builtin_prefetch(ahead->now.begin, 0, 2);
  }
}

/* How many of `steps` > 0 steps can take one piece of memory and prefetch `bytes` of it each.
 * `from`: where it begins, or null if there is nothing to prefetch. */
INLINE long take_span(Prefetch *ahead, long steps, const long bytes, const char **from) {
  const long spanned = (ahead->now.end - ahead->now.begin + bytes - 1) / bytes;
  const long some = spanned > 0 && spanned < steps ? spanned : steps;
  *from = spanned > 0 ? ahead->now.begin : NULL;
  if (spanned > 0) ahead->now.begin += bytes * some;
  if (some == spanned && ahead->num_later > 0) {
    ahead->now = *ahead->later++;
    ahead->num_later--;
  }
  return some;
}

/* Prefetches what a step takes of `from`, where `take_span` found it. */
INLINE void ask_for_step(const char *from, long step, const long bytes) {
  for (long line = 0; line < bytes; line += 64) __builtin_prefetch(from + bytes * step + line, 0, 2);
}

#define SUMS TILE_VECTORS
#define TILE_STEP tile_step
#define TILE_STEPS tile_steps
#define TILE_WIDE_BODY tile_wide_body
#define TILE_BODY tile_body
#include "tile_body.h"
#undef SUMS
#undef TILE_STEP
#undef TILE_STEPS
#undef TILE_WIDE_BODY
#undef TILE_BODY

#if FEW_ROW_VECTORS == TILE_VECTORS
#define few_rows_body tile_body
#else
#define SUMS FEW_ROW_VECTORS
#define TILE_STEP few_rows_step
#define TILE_STEPS few_rows_steps
#define TILE_WIDE_BODY few_rows_wide_body
#define TILE_BODY few_rows_body
#include "tile_body.h"
#undef SUMS
#undef TILE_STEP
#undef TILE_STEPS
#undef TILE_WIDE_BODY
#undef TILE_BODY
#endif

#define TILE_CASE(N)                                                                            \
  case N:                                                                                       \
    tile_body(is_bf16, N, accumulate, steps, odd, a, a_stride, panel, c, c_stride, ahead);      \
    break;
#define FEW_ROWS_CASE(N)                                                                        \
  case N:                                                                                       \
    few_rows_body(is_bf16, N, accumulate, steps, odd, a, a_stride, panel, c, c_stride, ahead);  \
    break;

INLINE void tile_of(const int is_bf16, const int accumulate, int rows, long steps, int odd,
                    const char *a, long a_stride, const uint32_t *panel, float *c, long c_stride,
                    Prefetch *ahead) {
  switch (rows) {
    FEW_ROWS_CASE(1) FEW_ROWS_CASE(2) TILE_CASE(3) TILE_CASE(4)
#if TILE_ROWS >= 6
    TILE_CASE(5) TILE_CASE(6)
#endif
#if TILE_ROWS == 12
    TILE_CASE(7) TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12)
#endif
  }
}
#undef TILE_CASE
#undef FEW_ROWS_CASE

#if VL == 16
/* out[w * stride + 0..15] = word w of 16 rows, for `words` <= 16 words. */
INLINE void transpose_words(const char *const *rows, long words, uint32_t *out, long stride) {
  __m512i x[16], y[16];
  __mmask16 mask = (__mmask16)((1u << words) - 1);
  for (int i = 0; i < 16; i++) x[i] = _mm512_maskz_loadu_epi32(mask, rows[i]);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  /* x[4 i + j]: words j, j + 4, j + 8, j + 12 of rows 4 i .. 4 i + 3, one a 128-bit lane */
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    __m512i low = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88);
    __m512i low2 = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
    __m512i high = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
    __m512i high2 = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
    y[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
    y[j + 8] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    y[j + 4] = _mm512_shuffle_i32x4(high, high2, 0x88);
    y[j + 12] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
  for (long w = 0; w < words; w++) _mm512_store_si512(out + w * stride, y[w]);
}
#else
#if VL == 8
/* out[w * stride + 0..7] = word w of 8 rows, for 8 words. */
INLINE void transpose_eight(const char *const *rows, uint32_t *out, long stride) {
  __m256 x[8], y[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) x[i] = _mm256_loadu_ps((const float *)rows[i]);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      const __m256d low = (__m256d)y[i + j], high = (__m256d)y[i + j + 2];
      x[i + 2 * j] = (__m256)_mm256_unpacklo_pd(low, high);
      x[i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd(low, high);
    }
  /* x[4 i + j]: words j and j + 4 of rows 4 i .. 4 i + 3, one a 128-bit lane */
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    _mm256_storeu_ps((float *)out + j * stride, _mm256_permute2f128_ps(x[j], x[j + 4], 0x20));
    _mm256_storeu_ps((float *)out + (j + 4) * stride, _mm256_permute2f128_ps(x[j], x[j + 4], 0x31));
  }
}
#endif

INLINE void transpose_words(const char *const *rows, long words, uint32_t *out, long stride) {
  long w = 0;
#if VL == 8
  for (; w + 8 <= words; w += 8)
    for (int half = 0; half < 16; half += 8) {
      const char *some[8];
      for (int i = 0; i < 8; i++) some[i] = rows[half + i] + 4 * w;
      transpose_eight(some, out + w * stride + half, stride);
    }
#endif
  for (; w < words; w++)
    for (int i = 0; i < 16; i++) out[w * stride + i] = load_word(rows[i] + 4 * w);
}
#endif

#endif
