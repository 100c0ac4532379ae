/* Walks the wire format of an ExportMetricsServiceRequest and leaves columns: what each exponential point says.

   The walk believes nothing: lengths are held against what encloses them, and whatever is not exactly what senders
   write (an unknown field, a field twice where protobuf would merge, another order of parts) makes it give up on the
   message. Source: protobuf.dev, "Encoding", and OTLP 1.11. */

#include "wire_columns.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

typedef uint8_t byte;

/* A part of the body; `begin` is -1 where it is longer than what it is in. */
typedef struct {
    i64 begin, end;
} Part;

typedef struct {
    i64 offset, begin, end, size;
} Side;

/* A number of seven bits a byte; moves `at` behind it, to -1 where it does not end, or is no int64. */
static inline i64 varint(const byte *body, i64 *at, i64 end) {
    i64 value = 0;
    i64 here = *at;
    for (int shift = 0; here < end && shift < 63; shift += 7) {
        i64 said = body[here++];
        value |= (said & 127) << shift;
        if (said < 128) {
            *at = here;
            return value;
        }
    }
    *at = -1;
    return 0;
}

static inline Part part_at(const byte *body, i64 at, i64 end) {
    i64 length = varint(body, &at, end);
    if (at < 0 || length > end - at) return (Part){-1, -1};
    return (Part){at, at + length};
}

static inline i64 zigzag(const byte *body, i64 *at, i64 end) {
    i64 value = varint(body, at, end);
    if (value > 0xFFFFFFFF) {
        *at = -1;
        return 0;
    }
    return (value >> 1) ^ -(value & 1);
}

static inline i64 fixed(const byte *body, i64 at) {
    i64 value;
    memcpy(&value, body + at, sizeof value);
    return value;
}

