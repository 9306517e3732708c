// Copies a table of (source, destination, size) between registered host memory and the device with very few SMs.
//
// Compiled at run time by kernel.py, which sets the macros and hands over the table; launched by backend.py. Two
// kernels share one way of cutting descriptors into pieces:
//   gather_bulk   (sm_90 and newer) each warp drives a private ring of shared-memory slots: bulk copy in, mbarrier wait,
//                 bulk copy out. One thread a warp issues; the other 31 fetch the descriptors that come next.
//   gather_plain  (older devices) each warp copies a piece through its registers, 16 bytes a lane.
// Both are right for every address and size down to one byte.
//
// Macros: WARPS a block; for gather_bulk DEPTH slots a warp, LAG of them draining while the others fill, CHUNK bytes a
// slot (a multiple of 128).

typedef unsigned long long u64;
typedef unsigned int u32;

struct Table {
    const u64* src;
    const u64* dst;
    const u64* size;
    const u32* first;  // first[i]: number of pieces before descriptor i, count + 1 words; null: `each` pieces for each
    u32 count, pieces, each, chunk;
};

struct Piece {
    u64 src, dst;
    u32 size;
};

// Piece `p` of the table. Pieces of one descriptor meet at destinations that are multiples of 16.
__device__ __forceinline__ Piece piece_at(const Table& t, u32 p) {
    u32 d, k, n;
    if (t.first) {
        u32 low = 0, high = t.count;  // invariant: first[low] <= p < first[high]
        while (high - low > 1) {
            const u32 middle = (low + high) >> 1;
            if (__ldg(t.first + middle) <= p) low = middle; else high = middle;
        }
        d = low;
        k = p - __ldg(t.first + low);
        n = __ldg(t.first + low + 1) - __ldg(t.first + low);
    } else {
        n = t.each;
        d = n == 1 ? p : p / n;
        k = p - d * n;
    }
    Piece piece;
    piece.src = __ldg(t.src + d);
    piece.dst = __ldg(t.dst + d);
    const u64 size = __ldg(t.size + d);
    if (n == 1) {
        piece.size = (u32)size;
        return piece;
    }
    // n = ceil(size / chunk), so step <= chunk and no piece is empty; only the last may exceed step, by under 16 bytes,
    // and then its aligned body still fits a slot.
    const u64 step = ((size + n - 1) / n + 127) & ~127ull;
    const u64 skew = piece.dst & 15;
    const u64 from = k == 0 ? 0 : k * step - skew;
    const u64 to = k == n - 1 ? size : (k + 1) * step - skew;
    piece.src += from;
    piece.dst += from;
    piece.size = (u32)(to - from);
    return piece;
}

__device__ __forceinline__ void copy_bytes(u64 dst, u64 src, u32 n, u32 lane) {
    if (lane < n) *(volatile unsigned char*)(dst + lane) = *(const volatile unsigned char*)(src + lane);
}

// One warp copies `size` bytes, whatever the alignment: 16-byte loads and stores, shifted by the difference between the
// two addresses modulo 16. No byte outside the two ranges is touched.
__device__ __noinline__ void copy_by_warp(u64 dst, u64 src, u32 size, u32 lane) {
    u32 head = (u32)(-dst & 15);
    if (head > size) head = size;
    copy_bytes(dst, src, head, lane);
    dst += head, src += head, size -= head;
    const u32 shift = (u32)(src & 15);
    if (shift == 0) {
        const u32 n = size >> 4;
        const uint4* from = (const uint4*)src;
        uint4* to = (uint4*)dst;
        u32 i = lane;
        for (; i + 96 < n; i += 128) {
            const uint4 a = __ldcs(from + i), b = __ldcs(from + i + 32);
            const uint4 c = __ldcs(from + i + 64), d = __ldcs(from + i + 96);
            __stcs(to + i, a), __stcs(to + i + 32, b), __stcs(to + i + 64, c), __stcs(to + i + 96, d);
        }
        for (; i < n; i += 32) __stcs(to + i, __ldcs(from + i));
        copy_bytes(dst + (n << 4), src + (n << 4), size & 15, lane);
        return;
    }
    // Word i of the destination needs aligned source words i and i + 1; word 0 reaches before the range, so the first
    // 16 bytes go one by one, and so does what follows the last pair of whole words.
    u32 edge = size < 16 ? size : 16;
    copy_bytes(dst, src, edge, lane);
    dst += edge, src += edge, size -= edge;
    const u32 n = size + shift < 16 ? 0 : (size + shift - 16) >> 4;  // source word i + 1 ends at 16 * (i + 2) - shift <= size
    const uint4* from = (const uint4*)(src - shift);
    uint4* to = (uint4*)dst;
    const u32 bits = (shift & 3) * 8, whole = shift >> 2;
    for (u32 i = lane; i < n; i += 32) {
        const uint4 a = __ldcs(from + i), b = __ldcs(from + i + 1);
        const u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        u32 v[5];
#pragma unroll
        for (int j = 0; j < 5; ++j)
            v[j] = whole == 0 ? w[j] : whole == 1 ? w[j + 1] : whole == 2 ? w[j + 2] : w[j + 3];
        __stcs(to + i, make_uint4(__funnelshift_r(v[0], v[1], bits), __funnelshift_r(v[1], v[2], bits),
                                  __funnelshift_r(v[2], v[3], bits), __funnelshift_r(v[3], v[4], bits)));
    }
    for (u32 i = (n << 4) + lane; i < size; i += 32)
        *(volatile unsigned char*)(dst + i) = *(const volatile unsigned char*)(src + i);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) gather_plain(const Table table) {
    const u32 lane = threadIdx.x & 31;
    const u32 workers = gridDim.x * WARPS;
    for (u32 p = (threadIdx.x >> 5) * gridDim.x + blockIdx.x; p < table.pieces; p += workers) {
        const Piece piece = piece_at(table, p);
        copy_by_warp(piece.dst, piece.src, piece.size, lane);
    }
}

