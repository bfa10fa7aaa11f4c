// Sampling on the CPU: one call draws a token for each row of logits.
//
// The noise is defined in ops/sampling/noise.py and is the same bit by bit here: compile without contraction of
// a * b + c. What is kept and what is drawn is defined in ops/sampling/reference.py. No row is sorted:
//  - every pass over a row uses the largest logit of each chunk of 64, found once;
//  - a filter is a threshold on the logit (ties at the threshold are kept together), found by
//    counting or weighing buckets and looking only into the bucket where the limit falls;
//  - noise is computed in full only for tokens that a cheap upper bound cannot rule out.
//
// Tokens: >= 0 drawn; ERROR_NOT_FINITE and ERROR_NO_CANDIDATE otherwise.

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { CHUNK = 64, BLOCK = 256, NUM_BUCKETS = 256, SMALL = 32 };
enum { ERROR_NOT_FINITE = -1, ERROR_NO_CANDIDATE = -2 };

static const float MASKED = -FLT_MAX;
static const double GREEDY_TEMPERATURE = 1e-5;
static const double LOG2_E = 1.44269504088896340736;

#ifdef __FMA__
#define MULTIPLY_ADD(a, b, c) __builtin_fma(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

// Columns of a slot's row of parameters, as `Field` in ops/sampling/reference.py has them. The rest
// is for devices.
enum { TEMPERATURE = 0, TOP_P = 1, GAP = 2, SEED = 3, TOP_K = 4, MASK_END = 5, TOP_N_SIGMA = 11 };
enum { NUM_FIELDS = 12 };

// Memory of one thread for rows of `vocab` logits.
typedef struct {
  float *maxima;  // one a chunk
  float *copy;    // as many
  float *logits;  // candidates
  float *search;  // candidates in the search
  float *masked;  // a row under its mask
  uint32_t *ids;  // of candidates
} Scratch;

typedef struct {
  const float *logits;
  const uint32_t *ids;  // NULL: candidate i is token i
  int64_t count;
  float threshold;  // lower ones are no candidates (used without ids only)
  double largest, inverse_temperature, temperature;
} Candidates;

// ---- noise -------------------------------------------------------------------------------------