static inline double number(i64 bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static bool is_ascii(const byte *body, Part part) {
    byte seen = 0;
    for (i64 at = part.begin; at < part.end; at++) seen |= body[at];
    return seen < 128;
}

/* Whether an exemplar is times, values and ids only. */
static bool exemplar_fits(const byte *body, Part exemplar) {
    i64 at = exemplar.begin;
    while (at < exemplar.end) {
        switch (body[at++]) {
        case 0x11: case 0x19: case 0x31: /* time, double, integer */
            at += 8;
            break;
        case 0x22: case 0x2A: /* ids of span and trace */
            at = part_at(body, at, exemplar.end).end;
            if (at < 0) return false;
            break;
        default:
            return false;
        }
    }
    return at == exemplar.end;
}

/* Whether a number of packed ones has more than nine bytes. */
static bool has_long_number(const byte *body, Part packed) {
    int open = 0;
    for (i64 at = packed.begin; at < packed.end; at++) {
        open = body[at] > 127 ? open + 1 : 0;
        if (open > 8) return true;
    }
    return false;
}

/* How many numbers are packed in a part; -1 where one has more than nine bytes, or does not end.

   Eight bytes are looked at together: those with the highest bit go on. A number of ten bytes has the highest bit in
   all of some four that lie at a multiple of four; hardly any other has. */
static inline i64 varints(const byte *body, Part packed) {
    const uint64_t high = 0x8080808080808080u, ones = 0x0101010101010101u;
    i64 at = packed.begin, open = 0;
    bool perhaps_long = false;
    if (at == packed.end) return 0;
    if (body[packed.end - 1] > 127) return -1;
    while (packed.end - at >= 8) {
        uint64_t counts = 0; /* of each of eight bytes, at most 31 */
        for (int words = 0; words < 31 && packed.end - at >= 8; words++, at += 8) {
            uint64_t said = (uint64_t)fixed(body, at) & high;
            counts += said >> 7;
            perhaps_long |= (uint32_t)said == (uint32_t)high || said >> 32 == high >> 32;
        }
        open += (i64)(counts * ones >> 56);
    }
    i64 before = open;
    for (; at < packed.end; at++) open += body[at] >> 7;
    perhaps_long |= open - before > 5; /* of such a number, seven bytes that follow the last four are here, or fewer */
    if (perhaps_long && has_long_number(body, packed)) return -1;
    return packed.end - packed.begin - open;
}

/* Offset and packed counts of one sign; `size` is -1 where it is not what it should be. */
static inline Side side_of(const byte *body, Part part) {
    Side side = {0, part.end, part.end, 0};
    bool seen = false;
    i64 at = part.begin;
    while (at < part.end) {
        byte tag = body[at++];
        if (tag == 0x08) {
            side.offset = zigzag(body, &at, part.end);
            if (at < 0) return (Side){0, 0, 0, -1};
        } else if (tag == 0x12 && !seen) {
            seen = true;
            Part packed = part_at(body, at, part.end);
            if (packed.begin < 0) return (Side){0, 0, 0, -1};
            side.begin = packed.begin;
            side.end = at = packed.end;
            side.size = varints(body, packed);
            if (side.size < 0) return side;
        } else {
            return (Side){0, 0, 0, -1};
        }
    }
    return side;
}

/* The zero threshold that a first bucket says which is sent though it is empty: where it ends, a power of two. */
static inline double threshold_of(i64 end, i64 scale) {
    if (scale < -10 || scale > 20) return 0.0;
    double exponent = ldexp((double)end, (int)-scale);
    return exponent <= -1.0 && exponent == floor(exponent) ? exp2(exponent) : 0.0;
}

/* One point's columns; false where it is not what it should be. */
static inline bool read_point(const byte *body, Part part, i64 metric, Point *point) {
    bool positive = false, negative = false;
    i64 at = part.begin, end = part.end, flags;
    Part inner;
    Side side;
    *point = (Point){
        .begin = at, .end = end, .key_begin = at, .key_end = at, .metric = metric, .plain = 1,
        .positive = end, .positive_end = end, .negative = end, .negative_end = end, .min = NAN, .max = NAN,
    };
    while (at < end) {
        i64 tag_at = at;
        byte tag = body[at++];
        switch (tag) {
        case 0x0A: /* attributes */
            at = part_at(body, at, end).end;
            if (at < 0) return false;
            if (point->key_end == point->key_begin) point->key_begin = tag_at;
            else if (point->key_end != tag_at) point->plain = 0;
            point->key_end = at;
            break;
        case 0x11: case 0x19: case 0x21: case 0x39: case 0x29: case 0x61: case 0x69: case 0x71: {
            if (end - at < 8) return false;
            i64 bits = fixed(body, at);
            at += 8;
            switch (tag) {
            case 0x11: point->start = bits; break;
            case 0x19: point->time = bits; break;
            case 0x21: point->count = bits; break;
            case 0x39: point->zero_count = bits; break;
            case 0x29: point->sum = number(bits); point->has_sum = 1; break;
            case 0x61: point->min = number(bits); break;
            case 0x69: point->max = number(bits); break;
            default: point->zero_threshold = number(bits);
            }
            break;
        }
        case 0x30:
            point->scale = zigzag(body, &at, end);
            if (at < 0) return false;
            break;
        case 0x42: case 0x4A:
            if (tag == 0x42 ? positive : negative) return false;
            inner = part_at(body, at, end);
            if (inner.begin < 0) return false;
            at = inner.end;
            side = side_of(body, inner);
            if (side.size < 0) return false;
            if (tag == 0x42) {
                positive = true;
                point->positive_offset = side.offset, point->positive_size = side.size;
                point->positive = side.begin, point->positive_end = side.end;
            } else {
                negative = true;
                point->negative_offset = side.offset, point->negative_size = side.size;
                point->negative = side.begin, point->negative_end = side.end;
            }
            break;
        case 0x50:
            flags = varint(body, &at, end);
            if (at < 0) return false;
            if (flags != 0) point->plain = 0;
            break;
        case 0x5A:
            inner = part_at(body, at, end);
            if (inner.begin < 0 || !exemplar_fits(body, inner)) return false;
            at = inner.end;
            break;
        default:
            return false;
        }
    }
    if (point->zero_threshold == 0 && point->positive_size > 0 && body[point->positive] == 0)
        point->zero_threshold = threshold_of(point->positive_offset + 1, point->scale);
    return true;
}

/* What was found so far, and where it goes. */
typedef struct {
    const byte *body;
    Point *points;
    Metric *metrics;
    i64 items, found, kinds, most_points, most_metrics;
} Walk;

static bool read_points(Walk *walk, Part data, Metric *metric) {
    const byte *body = walk->body;
    i64 at = data.begin;
    while (at < data.end) {
        byte tag = body[at++];
        if (tag == 0x10 && metric->temporality == 0) {
            metric->temporality = varint(body, &at, data.end);
            if (at < 0 || metric->temporality > 127) return false;
            continue;
        }
        if (tag != 0x0A || walk->found == walk->most_points) return false;
        Part point = part_at(body, at, data.end);
        if (point.begin < 0 || !read_point(body, point, walk->kinds, &walk->points[walk->found])) return false;
        at = point.end;
        walk->found++;
        walk->items++;
    }
    return true;
}

static bool read_metric(Walk *walk, Part part, Part resource, Part scope) {
    const byte *body = walk->body;
    if (walk->kinds == walk->most_metrics) return false;
    Metric *metric = &walk->metrics[walk->kinds];
    *metric = (Metric){
        .begin = part.begin, .end = part.end, .resource_begin = resource.begin, .resource_end = resource.end,
        .scope_begin = scope.begin, .scope_end = scope.end, .first = walk->found,
    };
    walk->items++;
    Part data = {-1, -1};
    i64 at = part.begin;
    while (at < part.end) {
        byte tag = body[at];
        Part inner = part_at(body, at + 1, part.end);
        if (inner.begin < 0 || data.begin >= 0) return false;
        switch (tag) {
        case 0x0A: case 0x12: case 0x1A: /* name, description, unit */
            break;
        case 0x2A: case 0x3A: case 0x4A: case 0x52: /* gauge, sum, histogram, exponential histogram */
            data = inner;
            metric->head_end = at;
            metric->exponential = tag == 0x52;
            break;
        default:
            return false;
        }
        at = inner.end;
    }
    if (data.begin < 0 || (metric->exponential && !read_points(walk, data, metric))) return false;
    metric->last = walk->found;
    walk->kinds++;
    return true;
}

/* What a resource or, within one, a scope has: what it is about, and at least one scope or metric. */
static bool read_level(Walk *walk, Part part, const Part *resource) {
    const byte *body = walk->body;
    Part about = {part.begin, part.begin};
    i64 at = part.begin, found = 0;
    walk->items++;
    while (at < part.end) {
        byte tag = body[at];
        Part inner = part_at(body, at + 1, part.end);
        if (inner.begin < 0) return false;
        at = inner.end;
        if (tag == 0x0A && !found && about.end == about.begin) about = inner;
        else if (tag == 0x1A && is_ascii(body, inner)) continue; /* schema */
        else if (tag != 0x12) return false;
        else if (!(resource ? read_metric(walk, inner, *resource, about) : read_level(walk, inner, &about))) return false;
        else found++;
    }
    return found > 0;
}

/* A message's points and metrics, of each at most so many; `found` gets how many there are. Returns how many items it
   has, resources, scopes, metrics and exponential points together; -1 where protobuf has to read it. */
i64 kc_scan(const byte *body, i64 size, Point *points, i64 most_points, Metric *metrics, i64 most_metrics, i64 *found) {
    Walk walk = {.body = body, .points = points, .metrics = metrics,
                 .most_points = most_points, .most_metrics = most_metrics};
    i64 at = 0;
    while (at < size) {
        if (body[at] != 0x0A) return -1;
        Part part = part_at(body, at + 1, size);
        if (part.begin < 0 || !read_level(&walk, part, NULL)) return -1;
        at = part.end;
    }
    found[0] = walk.found;
    found[1] = walk.kinds;
    return walk.items;
}

void kc_sizes_of_wire(i64 *sizes) {
    sizes[0] = sizeof(Point);
    sizes[1] = sizeof(Metric);
}
