/* Ragged causal attention over pages: online softmax (Milakov and Gimelshein 2018) over blocks of
 * positions, both products by the tile kernel, query heads of one KV head together.
 */
#ifndef WEFT_ATTENTION_H
#define WEFT_ATTENTION_H

#include "amx.h"
#include "attention_plan.h"
#include "team.h"

#define DIM_PANELS (MAX_DIM / PANEL)
#define LOWEST (-1e30f) /* a maximum over nothing: finite, so that differences stay numbers */

/* 32-bit words a row of q, K or V. */
static long words_of_dim(const Pool *pool) { return pool->is_bf16 ? pool->dim / 2 : pool->dim; }

/* Floats a row of accumulators. */
static long padded_dim(const Pool *pool) { return (pool->dim + PANEL - 1) / PANEL * PANEL; }

/* A thread's buffers. */
typedef struct {
  ALIGNED uint32_t q[MAX_ROWS * MAX_DIM];
  ALIGNED uint32_t keys[2 * MAX_DIM * PANEL]; /* [panel of positions][word of dim][32] */
  ALIGNED uint32_t values[DIM_PANELS * KV_BLOCK * PANEL]; /* [panel of dim][word of position][32] */
  ALIGNED float scores[MAX_ROWS * KV_BLOCK];
  ALIGNED bf16 weights[MAX_ROWS * KV_BLOCK];
  ALIGNED float sum[MAX_ROWS * MAX_DIM]; /* accumulators of the current segment */
  ALIGNED float total[MAX_ROWS * MAX_DIM]; /* and of those before it */
  float sum_max[MAX_ROWS], sum_weight[MAX_ROWS];
  float highest[MAX_ROWS], shrink[MAX_ROWS]; /* of the current block; see raise_maxima */
  float total_max[MAX_ROWS], total_weight[MAX_ROWS];
  /* Of a block in 8 bits: K, then V, in the type of q, and their scales. */
  ALIGNED char wide[2 * KV_BLOCK * MAX_DIM * 4];
  ALIGNED float k_scales[KV_BLOCK], v_scales[KV_BLOCK];
} Scratch;

/* K and V of some positions. */
typedef struct {
  int count;
  int absent; /* number of first positions that count as zeros */
  int num_spans;
  long to_value; /* bytes */
  const char *rows[KV_BLOCK]; /* K of each position; V lies `to_value` further */
  const char *scales[KV_BLOCK]; /* in 8 bits, likewise */
  Span spans[2 * KV_BLOCK]; /* the same memory in as few pieces as possible */
} Block;

/* Where the block of positions after that of `position` begins. */
static long next_block(long position) { return (position / KV_BLOCK + 1) * KV_BLOCK; }

/* The positions from `begin` on, up to the end of its block and before `end`. */
static void find_block(const Pool *pool, const Task *t, long begin, long end, Block *block) {
  const long bytes = vector_bytes(pool), to_value = part_bytes(pool);
  block->to_value = to_value;
  block->count = begin < end ? at_most(end - begin, next_block(begin) - begin) : 0;
  block->absent = begin < t->first_read ? at_most(t->first_read - begin, block->count) : 0;
  block->num_spans = 0;
  begin += block->absent;
  long page = begin / pool->page_size, offset = begin % pool->page_size;
  for (int i = block->absent; i < block->count; page++, offset = 0) {
    char *part = part_at(pool, t->layer, t->pages[page], t->kv_head, 0);
    const char *row = part + offset * bytes;
    int n = at_most(pool->page_size - offset, block->count - i);
    for (int k = 0; k < n; k++, i++) {
      block->rows[i] = row + k * bytes;
      if (pool->kept) block->scales[i] = (const char *)scale_in(pool, part, offset + k);
    }
    if (n == pool->page_size) {
      block->spans[block->num_spans++] = (Span){row, row + 2 * to_value};
    } else {
      block->spans[block->num_spans++] = (Span){row, row + n * bytes};
      block->spans[block->num_spans++] = (Span){row + to_value, row + to_value + n * bytes};
    }
  }
}