static inline double natural_log(double x) {
  int64_t bits;
  memcpy(&bits, &x, 8);
  bits += INT64_C(0x3FF0000000000000) - INT64_C(0x3FE6A09E00000000);
  const double k = (double)((bits >> 52) - 1023);
  bits = (bits & INT64_C(0x000FFFFFFFFFFFFF)) + INT64_C(0x3FE6A09E00000000);
  memcpy(&x, &bits, 8);
  const double f = x - 1.0;
  const double s = f / (2.0 + f), z = s * s, w = z * z;
  const double t1 = w * (3.999999999940941908e-01 +
                         w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const double t2 =
      z * (6.666666666666735130e-01 +
           w * (2.857142874366239149e-01 +
                w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  const double half_square = 0.5 * f * f;
  return (s * (half_square + (t2 + t1)) + k * 1.90821492927058770002e-10 - half_square + f) +
         k * 6.93147180369123816490e-01;
}

// One round of Philox; key words are bumped by the caller.
#define PHILOX_ROUND(c0, c1, c2, c3, k0, k1)                            \
  do {                                                                  \
    const uint64_t first = UINT64_C(0xD2511F53) * (uint64_t)(c0);       \
    const uint64_t second = UINT64_C(0xCD9E8D57) * (uint64_t)(c2);      \
    const uint32_t next0 = (uint32_t)(second >> 32) ^ (c1) ^ (k0);      \
    const uint32_t next2 = (uint32_t)(first >> 32) ^ (c3) ^ (k1);       \
    (c1) = (uint32_t)second;                                            \
    (c3) = (uint32_t)first;                                             \
    (c0) = next0;                                                       \
    (c2) = next2;                                                       \
  } while (0)

#define KEY0(seed, round) ((uint32_t)(seed) + (uint32_t)(round) * UINT32_C(0x9E3779B9))
#define KEY1(seed, round) ((uint32_t)((seed) >> 32) + (uint32_t)(round) * UINT32_C(0xBB67AE85))

void weft_philox(const uint32_t *counter, uint64_t seed, uint32_t *words) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  for (int r = 0; r < 10; r++) PHILOX_ROUND(c0, c1, c2, c3, KEY0(seed, r), KEY1(seed, r));
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

static double gumbel_noise(uint64_t seed, uint64_t position, uint32_t id) {
  const uint32_t counter[4] = {id >> 1, (uint32_t)position, (uint32_t)(position >> 32), 0};
  uint32_t words[4];
  weft_philox(counter, seed, words);
  const uint64_t high = words[2 * (id & 1)], low = words[2 * (id & 1) + 1];
  const double uniform = ((double)(high << 20 | low >> 12) + 0.5) * 0x1p-52;
  return -natural_log(-natural_log(uniform));
}

void weft_gumbel(uint64_t seed, uint64_t position, const uint32_t *ids, int64_t count,
                 double *noise) {
  for (int64_t i = 0; i < count; i++) noise[i] = gumbel_noise(seed, position, ids[i]);
}

// The high words of a run of `2 * pairs` tokens from an even id on.
static void high_words_of_run(uint64_t seed, uint64_t position, uint32_t first_pair, int pairs,
                              uint32_t *restrict high) {
  uint32_t even[BLOCK / 2], odd[BLOCK / 2];
  const uint32_t low = (uint32_t)position, top = (uint32_t)(position >> 32);
#pragma omp simd
  for (int i = 0; i < pairs; i++) {
    uint32_t c0 = first_pair + (uint32_t)i, c1 = low, c2 = top, c3 = 0;
    for (int r = 0; r < 10; r++) PHILOX_ROUND(c0, c1, c2, c3, KEY0(seed, r), KEY1(seed, r));
    even[i] = c0;
    odd[i] = c2;
  }
  for (int i = 0; i < pairs; i++) high[2 * i] = even[i], high[2 * i + 1] = odd[i];
}

static void high_words_of_ids(uint64_t seed, uint64_t position, const uint32_t *restrict ids,
                              int count, uint32_t *restrict high) {
  const uint32_t low = (uint32_t)position, top = (uint32_t)(position >> 32);
#pragma omp simd
  for (int i = 0; i < count; i++) {
    uint32_t c0 = ids[i] >> 1, c1 = low, c2 = top, c3 = 0;
    for (int r = 0; r < 10; r++) PHILOX_ROUND(c0, c1, c2, c3, KEY0(seed, r), KEY1(seed, r));
    high[i] = (ids[i] & 1) ? c2 : c0;
  }
}

// ---- weights and thresholds --------------------------------------------------------------------

// e^x for x <= 0, to about 1 ulp; 0 below -700. Weighs candidates, so its last bit never matters.
static inline double exp_of_negative(double x) {
  const double clamped = x < -700.0 ? -700.0 : x;
  const double shift = 0x1.8p52;
  const double n = (clamped * LOG2_E + shift) - shift;
  const double r = MULTIPLY_ADD(n, -1.90821492927058770002e-10,
                                MULTIPLY_ADD(n, -6.93147180369123816490e-01, clamped));
  double p = 1.0 / 6227020800.0;
  p = MULTIPLY_ADD(p, r, 1.0 / 479001600.0);
  p = MULTIPLY_ADD(p, r, 1.0 / 39916800.0);
  p = MULTIPLY_ADD(p, r, 1.0 / 3628800.0);
  p = MULTIPLY_ADD(p, r, 1.0 / 362880.0);
  p = MULTIPLY_ADD(p, r, 1.0 / 40320.0);
  p = MULTIPLY_ADD(p, r, 1.0 / 5040.0);
  p = MULTIPLY_ADD(p, r, 1.0 / 720.0);
  p = MULTIPLY_ADD(p, r, 1.0 / 120.0);
  p = MULTIPLY_ADD(p, r, 1.0 / 24.0);
  p = MULTIPLY_ADD(p, r, 1.0 / 6.0);
  p = MULTIPLY_ADD(p, r, 0.5);
  p = MULTIPLY_ADD(p, r, 1.0);
  p = MULTIPLY_ADD(p, r, 1.0);
  const int64_t exponent = ((int64_t)n + 1023) << 52;
  double power;
  memcpy(&power, &exponent, 8);
  return x < -700.0 ? 0.0 : p * power;
}

static double sum_of_weights(const float *restrict logits, int64_t count, double largest,
                             double inverse_temperature) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; i++)
    sum += exp_of_negative(((double)logits[i] - largest) * inverse_temperature);
  return sum;
}

// How a search weighs a logit: 1, or its share in units of the most likely token's.
typedef struct {
  int by_weight;
  double largest, inverse_temperature;
} Weighing;

static void weigh(const float *restrict logits, int count, const Weighing *how,
                  double *restrict weights) {
  const double largest = how->largest, inverse = how->inverse_temperature;
  if (how->by_weight) {
#pragma omp simd
    for (int i = 0; i < count; i++)
      weights[i] = exp_of_negative(((double)logits[i] - largest) * inverse);
  } else {
    for (int i = 0; i < count; i++) weights[i] = 1.0;
  }
}

// Smallest kept value among at most SMALL ones, given the weight of all above them.
static float threshold_of_few(float *values, int count, const Weighing *how, double above,
                              double limit) {
  double weights[SMALL];
  for (int i = 1; i < count; i++) {
    const float value = values[i];
    int j = i;
    for (; j > 0 && values[j - 1] < value; j--) values[j] = values[j - 1];
    values[j] = value;
  }
  weigh(values, count, how, weights);
  float kept = values[0];
  for (int i = 0; i < count && above < limit;) {
    kept = values[i];
    for (; i < count && values[i] == kept; i++) above += weights[i];
  }
  return kept;
}

// The smallest kept value, where a value is kept if all above it weigh less than `limit` (> 0).
// Destroys `values`. Buckets are monotone in the value, so equal values share one.
static float threshold_search(float *values, int64_t count, const Weighing *how, double limit) {
  double above = 0.0;
  for (;;) {
    if (count <= SMALL) return threshold_of_few(values, (int)count, how, above, limit);
    float low = values[0], high = values[0];
#pragma omp simd reduction(min : low) reduction(max : high)
    for (int64_t i = 0; i < count; i++) {
      low = values[i] < low ? values[i] : low;
      high = values[i] > high ? values[i] : high;
    }
    if (low == high) return low;
    const double scale = NUM_BUCKETS / ((double)high - low);
    double masses[NUM_BUCKETS] = {0}, weights[BLOCK];
    int32_t buckets[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
      const int n = (int)(count - start < BLOCK ? count - start : BLOCK);
      weigh(values + start, n, how, weights);
      for (int i = 0; i < n; i++) {
        const int32_t b = (int32_t)(((double)high - values[start + i]) * scale);
        buckets[i] = b < NUM_BUCKETS ? b : NUM_BUCKETS - 1;
      }
      for (int i = 0; i < n; i++) masses[buckets[i]] += weights[i];
    }
    int boundary = 0;
    while (boundary < NUM_BUCKETS - 1 && above + masses[boundary] < limit)
      above += masses[boundary++];
    int64_t n = 0;
    for (int64_t i = 0; i < count; i++) {
      const float value = values[i];
      const int32_t b = (int32_t)(((double)high - value) * scale);
      values[n] = value;
      n += (b < NUM_BUCKETS ? b : NUM_BUCKETS - 1) == boundary;
    }
    count = n;
  }
}

// ---- candidates --------------------------------------------------------------------------------

// Fills `maxima`; the row's largest logit, or NAN if one is not finite.
static float chunk_maxima(const float *row, int64_t vocab, float *maxima) {
  float largest = -FLT_MAX;
  uint32_t magnitude = 0;
  for (int64_t start = 0; start < vocab; start += CHUNK) {
    const int n = (int)(vocab - start < CHUNK ? vocab - start : CHUNK);
    float chunk_largest = -FLT_MAX;
    uint32_t bits[CHUNK];
    memcpy(bits, row + start, (size_t)n * 4);
#pragma omp simd reduction(max : chunk_largest, magnitude)
    for (int i = 0; i < n; i++) {
      const float value = row[start + i];
      chunk_largest = value > chunk_largest ? value : chunk_largest;
      const uint32_t without_sign = bits[i] & UINT32_C(0x7FFFFFFF);
      magnitude = without_sign > magnitude ? without_sign : magnitude;
    }
    maxima[start / CHUNK] = chunk_largest;
    largest = chunk_largest > largest ? chunk_largest : largest;
  }
  return magnitude >= UINT32_C(0x7F800000) ? NAN : largest;
}

// Copies `row` with MASKED in the place of each token whose bit is 0; returns whether the row is
// finite, at those places too.
static int apply_mask(const float *restrict row, int64_t vocab, const uint32_t *restrict mask,
                      float *restrict masked) {
  uint32_t magnitude = 0;
  for (int64_t start = 0; start < vocab; start += 32) {
    const int n = (int)(vocab - start < 32 ? vocab - start : 32);
    const uint32_t word = mask[start / 32];
    uint32_t bits[32];
    memcpy(bits, row + start, (size_t)n * 4);
#pragma omp simd reduction(max : magnitude)
    for (int i = 0; i < n; i++) {
      masked[start + i] = (word >> i) & 1 ? row[start + i] : MASKED;
      const uint32_t without_sign = bits[i] & UINT32_C(0x7FFFFFFF);
      magnitude = without_sign > magnitude ? without_sign : magnitude;
    }
  }
  return magnitude < UINT32_C(0x7F800000);
}

static int64_t first_of_largest(const float *row, int64_t vocab, const float *maxima,
                                float largest) {
  int64_t i = 0;
  while (maxima[i / CHUNK] != largest) i += CHUNK;
  while (i < vocab - 1 && row[i] != largest) i++;
  return i;
}

// Candidates of at least `threshold` in order of their ids.
static int64_t collect(const float *row, int64_t vocab, float threshold, Scratch *scratch) {
  int64_t n = 0;
  for (int64_t start = 0; start < vocab; start += CHUNK) {
    if (scratch->maxima[start / CHUNK] < threshold) continue;
    const int64_t end = vocab - start < CHUNK ? vocab : start + CHUNK;
    for (int64_t i = start; i < end; i++) {
      scratch->logits[n] = row[i];
      scratch->ids[n] = (uint32_t)i;
      n += row[i] >= threshold;
    }
  }
  return n;
}

// Value of the k-th largest logit, 1 <= k <= vocab.
static float kth_largest(const float *row, int64_t vocab, int64_t k, Scratch *scratch) {
  const int64_t num_chunks = (vocab + CHUNK - 1) / CHUNK;
  const Weighing count = {0, 0.0, 0.0};
  float bound = -FLT_MAX;
  if (k <= num_chunks) {
    // k chunks hold a value at least as large as the k-th largest maximum.
    memcpy(scratch->copy, scratch->maxima, (size_t)num_chunks * sizeof(float));
    bound = threshold_search(scratch->copy, num_chunks, &count, (double)k);
  }
  const int64_t n = collect(row, vocab, bound, scratch);
  return threshold_search(scratch->logits, n, &count, (double)k);
}

static void keep_at_least(Candidates *candidates, float threshold, Scratch *scratch) {
  int64_t n = 0;
  for (int64_t i = 0; i < candidates->count; i++) {
    const float value = scratch->logits[i];
    scratch->logits[n] = value;
    scratch->ids[n] = scratch->ids[i];
    n += value >= threshold;
  }
  candidates->count = n;
}

static void take_from_row(Candidates *candidates, const float *row, int64_t vocab,
                          float threshold, Scratch *scratch) {
  candidates->count = collect(row, vocab, threshold, scratch);
  candidates->logits = scratch->logits;
  candidates->ids = scratch->ids;
}

// Many candidates: going through the row costs less than through the list, as two tokens share a
// block of noise there.
static void widen_to_row(Candidates *candidates, const float *row, int64_t vocab) {
  float threshold = (float)candidates->largest;
#pragma omp simd reduction(min : threshold)
  for (int64_t i = 0; i < candidates->count; i++)
    threshold = candidates->logits[i] < threshold ? candidates->logits[i] : threshold;
  candidates->threshold = threshold;
  candidates->logits = row;
  candidates->ids = NULL;
  candidates->count = vocab;
}

// The smallest set of most likely candidates whose mass is at least `top_p`.
static void filter_top_p(Candidates *candidates, const float *row, int64_t vocab, double top_p,
                         Scratch *scratch) {
  const Weighing how = {1, candidates->largest, candidates->inverse_temperature};
  const double total = sum_of_weights(candidates->logits, candidates->count, how.largest,
                                      how.inverse_temperature);
  if (candidates->ids == NULL) {
    // Tokens each lighter than (1 - p) / vocab of the total weigh less than 1 - p together: all
    // of them are dropped, and the search need not see them.
    const double lightest = (1.0 - top_p) * (1.0 - 1e-6) / (double)vocab * total;
    const double cut = candidates->largest + log(lightest) * candidates->temperature;
    const float below = nextafterf((float)(cut > -FLT_MAX ? cut : -FLT_MAX), -INFINITY);
    take_from_row(candidates, row, vocab, below, scratch);
  }
  memcpy(scratch->search, candidates->logits, (size_t)candidates->count * sizeof(float));
  const float threshold =
      threshold_search(scratch->search, candidates->count, &how, top_p * total);
  keep_at_least(candidates, threshold, scratch);
}

// The standard deviation of the logits that are not masked.
static double deviation(const float *row, int64_t vocab) {
  double count = 0.0, sum = 0.0, squares = 0.0;
#pragma omp simd reduction(+ : count, sum, squares)
  for (int64_t i = 0; i < vocab; i++) {
    const double counts = row[i] > MASKED, z = row[i] > MASKED ? row[i] : 0.0;
    count += counts;
    sum += z;
    squares += z * z;
  }
  const double mean = sum / count;
  return sqrt(fmax(squares / count - mean * mean, 0.0));
}

// Candidates at most `-gap` below the largest logit, in units of the temperature.
static void filter_gap(Candidates *candidates, const float *row, int64_t vocab, double gap,
                       Scratch *scratch) {
  if (candidates->ids == NULL) {
    const double cut = candidates->largest + gap * candidates->temperature;
    const double slack = 1e-6 * (1.0 + fabs(cut) + fabs(candidates->largest));
    take_from_row(candidates, row, vocab, (float)(cut - slack > -FLT_MAX ? cut - slack : -FLT_MAX),
                  scratch);
  }
  int64_t n = 0;
  for (int64_t i = 0; i < candidates->count; i++) {
    const float value = scratch->logits[i];
    scratch->logits[n] = value;
    scratch->ids[n] = scratch->ids[i];
    n += ((double)value - candidates->largest) / candidates->temperature >= gap;
  }
  candidates->count = n;
}

// ---- drawing -----------------------------------------------------------------------------------

typedef struct {
  double score;
  int64_t token;
} Best;

static void consider(Best *best, const Candidates *candidates, int64_t i, uint64_t seed,
                     uint64_t position) {
  const uint32_t id = candidates->ids == NULL ? (uint32_t)i : candidates->ids[i];
  const double score = (double)candidates->logits[i] / candidates->temperature +
                       gumbel_noise(seed, position, id);
  if (score > best->score || (score == best->score && id < best->token)) {
    best->score = score;
    best->token = id;
  }
}

// Marks candidates whose score may reach `floor_`, all in units of bits below the largest logit.
// From u < (high + 1) / 2^32 follows g < 32 ln 2 - ln(~high), and the bits of a float, read as an
// integer, give its logarithm to base 2 from below.
static int mark_contenders(const float *restrict logits, const uint32_t *restrict high, int count,
                           float largest, float bits_per_unit, float floor_, float threshold,
                           uint8_t *restrict marks) {
  int any = 0;
#pragma omp simd reduction(| : any)
  for (int i = 0; i < count; i++) {
    const float rest = (float)~high[i];
    int32_t rest_bits;
    memcpy(&rest_bits, &rest, 4);
    const float noise_bound = (float)(32 + 127) - (float)rest_bits * 0x1p-23f;
    const int is_contender = ((logits[i] - largest) * bits_per_unit + noise_bound >= floor_) &
                             (logits[i] >= threshold);
    marks[i] = (uint8_t)is_contender;
    any |= is_contender;
  }
  return any;
}

static float contender_floor(const Best *best, const Candidates *candidates) {
  const double base = candidates->largest / candidates->temperature;
  return (float)((best->score - base) * LOG2_E - 0.01);
}

// argmax of logit / temperature + noise; the lowest id of equals.
static int64_t draw(const Candidates *candidates, int64_t first_guess, uint64_t seed,
                    uint64_t position) {
  Best best = {-INFINITY, INT64_MAX};
  if (candidates->count <= SMALL) {
    for (int64_t i = 0; i < candidates->count; i++) consider(&best, candidates, i, seed, position);
    return best.token;
  }
  consider(&best, candidates, first_guess, seed, position);
  const float bits_per_unit = (float)(LOG2_E * candidates->inverse_temperature);
  const float largest = (float)candidates->largest;
  float floor_ = contender_floor(&best, candidates);
  uint32_t high[BLOCK];
  uint8_t marks[BLOCK];
  for (int64_t start = 0; start < candidates->count; start += BLOCK) {
    const int n = (int)(candidates->count - start < BLOCK ? candidates->count - start : BLOCK);
    if (candidates->ids == NULL)
      high_words_of_run(seed, position, (uint32_t)(start / 2), (n + 1) / 2, high);
    else
      high_words_of_ids(seed, position, candidates->ids + start, n, high);
    if (!mark_contenders(candidates->logits + start, high, n, largest, bits_per_unit, floor_,
                         candidates->threshold, marks))
      continue;
    for (int i = 0; i < n; i++)
      if (marks[i]) consider(&best, candidates, start + i, seed, position);
    floor_ = contender_floor(&best, candidates);
  }
  return best.token;
}

static double real(const int64_t *params, int field) {
  double value;
  memcpy(&value, params + field, sizeof value);
  return value;
}

// `params` and `mask` are the slot's: bit i % 32 of word i / 32 says whether token i may be drawn.
static int64_t sample_row(const float *row, int64_t vocab, int64_t position, const int64_t *params,
                          const uint32_t *mask, Scratch *scratch) {
  if (position < params[MASK_END]) {
    if (!apply_mask(row, vocab, mask, scratch->masked)) return ERROR_NOT_FINITE;
    row = scratch->masked;
  }
  const float largest = chunk_maxima(row, vocab, scratch->maxima);
  if (isnan(largest)) return ERROR_NOT_FINITE;
  if (largest == MASKED) return ERROR_NO_CANDIDATE;
  const double temperature = real(params, TEMPERATURE);
  int64_t guess = first_of_largest(row, vocab, scratch->maxima, largest);
  if (temperature < GREEDY_TEMPERATURE) return guess;

  Candidates candidates = {row, NULL, vocab, -FLT_MAX, largest, 1.0 / temperature, temperature};
  const int64_t top_k = params[TOP_K];
  const double top_p = real(params, TOP_P), sigmas = real(params, TOP_N_SIGMA);
  double gap = real(params, GAP);
  if (top_k > 0 && top_k < vocab)
    take_from_row(&candidates, row, vocab, kth_largest(row, vocab, top_k, scratch), scratch);
  if (top_p < 1.0) filter_top_p(&candidates, row, vocab, top_p, scratch);
  if (sigmas > 0.0) gap = fmax(gap, -(sigmas * deviation(row, vocab)) / temperature);
  if (gap > -INFINITY) filter_gap(&candidates, row, vocab, gap, scratch);
  if (candidates.ids != NULL && candidates.count > SMALL && candidates.count > vocab / 4) {
    widen_to_row(&candidates, row, vocab);
  } else if (candidates.ids != NULL) {
    guess = 0;
    while (candidates.logits[guess] != largest) guess++;
  }
  return draw(&candidates, guess, (uint64_t)params[SEED], (uint64_t)position);
}

// ---- entry points ------------------------------------------------------------------------------

int64_t weft_sampling_scratch_floats(int64_t vocab) {
  return 4 * vocab + 2 * ((vocab + CHUNK - 1) / CHUNK) + 16;
}

static Scratch scratch_of_thread(float *memory, int64_t vocab) {
  const int64_t num_chunks = (vocab + CHUNK - 1) / CHUNK;
#ifdef _OPENMP
  memory += weft_sampling_scratch_floats(vocab) * omp_get_thread_num();
#endif
  float *lists = memory + 2 * num_chunks;
  return (Scratch){memory,         memory + num_chunks, lists,
                   lists + vocab,  lists + 2 * vocab,   (uint32_t *)(lists + 3 * vocab)};
}

// logits [num_rows, vocab] with `stride` floats between rows; `memory` as many scratches as
// `num_threads`. `params` and `masks` have a row for each slot. Writes tokens[num_rows].
void weft_sample_rows(const float *logits, int64_t stride, int64_t num_rows, int64_t vocab,
                      const int64_t *slots, const int64_t *positions, const int64_t *params,
                      const uint32_t *masks, float *memory, int num_threads, int64_t *tokens) {
  const int64_t mask_words = (vocab + 31) / 32;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Scratch scratch = scratch_of_thread(memory, vocab);
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < num_rows; r++)
      tokens[r] =
          sample_row(logits + r * stride, vocab, positions[r], params + slots[r] * NUM_FIELDS,
                     masks + slots[r] * mask_words, &scratch);
  }
}

