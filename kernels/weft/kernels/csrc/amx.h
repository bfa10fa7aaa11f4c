/* The matrix kernel of tile.h on the tile registers of Intel's AMX: up to 32 rows of bfloat16 times
 * a panel (Intel, Architecture Instruction Set Extensions, chapter 3).
 *
 * One instruction multiplies 16 rows by 16 columns over 16 words of K, and takes as long for one
 * row as for 16. A panel has the layout of its second operand. Each result is summed in the same
 * order whatever the number of rows, but not in the order of tile.h, so that a product must always
 * be computed by the same one of the two kernels. */
#ifndef WEFT_AMX_H
#define WEFT_AMX_H

#include "tile.h"

#define AMX_ROWS 32 /* of a block: two tiles of rows times two of columns */
#define AMX_DEPTH 16 /* words of K, and rows or columns, of one tile */

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) &&             \
    defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) &&            \
    defined(__AVX512VNNI__) && defined(__linux__)
#define HAS_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

static int amx_is_allowed;

/* Asks the system for the tile registers, for all threads of this process; returns whether it
 * refuses. */
static int ask_for_amx(void) {
  const long request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XTILEDATA */
  amx_is_allowed = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return !amx_is_allowed;
}

/* Completes all earlier writes, since compilers do not know that tiles are loaded from memory. */
INLINE void complete_writes(void) { __asm__ volatile("" ::: "memory"); }

/* The setup of a thread's tile registers. Between two operations they belong to no thread. */
typedef struct {
  int rows; /* of a block; 0: not set up */
  int is_flushing;
  unsigned int modes; /* of vectors, before that */
} Amx;

/* AMX treats subnormal numbers as zero, so the vector instructions of the same operation do too. */
static void flush_subnormals(Amx *amx) {
  if (amx->is_flushing) return;
  amx->is_flushing = 1;
  amx->modes = _mm_getcsr();
  _mm_setcsr(amx->modes | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
}

/* Tiles 0 to 3 hold results (two of columns for each 16 rows), 4 and 5 rows, 6 and 7 columns. For
 * more than 16 rows, the setup of the first 16 is always the same. */
static void set_up_amx(Amx *amx, int rows) {
  if (amx->rows == rows || (rows == AMX_DEPTH && amx->rows > rows)) return;
  flush_subnormals(amx);
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } ALIGNED config = {.palette = 1};
  const int upper = rows < AMX_DEPTH ? rows : AMX_DEPTH;
  const int rows_of[8] = {upper, upper, rows - upper, rows - upper, upper, rows - upper,
                          AMX_DEPTH, AMX_DEPTH};
  for (int i = 0; i < 8; i++) {
    config.rows[i] = (uint8_t)rows_of[i];
    config.row_bytes[i] = rows_of[i] > 0 ? 64 : 0;
  }
  complete_writes();
  _tile_loadconfig(&config);
  amx->rows = rows;
}

static void release_amx(Amx *amx) {
  if (amx->rows > 0) _tile_release();
  if (amx->is_flushing) _mm_setcsr(amx->modes);
  *amx = (Amx){0};
}

/* One tile's depth of K. */
INLINE void amx_step(const int is_tall, const char *a, long a_stride, const uint32_t *b) {
  _tile_loadd(6, b, PANEL * 4);
  _tile_loadd(4, a, a_stride);
  _tile_loadd(7, b + AMX_DEPTH, PANEL * 4);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (!is_tall) return;
  _tile_loadd(5, a + AMX_DEPTH * a_stride, a_stride);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

/* The last words of K, fewer than a tile's depth: filled up with zeros. */
static void amx_rest(int rows, long bytes, const char *a, long a_stride, const uint32_t *b) {
  ALIGNED char rows_end[AMX_ROWS * 64] = {0};
  ALIGNED uint32_t columns_end[AMX_DEPTH * PANEL] = {0};
  for (int r = 0; r < rows; r++) memcpy(rows_end + r * 64, a + r * a_stride, (size_t)bytes);
  memcpy(columns_end, b, (size_t)((bytes + 3) / 4 * PANEL * 4));
  complete_writes();
  amx_step(rows > AMX_DEPTH, rows_end, 64, columns_end);
}

INLINE void amx_steps(const int is_tall, long steps, const char *a, long a_stride,
                      const uint32_t *b, Prefetch *ahead) {
  for (long s = 0; s < steps; s += AMX_DEPTH, a += 64, b += AMX_DEPTH * PANEL) {
    ask_ahead(ahead, 2 * AMX_DEPTH);
    amx_step(is_tall, a, a_stride, b);
  }
}

/* The first and the second numbers of up to 16 pairs of bfloat16, of `left` > 0 numbers; returns the
 * number of pairs. */
INLINE int split_pairs(const void *a, long left, float *even, float *odd) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  const __mmask32 given = left < 32 ? ((uint32_t)1 << left) - 1 : 0xffffffffu;
  const __m512i pairs = _mm512_maskz_loadu_epi16(given, a);
  _mm512_store_si512(even, _mm512_slli_epi32(pairs, 16));
  _mm512_store_si512(odd, _mm512_and_si512(pairs, upper));
  /* If the compiler knew that the values are still in registers, it would take them from there one
   * by one. */
  __asm__ volatile("" ::"r"(even), "r"(odd) : "memory");
  return at_most((left + 1) / 2, AMX_DEPTH);
}

