/* A mixture of experts: rows are gathered expert by expert, multiplied, and put together again. */
#ifndef WEFT_MOE_H
#define WEFT_MOE_H

#include "linear.h"
#include "rows.h"

/* As laid out by weft/kernels/cpu.py. A pair is a row and one of its experts; pairs are numbered
 * row by row. */
typedef struct {
  const Weight *const *w13; /* [experts], gated: [hidden] -> [inner] */
  const Weight *const *w2;  /* [experts]: [inner] -> [hidden] */
  int64_t experts;
  int64_t top_k;
  int64_t rows;
  const void *x;          /* [rows, hidden] */
  const int32_t *ids;     /* [rows * top_k], below experts */
  const float *weights;   /* [rows * top_k] */
  const void *residual;   /* [rows, hidden], or null */
  void *out;              /* [rows, hidden] */
  int64_t *begins;        /* [experts + 1]: each expert's first place */
  int64_t *units;         /* [2 * (experts + 1)]: units of work before each expert, for w13 and w2 */
  int64_t *place;         /* [rows * top_k]: where a pair's row stands, expert by expert */
  void *gathered;         /* [rows * top_k, hidden] */
  void *inner;            /* [rows * top_k, inner] */
  float *products;        /* [rows * top_k, hidden] */
} Experts;

/* Sorts pairs by expert, rows in their order; 0 when an id is out of range. */
static int place_pairs(const Experts *m) {
  const long pairs = m->rows * m->top_k;
  memset(m->begins, 0, (size_t)(m->experts + 1) * sizeof *m->begins);
  for (long p = 0; p < pairs; p++) {
    if (m->ids[p] < 0 || m->ids[p] >= m->experts) return 0;
    m->begins[m->ids[p] + 1]++;
  }
  for (long e = 0; e < m->experts; e++) m->begins[e + 1] += m->begins[e];
  int64_t *next = m->units; /* filled with its own content afterwards */
  memcpy(next, m->begins, (size_t)m->experts * sizeof *next);
  for (long p = 0; p < pairs; p++) m->place[p] = next[m->ids[p]]++;
  int64_t *first = m->units, *second = m->units + m->experts + 1;
  first[0] = second[0] = 0;
  for (long e = 0; e < m->experts; e++) {
    const long rows = m->begins[e + 1] - m->begins[e];
    first[e + 1] = first[e] + (rows > 0 ? linear_units(m->w13[e], rows) : 0);
    second[e + 1] = second[e] + (rows > 0 ? linear_units(m->w2[e], rows) : 0);
  }
  return 1;
}

static void gather_share(const Experts *m, const Member *me) {
  const Weight *w = m->w13[0];
  const size_t size = (size_t)w->in_features * (w->is_bf16 ? 2 : 4);
  const long begin = m->rows * me->thread / me->threads;
  const long end = m->rows * (me->thread + 1) / me->threads;
  for (long r = begin; r < end; r++)
    for (long j = 0; j < m->top_k; j++)
      memcpy((char *)m->gathered + size * (size_t)m->place[r * m->top_k + j],
             (const char *)m->x + size * (size_t)r, size);
}

/* This thread's units of one of the two products, over all experts. */
static void experts_share(const Experts *m, const Weight *const *weights, const int64_t *units,
                          const void *x, void *out, int out_bf16, Range *ranges, const Member *me) {
  int at = 0;
  long e = 0;
  for (int64_t unit; (unit = next_unit(ranges, me->threads, me->thread, &at)) >= 0;) {
    if (unit < units[e]) e = 0; /* taken from another thread */
    while (unit >= units[e + 1]) e++;
    const Weight *w = weights[e];
    const long first = m->begins[e], rows = m->begins[e + 1] - first;
    const size_t in = (size_t)(first * w->in_features) * (w->is_bf16 ? 2 : 4);
    const size_t to = (size_t)(first * columns_of(w)) * (out_bf16 ? 2 : 4);
    Target target = {(char *)out + to, NULL, out_bf16};
    linear_unit(w, (const char *)x + in, rows, &target, unit - units[e]);
  }
}

/* out = residual + the weighted sum over each row's experts, in the order of its pairs. */
static void combine_share(const Experts *m, const Member *me) {
  const int is_bf16 = m->w2[0]->is_bf16;
  const long hidden = columns_of(m->w2[0]);
  const long begin = m->rows * me->thread / me->threads;
  const long end = m->rows * (me->thread + 1) / me->threads;
  for (long r = begin; r < end; r++)
    for (long c = 0; c < hidden; c += VL) {
      const int n = at_most(hidden - c, VL);
      vf sum = {0};
      for (long j = 0; j < m->top_k; j++) {
        const long pair = r * m->top_k + j;
        sum += m->weights[pair] * load_some(m->products, 0, m->place[pair] * hidden + c, n);
      }
      if (m->residual != NULL) sum += load_some(m->residual, is_bf16, r * hidden + c, n);
      store_some(m->out, is_bf16, r * hidden + c, n, sum);
    }
}

static void moe_share(const Experts *m, Range *first, Range *second, Member *me) {
  const int is_bf16 = m->w13[0]->is_bf16;
  gather_share(m, me);
  wait_for_all(me);
  experts_share(m, m->w13, m->units, m->gathered, m->inner, is_bf16, first, me);
  wait_for_all(me);
  experts_share(m, m->w2, m->units + m->experts + 1, m->inner, m->products, 0, second, me);
  wait_for_all(me);
  combine_share(m, me);
}

#endif