#ifdef DEPTH
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

#ifdef CLUSTER
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WARPS * 32, 1) gather_bulk(const Table table) {
#else
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) gather_bulk(const Table table) {
#endif
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ u64 barriers[WARPS * DEPTH];
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 slots = shared_address(memory + (u64)warp * DEPTH * CHUNK);
    const u32 bars = shared_address(barriers + warp * DEPTH);
    const u32 workers = gridDim.x * WARPS, worker = warp * gridDim.x + blockIdx.x;
    if (worker >= table.pieces) return;
    const u32 n = (table.pieces - worker + workers - 1) / workers;

    if (lane == 0) {
        for (int s = 0; s < DEPTH; ++s)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bars + 8 * s) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
#ifdef HINT
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#define WITH_HINT ".L2::cache_hint"
#else
#define WITH_HINT ""
#endif

    // Lane l holds piece i of this worker with i % 32 == l: `now` for the current 32, `next` for the 32 after them.
    Piece now, next;
    now.src = now.dst = next.src = next.dst = 0, now.size = next.size = 0;
    if (lane < n) now = piece_at(table, worker + lane * workers);
    if (lane + 32 < n) next = piece_at(table, worker + (lane + 32) * workers);
    // What lane 0 must know to drain a slot: destination and bytes of its body, kept for all slots by lane s % 32.
    u64 out_dst = 0;
    u32 out_size = 0;

    u32 issued = 0, drained = 0, fill = 0, drain = 0, phase = 0;
    while (true) {
        while (issued < n && issued < drained + (DEPTH - LAG)) {
            const u32 j = issued & 31;
            if (j == 0 && issued != 0) {
                now = next;
                const u32 ahead = issued + 32 + lane;
                if (ahead < n) next = piece_at(table, worker + ahead * workers);
            }
            u64 src = __shfl_sync(~0u, now.src, j), dst = __shfl_sync(~0u, now.dst, j);
            u32 size = __shfl_sync(~0u, now.size, j);
            if ((src ^ dst) & 15) {  // no bulk copy can do this: through registers, at once
                copy_by_warp(dst, src, size, lane);
                size = 0;
            } else if ((src | size) & 15) {
                u32 head = (u32)(-src & 15);
                if (head > size) head = size;
                const u32 tail = (size - head) & 15, body = size - head - tail;
                copy_bytes(dst, src, head, lane);
                copy_bytes(dst + head + body, src + head + body, tail, lane);
                src += head, dst += head, size = body;
            }
            if (lane == fill) out_dst = dst, out_size = size;
            if (lane == 0) {
                const u32 bar = bars + 8 * fill;
                if (size) {
                    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(size) : "memory");
#ifdef HINT
                    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                                 ::"r"(slots + fill * CHUNK), "l"(src), "r"(size), "r"(bar), "l"(policy) : "memory");
#else
                    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                                 ::"r"(slots + fill * CHUNK), "l"(src), "r"(size), "r"(bar) : "memory");
#endif
                } else {
                    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
                }
            }
            ++issued;
            fill = fill + 1 == DEPTH ? 0 : fill + 1;
        }
        if (drained == n) break;
        const u64 dst = __shfl_sync(~0u, out_dst, drain);
        const u32 size = __shfl_sync(~0u, out_size, drain);
        if (lane == 0) {
            const u32 bar = bars + 8 * drain;
            u32 done = 0;
            while (!done)
                asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                             : "=r"(done) : "r"(bar), "r"(phase) : "memory");
            if (size) {
#ifdef HINT
                asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;"
                             ::"l"(dst), "r"(slots + drain * CHUNK), "r"(size), "l"(policy) : "memory");
#else
                asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                             ::"l"(dst), "r"(slots + drain * CHUNK), "r"(size) : "memory");
#endif
            }
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            // All but the LAG youngest groups have left their slots, so the next loads may overwrite those.
#ifdef SETTLE
            asm volatile("cp.async.bulk.wait_group %0;" ::"n"(LAG) : "memory");
#else
            asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LAG) : "memory");
#endif
        }
        __syncwarp();
        ++drained;
        if (++drain == DEPTH) drain = 0, phase ^= 1;
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif
