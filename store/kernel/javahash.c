/* Java's String.hashCode of UTF-8 text: 31 * hash + unit over its UTF-16 code units.
 *
 * A character beyond U+FFFF is two units, a surrogate pair. Bytes that are not UTF-8 count as Java's decoder (and
 * Python's with errors="replace") reads them: each longest beginning of a character that does not go on is one U+FFFD.
 */
#include "kernel.h"

static inline uint32_t unit(uint32_t hash, uint32_t value) { return 31 * hash + value; }

static uint32_t hash_wide(uint32_t hash, const uint8_t *at, const uint8_t *end) {
    while (at < end) {
        uint8_t lead = *at++;
        if (lead < 0x80) {
            hash = unit(hash, lead);
            continue;
        }
        int more;
        uint32_t point;
        uint8_t low = 0x80, high = 0xBF; /* what the second byte may be */
        if (lead >= 0xC2 && lead <= 0xDF) {
            more = 1, point = lead & 0x1Fu;
        } else if (lead >= 0xE0 && lead <= 0xEF) {
            more = 2, point = lead & 0x0Fu;
            if (lead == 0xE0) low = 0xA0;
            if (lead == 0xED) high = 0x9F;
        } else if (lead >= 0xF0 && lead <= 0xF4) {
            more = 3, point = lead & 0x07u;
            if (lead == 0xF0) low = 0x90;
            if (lead == 0xF4) high = 0x8F;
        } else {
            hash = unit(hash, 0xFFFD);
            continue;
        }
        while (more && at < end && *at >= low && *at <= high) {
            point = point << 6 | (*at++ & 0x3Fu);
            low = 0x80, high = 0xBF;
            more--;
        }
        if (more) {
            hash = unit(hash, 0xFFFD); /* the byte that did not fit begins the next character */
        } else if (point >= 0x10000) {
            hash = unit(hash, 0xD800 + ((point - 0x10000) >> 10));
            hash = unit(hash, 0xDC00 + ((point - 0x10000) & 0x3FF));
        } else {
            hash = unit(hash, point);
        }
    }
    return hash;
}

uint32_t java_hash(uint32_t hash, const uint8_t *text, size_t size) {
    const uint8_t *at = text, *end = text + size;
    for (; end - at >= 8; at += 8) {
        if (native_u64(at) & 0x8080808080808080u) return hash_wide(hash, at, end);
        uint32_t left = ((at[0] * 31u + at[1]) * 31u + at[2]) * 31u + at[3];
        uint32_t right = ((at[4] * 31u + at[5]) * 31u + at[6]) * 31u + at[7];
        hash = hash * 0x94446F01u + left * 923521u + right; /* 31**8, 31**4 mod 2**32 */
    }
    for (; at < end && *at < 0x80; at++) hash = unit(hash, *at);
    return at < end ? hash_wide(hash, at, end) : hash;
}

typedef struct {
    Py_buffer data, starts, ends, before, out;
} Arguments;

/* hashes(data, starts, ends, before, out): `before` is int32[1], the same for all, or int32[n]. */
static PyObject *hashes(PyObject *arguments, bool of_index) {
    Arguments a;
    if (!PyArg_ParseTuple(arguments, "y*y*y*y*w*", &a.data, &a.starts, &a.ends, &a.before, &a.out)) return NULL;
    Py_ssize_t n = item_count(&a.starts, 8, "starts"), befores = item_count(&a.before, 4, "before");
    bool good = n >= 0 && befores >= 0 && holds(&a.ends, n, 8, "ends") && holds(&a.out, n, 4, "out") &&
                (befores == 1 || holds(&a.before, n, 4, "before")) && ranges_fit(&a.starts, &a.ends, n, a.data.len);
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        const uint8_t *bytes = a.data.buf, *from = a.starts.buf, *to = a.ends.buf, *before = a.before.buf;
        uint8_t *out = a.out.buf;
        for (Py_ssize_t i = 0; i < n; i++) {
            int64_t start = native_i64(from + 8 * i), end = native_i64(to + 8 * i);
            uint32_t hash = (uint32_t)native_i32(before + (befores == 1 ? 0 : 4 * i));
            hash = java_hash(hash, bytes + start, (size_t)(end - start));
            put_native_32(out + 4 * i, of_index ? index_hash(hash) : hash);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&a.data);
    PyBuffer_Release(&a.starts);
    PyBuffer_Release(&a.ends);
    PyBuffer_Release(&a.before);
    PyBuffer_Release(&a.out);
    if (!good) return NULL;
    Py_RETURN_NONE;
}

PyObject *kernel_java_hashes(PyObject *module, PyObject *arguments) {
    (void)module;
    return hashes(arguments, false);
}

PyObject *kernel_index_hashes(PyObject *module, PyObject *arguments) {
    (void)module;
    return hashes(arguments, true);
}
