/* The loops of tile.h, which includes them once for each number of vectors of columns in a pass:
 * SUMS. The compiler keeps the sums in registers only where their array is no wider than the pass. */
#define TILE_BYTES (SUMS * VL >= 16 ? SUMS * VL * 4 : 64) /* that a step prefetches: whole lines */

/* sum[rows] += one word a row * some columns of a panel, or the halves of their pairs. */
INLINE void TILE_STEP(const int is_bf16, const Halves halves, const int rows, const char *a,
                      long a_stride, const uint32_t *b, vf sum[TILE_ROWS][SUMS]) {
  vu column[SUMS];
#pragma GCC unroll 4
  for (int v = 0; v < SUMS; v++) {
    column[v] = *(const vu *)(b + v * VL);
    if (halves == FIRST) column[v] = column[v] << 16;
    if (halves == SECOND) column[v] = column[v] & 0xffff0000u;
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) {
    vu word = (vu){0} + load_word(a + r * a_stride);
#pragma GCC unroll 4
    for (int v = 0; v < SUMS; v++)
      sum[r][v] = multiply_add(is_bf16 && halves == BOTH, sum[r][v], word, column[v]);
  }
}

/* sum[rows] += a[rows] * some columns of a panel. `is_wide`: `a` lies in `WideRows`. */
INLINE void TILE_STEPS(const int is_bf16, const int is_wide, const int rows, const int ask,
                       long steps, const char *a, long a_stride, const uint32_t *b,
                       const char *prefetch, vf sum[TILE_ROWS][SUMS]) {
  for (long s = 0; s < steps; s++, b += PANEL) {
    if (ask) ask_for_step(prefetch, s, TILE_BYTES);
    if (is_wide) {
      TILE_STEP(is_bf16, FIRST, rows, a + 4 * s, a_stride, b, sum);
      TILE_STEP(is_bf16, SECOND, rows, a + TILE_ROWS * a_stride + 4 * s, a_stride, b, sum);
    } else {
      TILE_STEP(is_bf16, BOTH, rows, a + 4 * s, a_stride, b, sum);
    }
  }
}

/* `TILE_BODY` for bfloat16 where rows are widened. */
INLINE void TILE_WIDE_BODY(const int rows, const int accumulate, long steps, int odd,
                           const char *a, long a_stride, const uint32_t *panel, float *c,
                           long c_stride, Prefetch *ahead) {
  const long all = steps + odd;
  WideRows wide;
  vf kept[TILE_ROWS][PANEL / VL] = {0}; /* sums between parts */
  for (long done = 0; done < all; done += WIDE_STEPS) {
    const long count = at_most(all - done, WIDE_STEPS);
    const int is_last = done + count == all;
    const int ends_odd = is_last && odd;
    widen_rows(rows, count - ends_odd, ends_odd, a + 4 * done, a_stride, &wide);
    for (int first = 0; first < PANEL / VL; first += SUMS) {
      vf sum[TILE_ROWS][SUMS];
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < SUMS; v++) sum[r][v] = kept[r][first + v];
      for (long step = 0; step < count;) {
        const char *asked;
        const long some = take_span(ahead, count - step, TILE_BYTES, &asked);
        const char *from = (const char *)(wide.half[0][0] + step);
        const uint32_t *b = panel + (done + step) * PANEL + first * VL;
        if (asked != NULL)
          TILE_STEPS(1, 1, rows, 1, some, from, sizeof wide.half[0][0], b, asked, sum);
        else
          TILE_STEPS(1, 1, rows, 0, some, from, sizeof wide.half[0][0], b, NULL, sum);
        step += some;
      }
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < SUMS; v++) {
          vf *target = (vf *)(c + r * c_stride + (first + v) * VL);
          if (is_last && accumulate) sum[r][v] += *target;
          *(is_last ? target : &kept[r][first + v]) = sum[r][v];
        }
    }
  }
}

/* c[rows][32] (+)= a[rows] * panel. `odd`: one more step made of a single bfloat16. */
INLINE void TILE_BODY(const int is_bf16, const int rows, const int accumulate, long steps, int odd,
                      const char *a, long a_stride, const uint32_t *panel, float *c,
                      long c_stride, Prefetch *ahead) {
  if (WIDENS_ROWS && is_bf16) {
    TILE_WIDE_BODY(rows, accumulate, steps, odd, a, a_stride, panel, c, c_stride, ahead);
    return;
  }
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
        const long some = take_span(ahead, done + count - step, TILE_BYTES, &asked);
        const char *from = a + 4 * step;
        const uint32_t *by = b + step * PANEL;
        if (asked != NULL)
          TILE_STEPS(is_bf16, 0, rows, 1, some, from, a_stride, by, asked, sum);
        else
          TILE_STEPS(is_bf16, 0, rows, 0, some, from, a_stride, by, NULL, sum);
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
#undef TILE_BYTES
