/* Buckets of many histograms, one after the other, copied to and added to where they belong. */

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

/* Whether the places of one histogram's buckets are all within an array. */
static inline bool within(i64 begin, i64 size, i64 step, i64 most) {
    if (size == 0) return true;
    i64 last = begin + step * (size - 1);
    return begin >= 0 && last >= 0 && begin < most && last < most;
}

/* Pieces of `from`, of items of so many bytes, one after the other. Returns how many items, or -1 where one is not in
   `from`, which has `most`, or they are more than `room`. */
i64 kc_gather(const char *from, i64 most, i64 bytes, const i64 *begins, const i64 *sizes, i64 pieces, char *into, i64 room) {
    i64 at = 0;
    for (i64 piece = 0; piece < pieces; piece++) {
        i64 size = sizes[piece];
        if (size < 0 || size > room - at || !within(begins[piece], size, 1, most)) return -1;
        memcpy(into + at * bytes, from + begins[piece] * bytes, (size_t)(size * bytes));
        at += size;
    }
    return at;
}

/* Adds counts, `sign` times, where each histogram's buckets begin, upwards (step 1) or downwards (-1). */
#define ADDS(NAME, FROM, INTO)                                                                                          \
    static bool NAME(const FROM *counts, const i64 *begins, const i64 *sizes, i64 pieces, i64 step, INTO sign,          \
                     INTO *into, i64 most) {                                                                            \
        for (i64 piece = 0; piece < pieces; piece++) {                                                                  \
            i64 size = sizes[piece];                                                                                    \
            if (size < 0 || !within(begins[piece], size, step, most)) return false;                                     \
            INTO *at = into + begins[piece];                                                                            \
            if (step > 0)                                                                                               \
                for (i64 bucket = 0; bucket < size; bucket++) at[bucket] += sign * (INTO)counts[bucket];                \
            else                                                                                                        \
                for (i64 bucket = 0; bucket < size; bucket++) at[-bucket] += sign * (INTO)counts[bucket];               \
            counts += size;                                                                                             \
        }                                                                                                               \
        return true;                                                                                                    \
    }

/* For counts of 1, 2, 4 or 8 bytes each; returns 0, or -1 where a place is not in `into`, which has `most`. */
#define ADDS_OF_ANY(NAME, INTO)                                                                                         \
    ADDS(NAME##_8, uint8_t, INTO)                                                                                       \
    ADDS(NAME##_16, uint16_t, INTO)                                                                                     \
    ADDS(NAME##_32, uint32_t, INTO)                                                                                     \
    ADDS(NAME##_64, i64, INTO)                                                                                          \
    i64 kc_##NAME(const void *counts, i64 bytes, const i64 *begins, const i64 *sizes, i64 pieces, i64 step, INTO sign,  \
                  INTO *into, i64 most) {                                                                               \
        bool done = false;                                                                                              \
        if (bytes == 1) done = NAME##_8(counts, begins, sizes, pieces, step, sign, into, most);                         \
        else if (bytes == 2) done = NAME##_16(counts, begins, sizes, pieces, step, sign, into, most);                   \
        else if (bytes == 4) done = NAME##_32(counts, begins, sizes, pieces, step, sign, into, most);                   \
        else if (bytes == 8) done = NAME##_64(counts, begins, sizes, pieces, step, sign, into, most);                   \
        return done ? 0 : -1;                                                                                           \
    }

ADDS_OF_ANY(add_to_doubles, double)
ADDS_OF_ANY(add_to_numbers, i64)
