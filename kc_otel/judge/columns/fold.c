/* The loop that takes a message's plain points: each against its row, and what it adds into a slot.

   Whatever a point says that is not the usual case of `point_streams` leaves it, and what follows of its stream in the
   message, to the code that takes points one by one. So does a sum so close to the border of what its buckets allow that
   rounding might decide otherwise. */

#include "../otlp/wire_columns.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

/* These are what `stream_rows.py`, `points` and `stats.histogram` call so. */
enum { UP, DOWN, SIDE = 160, SPAN = 256, COUNTED = 1, CLOSED = -2, LOADED = 1, NEW = 2, LEAST_SCALE = -2, MOST_SCALE = 20 };
#define MOST (INT64_C(1) << 44)
#define LARGEST_SUM 0x1p565
#define WIDEST_ZERO 0.5
#define UNSAID_ZERO 0x1p-30
#define MOST_EXPONENT 512.0
#define LEAST_EXPONENT -1000.0

typedef struct {
    i64 start, time, scale, count, zero_count, series, pair, contract;
    i64 positive_size, positive_offset, negative_size, negative_offset;
    i64 loaded, dirty, blocked, at, room, wide;
    double sum, min, max, zero_threshold, least, least_negative, magnitude;
    double heard;
} Row;

typedef struct {
    i64 series, shorts, longs, scale, count, zero_count, observed;
    i64 positive_base, negative_base, has_positive, has_negative;
    double zero_threshold, sum, carry, min, max, newest, now;
} Slot;

typedef struct {
    i64 future, start, oldest, gap;
    double shorts, longs;
} Limits;

/* What is known: arrays, and how many rows and slots they have. */
typedef struct {
    Row *rows;
    uint32_t *counts; /* of each row, from its `at` on: positive buckets, then negative ones; in two words each if `wide` */
    Slot *slots;
    i64 *slot_buckets; /* [2, most_slots, SPAN] */
    i64 most_slots;
    i64 (*slot_of)[2]; /* [series, 2] */
    Limits *limits;
    const double *powers; /* [MOST_SCALE - LEAST_SCALE + 1, SIDE + 1] */
} Known;

/* One sign of a point: its counts, and what of them is more than in its row. The bucket numbers are -1 where nothing is. */
typedef struct {
    i64 counts[SIDE + 8], more[SIDE];
    i64 total, added, all, first, last, low, high;
} Counts;

/* Leave numbers of seven bits a byte as the bytes that they have, each in a word; false where one has more than eight.

   A word of the body has the ends of some numbers, which are taken in their order. */
static inline bool spread(const uint8_t *body, i64 at, i64 end, i64 *words) {
    const uint64_t high = 0x8080808080808080u;
    while (at < end) {
        uint64_t word = 0, ends;
        i64 left = end - at;
        if (left >= 8) {
            memcpy(&word, body + at, 8);
            ends = ~word & high;
            if (ends == high) {
                for (int byte = 0; byte < 8; byte++) words[byte] = body[at + byte];
                words += 8, at += 8;
                continue;
            }
            if (ends == 0) return false;
        } else {
            memcpy(&word, body + at, (size_t)left);
            ends = ~word & (high >> (64 - 8 * left));
        }
        int begin = 0;
        while (ends) {
            int after = __builtin_ctzll(ends) + 1;
            ends &= ends - 1;
            *words++ = (i64)(word >> begin & ~UINT64_C(0) >> (64 - (after - begin)));
            begin = after;
        }
        at += begin / 8;
    }
    return true;
}

/* The number that is in up to eight bytes of seven bits. */
static inline i64 joined(uint64_t word) {
    word = (word & 0x007F007F007F007Fu) | (word & 0x7F007F007F007F00u) >> 1;
    word = (word & 0x00003FFF00003FFFu) | (word & 0x3FFF00003FFF0000u) >> 2;
    return (i64)((word & 0x000000000FFFFFFFu) | (word & 0x0FFFFFFF00000000u) >> 4);
}