static const char zeros[MAX_DIM * 4];

INLINE int is_in(const Block *block, int i) { return i >= block->absent && i < block->count; }

/* Converts a block in 8 bits to floats. Its scales are applied to scores and weights later. */
INLINE void widen_block(const int kept, const int is_bf16, const Pool *pool, Block *block,
                        Scratch *scratch) {
  const long bytes = 4 * words_of_dim(pool);
  for (int i = 0; i < block->count || i % VL != 0; i++) {
    scratch->k_scales[i] = scratch->v_scales[i] = 0;
    if (!is_in(block, i)) continue;
    char *key = scratch->wide + i * bytes, *value = key + KV_BLOCK * bytes;
    widen_8_bits(kept, is_bf16, block->rows[i], pool->dim, key);
    widen_8_bits(kept, is_bf16, block->rows[i] + block->to_value, pool->dim, value);
    memcpy(&scratch->k_scales[i], block->scales[i], SCALE_BYTES);
    memcpy(&scratch->v_scales[i], block->scales[i] + block->to_value, SCALE_BYTES);
    block->rows[i] = key;
  }
  block->to_value = KV_BLOCK * bytes;
}

/* K of positions first .. first + 15 of a block as panel columns. */
static void pack_keys(const Pool *pool, const Block *block, int first, uint32_t *keys) {
  long words = words_of_dim(pool);
  const char *rows[16];
  for (int i = 0; i < 16; i++) rows[i] = is_in(block, first + i) ? block->rows[first + i] : zeros;
  uint32_t *out = keys + (first / PANEL) * words * PANEL + first % PANEL;
  for (long w = 0; w < words; w += 16) {
    transpose_words(rows, at_most(words - w, 16), out + w * PANEL, PANEL);
    for (int i = 0; i < 16; i++) rows[i] += 64;
  }
}

#if defined(__AVX512BW__)
/* out[0..31] = pairs of the first n <= 32 elements of two rows. */
INLINE void interleave(const bf16 *row, const bf16 *second, long n, uint32_t *out) {
  const __m512i order = _mm512_set_epi16(
      47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35,
      3, 34, 2, 33, 1, 32, 0);
  __mmask32 mask = n < 32 ? (1u << n) - 1 : 0xffffffffu;
  __m512i a = _mm512_maskz_loadu_epi16(mask, row), b = _mm512_maskz_loadu_epi16(mask, second);
  _mm512_store_si512(out, _mm512_permutex2var_epi16(a, order, b));
  __m512i upper = _mm512_add_epi16(order, _mm512_set1_epi16(16));
  _mm512_store_si512(out + 16, _mm512_permutex2var_epi16(a, upper, b));
}
#else
INLINE void interleave(const bf16 *row, const bf16 *second, long n, uint32_t *out) {
  for (long d = 0; d < n; d++) out[d] = row[d] | (uint32_t)second[d] << 16;
}
#endif

/* V of positions first .. first + 15 of a block as panel rows; a missing second half of a pair of
 * bfloat16 is 0. */
INLINE void pack_values(const int is_bf16, const Pool *pool, const Block *block, int first,
                        uint32_t *values) {
  const long dim = pool->dim, to_value = block->to_value;
  const int per_step = is_bf16 ? 2 : 1;
  const long steps = KV_BLOCK / per_step;
  for (int i = first; i < first + 16 && i < block->count; i += per_step) {
    const char *row = is_in(block, i) ? block->rows[i] + to_value : zeros;
    const char *other = is_in(block, i + 1) ? block->rows[i + 1] + to_value : zeros;
    const bf16 *second = (const bf16 *)other;
    uint32_t *out = values + (i / per_step) * PANEL;
    for (long d = 0; d < dim; d += PANEL, out += steps * PANEL) {
      int n = at_most(dim - d, PANEL);
      if (is_bf16)
        interleave((const bf16 *)row + d, second + d, n, out);
      else
        memcpy(out, row + 4 * d, (size_t)n * 4);
    }
  }
}

