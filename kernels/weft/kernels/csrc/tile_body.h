/* The loop of tile.h, which includes it once for each number of vectors of columns in a pass: SUMS.
 * The compiler keeps the sums in registers only where their array is no wider than the pass. */

/* sum[rows] += a[rows] * some columns of a panel. */
INLINE void TILE_STEPS(const int is_bf16, const int rows, const int ask, long steps, const char *a,
                       long a_stride, const uint32_t *b, const char *prefetch,
                       vf sum[TILE_ROWS][SUMS]) {
  for (long s = 0; s < steps; s++, b += PANEL) {
    if (ask) {
      __builtin_prefetch(prefetch + 128 * s, 0, 2);
      __builtin_prefetch(prefetch + 128 * s + 64, 0, 2);
    }
    vu column[SUMS];
#pragma GCC unroll 4
    for (int v = 0; v < SUMS; v++) column[v] = *(const vu *)(b + v * VL);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
      vu word = (vu){0} + load_word(a + r * a_stride + 4 * s);
#pragma GCC unroll 4
      for (int v = 0; v < SUMS; v++)
        sum[r][v] = multiply_add(is_bf16, sum[r][v], word, column[v]);
    }
  }
}

/* c[rows][32] (+)= a[rows] * panel. `odd`: one more step made of a single bfloat16. */
INLINE void TILE_BODY(const int is_bf16, const int rows, const int accumulate, long steps, int odd,
                      const char *a, long a_stride, const uint32_t *panel, float *c,
                      long c_stride, Prefetch *ahead) {
  const long chunk = is_bf16 ? LONG_MAX : CHUNK;
  for (int first = 0; first < PANEL / VL; first += SUMS) {
    const uint32_t *b = panel + first * VL;
    long done = 0;
    do {
      long count = steps - done < chunk ? steps - done : chunk;
      vf sum[TILE_ROWS][SUMS];
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < SUMS; v++) sum[r][v] = (vf){0};
      for (long step = done; step < done + count;) {
        const char *asked;
        const long some = take_span(ahead, done + count - step, &asked);
        const char *from = a + 4 * step;
        const uint32_t *by = b + step * PANEL;
        if (asked != NULL)
          TILE_STEPS(is_bf16, rows, 1, some, from, a_stride, by, asked, sum);
        else
          TILE_STEPS(is_bf16, rows, 0, some, from, a_stride, by, NULL, sum);
        step += some;
      }
      if (odd) {
        for (int r = 0; r < rows; r++) {
          bf16 last;
          memcpy(&last, a + r * a_stride + 4 * steps, sizeof last);
          for (int v = 0; v < SUMS; v++)
            sum[r][v] = multiply_add(is_bf16, sum[r][v], (vu){0} + (uint32_t)last,
                                     *(const vu *)(b + steps * PANEL + v * VL));
        }
      }
      const int add = accumulate || done > 0;
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < SUMS; v++) {
          vf *target = (vf *)(c + r * c_stride + (first + v) * VL);
          if (add) sum[r][v] += *target;
          *target = sum[r][v];
        }
      done += count;
    } while (done < steps);
  }
}
