/* A mixture of experts: rows are gathered expert by expert, multiplied, and put together again. */
#ifndef WEFT_MOE_H
#define WEFT_MOE_H

#include "linear.h"
#include "lora.h"
#include "rows.h"

/* Declared from this text in weft/kernels/shared/cpu.py.
 * A pair is a row and one of its experts; pairs are numbered row by row. */
typedef struct {
  const Weight *const *w13; /* [experts], gated: [hidden] -> [inner] */
  const Weight *const *w2;  /* [experts]: [inner] -> [hidden] */
  int64_t experts;
  int64_t top_k;
  int64_t rows;
  const void *x;          /* [rows, hidden] */
  const int32_t *ids;     /* [rows * top_k], below experts; experts itself: see is_share */
  const float *weights;   /* [rows * top_k] */
  const void *residual;   /* [rows, hidden], or null */
  void *out;              /* [rows, hidden] */
  int64_t *begins;        /* [experts + 1]: each expert's first place */
  int64_t *units;         /* [2 * (experts + 1)]: units of work before each expert, for w13 and w2 */
  int64_t *place;         /* [rows * top_k]: where a pair's row stands, expert by expert; or -1 */
  void *gathered;         /* [rows * top_k, hidden] */
  void *inner;            /* [rows * top_k, inner] */
  float *products;        /* [rows * top_k, hidden] */
  const Lora *lora;       /* or null; its groups add to w13 and to w2, token_slots are [rows] */
  int32_t *place_slots;   /* [rows * top_k]: of each place, the adapter's slot for its expert */
  int64_t layer;          /* of the adapters */
  int64_t is_share;       /* other ranks have the experts numbered `experts`: no place, no work */
} Experts;

/* Sorts pairs by expert, rows in their order. */
static Status place_pairs(const Experts *m) {
  const long pairs = m->rows * m->top_k;
  memset(m->begins, 0, (size_t)(m->experts + 1) * sizeof *m->begins);
  for (long p = 0; p < pairs; p++) {
    if (m->is_share && m->ids[p] == m->experts) continue;
    if (m->ids[p] < 0 || m->ids[p] >= m->experts) return BAD_EXPERT;
    m->begins[m->ids[p] + 1]++;
  }
  for (long e = 0; e < m->experts; e++) m->begins[e + 1] += m->begins[e];
  int64_t *next = m->units; /* its own content is filled in afterwards */
  memcpy(next, m->begins, (size_t)m->experts * sizeof *next);
  for (long p = 0; p < pairs; p++) m->place[p] = m->ids[p] < m->experts ? next[m->ids[p]]++ : -1;
  int64_t *first = m->units, *second = m->units + m->experts + 1;
  first[0] = second[0] = 0;
  for (long e = 0; e < m->experts; e++) {
    const long rows = m->begins[e + 1] - m->begins[e];
    first[e + 1] = first[e] + (rows > 0 ? linear_units(m->w13[e], rows) : 0);
    second[e + 1] = second[e] + (rows > 0 ? linear_units(m->w2[e], rows) : 0);
  }
  return FINE;
}

/* Sets each place's slot among all adapters' experts, and checks that its rows exist. */
static Status place_slots(const Experts *m) {
  if (m->lora == NULL) return FINE;
  const long each = m->experts + (m->is_share != 0); /* slots of an adapter */
  for (long p = 0; p < m->rows * m->top_k; p++) {
    if (m->place[p] < 0) continue;
    const long slot = m->lora->token_slots[p / m->top_k];
    const long of_expert = slot * each + m->ids[p];
    for (Group group = TO_W13; slot != 0 && group <= TO_W2; group++)
      for (long i = 0; i < m->lora->groups[group].count; i++)
        if (slot < 0 || !part_fits(&m->lora->groups[group].parts[i], of_expert, m->layer, 1))
          return BAD_LORA;
    m->place_slots[m->place[p]] = slot == 0 ? 0 : (int32_t)of_expert;
  }
  return FINE;
}

/* The additions to the rows of one expert, which begin at place `first`. */
typedef struct {
  Lora lora;
  Addition add;
} Placed;

static void place_addition(const Experts *m, Group group, long first, Placed *placed) {
  static const int64_t any[1] = {1};
  placed->add = (Addition){NULL, NULL, m->layer};
  if (m->lora == NULL) return;
  placed->lora = (Lora){.token_slots = m->place_slots + first,
                        .blocks = (int64_t *)any,
                        .shrunk = m->lora->shrunk + first * m->lora->width,
                        .width = m->lora->width};
  placed->add.lora = &placed->lora;
  placed->add.group = &m->lora->groups[group];
}

/* The ranks of this thread's places; few of them share an adapter's expert, so one by one. */
static void shrink_places(const Experts *m, Group group, const void *x, const Member *me) {
  Placed placed;
  place_addition(m, group, 0, &placed);
  if (!adds(&placed.add)) return;
  const int is_bf16 = m->w13[0]->is_bf16;
  Rows mine = rows_of(me, m->begins[m->experts]);
  for (long place = mine.first; place < mine.last; place++) {
    const int32_t slot = m->place_slots[place], at = (int32_t)place;
    for (long i = 0; slot != 0 && i < placed.add.group->count; i++) {
      const LoraPart *part = &placed.add.group->parts[i];
      shrink_block(&placed.lora, part, is_bf16, lora_rows(part, part->table, m->layer, slot),
                   lora_count(part, m->layer, slot), x, &at, 1);
    }
  }
}

