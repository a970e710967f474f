// Loops on the threads of the OpenMP library that torch brings, so that a process has one set of them.
//
// Called by the library's C interface and not by pragmas: GCC and Clang compile those for libraries of their own, while
// these few functions are in each. Which thread does which part never takes part in a result.
#pragma once

#include <algorithm>
#include <atomic>

extern "C" {
void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags);
void omp_set_num_threads(int count);
}

template <typename Body> struct Loop {
    const Body &body;
    const long count, chunk;
    std::atomic<long> next{0};

    static void run(void *self) {
        Loop &loop = *(Loop *)self;
        for (long at; (at = loop.next.fetch_add(loop.chunk, std::memory_order_relaxed)) < loop.count;)
            for (long i = at, end = std::min(at + loop.chunk, loop.count); i < end; i++) loop.body(i);
    }
};

// body(i) for each i below `count`; threads take `chunk` of them at a time.
template <typename Body> void each(long count, long chunk, const Body &body) {
    Loop<Body> loop{body, count, chunk};
    if (count <= chunk)  // It isn't worth waking others.
        Loop<Body>::run(&loop);
    else
        GOMP_parallel(Loop<Body>::run, &loop, 0, 0);
}
