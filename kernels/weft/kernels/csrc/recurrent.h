/* Recurrent layers: short convolutions, and heads with a matrix as state. Rows are taken one after
 * another, so that a row's bits do not depend on where its sequence is cut. */
#ifndef WEFT_RECURRENT_H
#define WEFT_RECURRENT_H

#include "rows.h"
#include "simd.h"
#include "team.h"

/* Rows whose keys and queries are prepared together, and the most elements of each. */
#define PREPARED_ROWS 16
#define MAX_KEYS 256
/* Vectors of values that are taken through all rows before the next ones, so that their states stay
 * near. */
#define WIDE 4
#define MAX_TAPS_OF_CONV 8

/* Declared from this text in weft/kernels/shared/cpu.py.
 * Of a head, with keys and values as columns of its state S:
 * S = exp(decay) * S; S += k (beta * (v - k S))^T, or k (step * v)^T; out = q S + skip * v. */
typedef struct {
  const void *q, *k, *v;            /* [rows, heads / shared, keys], the same, [rows, heads, values] */
  int64_t q_row, k_row, v_row;      /* Elements from one row to the next. */
  int64_t q_head, k_head, v_head;   /* The same for heads. */
  const float *decay;               /* [rows, heads, decays] */
  const float *beta;                /* [rows, heads], or null: there is no delta rule */
  const float *steps;               /* [rows, heads], or null: 1 */
  const float *skips;               /* [heads], or null: 0 */
  float *states;                    /* [sequences, heads, keys, values]: before rows, then after */
  void *out;                        /* [rows, heads, values] */
  const int64_t *cu_lens;           /* [sequences + 1] */
  int64_t sequences, heads, shared, keys, values;
  int64_t decays;                   /* 1, or `keys` */
  float scale;                      /* on queries */
  int32_t is_bf16;
  int32_t is_unit;                  /* keys and queries are normalised to length 1 first */
} Recurrence;

/* Of some rows of one head. */
typedef struct {
  ALIGNED float q[PREPARED_ROWS][MAX_KEYS], k[PREPARED_ROWS][MAX_KEYS];
  ALIGNED float kept[PREPARED_ROWS][MAX_KEYS]; /* exp(decay); the first for all where it is one */
} Prepared;

/* out [n] = x * factor, where `is_unit` divided by the length. */
INLINE void load_key(const int is_bf16, const void *x, long offset, long n, float factor,
                     int is_unit, float *out) {
  vf total = {0};
  for (long i = 0; i < n; i += VL) {
    const int some = at_most(n - i, VL);
    const vf value = load_some(x, is_bf16, offset + i, some);
    total = vf_fma(value, value, total);
    store_some(out, 0, i, some, value);
  }
  if (is_unit) factor /= sqrtf(vf_sum(total) + 1e-6f);
  for (long i = 0; i < n; i++) out[i] *= factor;
}

INLINE void prepare_rows(const int is_bf16, const Recurrence *r, long head, long first, long count,
                         Prepared *p) {
  const long shared = head / r->shared;
  for (long i = 0; i < count; i++) {
    const long row = first + i;
    load_key(is_bf16, r->q, row * r->q_row + shared * r->q_head, r->keys, r->scale, r->is_unit,
             p->q[i]);
    load_key(is_bf16, r->k, row * r->k_row + shared * r->k_head, r->keys, 1.0f, r->is_unit, p->k[i]);
    const float *decay = r->decay + (row * r->heads + head) * r->decays;
    for (long d = 0; d < r->decays; d += VL) {
      const int some = at_most(r->decays - d, VL);
      store_some(p->kept[i], 0, d, some, vf_exp(load_some(decay, 0, d, some)));
    }
  }
}

/* Takes `count` prepared rows through the values from `at` on, `wide` vectors of them of which the
 * last has `some` elements. */
