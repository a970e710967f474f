// Memory that grows and is freed with its owner. In place of std::vector, so that a compiler that comes without a
// built C++ library (zig) needs none: all that is left is in the C library of the process.
#pragma once

#include <cstdlib>

#if defined(__clang__)
// What destroys a thread's own objects when it ends: the C library's, by the name that Clang calls.
extern "C" int __cxa_thread_atexit_impl(void (*)(void *), void *, void *);
extern "C" __attribute__((visibility("hidden"), weak)) int __cxa_thread_atexit(void (*function)(void *), void *object,
                                                                               void *library) {
    return __cxa_thread_atexit_impl(function, object, library);
}
#endif

// `T` needs no construction. What it holds is lost when it grows.
template <typename T> class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(long count) { resize(count); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() { free(items); }

    void resize(long count) {
        if (count <= room) return;
        free(items);
        items = (T *)malloc(count * sizeof(T));
        if (!items) abort();
        room = count;
    }
    // Frees it if it is larger than this.
    void release(long bytes) {
        if (room * (long)sizeof(T) <= bytes) return;
        free(items);
        items = nullptr;
        room = 0;
    }
    T *data() { return items; }
    T &operator[](long i) { return items[i]; }
    const T &operator[](long i) const { return items[i]; }

  private:
    T *items = nullptr;
    long room = 0;
};