/* Positions of a block that a row may see; no fewer than the rows before it in its request. */
INLINE int visible_to(const Task *t, int row, long begin, int count) {
  const long at = row / t->group;
  long last = (t->key_ends == NULL ? t->first_position + at + 1 : t->key_ends[at]) - begin;
  return last < 0 ? 0 : at_most(last, count);
}

/* Number of first positions of a block that lie before a row's window. */
INLINE int before_window(const Task *t, int row, long begin, int count) {
  if (t->window == 0) return 0;
  const long at = position_of(t, row / t->group);
  long hidden = at + 1 - t->window - begin;
  if (t->is_chunked) hidden = at / t->window * t->window - begin;
  return hidden < 0 ? 0 : at_most(hidden, count);
}

/* Hides the rows of its tree that a row does not see, among the positions of a block. */
static void hide_others(const Task *t, int row, long begin, int visible, float *scores) {
  const int64_t word = t->ancestors[row / t->group];
  if (word == -1) return; /* a row of a prompt in a step with trees */
  for (long i = t->root > begin ? t->root - begin : 0; i < visible; i++)
    if (!sees_row(word, begin + i - t->root)) scores[i] = -INFINITY;
}

/* The highest of a row's scores. Scores of positions that the row does not see become -inf. */
INLINE float highest_score(const Task *t, int row, long begin, int count, float *scores) {
  const int hidden = before_window(t, row, begin, count), visible = visible_to(t, row, begin, count);
  for (int i = 0; i < hidden; i++) scores[i] = -INFINITY;
  for (int i = visible; i % VL != 0; i++) scores[i] = -INFINITY;
  if (t->ancestors != NULL) hide_others(t, row, begin, visible, scores);
  vf highest = vf_splat(LOWEST);
  for (int i = 0; i < visible; i += VL) highest = vf_max(*(vf *)(scores + i), highest);
  return vf_highest(highest);
}

/* Caps unscaled products of q and K, with `cap` in the same units: cap * tanh(score / cap). */
static void cap_scores(float cap, int count, float *scores) {
  for (int i = 0; i < count; i += VL) {
    vf ratio = *(vf *)(scores + i) / cap;
    vf small = vf_exp2_nonpositive(0, vf_max(ratio, -ratio) * -2.8853900817779268f);
    vf bound = cap * (1.0f - small) / (1.0f + small);
    *(vf *)(scores + i) = vf_select((vi)(ratio < 0), -bound, bound);
  }
}

/* Raises the maxima of rows first_row .. last_row - 1 to those of their scores, which are exponents
 * of two in units of `scale`. `shrink`: factor on earlier sums. It takes many rows at once, since a
 * single row would wait for its own results. */
INLINE void raise_maxima(float scale, int first_row, int last_row, Scratch *scratch) {
  for (int row = first_row - first_row % VL; row < last_row; row += VL) {
    vf before = *(vf *)(scratch->sum_max + row);
    vf now = vf_max(*(vf *)(scratch->highest + row) * scale, before);
    *(vf *)(scratch->shrink + row) = vf_exp2_nonpositive(0, before - now);
    *(vf *)(scratch->sum_max + row) = now;
  }
}

/* Turns the scores of one row into weights; updates its sum and accumulator. */
INLINE void weigh_row(const int is_bf16, const int kept, float scale, long width, int row,
                      int visible, int count, Scratch *scratch) {
  float *scores = scratch->scores + row * KV_BLOCK;
  const float highest = scratch->sum_max[row], shrink = scratch->shrink[row];
  vf total = {0};
#pragma GCC unroll 4
  for (int i = 0; i < KV_BLOCK / VL; i++) {
    if (i * VL >= count) break;
    vf weight = {0};
    if (i * VL < visible)
      weight = vf_exp2_nonpositive(
          is_bf16, vf_fma(*(vf *)(scores + i * VL), vf_splat(scale), vf_splat(-highest)));
    total += weight;
    if (kept) weight *= *(vf *)(scratch->v_scales + i * VL);
    if (is_bf16)
      vf_store_bf16(scratch->weights + row * KV_BLOCK + i * VL, weight);
    else
      *(vf *)(scores + i * VL) = weight;
  }
  if (shrink != 1)
    for (long d = 0; d < width; d += VL) *(vf *)(scratch->sum + row * width + d) *= shrink;
  scratch->sum_weight[row] = scratch->sum_weight[row] * shrink + vf_sum(total);
}

