/* CRC-32 (polynomial 0x04C11DB7, reflected: zlib's), by the fastest way this processor has.
 *
 * x86-64: carry-less multiplication. Source: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using
 * PCLMULQDQ Instruction", Intel 2009; the constants are those of its reflected CRC-32.
 * ARM: the CRC32 instructions of ARMv8. Elsewhere, and for less than 16 bytes: slicing by 16, resp. by bytes.
 */
#include "kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

static uint32_t tables[16][256];

static void make_tables(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xEDB88320u & (0u - (crc & 1)));
        tables[0][i] = crc;
    }
    for (int k = 1; k < 16; k++)
        for (int i = 0; i < 256; i++) tables[k][i] = tables[k - 1][i] >> 8 ^ tables[0][tables[k - 1][i] & 0xFF];
}

/* The functions below take and return the register, which is the complement of the CRC. */

static uint32_t by_bytes(uint32_t crc, const uint8_t *data, size_t size) {
    while (size--) crc = crc >> 8 ^ tables[0][(crc ^ *data++) & 0xFF];
    return crc;
}

static uint32_t by_slices(uint32_t crc, const uint8_t *data, size_t size) {
    for (; size >= 16; size -= 16, data += 16) {
        uint64_t low = native_u64(data) ^ crc, high = native_u64(data + 8);
        crc = 0;
        for (int i = 0; i < 8; i++) {
            crc ^= tables[15 - i][low >> 8 * i & 0xFF];
            crc ^= tables[7 - i][high >> 8 * i & 0xFF];
        }
    }
    return by_bytes(crc, data, size);
}

static uint32_t slicing(uint32_t crc, const uint8_t *data, size_t size) { return ~by_slices(~crc, data, size); }

#if defined(__x86_64__)
#define PCLMUL __attribute__((target("pclmul,ssse3,sse4.1")))

