/* Full logits, a row at a time: one read of them, then two arrays that stay in cache. `logits.py` has the mathematics.

   Loops are written to become vectors: no branches, few reductions, and those named. Contraction is allowed here (a
   product and a sum rounded once), another order of terms only in the sums that say so. */

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

enum { MEASURED, INVALID, LEFT };
enum { LANES = 256, CHUNK = 4096 };
#define STEEP 60.0f
#define FAR_APART 256.0f
#define LOG2_E 1.4426950408889634f
#define LN2_HIGH 0.693145751953125f
#define LN2_LOW 1.428606765330187e-06f
#define LN2 0.6931471805599453f
#define ROUND 12582912.0f /* 1.5 * 2^23: adding it leaves a rounded integer in the low bits */
#define SQRT_HALF 0x3F3504F3

static inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Where a row is taken apart: q, w, and two arrays of a chunk. */
typedef struct {
    float *q, *w, d[CHUNK], log1p[CHUNK];
} Scratch;

typedef struct {
    float top_p, top_q, most, least;
    bool nan;
} Extremes;

/* Both maxima and both ends of their difference, of what is not NaN; whether a logit is NaN. */
static Extremes extremes(const float *restrict p, const float *restrict q, i64 size) {
    float top_p[LANES], top_q[LANES], most[LANES], least[LANES];
    int32_t bad = 0;
    for (int j = 0; j < LANES; j++) top_p[j] = top_q[j] = most[j] = -INFINITY, least[j] = INFINITY;
    for (i64 start = 0; start < size; start += LANES) {
        int lanes = size - start < LANES ? (int)(size - start) : LANES;
        for (int j = 0; j < lanes; j++) {
            float a = p[start + j], b = q[start + j], gap = a - b;
            top_p[j] = a > top_p[j] ? a : top_p[j];
            top_q[j] = b > top_q[j] ? b : top_q[j];
            most[j] = gap > most[j] ? gap : most[j];
            least[j] = gap < least[j] ? gap : least[j];
            bad |= (a != a) | (b != b);
        }
    }
    Extremes found = {top_p[0], top_q[0], most[0], least[0], bad != 0};
    for (int j = 1; j < LANES; j++) {
        found.top_p = top_p[j] > found.top_p ? top_p[j] : found.top_p;
        found.top_q = top_q[j] > found.top_q ? top_q[j] : found.top_q;
        found.most = most[j] > found.most ? most[j] : found.most;
        found.least = least[j] < found.least ? least[j] : found.least;
    }
    return found;
}

/* Index of the first logit that is `value`. */
static i64 first_of(const float *z, i64 size, float value) {
    for (i64 start = 0; start < size; start += LANES) {
        i64 end = size - start < LANES ? size : start + LANES;
        int32_t found = 0;
        for (i64 j = start; j < end; j++) found |= z[j] == value;
        for (i64 j = start; found && j < end; j++)
            if (z[j] == value) return j;
    }
    return size;
}

