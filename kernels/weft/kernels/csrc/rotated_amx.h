/* Rotated products (rotated.h) on the tile registers of AMX. */
#ifndef WEFT_ROTATED_AMX_H
#define WEFT_ROTATED_AMX_H

/* Words of tile.h's panels of 32 columns of the matrix, whose numbers are 1 and -1. */
ALIGNED static uint32_t hadamard[ROTATED_BLOCK / PANEL][ROTATED_BLOCK / 2][PANEL];

static void fill_hadamard(void) {
  for (int k = 0; k < ROTATED_BLOCK; k += 2)
    for (int c = 0; c < ROTATED_BLOCK; c++) {
      const uint32_t first = __builtin_parity(k & c) ? 0xbf80 : 0x3f80;
      const uint32_t second = __builtin_parity((k + 1) & c) ? 0xbf80 : 0x3f80;
      hadamard[c / PANEL][k / 2][c % PANEL] = first | second << 16;
    }
}

/* Rotates and rounds rows begin .. end - 1 of x [rows, n], n being a multiple of 64. */
static void amx_rotate_rows(const bf16 *x, const Rotated *to, long rows, long n, long begin,
                            long end) {
  ALIGNED float rotated[MOST_ROTATED];
  const long at_once = n * 16 < MOST_ROTATED / 2 ? 16 : 1, blocks = n / ROTATED_BLOCK;
  Prefetch none = {{NULL, NULL}, NULL, 0};
  Amx amx = {0};
  for (long first = begin; first < end; first += at_once) {
    const long some = at_most(end - first, (int)at_once), count = some * blocks;
    for (long block = 0; block < count; block += AMX_ROWS) {
      const char *from = (const char *)(x + first * n + block * ROTATED_BLOCK);
      float *into = rotated + block * ROTATED_BLOCK;
      for (int half = 0; half < ROTATED_BLOCK / PANEL; half++)
        amx_tile(0, at_most(count - block, AMX_ROWS), 2 * ROTATED_BLOCK, from, 2 * ROTATED_BLOCK,
                 hadamard[half][0], into + half * PANEL, ROTATED_BLOCK, &none, &amx);
    }
    complete_writes();
    for (long row = first; row < first + some; row++) {
      const long tile = row / AMX_DEPTH * AMX_DEPTH, beside = at_most(rows - tile, AMX_DEPTH);
      int8_t *out = to->numbers + tile * n + (row - tile) * ROTATED_BLOCK;
      to->scales[row] =
          round_rotated(rotated + (row - first) * n, n, out, beside * ROTATED_BLOCK);
    }
  }
  release_amx(&amx);
}

/* c [32] = the only row times a panel. The instruction takes numbers without a sign, so 128 is
 * added to the row's, and the effect of that is subtracted. */
static void amx_rotated_row(const Rotated *x, long n, const int8_t *panel, int32_t *c,
                        Prefetch *ahead) {
  const __m512i above = _mm512_set1_epi8((char)0x80);
  const __m512i zero = _mm512_setzero_si512();
  __m512i sum[2][2] = {{zero, zero}, {zero, zero}}, less[2][2] = {{zero, zero}, {zero, zero}};
  for (long k = 0; k < n; k += 16, panel += 16 * PANEL) {
    ask_ahead(ahead, 8);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      int32_t four;
      memcpy(&four, x->numbers + k + 4 * i, sizeof four);
      const __m512i row = _mm512_xor_si512(_mm512_set1_epi32(four), above);
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const __m512i column = _mm512_loadu_si512(panel + (i * 2 + v) * 64);
        sum[i % 2][v] = _mm512_dpbusd_epi32(sum[i % 2][v], row, column);
        less[i % 2][v] = _mm512_dpbusd_epi32(less[i % 2][v], above, column);
      }
    }
  }
  for (int v = 0; v < 2; v++) {
    const __m512i all = _mm512_add_epi32(sum[0][v], sum[1][v]);
    const __m512i rest = _mm512_add_epi32(less[0][v], less[1][v]);
    _mm512_storeu_si512(c + v * 16, _mm512_sub_epi32(all, rest));
  }
}

/* One block along K of up to 16 rows, or of 32. */
INLINE void amx_rotated_step(const int is_tall, const int8_t *upper, const int8_t *lower,
                         const int8_t *panel) {
  _tile_loadd(6, panel, PANEL * 4);
  _tile_loadd(4, upper, ROTATED_BLOCK);
  _tile_loadd(7, panel + ROTATED_BLOCK, PANEL * 4);
  _tile_dpbssd(0, 4, 6);
  _tile_dpbssd(1, 4, 7);
  if (!is_tall) return;
  _tile_loadd(5, lower, ROTATED_BLOCK);
  _tile_dpbssd(2, 5, 6);
  _tile_dpbssd(3, 5, 7);
}

/* c [rows <= AMX_ROWS][32] = rows from `row` on, a multiple of AMX_ROWS, times a panel. */
static void amx_rotated_tile(int rows, const Rotated *x, long row, long n, const int8_t *panel,
                         int32_t *c, Prefetch *ahead, Amx *amx) {
  if (row == 0 && rows == 1) {
    amx_rotated_row(x, n, panel, c, ahead);
    return;
  }
  const int is_tall = rows > AMX_DEPTH;
  const int8_t *upper = x->numbers + row * n, *lower = upper + AMX_DEPTH * n;
  const long upper_bytes = at_most(rows, AMX_DEPTH) * ROTATED_BLOCK;
  const long lower_bytes = is_tall ? (rows - AMX_DEPTH) * ROTATED_BLOCK : 0;
  set_up_amx(amx, rows);
  complete_writes();
  _tile_zero(0);
  _tile_zero(1);
  if (is_tall) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (long k = 0; k < n; k += ROTATED_BLOCK) {
    ask_ahead(ahead, 2 * AMX_DEPTH);
    if (is_tall)
      amx_rotated_step(1, upper, lower, panel);
    else
      amx_rotated_step(0, upper, lower, panel);
    upper += upper_bytes, lower += lower_bytes, panel += ROTATED_BLOCK * PANEL;
  }
  _tile_stored(0, c, PANEL * 4);
  _tile_stored(1, c + AMX_DEPTH, PANEL * 4);
  if (is_tall) {
    _tile_stored(2, c + AMX_DEPTH * PANEL, PANEL * 4);
    _tile_stored(3, c + AMX_DEPTH * PANEL + AMX_DEPTH, PANEL * 4);
  }
  complete_writes();
}

#endif