INLINE void values_through(const int is_bf16, const int by_key, const int wide, const Recurrence *r,
                           const Prepared *p, float *state, long head, long first, long count,
                           long at, int some) {
  const long keys = r->keys, width = r->values;
  for (long i = 0; i < count; i++) {
    const long row = first + i, gate = row * r->heads + head;
    const float step = r->steps == NULL ? 1.0f : r->steps[gate];
    const float skip = r->skips == NULL ? 0.0f : r->skips[head];
    const float *q = p->q[i], *k = p->k[i], *kept = p->kept[i];
    const long source = row * r->v_row + head * r->v_head + at;
    vf v[WIDE], u[WIDE], out[WIDE];
    for (int w = 0; w < wide; w++) {
      v[w] = load_some(r->v, is_bf16, source + w * VL, w + 1 < wide ? VL : some);
      u[w] = (vf){0};
    }
    if (r->beta != NULL) {
      for (long d = 0; d < keys; d++) {
        const vf key = vf_splat(k[d] * kept[by_key ? d : 0]);
        for (int w = 0; w < wide; w++) {
          const int n = w + 1 < wide ? VL : some;
          u[w] = vf_fma(key, load_some(state, 0, d * width + at + w * VL, n), u[w]);
        }
      }
      for (int w = 0; w < wide; w++) u[w] = (v[w] - u[w]) * r->beta[gate];
    } else {
      for (int w = 0; w < wide; w++) u[w] = v[w] * step;
    }
    for (int w = 0; w < wide; w++) out[w] = v[w] * skip;
    for (long d = 0; d < keys; d++) {
      const vf left = vf_splat(kept[by_key ? d : 0]), key = vf_splat(k[d]), query = vf_splat(q[d]);
      for (int w = 0; w < wide; w++) {
        const int n = w + 1 < wide ? VL : some;
        const long place = d * width + at + w * VL;
        const vf next = vf_fma(key, u[w], left * load_some(state, 0, place, n));
        store_some(state, 0, place, n, next);
        out[w] = vf_fma(query, next, out[w]);
      }
    }
    for (int w = 0; w < wide; w++)
      store_some(r->out, is_bf16, gate * width + at + w * VL, w + 1 < wide ? VL : some, out[w]);
  }
}

/* One head of one sequence. */
INLINE void head_through(const int is_bf16, const int by_key, const Recurrence *r, long sequence,
                         long head, Prepared *p) {
  float *state = r->states + (sequence * r->heads + head) * r->keys * r->values;
  const long end = r->cu_lens[sequence + 1];
  for (long first = r->cu_lens[sequence]; first < end; first += PREPARED_ROWS) {
    const long count = at_most(end - first, PREPARED_ROWS);
    prepare_rows(is_bf16, r, head, first, count, p);
    long at = 0;
    for (; at + WIDE * VL <= r->values; at += WIDE * VL)
      values_through(is_bf16, by_key, WIDE, r, p, state, head, first, count, at, VL);
    for (; at < r->values; at += VL)
      values_through(is_bf16, by_key, 1, r, p, state, head, first, count, at,
                     at_most(r->values - at, VL));
  }
}

static void recurrence_share(const Recurrence *r, Range *ranges, int threads, const Member *me) {
  Prepared prepared;
  int at = 0;
  for (int64_t unit; (unit = next_unit(ranges, threads, me->thread, &at)) >= 0;) {
    const long sequence = unit / r->heads, head = unit % r->heads;
    if (r->is_bf16 && r->decays > 1)
      head_through(1, 1, r, sequence, head, &prepared);
    else if (r->is_bf16)
      head_through(1, 0, r, sequence, head, &prepared);
    else if (r->decays > 1)
      head_through(0, 1, r, sequence, head, &prepared);
    else
      head_through(0, 0, r, sequence, head, &prepared);
  }
}

/* Declared from this text in weft/kernels/shared/cpu.py. Of a channel, with `keys` numbers as state s:
 * s = exp(dt * a) * s + dt * x * b; out = c . s + d * x. */
typedef struct {
  const void *x;          /* [rows, channels] */
  const void *b, *c;      /* [rows, keys] */
  const float *dt;        /* [rows, channels] */
  const float *a;         /* [keys, channels] */
  const float *d;         /* [channels] */
  float *states;          /* [sequences, keys, channels]: before the rows, then after */
  void *out;              /* [rows, channels] */
  const int64_t *cu_lens; /* [sequences + 1] */
  int64_t sequences, channels, keys;
  int32_t is_bf16;
} Selection;