static inline void used(const i64 *counts, i64 begin, i64 end, i64 *first, i64 *last) {
    i64 low = begin, high = end - 1;
    while (low <= high && counts[low] == 0) low++;
    if (low > high) {
        *first = *last = -1;
        return;
    }
    while (counts[high] == 0) high--;
    *first = low, *last = high;
}

/* Read one sign's counts, and subtract those of the row, whose first bucket is `shift` before; false where a count went
   down, or is none. */
static __attribute__((noinline)) bool subtract(const uint8_t *body, i64 at, i64 end, i64 size, const uint32_t *cells, bool wide, i64 before, i64 shift, Counts *of) {
    of->total = of->added = of->all = 0;
    of->first = of->last = of->low = of->high = -1;
    if (size == 0) return true;
    i64 *restrict counts = of->counts, *restrict more = of->more;
    if (!spread(body, at, end, counts)) return false;
    for (i64 bucket = 0; bucket < size; bucket++) more[bucket] = counts[bucket] = joined((uint64_t)counts[bucket]);
    i64 from = shift < 0 ? -shift : 0, until = before - shift < size ? before - shift : size;
    const i64 *words = (const i64 *)(const void *)cells;
    if (wide)
        for (i64 bucket = from; bucket < until; bucket++) more[bucket] -= words[bucket + shift];
    else
        for (i64 bucket = from; bucket < until; bucket++) more[bucket] -= cells[bucket + shift];
    i64 total = 0, added = 0, wrong = 0, all = 0;
    for (i64 bucket = 0; bucket < size; bucket++) {
        total += counts[bucket];
        added += more[bucket];
        wrong |= more[bucket] | (MOST - counts[bucket]);
        all |= counts[bucket];
    }
    if (wrong < 0) return false;
    of->total = total, of->added = added, of->all = all;
    used(counts, 0, size, &of->first, &of->last);
    used(more, 0, size, &of->low, &of->high);
    return true;
}

/* The sum of |x| if every observation lay at the lower edge of the bucket below its own. Counts are below 2^44, and so
   the last digits of 2^52 and more. */
static inline double least_of(const Counts *of, i64 offset, i64 scale, double step, const double *powers) {
    if (of->first < 0) return 0.0;
    const double *restrict ratio = powers + (scale - LEAST_SCALE) * (SIDE + 1);
    const i64 *restrict counts = of->counts + of->first;
    i64 size = of->last + 1 - of->first, bucket = 0;
    double lanes[8] = {0};
    for (; bucket + 8 <= size; bucket += 8)
        for (int lane = 0; lane < 8; lane++) {
            i64 bits = counts[bucket + lane] | 0x4330000000000000;
            double count;
            memcpy(&count, &bits, sizeof count);
            lanes[lane] += (count - 0x1p52) * ratio[bucket + lane];
        }
    for (; bucket < size; bucket++) lanes[0] += (double)counts[bucket] * ratio[bucket];
    double total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    return pow(2.0, (double)(offset + of->first - 1) * step) * total;
}

/* Whether a sum is surely between its bounds, also if those are rounded otherwise; `sum_fits` decides the rest. */
static inline bool fits(double low, double high, double sum, double slack) {
    double width = fabs(low) + fabs(high);
    double border = slack + 1e-9 * width;
    double apart = 0.2 * slack + 1e-12 * width;
    return low - border + apart < sum && sum < high + border - apart;
}

static inline double either(double value) { return isfinite(value) ? value : NAN; }

/* Whether a point's added buckets of one sign have room in a slot. */
static inline bool has_room(const Counts *of, i64 offset, i64 has, i64 base) {
    return of->low < 0 || !has || (offset + of->low >= base && offset + of->high < base + SPAN);
}

