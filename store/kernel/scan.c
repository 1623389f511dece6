/* Where records begin in a stretch of the log, and their heads. */
#include "frame.h"

static int64_t scan(const uint8_t *data, int64_t usable, int64_t physical_offset, bool verify, uint8_t *starts,
                    int64_t room) {
    int64_t count = 0, at = 0;
    Frame f;
    while (count < room && frame_of(data + at, usable - at, &f)) {
        /* a sum of unsigned numbers: an offset near 2**63 must not overflow */
        if ((uint64_t)f.physical_offset != (uint64_t)physical_offset + (uint64_t)at) break;
        if (verify && !crcs_match(data + at, &f)) break;
        put_native_64(starts + 8 * count++, (uint64_t)at);
        at += f.size;
    }
    return count;
}

PyObject *kernel_scan(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data, starts;
    long long usable, physical_offset;
    int verify;
    if (!PyArg_ParseTuple(arguments, "y*LLpw*", &data, &usable, &physical_offset, &verify, &starts)) return NULL;
    Py_ssize_t room = item_count(&starts, 8, "starts");
    bool good = room >= 0;
    if (good && (usable < 0 || usable > data.len)) {
        PyErr_Format(PyExc_ValueError, "usable: found %lld; allowed is 0 to %zd", usable, data.len);
        good = false;
    }
    int64_t count = 0;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        count = scan(data.buf, usable, physical_offset, verify != 0, starts.buf, room);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&starts);
    return good ? PyLong_FromLongLong(count) : NULL;
}

/* The fields of RECORD_HEAD: their places, their widths, and what lies before them: 1 the born host, 2 both hosts. */
static const struct {
    uint8_t at, width, behind;
} FIELDS[] = {
    {0, 4, 0},  {4, 4, 0},  {8, 4, 0},  {12, 4, 0}, {16, 4, 0}, {20, 8, 0}, {28, 8, 0}, {36, 4, 0}, {40, 8, 0},
    {48, 4, 0}, {52, 4, 0}, {56, 8, 1}, {64, 4, 1}, {68, 4, 1}, {72, 4, 2}, {76, 8, 2}, {84, 4, 2},
};
enum { FIELD_COUNT = sizeof FIELDS / sizeof *FIELDS, BORN_IP = 48, STORE_IP = 64, IPV4_HOST_SIZE = 8 };

static inline void swapped(uint8_t *to, const uint8_t *from, int width) {
    if (width == 4)
        put_native_32(to, big_u32(from));
    else
        put_native_64(to, big_u64(from));
}

/* Fields behind an IPv6 host. What the end of the data cuts off reads as 0, and so do the IPv6 hosts themselves. */
static void moved_fields(uint8_t *head, const uint8_t *p, int64_t available, int32_t sys_flag) {
    for (int i = 0; i < FIELD_COUNT; i++) {
        int width = FIELDS[i].width;
        int extra = FIELDS[i].behind == 0 ? 0 : FIELDS[i].behind == 1 ? born_extra(sys_flag) : hosts_extra(sys_flag);
        if (FIELDS[i].at + extra + width <= available)
            swapped(head + FIELDS[i].at, p + FIELDS[i].at + extra, width);
        else
            memset(head + FIELDS[i].at, 0, (size_t)width);
    }
    if (sys_flag & BORN_HOST_V6) memset(head + BORN_IP, 0, IPV4_HOST_SIZE);
    if (sys_flag & STORE_HOST_V6) memset(head + STORE_IP, 0, IPV4_HOST_SIZE);
}

PyObject *kernel_heads(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data, starts, out;
    if (!PyArg_ParseTuple(arguments, "y*y*w*", &data, &starts, &out)) return NULL;
    Py_ssize_t n = item_count(&starts, 8, "starts"), row = 0;
    bool good = n >= 0 && holds(&out, n, HEAD_SIZE, "out");
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        uint8_t *head = out.buf;
        for (; row < n; row++, head += HEAD_SIZE) {
            int64_t start = native_i64((uint8_t *)starts.buf + 8 * row);
            if (start < 0 || start > data.len - HEAD_SIZE) break;
            const uint8_t *p = (uint8_t *)data.buf + start;
            int32_t sys_flag = (int32_t)big_u32(p + 36);
            if (hosts_extra(sys_flag))
                moved_fields(head, p, data.len - start, sys_flag);
            else
                for (int i = 0; i < FIELD_COUNT; i++) swapped(head + FIELDS[i].at, p + FIELDS[i].at, FIELDS[i].width);
        }
        Py_END_ALLOW_THREADS
        good = row == n;
        if (!good) PyErr_Format(PyExc_ValueError, "head %zd: found a place outside the data", row);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&out);
    if (!good) return NULL;
    Py_RETURN_NONE;
}