/* VL channels of one sequence. */
INLINE void select_through(const int is_bf16, const Selection *s, long sequence, long channel) {
  const int some = at_most(s->channels - channel, VL);
  float *states = s->states + sequence * s->keys * s->channels;
  const vf skip = load_some(s->d, 0, channel, some);
  for (long row = s->cu_lens[sequence]; row < s->cu_lens[sequence + 1]; row++) {
    const long place = row * s->channels + channel;
    const vf x = load_some(s->x, is_bf16, place, some), dt = load_some(s->dt, 0, place, some);
    const vf taken = dt * x;
    vf out = skip * x;
    for (long n = 0; n < s->keys; n++) {
      const long at = n * s->channels + channel;
      const vf left = vf_exp(dt * load_some(s->a, 0, at, some));
      const vf key = vf_splat(load_one(s->b, is_bf16, row * s->keys + n));
      const vf next = vf_fma(key, taken, left * load_some(states, 0, at, some));
      store_some(states, 0, at, some, next);
      out = vf_fma(vf_splat(load_one(s->c, is_bf16, row * s->keys + n)), next, out);
    }
    store_some(s->out, is_bf16, place, some, out);
  }
}

static void selection_share(const Selection *s, Range *ranges, int threads, const Member *me) {
  const long vectors = (s->channels + VL - 1) / VL;
  int at = 0;
  for (int64_t unit; (unit = next_unit(ranges, threads, me->thread, &at)) >= 0;) {
    const long sequence = unit / vectors, channel = unit % vectors * VL;
    if (s->is_bf16)
      select_through(1, s, sequence, channel);
    else
      select_through(0, s, sequence, channel);
  }
}

/* Declared from this text in weft/kernels/shared/cpu.py. */
typedef struct {
  const void *x;          /* [rows, channels] */
  int64_t row;            /* Elements from one row to the next. */
  const float *weight;    /* [taps, channels], a row's own last */
  const float *bias;      /* [channels], or null */
  void *tails;            /* [sequences, channels, taps - 1]: before the rows, then after */
  void *out;              /* [rows, channels] */
  const int64_t *cu_lens; /* [sequences + 1] */
  int64_t sequences, channels, taps;
  int32_t is_bf16, has_silu;
} Convolution;

/* VL channels of one sequence. */
INLINE void channels_through(const int is_bf16, const Convolution *c, long sequence, long channel) {
  const int some = at_most(c->channels - channel, VL);
  const long before = c->taps - 1, tails = (sequence * c->channels + channel) * before;
  vf weight[MAX_TAPS_OF_CONV], seen[MAX_TAPS_OF_CONV];
  for (long t = 0; t < c->taps; t++)
    weight[t] = load_some(c->weight, 0, t * c->channels + channel, some);
  ALIGNED float values[VL] = {0};
  for (long t = 0; t < before; t++) {
    for (int i = 0; i < some; i++) values[i] = load_one(c->tails, is_bf16, tails + i * before + t);
    seen[t] = *(const vf *)values;
  }
  const vf bias = c->bias == NULL ? (vf){0} : load_some(c->bias, 0, channel, some);
  for (long row = c->cu_lens[sequence]; row < c->cu_lens[sequence + 1]; row++) {
    seen[before] = load_some(c->x, is_bf16, row * c->row + channel, some);
    vf sum = bias;
    for (long t = 0; t < c->taps; t++) sum = vf_fma(weight[t], seen[t], sum);
    store_some(c->out, is_bf16, row * c->channels + channel, some, c->has_silu ? vf_silu(sum) : sum);
    for (long t = 0; t < before; t++) seen[t] = seen[t + 1];
  }
  for (long t = 0; t < before; t++) {
    *(vf *)values = seen[t];
    for (int i = 0; i < some; i++) store_one(c->tails, is_bf16, tails + i * before + t, values[i]);
  }
}

static void convolution_share(const Convolution *c, Range *ranges, int threads, const Member *me) {
  const long vectors = (c->channels + VL - 1) / VL;
  int at = 0;
  for (int64_t unit; (unit = next_unit(ranges, threads, me->thread, &at)) >= 0;) {
    const long sequence = unit / vectors, channel = unit % vectors * VL;
    if (c->is_bf16)
      channels_through(1, c, sequence, channel);
    else
      channels_through(0, c, sequence, channel);
  }
}

#endif
