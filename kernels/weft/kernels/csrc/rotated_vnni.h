/* Rotated products (rotated.h) by AVX512-VNNI.
 *
 * The instruction multiplies numbers without a sign by numbers with one. So 128 is added to the
 * weights, and its effect, 128 times the sum of the row, is subtracted at the end. */
#ifndef WEFT_ROTATED_VNNI_H
#define WEFT_ROTATED_VNNI_H

/* In each pair of x the lower number becomes the sum of both, and the upper one their difference.
 * `partners`: the place of each number's partner. */
INLINE __m512 butterfly(__m512 x, __m512i partners, __mmask16 upper) {
  const __m512 partner = _mm512_permutexvar_ps(partners, x);
  return _mm512_mask_sub_ps(_mm512_add_ps(partner, x), upper, partner, x);
}

/* out [64] = x [64] times the Hadamard matrix whose numbers are 1 and -1 (the fast Walsh-Hadamard
 * transform: Fino and Algazi, 1976). */
INLINE void rotate_block(const bf16 *x, float *out) {
  __m512 y[4];
  for (int v = 0; v < 4; v++) y[v] = (__m512)vf_load_bf16(x + v * 16);
  const __m512 sums[2] = {_mm512_add_ps(y[0], y[1]), _mm512_add_ps(y[2], y[3])};
  const __m512 rests[2] = {_mm512_sub_ps(y[0], y[1]), _mm512_sub_ps(y[2], y[3])};
  y[0] = _mm512_add_ps(sums[0], sums[1]), y[1] = _mm512_add_ps(rests[0], rests[1]);
  y[2] = _mm512_sub_ps(sums[0], sums[1]), y[3] = _mm512_sub_ps(rests[0], rests[1]);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __mmask16 uppers[4] = {0xaaaa, 0xcccc, 0xf0f0, 0xff00};
#pragma GCC unroll 4
  for (int bit = 0; bit < 4; bit++) {
    const __m512i partners = _mm512_xor_si512(lanes, _mm512_set1_epi32(1 << bit));
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) y[v] = butterfly(y[v], partners, uppers[bit]);
  }
  for (int v = 0; v < 4; v++) _mm512_storeu_ps(out + v * 16, y[v]);
}

/* Rotates and rounds rows begin .. end - 1 of x [rows, n]. */
static void vnni_rotate_rows(const bf16 *x, const Rotated *to, long rows, long n, long begin,
                             long end) {
  ALIGNED float rotated[MOST_ROTATED];
  ALIGNED int32_t fours[MOST_ROTATED / 4];
  for (long row = begin; row < end; row++) {
    const TileRows tile = tile_with(rows, row);
    for (long i = 0; i < n; i += ROTATED_BLOCK) rotate_block(x + row * n + i, rotated + i);
    to->scales[row] = round_rotated(rotated, n, (int8_t *)fours, ROTATED_BLOCK);
    __m512i sum = _mm512_setzero_si512();
    for (long i = 0; i < n / 4; i += 16)
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_load_si512(fours + i));
    to->sums[row] = _mm512_reduce_add_epi32(sum);
    int32_t *out = (int32_t *)(to->numbers + tile.first * n) + (row - tile.first);
    for (long i = 0; i < n / 4; i++) out[i * tile.count] = fours[i];
  }
}

/* sum [rows] += some fours of the rows times a panel's columns. `asks`: whether to prefetch
 * `asked`, two cache lines for each four. */
INLINE void vnni_steps(const int rows, const int asks, long steps, const int32_t *fours,
                       const int8_t *panel, const char *asked, __m512i sum[TILE_ROWS][2]) {
  const __m512i above = _mm512_set1_epi8((char)0x80);
  for (long s = 0; s < steps; s++, fours += rows, panel += 4 * PANEL) {
    if (asks) ask_for_step(asked, s, 4 * PANEL);
    const __m512i left = _mm512_xor_si512(_mm512_loadu_si512(panel), above);
    const __m512i right = _mm512_xor_si512(_mm512_loadu_si512(panel + 64), above);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
      const __m512i four = _mm512_set1_epi32(fours[r]);
      sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], left, four);
      sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], right, four);
    }
  }
}

/* c [rows][32] = rows from `row` on, which are a tile's, times a panel. */
INLINE void vnni_columns(const int rows, const Rotated *x, long row, long n, const int8_t *panel,
                         int32_t *c, Prefetch *ahead) {
  const int32_t *fours = (const int32_t *)(x->numbers + row * n);
  __m512i sum[TILE_ROWS][2];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
  for (long left = n / 4; left > 0;) {
    const char *asked;
    const long some = take_span(ahead, left, 4 * PANEL, &asked);
    if (asked != NULL)
      vnni_steps(rows, 1, some, fours, panel, asked, sum);
    else
      vnni_steps(rows, 0, some, fours, panel, NULL, sum);
    left -= some, fours += some * rows, panel += some * 4 * PANEL;
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) {
    const __m512i added = _mm512_set1_epi32(x->sums[row + r] * 128);
    _mm512_storeu_si512(c + r * PANEL, _mm512_sub_epi32(sum[r][0], added));
    _mm512_storeu_si512(c + r * PANEL + 16, _mm512_sub_epi32(sum[r][1], added));
  }
}

#define VNNI_CASE(N)                                    \
  case N:                                               \
    vnni_columns(N, x, row, n, panel, c, ahead);        \
    break;

/* `vnni_columns` for any number of rows up to TILE_ROWS. */
static void vnni_rotated_tile(int rows, const Rotated *x, long row, long n, const int8_t *panel,
                              int32_t *c, Prefetch *ahead) {
  switch (rows) {
    VNNI_CASE(1) VNNI_CASE(2) VNNI_CASE(3) VNNI_CASE(4) VNNI_CASE(5) VNNI_CASE(6)
    VNNI_CASE(7) VNNI_CASE(8) VNNI_CASE(9) VNNI_CASE(10) VNNI_CASE(11) VNNI_CASE(12)
  }
}
#undef VNNI_CASE

#endif