static inline void add(const Counts *of, i64 offset, i64 *has, i64 *base, i64 *buckets) {
    if (of->low < 0) return;
    if (!*has) {
        *has = 1;
        memset(buckets, 0, SPAN * sizeof *buckets);
        *base = offset + of->low - (SPAN - (of->high - of->low + 1)) / 2;
    }
    i64 *restrict into = buckets + (offset - *base);
    for (i64 bucket = of->low; bucket <= of->high; bucket++) into[bucket] += of->more[bucket];
}

/* How many buckets there are from the first to the last that has observations. */
static inline i64 width(const Counts *of) { return of->first < 0 ? 0 : of->last + 1 - of->first; }

/* Keep those in a row, in two words each if `wide`; returns where the next ones begin. */
static inline uint32_t *put(uint32_t *cells, bool wide, const Counts *of) {
    i64 size = width(of);
    if (size == 0) return cells;
    if (wide) {
        memcpy(cells, of->counts + of->first, (size_t)size * sizeof *of->counts);
        return cells + 2 * size;
    }
    for (i64 bucket = 0; bucket < size; bucket++) cells[bucket] = (uint32_t)of->counts[of->first + bucket];
    return cells + size;
}

/* Take the plain ones of points `first` to `last`, in their order; returns how many slots are in use.

   A stream's points that follow on one that is left are left as well: what becomes of them may depend on it. There has to
   be room for a slot for each. `outcomes` gets COUNTED for what was taken, `heard` 1 for pairs of kernels, and `gaps` one
   more for the contract of each point that came late. */
