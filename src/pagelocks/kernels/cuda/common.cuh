// What the kernels share: types, warp and block helpers, the few instructions of sm_90 that C++ has no name for.
// No header is included, so that NVRTC needs nothing but itself.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__

constexpr u32 FULL = 0xffffffffu;
#define INF __int_as_float(0x7f800000)
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr int PAGE = 16;

// ---- programmatic dependent launch: a kernel may start before the one ahead of it ends, and must then wait -------
// Only kernels that are followed by one of ours let it start early: how others wait is not ours to know.  And they do so
// late: a kernel that was let start by the first instruction of a long one took 9 microseconds longer as soon as other code
// had been in the instruction caches; let start when that one's last data is on its way, it does not (docs/performance.md).
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- numbers -------------------------------------------------------------------------------------------------------
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float power_of_two(int e) { return __int_as_float((e < -126 ? -126 : e > 127 ? 127 : e) + 127 << 23); }

DEVICE float half_to_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE u16 float_to_half_up(float f) { u16 h; asm("cvt.rp.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
DEVICE u32 floats_to_halves(float low, float high) {
  u32 h; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(high), "f"(low)); return h;
}
DEVICE u32 low_twice(u32 h) {
  u32 two; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(two) : "r"(h));
  return two;
}
DEVICE u32 high_twice(u32 h) {
  u32 two; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(two) : "r"(h));
  return two;
}
DEVICE u32 subtract_halves(u32 a, u32 b) { u32 h; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(h) : "r"(a), "r"(b)); return h; }
DEVICE u32 multiply_halves(u32 a, u32 b) { u32 h; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(h) : "r"(a), "r"(b)); return h; }
DEVICE u32 floats_to_bf16s(float low, float high) {
  u32 h; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(high), "f"(low)); return h;
}
DEVICE float low_half(u32 h) { return half_to_float((u16)h); }
DEVICE float high_half(u32 h) { return half_to_float((u16)(h >> 16)); }

// The element type of queries, keys, values and outputs.
#ifdef FP16
DEVICE float element_low(u32 pair) { return low_half(pair); }
DEVICE float element_high(u32 pair) { return high_half(pair); }
DEVICE u32 elements(float low, float high) { return floats_to_halves(low, high); }
#define MMA_TYPES "f32.f16.f16.f32"
#else
DEVICE float element_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float element_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE u32 elements(float low, float high) { return floats_to_bf16s(low, high); }
#define MMA_TYPES "f32.bf16.bf16.f32"
#endif

// ---- warps ---------------------------------------------------------------------------------------------------------
DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(FULL, x, 1));
  return fmaxf(x, __shfl_xor_sync(FULL, x, 2));
}
DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(FULL, x, 1);
  return x + __shfl_xor_sync(FULL, x, 2);
}
// Half of a sum over lanes: of values a and b, a lane with `second` keeps b and gets the other lane's share of it.
DEVICE float halve(float a, float b, bool second, int distance) {
  return (second ? b : a) + __shfl_xor_sync(FULL, second ? a : b, distance);
}
DEVICE float warp_max(float x) {
  for (int k = 16; k; k >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, k));
  return x;
}
DEVICE float warp_sum(float x) {
  for (int k = 16; k; k >>= 1) x += __shfl_xor_sync(FULL, x, k);
  return x;
}

constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int most(int a, int b) { return a > b ? a : b; }

// Row of a cumulative table start[rows + 1] that holds `position`; rows without any positions are passed over.
DEVICE int row_of(const int* start, int rows, int position) {
  int low = 0, high = rows - 1;  // the last row with start[row] <= position
  while (low < high) {
    int middle = (low + high + 1) >> 1;
    if (start[middle] <= position) low = middle; else high = middle - 1;
  }
  return low;
}

// `total` positions over `parts` blocks, as evenly as whole numbers go: block `part` starts at total * part / parts, so that
// items of one length that share the blocks evenly begin with one.  None is empty where parts <= total.
DEVICE int part_begin(int total, int part, int parts) {
  const u32 each = (u32)total / (u32)parts, more = (u32)total % (u32)parts;
  return (int)(each * part + more * part / (u32)parts);
}
DEVICE int part_of(int total, int position, int parts) {
  return (int)((((u64)position + 1) * (u32)parts - 1) / (u32)total);
}

// How many of `parts` blocks are worth having for so many positions.
#ifdef LEAST_PAGES
DEVICE int parts_of(int total, int parts) { return min(parts, (total + LEAST_PAGES - 1) / LEAST_PAGES); }
#endif

// The pages that one block of score works on, worked out once a step: low ... high - 1 of all rows', which are rows row ...
// limit - 1; of the first row, its pages page ... end - 1.  Nothing where row == limit.
struct __align__(16) ScorePart {
  int low, high, row, limit;
  int page, end, unused[2];
};

// ---- global memory -------------------------------------------------------------------------------------------------
// What every layer of a step reads or writes anew should stay in L2 while its keys and weights pass through it.
DEVICE u64 keep_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE u64 pass_policy() {  // for what is read once
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE int load_kept(const int* from) {
  int value;
  asm volatile("ld.global.L2::cache_hint.b32 %0, [%1], %2;" : "=r"(value) : "l"(from), "l"(keep_policy()) : "memory");
  return value;
}
DEVICE int4 load_kept(const int4* from) {
  int4 all;
  asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(all.x), "=r"(all.y), "=r"(all.z), "=r"(all.w) : "l"(from), "l"(keep_policy()) : "memory");
  return all;
}
DEVICE void store_kept(float* to, float value, u64 policy) {
  asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "f"(value), "l"(policy) : "memory");
}

// ---- shared memory -------------------------------------------------------------------------------------------------
DEVICE u32 shared_address(const void* pointer) {
  u32 address;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(address) : "l"(pointer));
  return address;
}
DEVICE void copy_async_16(u32 to, const void* from, bool valid) {  // zeros where not valid
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void copy_async_4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

DEVICE void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}
// A barrier of N of a block's threads: those that arrive go on, those that wait see what the others had written.
template <int N> DEVICE void block_arrive() { asm volatile("bar.arrive 1, %0;" ::"n"(N) : "memory"); }
template <int N> DEVICE void block_wait() { asm volatile("bar.sync 1, %0;" ::"n"(N) : "memory"); }
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// ---- clusters: shared memory of another block, and stores that count on an mbarrier there as they arrive ------------
DEVICE u32 cluster_rank() { u32 n; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(n)); return n; }
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE u32 remote(const void* shared, u32 rank) {
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  return address;
}
DEVICE void store_async(u32 to, u32 value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(value),
               "r"(barrier) : "memory");
}
DEVICE void store_async(u32 to, u64 value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to), "l"(value),
               "r"(barrier) : "memory");
}
DEVICE void store_async(u32 to, float2 value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(value.x), "f"(value.y), "r"(barrier) : "memory");
}
DEVICE void store_async(u32 to, uint4 value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier) : "memory");
}
DEVICE void add_async(u32 to, u32 value, u32 barrier) {
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];" ::"r"(to),
               "r"(value), "r"(barrier) : "memory");
}
DEVICE void barrier_expect_remote(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// ---- matrix products -----------------------------------------------------------------------------------------------
DEVICE void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// (16 x 16) (16 x 8) in the element type, fp32 sums.
DEVICE void mma_elements(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col." MMA_TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void mma_halves(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// (16 x 32) signed (32 x 8) unsigned or signed bytes, int32 sums.
DEVICE void mma_bytes_unsigned(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_bytes_signed(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