static void gather_share(const Experts *m, const Member *me) {
  const Weight *w = m->w13[0];
  const size_t size = (size_t)w->in_features * (w->is_bf16 ? 2 : 4);
  const long begin = m->rows * me->thread / me->threads;
  const long end = m->rows * (me->thread + 1) / me->threads;
  for (long r = begin; r < end; r++)
    for (long j = 0; j < m->top_k; j++) {
      const int64_t place = m->place[r * m->top_k + j];
      if (place < 0) continue;
      memcpy((char *)m->gathered + size * (size_t)place, (const char *)m->x + size * (size_t)r,
             size);
    }
}

static const Weight *const *weights_of(const Experts *m, Group group) {
  return group == TO_W13 ? m->w13 : m->w2;
}

/* Bytes a place for the prepared rows of either product. */
static long places_width(const Experts *m) {
  long width = 0;
  for (Group group = TO_W13; group <= TO_W2; group++)
    for (long e = 0; e < m->experts; e++) {
      const long own = prepared_bytes(weights_of(m, group)[e], 1);
      if (m->begins[e + 1] > m->begins[e] && own > width) width = own;
    }
  return width;
}

/* Prepares this thread's places of x for a product; `prepared`: [places, width]. */
static void prepare_places(const Experts *m, Group group, const void *x, char *prepared, long width,
                           const Member *me) {
  const Rows mine = rows_of(me, m->begins[m->experts]);
  for (long e = 0; e < m->experts && m->begins[e] < mine.last; e++) {
    const Weight *w = weights_of(m, group)[e];
    const long begin = m->begins[e], end = m->begins[e + 1];
    const long first = mine.first > begin ? mine.first : begin;
    const long last = mine.last < end ? mine.last : end;
    if (first >= last) continue;
    const PreparedRows to = prepared_in(w, prepared + begin * width, end - begin);
    const char *rows = (const char *)x + begin * w->in_features * (w->is_bf16 ? 2 : 4);
    prepare_input_rows(w, rows, &to, end - begin, first - begin, last - begin);
  }
}

/* This thread's units of one of the two products, over all experts; `ranges` divide them among
 * `threads`, of which the team may have fewer. */
static void experts_share(const Experts *m, Group group, const void *x, char *prepared, long width,
                          void *out, int out_bf16, Range *ranges, int threads, const Member *me) {
  const Weight *const *weights = weights_of(m, group);
  const int64_t *units = group == TO_W13 ? m->units : m->units + m->experts + 1;
  Placed placed;
  Amx amx = {0};
  int at = 0;
  long e = 0;
  for (int64_t unit; (unit = next_unit(ranges, threads, me->thread, &at)) >= 0;) {
    if (unit < units[e]) e = 0; /* the unit was taken from another thread */
    while (unit >= units[e + 1]) e++;
    const Weight *w = weights[e];
    const long first = m->begins[e], rows = m->begins[e + 1] - first;
    const size_t in = (size_t)(first * w->in_features) * (w->is_bf16 ? 2 : 4);
    const size_t to = (size_t)(first * columns_of(w)) * (out_bf16 ? 2 : 4);
    Target target = {(char *)out + to, NULL, out_bf16};
    place_addition(m, group, first, &placed);
    const PreparedRows to_rows = prepared_in(w, prepared + first * width, rows);
    const Input input = input_of(w, (const char *)x + in, &to_rows);
    linear_unit(w, input, rows, &target, &placed.add, unit - units[e], &amx);
  }
  release_amx(&amx);
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
        if (m->place[pair] < 0) continue;
        const vf given = load_some(m->products, 0, m->place[pair] * hidden + c, n);
        sum = vf_fma(vf_splat(m->weights[pair]), given, sum);
      }
      if (m->residual != NULL) sum += load_some(m->residual, is_bf16, r * hidden + c, n);
      store_some(m->out, is_bf16, r * hidden + c, n, sum);
    }
}

/* One of the two products, x being complete. */
static void expert_product(const Experts *m, Group group, const void *x, char *prepared, long width,
                           void *out, int out_bf16, Range *ranges, int threads, Member *me) {
  if (width > 0) prepare_places(m, group, x, prepared, width, me);
  if (m->lora != NULL) shrink_places(m, group, x, me);
  if (width > 0 || m->lora != NULL) wait_for_all(me);
  experts_share(m, group, x, prepared, width, out, out_bf16, ranges, threads, me);
  wait_for_all(me);
}

/* `prepared`: memory of `places_width` bytes for each pair. */
static void moe_share(const Experts *m, char *prepared, long width, Range *first, Range *second,
                      int threads, Member *me) {
  gather_share(m, me);
  wait_for_all(me);
  expert_product(m, TO_W13, m->gathered, prepared, width, m->inner, m->w13[0]->is_bf16, first,
                 threads, me);
  expert_product(m, TO_W2, m->inner, prepared, width, m->products, 0, second, threads, me);
  combine_share(m, me);
}

#endif