i64 kc_fold(const Known *known, const uint8_t *body, const Point *points, const i64 *rows_of, i64 first, i64 last,
            i64 in_use, double now, i64 message, int8_t *outcomes, uint8_t *heard, i64 *gaps) {
    Counts up, down;
    i64 scale = -1000;
    double wider = 0.0, step = 0.0;
    for (i64 number = first; number < last; number++) {
        i64 at = rows_of[number];
        if (at < 0) continue;
        const Point *point = &points[number];
        Row *row = &known->rows[at];
        const Limits *limit = &known->limits[row->contract];
        uint32_t *up_before = known->counts + row->at, *down_before = up_before + (row->positive_size << row->wide);
        bool new = row->loaded == NEW;
        if (new) row->start = point->start, row->scale = point->scale, row->zero_threshold = point->zero_threshold;
        bool usual = (new ? point->start >= limit->start && point->start <= point->time && point->zero_threshold >= 0.0
                            && point->count > 0 && isfinite(point->min) && isfinite(point->max)
                          : row->loaded == LOADED && row->time >= limit->start && row->count > 0)
            && row->blocked != message && point->plain == 1 && point->has_sum == 1
            && point->start == row->start && row->time < point->time && point->time <= limit->future
            && point->time >= limit->oldest
            && point->scale == row->scale && LEAST_SCALE <= point->scale && point->scale <= MOST_SCALE
            && point->zero_threshold == row->zero_threshold && row->zero_threshold <= WIDEST_ZERO
            && point->positive_size <= SIDE && point->negative_size <= SIDE
            && row->zero_count <= point->zero_count && point->zero_count < MOST
            && known->slot_of[row->series][0] != CLOSED
            && isfinite(point->sum) && fabs(point->sum) < LARGEST_SUM;
        if (usual && point->scale != scale) {
            scale = point->scale;
            step = pow(2.0, (double)-scale);
            wider = pow(2.0, 3.0 * step);
        }
        i64 zero_added = point->zero_count - row->zero_count;
        usual = usual
            && subtract(body, point->positive, point->positive_end, point->positive_size, up_before,
                        row->wide, row->positive_size, point->positive_offset - row->positive_offset, &up)
            && subtract(body, point->negative, point->negative_end, point->negative_size, down_before,
                        row->wide, row->negative_size, point->negative_offset - row->negative_offset, &down)
            && (width(&up) + width(&down)) << row->wide <= row->room && (row->wide || (up.all | down.all) >> 32 == 0)
            && up.total + down.total + point->zero_count == point->count && point->count < MOST
            /* Also buckets of the value before that are not in this one would have gone down. */
            && up.added + down.added + zero_added == point->count - row->count
            && (up.first < 0 || (double)(point->positive_offset + up.first) * step >= LEAST_EXPONENT)
            && (down.first < 0 || (double)(point->negative_offset + down.first) * step >= LEAST_EXPONENT)
            && (double)(point->positive_offset + up.last + 1) * step <= MOST_EXPONENT
            && (double)(point->negative_offset + down.last + 1) * step <= MOST_EXPONENT;
        double least = 0.0, least_negative = 0.0, size = 0.0;
        if (usual) {
            least = least_of(&up, point->positive_offset, scale, step, known->powers);
            least_negative = least_of(&down, point->negative_offset, scale, step, known->powers);
            double zero = point->zero_threshold > UNSAID_ZERO ? point->zero_threshold : UNSAID_ZERO;
            double zeros = (double)point->zero_count * zero, zeros_added = (double)zero_added * zero;
            double low = least - least_negative * wider - zeros;
            double high = least * wider - least_negative + zeros;
            size = fabs(low) > fabs(high) ? fabs(low) : fabs(high);
            double low_added = (least - row->least) - (least_negative - row->least_negative) * wider - zeros_added;
            double high_added = (least - row->least) * wider - (least_negative - row->least_negative) + zeros_added;
            usual = fits(low, high, point->sum, 0.0)
                && (point->count == row->count
                    || fits(low_added, high_added, point->sum - row->sum, 1e-12 * (row->magnitude + size)));
        }
        if (!usual) {
            row->blocked = message;
            continue;
        }
        if (point->count > row->count) {
            /* The outermost edges of what was added, in the words of `difference`. */
            double lowest, highest;
            if (down.low >= 0) lowest = -pow(2.0, (double)(point->negative_offset + down.high + 1) * step);
            else if (zero_added) lowest = -point->zero_threshold;
            else lowest = pow(2.0, (double)(point->positive_offset + up.low) * step);
            if (up.low >= 0) highest = pow(2.0, (double)(point->positive_offset + up.high + 1) * step);
            else if (zero_added) highest = point->zero_threshold;
            else highest = -pow(2.0, (double)(point->negative_offset + down.low) * step);
            double least_value = either(point->min), most_value = either(point->max);
            bool moved = most_value > row->max;
            if (least_value < row->min || lowest < least_value) lowest = least_value;
            if (moved || highest > most_value) highest = most_value;
            double time = (double)point->time / 1e9;
            if (time > now) time = now;
            i64 shorts = (i64)floor(time / limit->shorts), longs = (i64)floor(time / limit->longs);
            i64 *counts_into = &known->slot_of[row->series][shorts & 1];
            Slot *slot = &known->slots[*counts_into >= 0 ? *counts_into : in_use];
            if (*counts_into < 0
                || !(slot->shorts == shorts && slot->longs == longs && slot->scale == point->scale
                     && slot->zero_threshold == point->zero_threshold
                     && has_room(&up, point->positive_offset, slot->has_positive, slot->positive_base)
                     && has_room(&down, point->negative_offset, slot->has_negative, slot->negative_base))) {
                slot = &known->slots[in_use];
                *counts_into = in_use++;
                *slot = (Slot){
                    .series = row->series, .shorts = shorts, .longs = longs, .scale = point->scale,
                    .zero_threshold = point->zero_threshold,
                    .min = INFINITY, .max = -INFINITY, .newest = -INFINITY, .now = -INFINITY,
                };
            }
            slot->count += point->count - row->count;
            slot->zero_count += zero_added;
            /* Neumaier's sum: what is lost in adding is carried along. */
            double gain = point->sum - row->sum, whole = slot->sum + gain;
            slot->carry += fabs(slot->sum) >= fabs(gain) ? (slot->sum - whole) + gain : (gain - whole) + slot->sum;
            slot->sum = whole;
            if (lowest < slot->min) slot->min = lowest;
            if (highest > slot->max) slot->max = highest, slot->observed = moved;
            else if (highest == slot->max && moved) slot->observed = 1;
            if (time > slot->newest) slot->newest = time;
            if (now > slot->now) slot->now = now;
            i64 *buckets = known->slot_buckets + *counts_into * SPAN;
            add(&up, point->positive_offset, &slot->has_positive, &slot->positive_base, buckets);
            add(&down, point->negative_offset, &slot->has_negative, &slot->negative_base, buckets + known->most_slots * SPAN);
        }
        outcomes[number] = COUNTED;
        if (!new && point->time - row->time > limit->gap) gaps[row->contract]++;
        row->loaded = LOADED;
        heard[row->pair] = 1;
        row->time = point->time, row->count = point->count, row->zero_count = point->zero_count, row->sum = point->sum;
        row->min = either(point->min), row->max = either(point->max);
        row->positive_offset = up.first < 0 ? 0 : point->positive_offset + up.first, row->positive_size = width(&up);
        row->negative_offset = down.first < 0 ? 0 : point->negative_offset + down.first, row->negative_size = width(&down);
        put(put(up_before, row->wide, &up), row->wide, &down);
        row->least = least, row->least_negative = least_negative, row->magnitude = size;
        row->heard = now, row->dirty = 1;
    }
    return in_use;
}