// The `num_top` largest logits of each row, largest first, lower ids first among equals, and the
// logarithm of the sum of all exponentials (NAN for a row that is not finite).
void weft_top_rows(const float *logits, int64_t stride, int64_t num_rows, int64_t vocab,
                   int64_t num_top, float *memory, int num_threads, double *log_sums,
                   int64_t *top_ids) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Scratch scratch = scratch_of_thread(memory, vocab);
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < num_rows; r++) {
      const float *row = logits + r * stride;
      const float largest = chunk_maxima(row, vocab, scratch.maxima);
      log_sums[r] = NAN;
      if (isnan(largest)) continue;
      log_sums[r] = largest + log(sum_of_weights(row, vocab, largest, 1.0));
      if (num_top == 0) continue;
      const float threshold = kth_largest(row, vocab, num_top, &scratch);
      const int64_t n = collect(row, vocab, threshold, &scratch);
      int64_t *top = top_ids + r * num_top;
      int64_t filled = 0;
      for (int64_t i = 0; i < n; i++) {
        const float value = scratch.logits[i];
        if (filled == num_top && !(value > row[top[filled - 1]])) continue;
        int64_t j = filled < num_top ? filled++ : filled - 1;
        for (; j > 0 && row[top[j - 1]] < value; j--) top[j] = top[j - 1];
        top[j] = scratch.ids[i];
      }
    }
  }
}
