/* Attention in both directions over whole sequences, without padding.
 *
 * It runs on the blocks of attention.h: a row at p that sees `reach` rows to each side is treated as
 * a causal row at p + reach with a window of 2 * reach + 1. Rows are cut into tasks at fixed places
 * of a sequence, so a row's result does not depend on the batch.
 */
#ifndef WEFT_ENCODER_H
#define WEFT_ENCODER_H

#include "attention.h"

/* Declared from this text in weft/kernels/shared/cpu.py.
 * Heads follow one another; strides are in elements. */
typedef struct {
  const void *q, *k; /* V lies `to_value` elements after K */
  void *out; /* [tokens, heads, dim] */
  const int32_t *cu_lens; /* [sequences + 1] */
  int64_t q_row, k_row, to_value;
  int64_t sequences, heads, kv_heads, dim;
  int64_t reach; /* rows to each side that a row sees; -1: all */
  float scale;
  int32_t is_bf16;
} BothWays;

static long rows_a_task(const BothWays *b) { return MAX_ROWS / (b->heads / b->kv_heads); }

static long tasks_of_head(const BothWays *b, long sequence) {
  const long length = b->cu_lens[sequence + 1] - b->cu_lens[sequence];
  return (length + rows_a_task(b) - 1) / rows_a_task(b);
}

/* begins [sequences + 1]: the first task of each sequence. */
static void count_tasks(const BothWays *b, int64_t *begins) {
  begins[0] = 0;
  for (long s = 0; s < b->sequences; s++)
    begins[s + 1] = begins[s] + b->kv_heads * tasks_of_head(b, s);
}

/* K and V of a sequence's rows from `begin` on, a multiple of KV_BLOCK, before `end`. */
INLINE void rows_block(const char *keys, long row_bytes, long begin, long end, Block *block) {
  block->count = at_most(end - begin, KV_BLOCK);
  block->absent = block->num_spans = 0;
  for (int i = 0; i < block->count; i++) block->rows[i] = keys + (begin + i) * row_bytes;
}

static void both_ways_task(const BothWays *b, const Attention *a, const Pool *pool, long sequence,
                           long index, Scratch *scratch, Amx *amx) {
  const long size = b->is_bf16 ? 2 : 4, group = b->heads / b->kv_heads;
  const long token = b->cu_lens[sequence], length = b->cu_lens[sequence + 1] - token;
  const long parts = tasks_of_head(b, sequence), head = index / parts;
  const long first = index % parts * rows_a_task(b), count = at_most(length - first, rows_a_task(b));
  const int is_local = b->reach >= 0 && b->reach < length;
  const Task t = {.kv_head = head, .group = group, .rows = (int)(count * group),
                  .first_position = first + (is_local ? b->reach : length),
                  .window = is_local ? 2 * b->reach + 1 : 0};
  for (long i = 0; i < count; i++)
    memcpy((char *)scratch->q + i * group * b->dim * size,
           (const char *)b->q + ((token + first + i) * b->q_row + head * group * b->dim) * size,
           (size_t)(group * b->dim * size));
  const char *keys = (const char *)b->k + (token * b->k_row + head * b->dim) * size;
  long begin = 0, end = length;
  if (is_local) {
    begin = first > b->reach ? (first - b->reach) / KV_BLOCK * KV_BLOCK : 0;
    end = first + count + b->reach < length ? first + count + b->reach : length;
  }
  start_segment(pool, &t, scratch);
  Block block, none = {.num_spans = 0};
  for (; begin < end; begin += KV_BLOCK) {
    rows_block(keys, b->k_row * size, begin, end, &block);
    block.to_value = b->to_value * size;
    attend_block_of[KEPT_AS_ROWS][b->is_bf16](a, pool, &t, begin, &block, &none, scratch, amx);
  }
  for (int row = 0; row < t.rows; row++)
    write_row(a, pool, scratch->sum + row * padded_dim(pool), scratch->sum_max[row],
              scratch->sum_weight[row], token + first + row / group, head * group + row % group);
}

/* One thread's tasks; `begins` from `count_tasks`, and `ranges` divide them. */
static void both_ways_share(const BothWays *b, const int64_t *begins, Range *ranges, int threads,
                            const Member *me) {
  const Attention attention = {.out = b->out, .heads = b->heads, .scale = b->scale};
  const Pool pool = {.kv_heads = b->kv_heads, .dim = b->dim, .is_bf16 = b->is_bf16};
  Scratch scratch;
  Amx amx = {0};
  int at = 0;
  long sequence = 0;
  for (int64_t task; (task = next_unit(ranges, threads, me->thread, &at)) >= 0;) {
    if (task < begins[sequence]) sequence = 0;
    while (task >= begins[sequence + 1]) sequence++;
    both_ways_task(b, &attention, &pool, sequence, task - begins[sequence], &scratch, &amx);
  }
  release_amx(&amx);
}

#endif
