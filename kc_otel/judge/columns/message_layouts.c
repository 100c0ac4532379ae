/* What identifies the streams of a message besides their resources, copied, and compared with that of another one. */

#include "../otlp/wire_columns.h"

#include <stdbool.h>
#include <string.h>

enum { OTHER, SAME, PLAIN };

/* What a metric says besides its bytes: whether its resource is another one than that of the metric before; how many bytes
   of scope and head are its own, -1 for the scope of the metric before, which is not compared once more; its temporality,
   whether it is exponential, and its points. */
typedef struct {
    i64 resource, scope, head, temporality, exponential, first, last;
} Said;

static Said describe(const Metric *of, const Metric *before) {
    bool resource = before == NULL || of->resource_begin != before->resource_begin;
    bool scope = before == NULL || of->scope_begin != before->scope_begin;
    return (Said){
        resource,
        scope ? of->scope_end - of->scope_begin : -1,
        of->head_end - of->begin, of->temporality, of->exponential, of->first, of->last,
    };
}

static uint8_t *copy(uint8_t *into, const uint8_t *from, i64 size) {
    if (size <= 0) return into;
    memcpy(into, from, (size_t)size);
    return into + size;
}

/* Fills identities (as long as the message at most), said [metrics] and sizes [points]; returns the bytes of the first. */
i64 kc_copy_identities(const uint8_t *body, const Point *points, i64 found, const Metric *metrics, i64 kinds,
                       uint8_t *identities, Said *said, i64 *sizes) {
    uint8_t *into = identities;
    for (i64 number = 0; number < kinds; number++) {
        const Metric *of = &metrics[number];
        Said here = said[number] = describe(of, number ? of - 1 : NULL);
        into = copy(into, body + of->scope_begin, here.scope);
        into = copy(into, body + of->begin, here.head);
    }
    for (i64 number = 0; number < found; number++) {
        sizes[number] = points[number].key_end - points[number].key_begin;
        into = copy(into, body + points[number].key_begin, sizes[number]);
    }
    return into - identities;
}

static bool differ(const uint8_t *body, const uint8_t **known, i64 size) {
    if (size <= 0) return false;
    const uint8_t *here = *known;
    *known += size;
    return memcmp(body, here, (size_t)size) != 0;
}

/* Whether a message with as many metrics and points has just these streams: OTHER, SAME, or PLAIN where all of them are
   exponential points that say nothing but what has a column. */
i64 kc_is_same(const uint8_t *body, const Point *points, i64 found, const Metric *metrics, i64 kinds,
               const uint8_t *identities, const Said *said, const i64 *sizes) {
    bool plain = true;
    for (i64 number = 0; number < kinds; number++) {
        const Metric *of = &metrics[number];
        Said here = describe(of, number ? of - 1 : NULL);
        if (memcmp(&here, &said[number], sizeof here)) return OTHER;
        if (differ(body + of->scope_begin, &identities, here.scope)) return OTHER;
        if (differ(body + of->begin, &identities, here.head)) return OTHER;
        plain &= of->exponential == 1;
    }
    for (i64 number = 0; number < found; number++) {
        const Point *point = &points[number];
        if (point->key_end - point->key_begin != sizes[number]) return OTHER;
        if (differ(body + point->key_begin, &identities, sizes[number])) return OTHER;
        plain &= point->plain == 1;
    }
    return plain ? PLAIN : SAME;
}
