/* Records that the walk leaves; `wire_columns.py` has the same as NumPy's dtypes, field by field. */
#ifndef KC_WIRE_COLUMNS_H
#define KC_WIRE_COLUMNS_H

#include <stdint.h>

#if (defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__) || UINTPTR_MAX < UINT64_MAX
#error "numbers of the wire are read as they lie there, little end first, and NumPy's indices as eight bytes"
#endif

typedef int64_t i64;

typedef struct {
    i64 begin, end, key_begin, key_end, metric, plain;
    i64 start, time, count, zero_count, scale, has_sum;
    i64 positive, positive_end, positive_size, positive_offset;
    i64 negative, negative_end, negative_size, negative_offset;
    double sum, min, max, zero_threshold;
} Point;

typedef struct {
    i64 begin, end, resource_begin, resource_end, scope_begin, scope_end;
    i64 head_end, exponential, temporality, first, last;
} Metric;

#endif