/* Counts of the buckets of some rows [n], positive and then negative ones, one row after the other. */
void kc_counts_of(const Known *known, const i64 *rows, i64 n, i64 *counts) {
    for (i64 number = 0; number < n; number++) {
        const Row *row = &known->rows[rows[number]];
        const uint32_t *cells = known->counts + row->at;
        i64 size = row->positive_size + row->negative_size;
        if (row->wide && size) memcpy(counts, cells, (size_t)size * sizeof *counts);
        else
            for (i64 bucket = 0; bucket < size; bucket++) counts[bucket] = cells[bucket];
        counts += size;
    }
}

/* What is used of one sign's buckets of some slots [n]: number of the first bucket and how many there are, offset [n] and
   size [n], and the counts of all of them, one after the other. Returns how many counts, and the largest one. */
i64 kc_used_parts(const Slot *slots, const i64 *buckets, const i64 *which, i64 n, i64 side, i64 *offset, i64 *size,
                  i64 *counts, i64 *largest) {
    i64 total = 0, most = 0;
    for (i64 number = 0; number < n; number++) {
        const Slot *slot = &slots[which[number]];
        const i64 *of = buckets + which[number] * SPAN;
        i64 low = -1, high = -1;
        if (side == UP ? slot->has_positive : slot->has_negative) used(of, 0, SPAN, &low, &high);
        offset[number] = low < 0 ? 0 : low + (side == UP ? slot->positive_base : slot->negative_base);
        size[number] = low < 0 ? 0 : high + 1 - low;
        for (i64 bucket = 0; bucket < size[number]; bucket++) {
            counts[total + bucket] = of[low + bucket];
            most |= of[low + bucket]; /* as many digits as the largest */
        }
        total += size[number];
    }
    *largest = most;
    return total;
}

void kc_sizes_of_fold(i64 *sizes) {
    sizes[0] = sizeof(Row);
    sizes[1] = sizeof(Slot);
    sizes[2] = sizeof(Limits);
    sizes[3] = SIDE;
    sizes[4] = SPAN;
    sizes[5] = LEAST_SCALE;
    sizes[6] = MOST_SCALE;
}

/* Of what the library was compiled from: `hatch_build.py` looks for it. */
const char kc_sources[] = KC_SOURCES;