/* x moved on by 128 bits, with what comes there added; `by` holds two powers of x modulo the polynomial. */
PCLMUL static inline __m128i folded(__m128i x, __m128i by, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(x, by, 0x00), high = _mm_clmulepi64_si128(x, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

PCLMUL static inline __m128i load16(const uint8_t *at) { return _mm_loadu_si128((const __m128i *)at); }

/* Indices for a shuffle: a load of 16 of them from 16 - r on moves bytes up by 16 - r, from 16 + r on down by r. */
static const uint8_t MOVES[48] = {
    0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
    0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,   11,   12,   13,   14,   15,
    0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
};

PCLMUL static uint32_t by_multiplication(uint32_t crc, const uint8_t *data, size_t size) {
    if (size < 16) return by_bytes(crc, data, size);
    const __m128i by4 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by1 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    __m128i x = _mm_xor_si128(load16(data), _mm_cvtsi32_si128((int)crc));
    data += 16;
    size -= 16;
    if (size >= 48) {
        __m128i x2 = load16(data), x3 = load16(data + 16), x4 = load16(data + 32);
        data += 48;
        size -= 48;
        for (; size >= 64; size -= 64, data += 64) {
            x = folded(x, by4, load16(data));
            x2 = folded(x2, by4, load16(data + 16));
            x3 = folded(x3, by4, load16(data + 32));
            x4 = folded(x4, by4, load16(data + 48));
        }
        x = folded(folded(folded(x, by1, x2), by1, x3), by1, x4);
    }
    for (; size >= 16; size -= 16, data += 16) x = folded(x, by1, load16(data));
    if (size) { /* r = size bytes are left: the first r bytes of x are folded over the 16 bytes that end the data */
        __m128i first = _mm_shuffle_epi8(x, load16(MOVES + size));
        __m128i down = load16(MOVES + 16 + size);
        __m128i rest = _mm_blendv_epi8(_mm_shuffle_epi8(x, down), load16(data + size - 16), down);
        x = folded(first, by1, rest);
    }
    /* 128 bits to 64, to 32 */
    const __m128i mask = _mm_set_epi32(0, 0, 0, -1);
    x = _mm_xor_si128(_mm_srli_si128(x, 8), _mm_clmulepi64_si128(x, by1, 0x10));
    const __m128i by64 = _mm_set_epi64x(0, 0x0163cd6124);
    x = _mm_xor_si128(_mm_srli_si128(x, 4), _mm_clmulepi64_si128(_mm_and_si128(x, mask), by64, 0x00));
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    __m128i t = _mm_clmulepi64_si128(_mm_and_si128(x, mask), barrett, 0x10);
    t = _mm_clmulepi64_si128(_mm_and_si128(t, mask), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(x, t), 1);
}

static uint32_t multiplying(uint32_t crc, const uint8_t *data, size_t size) {
    return ~by_multiplication(~crc, data, size);
}
#endif

#if defined(__aarch64__) && defined(__linux__)
__attribute__((target("+crc"))) static uint32_t instructed(uint32_t crc, const uint8_t *data, size_t size) {
    crc = ~crc;
    for (; size >= 32; size -= 32, data += 32) {
        crc = __crc32d(crc, native_u64(data));
        crc = __crc32d(crc, native_u64(data + 8));
        crc = __crc32d(crc, native_u64(data + 16));
        crc = __crc32d(crc, native_u64(data + 24));
    }
    for (; size >= 8; size -= 8, data += 8) crc = __crc32d(crc, native_u64(data));
    for (; size; size--, data++) crc = __crc32b(crc, *data);
    return ~crc;
}
#endif

typedef uint32_t (*Crc32)(uint32_t, const uint8_t *, size_t);

static struct {
    const char *name;
    Crc32 update;
} methods[] = {{"slicing", slicing}, {NULL, NULL}};

Crc32 crc32_update = slicing;
const char *crc32_method = "slicing";

void crc32_choose(void) {
    make_tables();
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1")) {
        methods[1].name = "pclmul";
        methods[1].update = multiplying;
    }
#elif defined(__aarch64__) && defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_CRC32) {
        methods[1].name = "armv8";
        methods[1].update = instructed;
    }
#endif
    int best = methods[1].update != NULL;
    crc32_method = methods[best].name;
    crc32_update = methods[best].update;
}

PyObject *kernel_crc32(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(arguments, "y*|I", &data, &crc)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = crc32_update(crc, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

/* For tests: the CRC of one buffer by each method that this processor has. */
PyObject *kernel_crc32_methods(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(arguments, "y*|I", &data, &crc)) return NULL;
    PyObject *found = PyDict_New();
    for (int i = 0; found != NULL && i < 2; i++) {
        if (methods[i].update == NULL) continue;
        PyObject *value = PyLong_FromUnsignedLong(methods[i].update(crc, data.buf, (size_t)data.len));
        if (value == NULL || PyDict_SetItemString(found, methods[i].name, value) < 0) Py_CLEAR(found);
        Py_XDECREF(value);
    }
    PyBuffer_Release(&data);
    return found;
}

PyObject *kernel_crcs_of_ranges(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data, starts, ends, out;
    if (!PyArg_ParseTuple(arguments, "y*y*y*w*", &data, &starts, &ends, &out)) return NULL;
    Py_ssize_t n = item_count(&starts, 8, "starts");
    bool good = n >= 0 && holds(&ends, n, 8, "ends") && holds(&out, n, 4, "out") &&
                ranges_fit(&starts, &ends, n, data.len);
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        const uint8_t *bytes = data.buf, *from = starts.buf, *to = ends.buf;
        uint8_t *crcs = out.buf;
        for (Py_ssize_t i = 0; i < n; i++) {
            int64_t start = native_i64(from + 8 * i), end = native_i64(to + 8 * i);
            put_native_32(crcs + 4 * i, crc32_update(0, bytes + start, (size_t)(end - start)));
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&ends);
    PyBuffer_Release(&out);
    if (!good) return NULL;
    Py_RETURN_NONE;
}