/* Adds a block of positions from `begin` on to the segment; prefetches the next block. */
INLINE void attend_block(const int is_bf16, const int kept, const Attention *a, const Pool *pool,
                         const Task *t, long begin, Block *block, const Block *next,
                         Scratch *scratch, Amx *amx) {
  if (kept) widen_block(kept, is_bf16, pool, block, scratch);
  const long words = words_of_dim(pool), row_bytes = 4 * words, width = padded_dim(pool);
  const int count = block->count, most = tile_rows(is_bf16);
  for (int first = 0; first < count; first += 16) {
    pack_keys(pool, block, first, scratch->keys);
    pack_values(is_bf16, pool, block, first, scratch->values);
  }
  int first_row = 0, last_row = t->rows;
  while (first_row < t->rows && visible_to(t, first_row, begin, count) == 0) first_row++;
  while (last_row > first_row && before_window(t, last_row - 1, begin, count) == count) last_row--;
  const long steps = is_bf16 ? KV_BLOCK / 2 : KV_BLOCK;
  const long used_steps = is_bf16 ? (count + 1) / 2 : count;
  const long weight_bytes = KV_BLOCK * (is_bf16 ? 2 : 4);
  const float scale = a->scale * 1.44269504088896341f; /* log2(e) */
  const char *weights = is_bf16 ? (const char *)scratch->weights : (const char *)scratch->scores;
  Prefetch ahead = {0};
  if (next->num_spans > 0)
    ahead = (Prefetch){next->spans[0], next->spans + 1, next->num_spans - 1};
  for (int row = first_row; row < last_row; row += most)
    for (int c = 0; c < count; c += PANEL)
      tile_product(is_bf16, 0, at_most(last_row - row, most), words, 0,
                   (const char *)scratch->q + row * row_bytes, row_bytes, scratch->keys + c * words,
                   scratch->scores + row * KV_BLOCK + c, KV_BLOCK, &ahead, amx);
  for (int row = 0; row < (t->rows + VL - 1) / VL * VL; row++) {
    float *scores = scratch->scores + row * KV_BLOCK;
    const int sees = row >= first_row && row < last_row;
    if (sees && kept)
      for (int i = 0; i < count; i += VL) *(vf *)(scores + i) *= *(vf *)(scratch->k_scales + i);
    if (sees && a->softcap > 0) cap_scores(a->softcap / a->scale, count, scores);
    scratch->highest[row] = sees ? highest_score(t, row, begin, count, scores) : -INFINITY;
  }
  raise_maxima(scale, first_row, last_row, scratch);
  for (int row = first_row; row < last_row; row++)
    weigh_row(is_bf16, kept, scale, width, row, visible_to(t, row, begin, count), count, scratch);
  for (int row = first_row; row < last_row; row += most)
    for (long d = 0; d < pool->dim; d += PANEL)
      tile_product(is_bf16, 1, at_most(last_row - row, most), used_steps, 0,
                   weights + row * weight_bytes, weight_bytes, scratch->values + d * steps,
                   scratch->sum + row * width + d, width, &ahead, amx);
}

/* `attend_block` for each way to keep vectors and each type of rows. */
#define ATTEND_BLOCK(name, kept, is_bf16)                                                          \
  static void name(const Attention *a, const Pool *pool, const Task *t, long begin, Block *block, \
                   const Block *next, Scratch *scratch, Amx *amx) {                               \
    attend_block(is_bf16, kept, a, pool, t, begin, block, next, scratch, amx);                    \
  }
