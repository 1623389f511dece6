/* Many parts of a file, read or written by one call: one pread or pwrite for each, without Python in between.
 *
 * A thread that asks for the GIL between two short system calls takes it from a thread that puts messages, and gets it
 * back only when that one waits. With the GIL released once for all parts, both work at the same time.
 */
#include "kernel.h"

#include <sys/types.h>
#include <unistd.h>

static PyObject *move_parts(PyObject *arguments, bool writes) {
    int fd;
    Py_buffer data, positions, starts, ends;
    if (!PyArg_ParseTuple(arguments, writes ? "iy*y*y*y*" : "iw*y*y*y*", &fd, &data, &positions, &starts, &ends)) return NULL;
    Py_ssize_t n = item_count(&positions, 8, "positions"), done = 0;
    bool good = n >= 0 && holds(&starts, n, 8, "starts") && holds(&ends, n, 8, "ends") &&
                ranges_fit(&starts, &ends, n, data.len);
    if (good) {
        uint8_t *bytes = data.buf;
        const uint8_t *from = starts.buf, *to = ends.buf, *at = positions.buf;
        Py_BEGIN_ALLOW_THREADS
        for (; done < n; done++) {
            int64_t start = native_i64(from + 8 * done), position = native_i64(at + 8 * done);
            size_t size = (size_t)(native_i64(to + 8 * done) - start);
            if (size == 0) continue;
            ssize_t moved = writes ? pwrite(fd, bytes + start, size, position) : pread(fd, bytes + start, size, position);
            if (moved < 0 || (size_t)moved != size) break;
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&ends);
    return good ? PyLong_FromSsize_t(done) : NULL;
}

/* pread_parts(fd, out, positions, starts, ends): fill range i of `out` from position i of the file; how many it filled
 * before one failed or was short. int64[n] each. */
PyObject *kernel_pread_parts(PyObject *module, PyObject *arguments) {
    (void)module;
    return move_parts(arguments, false);
}

/* pwrite_parts(fd, data, positions, starts, ends): as `pread_parts`, but it writes. */
PyObject *kernel_pwrite_parts(PyObject *module, PyObject *arguments) {
    (void)module;
    return move_parts(arguments, true);
}
