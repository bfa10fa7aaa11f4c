/* What the CPU can do at most: reading memory, and multiply-adds that touch registers only. */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Reads every cache line of data; returns something that depends on it. */
int64_t roofline_read(const int64_t *data, int64_t words) {
  int64_t total = 0;
#pragma omp parallel for schedule(static) reduction(^ : total)
  for (int64_t i = 0; i < words; i += 32) {
    int64_t part = 0;
    for (int j = 0; j < 32; j++) part ^= data[i + j];
    total ^= part;
  }
  return total;
}

#define CHAINS 12

/* Multiply-adds of float32 a step and thread: CHAINS * 2 * lanes. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float lanes __attribute__((vector_size(4 * LANES)));

int roofline_lanes(void) { return LANES; }
int roofline_chains(void) { return CHAINS; }

float roofline_float32(int64_t steps, float x) {
  float result = 0;
#pragma omp parallel reduction(+ : result)
  {
    lanes sum[CHAINS], a = (lanes){0} + x, b = (lanes){0} + 0.5f;
    for (int c = 0; c < CHAINS; c++) sum[c] = (lanes){0} + (float)c;
    for (int64_t s = 0; s < steps; s++) {
      __asm__ volatile("" : "+x"(a), "+x"(b)); /* neither is constant */
#pragma GCC unroll 12
      for (int c = 0; c < CHAINS; c++) sum[c] = sum[c] * a + b;
    }
    for (int c = 0; c < CHAINS; c++)
      for (int i = 0; i < LANES; i++) result += sum[c][i];
  }
  return result;
}

/* Two bfloat16 multiply-adds a lane; 0 steps are done where the CPU has no such instruction. */
float roofline_bfloat16(int64_t steps, float x) {
  float result = 0;
#if defined(__AVX512BF16__)
#pragma omp parallel reduction(+ : result)
  {
    __m512 sum[CHAINS];
    __m512bh a = (__m512bh)_mm512_set1_ps(x), b = (__m512bh)_mm512_set1_ps(0.5f);
    for (int c = 0; c < CHAINS; c++) sum[c] = _mm512_set1_ps((float)c);
    for (int64_t s = 0; s < steps; s++) {
      __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
      for (int c = 0; c < CHAINS; c++) sum[c] = _mm512_dpbf16_ps(sum[c], a, b);
    }
    for (int c = 0; c < CHAINS; c++) result += _mm512_reduce_add_ps(sum[c]);
  }
#else
  (void)steps, (void)x;
#endif
  return result;
}

/* Multiply-adds of AMX a step and thread: 4 tiles of 16 * 16 * 32; -1 where it is not to be had. */
float roofline_amx(int64_t steps, float x) {
#if defined(__AMX_BF16__) && defined(__linux__)
  const long request_permission = 0x1023, tile_data = 18;
  if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) return -1;
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } __attribute__((aligned(64))) config = {.palette = 1};
  for (int i = 0; i < 8; i++) config.rows[i] = 16, config.row_bytes[i] = 64;
#pragma omp parallel
  {
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t s = 0; s < steps; s++) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
  }
  return x;
#else
  (void)steps, (void)x;
  return -1;
#endif
}
