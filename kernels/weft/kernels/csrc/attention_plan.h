/* How attention is cut into tasks.
 *
 * The positions of a request are cut into segments at fixed places. Each segment is reduced by
 * itself and the results are merged in order, whether one thread does all segments of a block of
 * rows or each goes to another thread; so a row's result does not depend on the batch.
 */
#ifndef WEFT_ATTENTION_PLAN_H
#define WEFT_ATTENTION_PLAN_H

#include <stdlib.h>

#include "rows.h"

#define MAX_ROWS 96 /* query rows times heads of a group in one task */
#define SEGMENT 512 /* positions */
#define KV_BLOCK 64 /* positions between two updates of the running maximum; divides SEGMENT */

typedef struct {
  const void *q; /* [tokens, heads, dim] */
  void *out; /* the same shape */
  const int32_t *page_table; /* [requests, max_pages], rows table_stride apart */
  const int32_t *cu_q_lens; /* [requests + 1] */
  const int32_t *kv_lens; /* [requests] */
  int64_t requests;
  int64_t max_pages;
  int64_t table_stride;
  int64_t heads;
  float scale;
  int64_t first_seen; /* positions before it are never attended to */
  int64_t window; /* positions that a row attends to at most, its own the last; 0: all */
  int64_t is_chunked; /* the window begins at a multiple of its length */
  const int64_t *ancestors; /* [tokens], which rows of its tree each one sees; null: all before it */
  int64_t earlier_rows; /* of each tree: bit 0 is about the place so far before a request's rows */
  const float *sinks; /* [heads], a logit in each head's sum that has no value; null: none */
  float softcap; /* cap of the scores, cap * tanh(score / cap); 0: none */
  const int32_t *key_ends; /* [tokens], position after the last that a row sees; null: its own */
} Attention;

/* Rows are numbered in their tree. The last bit of a word stands for all rows from there on. */
static inline int sees_row(int64_t word, long row) { return word >> (row < 63 ? row : 63) & 1; }

/* How many rows of its tree a row has before itself. */
static inline long depth_of(int64_t word, long row) {
  const uint64_t before = row < 64 ? ((uint64_t)1 << row) - 1 : ~(uint64_t)0;
  const long behind = row > 64 && word < 0 ? row - 64 : 0;
  return __builtin_popcountll((uint64_t)word & before) + behind;
}

/* How one request is cut into tasks. */
typedef struct {
  int64_t first_task; /* tasks: [kv head][row block], or [kv head][segment] when `split` */
  int64_t partials; /* index of the first partial result when `split` */
  int32_t row_blocks;
  int32_t segments;
  int32_t split;
} Share;

typedef struct {
  Share *shares; /* [requests] */
  float *partials; /* [partials][dim + 2]: accumulator, maximum, sum; one row each */
  int64_t tasks;
  int64_t next_task; /* taken with an atomic addition */
  int32_t any_split;
} Plan;

static long group_of(const Attention *a, const Pool *pool) { return a->heads / pool->kv_heads; }
static long rows_per_block(const Attention *a, const Pool *pool) {
  long rows = MAX_ROWS / group_of(a, pool);
  return rows > 0 ? rows : 1;
}

static Status plan_attention(const Attention *a, const Pool *pool, Plan *plan) {
  long group = group_of(a, pool), per_block = rows_per_block(a, pool), partials = 0;
  *plan = (Plan){.shares = malloc((size_t)(a->requests + 1) * sizeof(Share))};
  if (plan->shares == NULL) return OUT_OF_MEMORY;
  for (long r = 0; r < a->requests; r++) {
    long rows = a->cu_q_lens[r + 1] - a->cu_q_lens[r];
    Share share = {.first_task = plan->tasks, .partials = partials};
    share.row_blocks = (int32_t)((rows + per_block - 1) / per_block);
    share.segments = rows > 0 ? (a->kv_lens[r] + SEGMENT - 1) / SEGMENT : 0;
    share.split = share.row_blocks == 1 && share.segments > 1;
    if (share.split) {
      plan->any_split = 1;
      partials += pool->kv_heads * share.segments * rows * group;
    }
    plan->tasks += pool->kv_heads * (share.split ? share.segments : share.row_blocks);
    plan->shares[r] = share;
  }
  plan->shares[a->requests] = (Share){.first_task = plan->tasks};
  if (!plan->any_split) return FINE;
  plan->partials = malloc((size_t)(partials * (pool->dim + 2)) * sizeof(float));
  return plan->partials == NULL ? OUT_OF_MEMORY : FINE;
}

static void free_plan(Plan *plan) {
  free(plan->shares);
  free(plan->partials);
}