ATTEND_BLOCK(attend_block_float, KEPT_AS_ROWS, 0)
ATTEND_BLOCK(attend_block_bf16, KEPT_AS_ROWS, 1)
ATTEND_BLOCK(attend_block_fp8_float, KEPT_IN_FP8, 0)
ATTEND_BLOCK(attend_block_fp8_bf16, KEPT_IN_FP8, 1)
ATTEND_BLOCK(attend_block_int8_float, KEPT_IN_INT8, 0)
ATTEND_BLOCK(attend_block_int8_bf16, KEPT_IN_INT8, 1)

static void (*const attend_block_of[][2])(const Attention *, const Pool *, const Task *, long,
                                          Block *, const Block *, Scratch *, Amx *) = {
    {attend_block_float, attend_block_bf16},
    {attend_block_fp8_float, attend_block_fp8_bf16},
    {attend_block_int8_float, attend_block_int8_bf16},
};

static void start_segment(const Pool *pool, const Task *t, Scratch *scratch) {
  memset(scratch->sum, 0, (size_t)(t->rows * padded_dim(pool)) * sizeof(float));
  for (int row = 0; row < t->rows; row++) {
    scratch->sum_max[row] = LOWEST;
    scratch->sum_weight[row] = 0;
  }
}

/* The result of a job without positions. */
static void see_nothing(const Pool *pool, const Task *t, Scratch *scratch) {
  memset(scratch->total, 0, (size_t)(t->rows * padded_dim(pool)) * sizeof(float));
  for (int row = 0; row < t->rows; row++) {
    scratch->total_max[row] = LOWEST;
    scratch->total_weight[row] = 0;
  }
}

/* One row: merges a later segment into (total, its maximum and sum). */
INLINE void merge_row(float *total, float *total_max, float *total_weight, const float *sum,
                      float sum_max, float sum_weight, long dim) {
  float now = sum_max > *total_max ? sum_max : *total_max;
  float old_scale = vf_exp2_nonpositive(0, vf_splat(*total_max - now))[0];
  float new_scale = vf_exp2_nonpositive(0, vf_splat(sum_max - now))[0];
  for (long d = 0; d < dim; d += VL) {
    int n = at_most(dim - d, VL);
    const vf added = load_some(sum, 0, d, n) * new_scale;
    store_some(total, 0, d, n, vf_fma(load_some(total, 0, d, n), vf_splat(old_scale), added));
  }
  *total_weight = *total_weight * old_scale + sum_weight * new_scale;
  *total_max = now;
}

INLINE void write_row(const Attention *a, const Pool *pool, const float *total, float highest,
                      float weight, long token, long head) {
  if (a->sinks != NULL) weight += exp2f(a->sinks[head] * 1.44269504088896341f - highest);
  if (weight == 0) weight = 1; /* it sees nothing: zeros */
  for (long d = 0; d < pool->dim; d += VL) {
    int n = at_most(pool->dim - d, VL);
    store_some(a->out, pool->is_bf16, (token * a->heads + head) * pool->dim + d, n,
               load_some(total, 0, d, n) / weight);
  }
}

static void gather_q(const Attention *a, const Pool *pool, const Job *job, Scratch *scratch) {
  const Task *t = &job->task;
  long bytes = t->group * 4 * words_of_dim(pool);
  for (long i = 0; i < t->rows / t->group; i++)
    memcpy((char *)scratch->q + i * bytes,
           (const char *)a->q + ((job->first_token + i) * pool->kv_heads + t->kv_head) * bytes,
           (size_t)bytes);
}

static void store_job(const Attention *a, const Pool *pool, const Job *job, Scratch *scratch) {
  const Task *t = &job->task;
  for (int row = 0; row < t->rows; row++) {
    if (job->partial == NULL) {
      long token = job->first_token + row / t->group;
      write_row(a, pool, scratch->total + row * padded_dim(pool), scratch->total_max[row],
                scratch->total_weight[row], token, t->kv_head * t->group + row % t->group);
      continue;
    }
    float *partial = job->partial + row * (pool->dim + 2);
    memcpy(partial, scratch->total + row * padded_dim(pool), (size_t)pool->dim * sizeof(float));
    partial[pool->dim] = scratch->total_max[row];
    partial[pool->dim + 1] = scratch->total_weight[row];
  }
}

