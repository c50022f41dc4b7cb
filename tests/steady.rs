//! Steady-state training allocates nothing from the system: buffers come from the pool, and nothing
//! large from the heap.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use hpctrain::backend::Backend as _;
use hpctrain::backend::cpu::Cpu;
use hpctrain::checkpoint::Progress;
use hpctrain::comm::{self, Comm};
use hpctrain::config::{Environment, ResolvedConfig, Sources, load, resolve};
use hpctrain::engine::micro_batches::{self, MicroBatches};
use hpctrain::engine::{engine, on_threads, train_round};
use hpctrain::error::Result;
use hpctrain::parallel::ControlFlags;

/// The least bytes of an allocation that counts as large.
const LARGE: usize = 4 << 10;
/// The number of steps in which memory may still be allocated.
const WARM_UP: usize = 3;
/// The number of steps after them in which allocations are counted.
const STEADY: usize = 5;

/// The system's allocator, with counts.
struct CountingAllocator;

/// Whether allocations are counted.
static COUNTING: AtomicBool = AtomicBool::new(false);
/// The number of large allocations that were counted.
static SEEN: AtomicUsize = AtomicUsize::new(0);
/// The size of the largest of them.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

/// Counts an allocation, unless it is aligned to cache lines. Two kinds are: buffers of the pool,
/// which the memory statistics count, and the operands that the GEMM crate packs and frees within
/// each call.
fn count(bytes: usize, align: usize) {
    if bytes >= LARGE && align < 64 && COUNTING.load(Ordering::Relaxed) {
        SEEN.fetch_add(1, Ordering::Relaxed);
        LARGEST.fetch_max(bytes, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), layout.align());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), layout.align());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, layout.align());
        // SAFETY: the caller's promise.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Serialises the tests, which share one allocator.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const SMALL: [&str; 6] = [
    "model.layers=2",
    "model.width=64",
    "model.heads=4",
    "model.context=32",
    "batch.global=48",
    "model.dropout=0.1",
];

fn plan(ranks: usize, threads: usize, settings: &[&str]) -> ResolvedConfig {
    let overrides: Vec<String> =
        SMALL.iter().chain(settings).map(|setting| setting.to_string()).collect();
    let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
    resolve(config, &Environment { ranks, threads, vocabulary: Some(65), on_gpu: false }).unwrap()
}

/// Trains, and calls `watch` to start and stop counting allocations. Returns the number of buffers
/// that were newly allocated in between.
fn train(comm: &Comm<Cpu>, plan: &ResolvedConfig, watch: impl Fn(bool)) -> Result<usize> {
    let (data, _) = micro_batches::open(&plan.config)?;
    let (mut engine, _) = engine(comm, plan, Cpu::new(plan.threads), None)?;
    let mut progress = Progress::default();
    let mut feed = MicroBatches::start(&engine.model, data, plan, progress)?;
    for _ in 0..WARM_UP {
        train_round(plan, &mut engine, || feed.next_micro(), &mut progress, ControlFlags::empty)?;
    }
    let before = engine.model.backend.memory_stats().system_allocs();
    watch(true);
    for _ in 0..STEADY {
        train_round(plan, &mut engine, || feed.next_micro(), &mut progress, ControlFlags::empty)?;
    }
    watch(false);
    Ok(engine.model.backend.memory_stats().system_allocs() - before)
}

#[test]
fn one_rank_allocates_nothing_large() {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for (threads, settings) in [
        (1, ""),
        (2, ""),
        (2, "parallel.recompute=true"),
        (2, "batch.micro=8 parallel.virtual_ranks=2"),
    ] {
        let plan = plan(1, threads, &settings.split_whitespace().collect::<Vec<_>>());
        SEEN.store(0, Ordering::Relaxed);
        let fresh = train(&comm::single(), &plan, |watch| COUNTING.store(watch, Ordering::Relaxed))
            .unwrap();
        let seen = SEEN.load(Ordering::Relaxed);
        let largest = LARGEST.load(Ordering::Relaxed);
        assert_eq!(
            (seen, fresh),
            (0, 0),
            "{threads} threads, {settings}: the largest has {largest} bytes"
        );
    }
}

#[test]
fn the_watch_sees() {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    COUNTING.store(true, Ordering::Relaxed);
    let large = std::hint::black_box(vec![1u8; LARGE]);
    COUNTING.store(false, Ordering::Relaxed);
    assert!(SEEN.swap(0, Ordering::Relaxed) > 0 && large.len() == LARGE);
}

#[test]
fn pools_of_every_layout_are_enough() {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for (ranks, settings) in [
        (1, "batch.micro=16"),
        (1, "parallel.virtual_ranks=8 parallel.recompute=true"),
        (2, "parallel.zero=0"),
        (4, "parallel.zero=1"),
        (4, "parallel.zero=2"),
        (4, "parallel.zero=3"),
        (4, "parallel.zero=3 parallel.shard=2 parallel.recompute=true"),
        (2, "parallel.zero=2 parallel.virtual_ranks=8 batch.micro=2"),
        (2, "parallel.zero=3 parallel.virtual_ranks=8 parallel.recompute=true"),
        (3, "parallel.zero=3 comm.algorithm=ring batch.micro=4"),
    ] {
        let settings: Vec<&str> = settings.split_whitespace().collect();
        let plan = plan(ranks, 1, &settings);
        let fresh = on_threads(ranks, |comm| train(comm, &plan, |_| ())).unwrap();
        assert!(
            fresh.iter().all(|fresh| *fresh == 0),
            "{ranks} ranks, {settings:?}: {fresh:?} fresh buffers"
        );
    }
}