/* One task: some rows of a request for one KV head. */
typedef struct {
  const int32_t *pages;
  long layer, kv_head, group;
  long first_position; /* of the first query row */
  long window; /* of Attention */
  int is_chunked;
  long first_read; /* no row sees positions before it: they count as zeros */
  const int64_t *ancestors; /* of the first query row on; null: they see all before them */
  long root; /* place of the tree's first row */
  const int32_t *key_ends; /* of Attention, of the first query row on */
  int rows; /* query rows * group */
} Task;

/* A task with all that is needed to run it. */
typedef struct {
  Task task;
  long first_token; /* of its first query row */
  long begin, end; /* positions it reads; none if begin >= end */
  float *partial; /* where its result goes when the request is split, else null */
} Job;

/* The position of a task's query row; it equals the row's place unless the row is in a tree. */
static inline long position_of(const Task *t, long row) {
  const long place = t->first_position + row;
  return t->ancestors == NULL ? place : t->root + depth_of(t->ancestors[row], place - t->root);
}

static Job find_job(const Attention *a, const Pool *pool, const Plan *plan, long layer,
                    long index) {
  long low = 0, high = a->requests; /* the last request with first_task <= index that has tasks */
  while (high - low > 1) {
    long middle = (low + high) / 2;
    if (plan->shares[middle].first_task <= index) low = middle;
    else high = middle;
  }
  const Share *share = &plan->shares[low];
  long group = group_of(a, pool), per_block = rows_per_block(a, pool);
  long per_head = share->split ? share->segments : share->row_blocks;
  long kv_head = (index - share->first_task) / per_head;
  long part = (index - share->first_task) % per_head;
  long q_rows = a->cu_q_lens[low + 1] - a->cu_q_lens[low], kv_len = a->kv_lens[low];
  /* Later rows see more positions: start with them. */
  long block = share->split ? 0 : share->row_blocks - 1 - part, first = block * per_block;
  long count = q_rows - first < per_block ? q_rows - first : per_block;
  long position = kv_len - q_rows + first, begin = a->first_seen;
  Job job = {.first_token = a->cu_q_lens[low] + first, .end = position + count};
  job.task = (Task){.pages = a->page_table + low * a->table_stride, .layer = layer,
                    .kv_head = kv_head, .group = group, .first_position = position,
                    .window = a->window, .is_chunked = a->is_chunked != 0,
                    .first_read = a->first_seen, .rows = (int)(count * group),
                    .ancestors = a->ancestors == NULL ? NULL : a->ancestors + job.first_token,
                    .key_ends = a->key_ends == NULL ? NULL : a->key_ends + job.first_token,
                    .root = kv_len - q_rows - a->earlier_rows};
  for (long row = 0; a->key_ends != NULL && row < count; row++)
    if (job.task.key_ends[row] > job.end) job.end = job.task.key_ends[row];
  if (a->window > 0) {
    for (long row = 0; a->ancestors != NULL && row < count; row++) {
      long of_row = position_of(&job.task, row);
      if (of_row < position) position = of_row;
    }
    long first_read = position + 1 - a->window;
    if (a->is_chunked) first_read = position / a->window * a->window;
    if (first_read > a->first_seen) job.task.first_read = first_read;
    /* Rounded down to a block's border, so that a row's blocks do not depend on other rows. */
    if (first_read / KV_BLOCK * KV_BLOCK > begin) begin = first_read / KV_BLOCK * KV_BLOCK;
  }
  job.begin = begin;
  if (share->split) {
    if (job.begin < part * SEGMENT) job.begin = part * SEGMENT;
    if (job.end > (part + 1) * SEGMENT) job.end = (part + 1) * SEGMENT;
    long partial = share->partials + (kv_head * share->segments + part) * job.task.rows;
    job.partial = plan->partials + partial * (pool->dim + 2);
  }
  return job;
}

/* Whether everything that will be read lies within the pool and the `tokens` query rows. */
static Status check_attention(const Attention *a, const Pool *pool, long tokens) {
  if (a->cu_q_lens[0] != 0 || a->cu_q_lens[a->requests] != tokens) return BAD_LENGTHS;
  for (long r = 0; r < a->requests; r++) {
    long rows = a->cu_q_lens[r + 1] - a->cu_q_lens[r], kv_len = a->kv_lens[r];
    if (rows < 0 || kv_len < rows || kv_len > a->max_pages * pool->page_size) return BAD_LENGTHS;
    if (rows == 0) continue;
    const int32_t *table = a->page_table + r * a->table_stride;
    long pages = (kv_len + pool->page_size - 1) / pool->page_size;
    int bad = 0;
    for (long i = 0; i < pages; i++) bad |= (uint32_t)table[i] >= (uint64_t)pool->pages;
    if (bad) return BAD_PAGE;
    for (long i = 0, row = a->cu_q_lens[r]; a->key_ends != NULL && i < rows; i++, row++)
      if (a->key_ends[row] <= kv_len - rows + i || a->key_ends[row] > kv_len) return BAD_LENGTHS;
  }
  return FINE;
}

#endif
