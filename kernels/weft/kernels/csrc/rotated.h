/* Products of int8 weights with rows in int8, on AMX (rotated_amx.h) and AVX512-VNNI (rotated_vnni.h).
 *
 * Both are rotated before they are rounded: each block of 64 numbers along K is multiplied by a
 * Hadamard matrix, which spreads a number that is far larger than its neighbours over all of them
 * (Ashkboos et al., QuaRot, 2024, rotates whole rows). A product of two rotated blocks is that of
 * the blocks themselves. A row has one scale, so sums are whole numbers up to the end of K: they
 * are exact, and a row's result is the same whatever rows are beside it.
 *
 * A panel is [fours along K][32 columns][4] int8, as the instructions want it. */
#ifndef WEFT_ROTATED_H
#define WEFT_ROTATED_H

#include "quantised.h"

#define ROTATED_BLOCK 64 /* numbers of a block */
#define MOST_ROTATED 32768 /* numbers of a row */
#define HADAMARD_NORM 8 /* square root of a block */

/* Rows in int8. On AMX they lie in tiles of 16 rows, or those that are left, block after block:
 * [rows][64]. Else they lie in tiles of tile.h: [fours along K][rows][4]. */
typedef struct {
  int8_t *numbers;
  float *scales; /* [rows] */
  int32_t *sums; /* [rows], of the numbers; not on AMX */
} Rotated;

/* Bytes of memory for `rows` rows of n numbers. */
static long rotated_bytes(long rows, long n) { return rows * (n + 8) + 64; }

/* Lays such rows out in memory of `rotated_bytes`. */
static Rotated rotated_in(void *memory, long rows, long n) {
  Rotated x = {.numbers = (int8_t *)(((uintptr_t)memory + 63) & ~(uintptr_t)63)};
  x.scales = (float *)(x.numbers + rows * n);
  x.sums = (int32_t *)(x.scales + rows);
  return x;
}

#if HAS_VNNI
/* Rounds a row's rotated numbers, which are HADAMARD_NORM times too large, to int8, 64 of them
 * every `stride` bytes; returns their scale, which is NaN if one is not finite. */
static float round_rotated(const float *rotated, long n, int8_t *out, long stride) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i highest[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (long i = 0; i < n; i += 32)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const __m512i bits = _mm512_loadu_si512(rotated + i + v * 16);
      highest[v] = _mm512_max_epi32(highest[v], _mm512_and_si512(bits, magnitude));
    }
  union { int32_t bits; float value; } largest = {
      .bits = _mm512_reduce_max_epi32(_mm512_max_epi32(highest[0], highest[1]))};
  const float scale = largest.value <= FLT_MAX ? largest.value / 127.0f : NAN;
  const __m512 factor = _mm512_set1_ps(scale > FLT_MIN ? 1.0f / scale : 0.0f);
  for (long i = 0; i < n; i += ROTATED_BLOCK, out += stride)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      const __m512 value = _mm512_mul_ps(_mm512_loadu_ps(rotated + i + v * 16), factor);
      _mm_storeu_si128((__m128i *)(out + v * 16), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(value)));
    }
  return scale / HADAMARD_NORM;
}

#include "rotated_vnni.h"
#endif
#if HAS_AMX
#include "rotated_amx.h"
#else
static void fill_hadamard(void) {}
#endif

/* Whether products take rows in int8. */
static int takes_int8_rows(void) { return HAS_VNNI || amx_is_allowed; }

/* Rotates and rounds rows first .. last - 1 of x [rows, n], n being a multiple of 64. */
static void rotate_rows(const bf16 *x, const Rotated *to, long rows, long n, long first, long last) {
#if HAS_AMX
  if (amx_is_allowed) {
    amx_rotate_rows(x, to, rows, n, first, last);
    return;
  }
#endif
#if HAS_VNNI
  vnni_rotate_rows(x, to, rows, n, first, last);
#else
  (void)x, (void)to, (void)rows, (void)n, (void)first, (void)last;
  __builtin_trap(); /* Such weights are packed only where `takes_int8_rows`. */
#endif
}

/* tile [rows][32] = rows from `row` on times a panel, with all scales; `scales`: of its columns. */
static void rotated_product(int rows, const Rotated *x, long row, long n, const int8_t *panel,
                            const float *scales, float *tile, Prefetch *ahead, Amx *amx) {
#if HAS_VNNI
  ALIGNED int32_t sums[MOST_TILE_ROWS * PANEL];
#if HAS_AMX
  if (amx_is_allowed) {
    flush_subnormals(amx); /* of one row too, which needs no tiles */
    amx_rotated_tile(rows, x, row, n, panel, sums, ahead, amx);
  } else
#endif
    vnni_rotated_tile(rows, x, row, n, panel, sums, ahead);
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int c = 0; c < PANEL; c += 16) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + r * PANEL + c));
      const __m512 of_row = _mm512_mul_ps(sum, _mm512_set1_ps(x->scales[row + r]));
      _mm512_storeu_ps(tile + r * PANEL + c, _mm512_mul_ps(of_row, _mm512_loadu_ps(scales + c)));
    }
#else
  (void)rows, (void)x, (void)row, (void)n, (void)panel;
  (void)scales, (void)tile, (void)ahead;
  __builtin_trap();
#endif
  (void)amx;
}

#endif