/* exp(x) = power (1 + y), x from -87 to 80. */
static inline float exponential(float x, float *power) {
    float rounded = x * LOG2_E + ROUND, n = rounded - ROUND;
    float r = x - n * LN2_HIGH - n * LN2_LOW;
    float y = 1.9875691500e-4f * r + 1.3981999507e-3f;
    y = ((y * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r + 1.6666665459e-1f;
    y = (y * r + 5.0000001201e-1f) * r * r + r;
    *power = float_of((int32_t)((uint32_t)(bits_of(rounded) + 127) << 23));
    return y;
}

/* Fills q and w. */
static void exponentials(const float *restrict z_p, const float *restrict z_q, i64 size, Extremes of, float *restrict q,
                         float *restrict w) {
    float apart = of.top_p - of.top_q;
    for (i64 i = 0; i < size; i++) {
        float power, x = z_q[i] - of.top_q;
        float y = exponential(x > -87.0f ? x : -87.0f, &power);
        q[i] = y * power + power;
        x = z_p[i] - z_q[i] - apart;
        x = x == x ? x : 0.0f; /* NaN, where both are -inf */
        x = x > -87.0f ? x : -87.0f;
        y = exponential(x < 80.0f ? x : 80.0f, &power);
        w[i] = y * power + (power - 1.0f);
    }
}

/* Fills d and log1p(u/2), and turns w into u = expm1(d). */
static void differences(const float *restrict z_p, const float *restrict z_q, i64 size, float apart, double shift,
                        float *restrict w, float *restrict d, float *restrict log1p_half) {
    float scale = (float)exp(-shift), offset = (float)expm1(-shift), less = (float)shift;
    for (i64 i = 0; i < size; i++) {
        float g = z_p[i] - z_q[i] - apart;
        g = g == g ? g : 0.0f; /* NaN, where both are -inf */
        d[i] = g - less;
        float u = w[i] * scale + offset;
        float y = u * 0.5f, one = y + 1.0f;
        int32_t bits = bits_of(one) - SQRT_HALF;
        float n = (float)(bits >> 23);
        float f = float_of((bits & 0x7FFFFF) + SQRT_HALF) - 1.0f;
        float v = 7.0376836292e-2f * f + -1.1514610310e-1f;
        v = ((v * f + 1.1676998740e-1f) * f + -1.2420140846e-1f) * f + 1.4249322787e-1f;
        v = ((v * f + -1.6668057665e-1f) * f + 2.0000714765e-1f) * f + -2.4999993993e-1f;
        v = (v * f + 3.3333331174e-1f) * f - 0.5f;
        w[i] = u;
        log1p_half[i] = v * f * f + f + n * LN2 + (y - (one - 1.0f)) / one; /* the last: what 1 + y rounded away */
    }
}

/* Sums of q and of q w. */
static void masses(const float *q, const float *w, i64 size, double *sum_q, double *sum_w) {
    *sum_q = *sum_w = 0.0;
    for (i64 start = 0; start < size; start += CHUNK) {
        i64 end = size - start < CHUNK ? size : start + CHUNK;
        float a = 0.0f, b = 0.0f;
#pragma omp simd reduction(+ : a, b)
        for (i64 i = start; i < end; i++) {
            a += q[i];
            b += q[i] * w[i];
        }
        *sum_q += (double)a;
        *sum_w += (double)b;
    }
}

/* Adds the sums of |p - q|, p d, q d, (p + q) log1p(u/2), p - q and (p - q) log q, each times sum q. */
static void sums(const float *restrict z_q, i64 size, float top_q, const float *restrict q, const float *restrict u,
                 const float *restrict d, const float *restrict log1p_half, double *totals) {
    float t0 = 0, t1 = 0, t2 = 0, t3 = 0, t4 = 0, t5 = 0;
#pragma omp simd reduction(+ : t0, t1, t2, t3, t4, t5)
    for (i64 i = 0; i < size; i++) {
        float log_q = z_q[i] - top_q;
        log_q = log_q > -1e6f ? log_q : -1e6f;
        float change = q[i] * u[i], p_i = q[i] + change;
        t0 += fabsf(change);
        t1 += p_i * d[i];
        t2 += q[i] * d[i];
        t3 += (p_i + q[i]) * log1p_half[i];
        t4 += change;
        t5 += change * log_q;
    }
    totals[0] += (double)t0, totals[1] += (double)t1, totals[2] += (double)t2;
    totals[3] += (double)t3, totals[4] += (double)t4, totals[5] += (double)t5;
}

/* One row's quantities and its target's log-probabilities; how it went. */
static int8_t measure(const float *z_p, const float *z_q, i64 size, i64 target, Scratch *scratch, double *values,
                      double *logprobs) {
    Extremes of = extremes(z_p, z_q, size);
    if (of.nan || !(isfinite(of.top_p) && isfinite(of.top_q))) {
        for (int j = 0; j < 7; j++) values[j] = (double)NAN;
        return INVALID;
    }
    float apart = of.top_p - of.top_q;
    if (!(isfinite(of.most) && isfinite(of.least) && of.most - of.least < STEEP && fabsf(apart) < FAR_APART)) return LEFT;
    double sum_q, sum_w, totals[6] = {0};
    exponentials(z_p, z_q, size, of, scratch->q, scratch->w);
    masses(scratch->q, scratch->w, size, &sum_q, &sum_w);
    double shift = log1p(sum_w / sum_q);
    for (i64 start = 0; start < size; start += CHUNK) {
        i64 part = size - start < CHUNK ? size - start : CHUNK;
        float *u = scratch->w + start;
        differences(z_p + start, z_q + start, part, apart, shift, u, scratch->d, scratch->log1p);
        sums(z_q + start, part, of.top_q, scratch->q + start, u, scratch->d, scratch->log1p, totals);
    }
    for (int j = 0; j < 6; j++) totals[j] /= sum_q;
    double distance = totals[0], p_d = totals[1], q_d = totals[2], mixture = totals[3], rest = totals[4], entropy = totals[5];
    values[0] = (double)(of.most - of.least) / 2.0;
    values[1] = distance / 2.0;
    values[2] = p_d - rest;
    values[3] = rest - q_d;
    values[4] = (p_d - mixture) / 2.0;
    values[5] = first_of(z_p, size, of.top_p) != first_of(z_q, size, of.top_q) ? 1.0 : 0.0;
    values[6] = -p_d - entropy;
    if (target >= 0) {
        double log_sum = log(sum_q);
        logprobs[0] = (double)z_p[target] - (double)of.top_p - log_sum - shift;
        logprobs[1] = (double)z_q[target] - (double)of.top_q - log_sum;
    }
    return MEASURED;
}

/* Rows `at`[n] of logits [*, vocab], with a token of each or -1: fills values [n, 7], where there is a target logprobs
   [n, 2], and state [n]. `memory` is for 2 vocab floats. */
void kc_float32_rows(const float *z_p, const float *z_q, i64 vocab, const i64 *at, const i64 *targets, i64 size,
                     float *memory, double *values, double *logprobs, int8_t *state) {
    Scratch scratch = {.q = memory, .w = memory + vocab};
    for (i64 k = 0; k < size; k++)
        state[k] = measure(z_p + at[k] * vocab, z_q + at[k] * vocab, vocab, targets[k], &scratch, values + 7 * k,
                           logprobs + 2 * k);
}

static void widen(const uint16_t *restrict from, float *restrict into, i64 size) {
    for (i64 j = 0; j < size; j++) into[j] = float_of((int32_t)((uint32_t)from[j] << 16));
}

/* The same of bfloat16 logits, given as their bits. `memory` is for 4 vocab floats. */
void kc_bfloat16_rows(const uint16_t *z_p, const uint16_t *z_q, i64 vocab, const i64 *at, const i64 *targets, i64 size,
                      float *memory, double *values, double *logprobs, int8_t *state) {
    Scratch scratch = {.q = memory, .w = memory + vocab};
    float *wide_p = memory + 2 * vocab, *wide_q = memory + 3 * vocab;
    for (i64 k = 0; k < size; k++) {
        widen(z_p + at[k] * vocab, wide_p, vocab);
        widen(z_q + at[k] * vocab, wide_q, vocab);
        state[k] = measure(wide_p, wide_q, vocab, targets[k], &scratch, values + 7 * k, logprobs + 2 * k);
    }
}