/* c[32] = a * panel by vectors, with the bits of the AMX instruction as it is specified: over 16
 * words, the first and the second elements of all pairs are summed separately, then added to each
 * other and to the earlier sum. It serves a single row, which waits for memory: tiles that are
 * mostly empty would lengthen the wait. */
static void amx_row(long bytes, const char *a, const uint32_t *b, float *c, Prefetch *ahead,
                    Amx *amx) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  flush_subnormals(amx);
  for (; bytes > 0; bytes -= 64, a += 64) {
    ALIGNED float even[AMX_DEPTH], odd[AMX_DEPTH];
    const int words = split_pairs(a, bytes / 2, even, odd);
    __m512 first[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, second[2] = {first[0], first[0]};
    for (int i = 0; i < words; i++, b += PANEL) {
      if (i % 4 == 0) ask_ahead(ahead, 8);
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const __m512i column = _mm512_loadu_si512(b + v * 16);
        const __m512 lower = (__m512)_mm512_slli_epi32(column, 16);
        first[v] = _mm512_fmadd_ps(lower, _mm512_set1_ps(even[i]), first[v]);
        const __m512 higher = (__m512)_mm512_and_si512(column, upper);
        second[v] = _mm512_fmadd_ps(higher, _mm512_set1_ps(odd[i]), second[v]);
      }
    }
    for (int v = 0; v < 2; v++) sum[v] = _mm512_add_ps(sum[v], _mm512_add_ps(first[v], second[v]));
  }
  for (int v = 0; v < 2; v++) _mm512_storeu_ps(c + v * 16, sum[v]);
}

/* c[rows <= AMX_ROWS][32] (+)= a[rows] * panel, over `bytes` of each row of a. */
INLINE void amx_tile(const int accumulate, int rows, long bytes, const char *a, long a_stride,
                     const uint32_t *panel, float *c, long c_stride, Prefetch *ahead, Amx *amx) {
  const long steps = bytes / 64 * AMX_DEPTH, stride = c_stride * 4;
  const int is_tall = rows > AMX_DEPTH;
  float *lower = c + AMX_DEPTH * c_stride;
  if (rows == 1 && !accumulate) {
    amx_row(bytes, a, panel, c, ahead, amx);
    return;
  }
  set_up_amx(amx, rows);
  complete_writes();
  if (accumulate) {
    _tile_loadd(0, c, stride);
    _tile_loadd(1, c + AMX_DEPTH, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if (is_tall && accumulate) {
    _tile_loadd(2, lower, stride);
    _tile_loadd(3, lower + AMX_DEPTH, stride);
  } else if (is_tall) {
    _tile_zero(2);
    _tile_zero(3);
  }
  if (is_tall)
    amx_steps(1, steps, a, a_stride, panel, ahead);
  else
    amx_steps(0, steps, a, a_stride, panel, ahead);
  if (bytes % 64 > 0) amx_rest(rows, bytes % 64, a + steps * 4, a_stride, panel + steps * PANEL);
  _tile_stored(0, c, stride);
  _tile_stored(1, c + AMX_DEPTH, stride);
  if (!is_tall) return;
  _tile_stored(2, lower, stride);
  _tile_stored(3, lower + AMX_DEPTH, stride);
}

#else
#define HAS_AMX 0

static const int amx_is_allowed = 0;
static int ask_for_amx(void) { return 0; }
typedef struct {
  int rows;
} Amx;
static void release_amx(Amx *amx) { (void)amx; }
INLINE void amx_tile(const int accumulate, int rows, long bytes, const char *a, long a_stride,
                     const uint32_t *panel, float *c, long c_stride, Prefetch *ahead, Amx *amx) {
  (void)accumulate, (void)rows, (void)bytes, (void)a, (void)a_stride;
  (void)panel, (void)c, (void)c_stride, (void)ahead, (void)amx;
}

#endif

INLINE int uses_amx(const int is_bf16) { return is_bf16 && amx_is_allowed; }

#define MOST_TILE_ROWS (AMX_ROWS > TILE_ROWS ? AMX_ROWS : TILE_ROWS)

/* Rows of the largest tile. */
INLINE int tile_rows(const int is_bf16) { return uses_amx(is_bf16) ? AMX_ROWS : TILE_ROWS; }

/* c[rows <= tile_rows][32] (+)= a[rows] * panel. `odd`: one more step made of a single bfloat16;
 * `amx`: of this thread, to be released at the end of its work. */
INLINE void tile_product(const int is_bf16, const int accumulate, int rows, long steps, int odd,
                         const char *a, long a_stride, const uint32_t *panel, float *c,
                         long c_stride, Prefetch *ahead, Amx *amx) {
  if (uses_amx(is_bf16))
    amx_tile(accumulate, rows, 4 * steps + 2 * odd, a, a_stride, panel, c, c_stride, ahead, amx);
  else if (is_bf16)
    tile_of(1, accumulate, rows, steps, odd, a, a_stride, panel, c, c_stride, ahead);
  else
    tile_of(0, accumulate, rows, steps, 0, a, a_stride, panel, c, c_stride, ahead);
}

#endif