static void run_job(const Attention *a, const Pool *pool, const Job *job, const Job *next,
                    Scratch *scratch, Amx *amx) {
  const Task *t = &job->task;
  const long width = padded_dim(pool);
  gather_q(a, pool, job, scratch);
  Block blocks[2], *block = &blocks[0], *ahead = &blocks[1];
  find_block(pool, t, job->begin, job->end, ahead);
  if (job->begin >= job->end) see_nothing(pool, t, scratch);
  for (long segment = job->begin, next_segment; segment < job->end; segment = next_segment) {
    next_segment = (segment / SEGMENT + 1) * SEGMENT;
    long segment_end = next_segment < job->end ? next_segment : job->end;
    start_segment(pool, t, scratch);
    for (long begin = segment; begin < segment_end; begin = next_block(begin)) {
      Block *found = ahead;
      ahead = block;
      block = found;
      if (next_block(begin) < job->end)
        find_block(pool, t, next_block(begin), job->end, ahead);
      else if (next != NULL)
        find_block(pool, &next->task, next->begin, next->end, ahead);
      else
        ahead->num_spans = 0;
      attend_block_of[pool->kept][pool->is_bf16](a, pool, t, begin, block, ahead, scratch, amx);
    }
    for (int row = 0; row < t->rows; row++) {
      float *total = scratch->total + row * width, *sum = scratch->sum + row * width;
      if (segment == job->begin) {
        memcpy(total, sum, (size_t)width * sizeof(float));
        scratch->total_max[row] = scratch->sum_max[row];
        scratch->total_weight[row] = scratch->sum_weight[row];
      } else {
        merge_row(total, &scratch->total_max[row], &scratch->total_weight[row], sum,
                  scratch->sum_max[row], scratch->sum_weight[row], pool->dim);
      }
    }
  }
  store_job(a, pool, job, scratch);
}

/* Merges the segments of a split request's rows. */
static void merge_segments(const Attention *a, const Pool *pool, const Plan *plan, long request,
                           long kv_head) {
  const Share *share = &plan->shares[request];
  long group = group_of(a, pool), width = pool->dim + 2;
  long rows = (a->cu_q_lens[request + 1] - a->cu_q_lens[request]) * group;
  float *parts = plan->partials + (share->partials + kv_head * share->segments * rows) * width;
  for (long row = 0; row < rows; row++) {
    float *total = parts + row * width;
    for (long s = 1; s < share->segments; s++) {
      const float *sum = parts + (s * rows + row) * width;
      merge_row(total, total + pool->dim, total + pool->dim + 1, sum, sum[pool->dim],
                sum[pool->dim + 1], pool->dim);
    }
    write_row(a, pool, total, total[pool->dim], total[pool->dim + 1],
              a->cu_q_lens[request] + row / group, kv_head * group + row % group);
  }
}

/* One thread's part; every thread of the team calls it. */
static void attention_share(const Attention *a, const Pool *pool, Plan *plan, long layer,
                            Member *me) {
  Scratch scratch;
  Amx amx = {0};
  long index = __atomic_fetch_add(&plan->next_task, 1, __ATOMIC_RELAXED);
  Job job;
  if (index < plan->tasks) job = find_job(a, pool, plan, layer, index);
  while (index < plan->tasks) {
    long next_index = __atomic_fetch_add(&plan->next_task, 1, __ATOMIC_RELAXED);
    Job next;
    if (next_index < plan->tasks) next = find_job(a, pool, plan, layer, next_index);
    run_job(a, pool, &job, next_index < plan->tasks ? &next : NULL, &scratch, &amx);
    index = next_index;
    job = next;
  }
  release_amx(&amx);
  if (!plan->any_split) return;
  wait_for_all(me);
  for (long i = me->thread; i < a->requests * pool->kv_heads; i += me->threads)
    if (plan->shares[i / pool->kv_heads].split)
      merge_segments(a, pool, plan, i / pool->kv_heads, i % pool->kv_heads);
}

#endif
