//! A fork-join thread pool whose workers spin between kernels.
//!
//! Kernels of a small model take tens of microseconds; waking a sleeping thread costs as much.
//! Workers therefore spin briefly after a job before they sleep. A job consists of independent
//! tasks, each claimed once; the caller works too and returns when all are done.
//!
//! A kernel's items are distributed in order: a thread gets the same part of the rows of all
//! tensors in every kernel, which its caches hold. Only a thread without items of its share steals
//! from others.
//!
//! `unsafe` code passes a borrowed closure to threads that outlive the borrow. It is sound because
//! the caller waits until all tasks are done.
//!
//! Kernels distribute their work by rayon's indexed parallel iterators over slices. Its thread pool
//! is not used: the threads of this one keep their parts and stay awake between kernels.

use std::cell::UnsafeCell;
use std::mem::replace;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rayon::iter::plumbing::{Producer, ProducerCallback};
use rayon::iter::{Either, IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::spawn;

/// Iterations that a worker spins for the next job before it sleeps: 0.2 ms on a Xeon with AMX; other
/// CPUs pause for longer or shorter.
const SPINS: u32 = 20_000;

/// The bits of the claim word that hold the next task and the number of tasks each; the rest is the
/// job's number.
const TASK_BITS: u32 = 24;
const TASK_MASK: u64 = (1 << TASK_BITS) - 1;

/// A task, called with the index of the thread and that of the task.
type Task<'a> = &'a (dyn Fn(usize, usize) + Sync);

struct Shared {
    /// Job number, number of tasks and next task in one word: claiming a task atomically determines
    /// which job it belongs to and whether it exists.
    claim: AtomicU64,
    /// The number of finished tasks of the current job.
    done: AtomicUsize,
    /// The current job. Written only while no claimed task is unfinished.
    job: UnsafeCell<Option<Task<'static>>>,
    panicked: AtomicBool,
    sleepers: AtomicUsize,
    stop: AtomicBool,
}

// SAFETY: `job` is written by the one caller inside `run` (it holds the pool's lock) while every
// earlier task is finished, and read only by threads that hold an unfinished task of the current
// job.
unsafe impl Sync for Shared {}

impl Shared {
    /// Claims the next task of the current job, if one is left.
    fn next(&self) -> Option<usize> {
        let split =
            |word: u64| ((word & TASK_MASK) as usize, ((word >> TASK_BITS) & TASK_MASK) as usize);
        let (index, tasks) = split(self.claim.load(Ordering::Acquire));
        if index >= tasks {
            return None;
        }
        let (index, tasks) = split(self.claim.fetch_add(1, Ordering::AcqRel));
        (index < tasks).then_some(index)
    }

    /// Runs tasks of the current job on this thread until none is left to claim.
    fn work(&self, thread: usize) {
        while let Some(index) = self.next() {
            // SAFETY: a claimed, unfinished task keeps `run` from returning and the job from
            // changing.
            let job = unsafe { *self.job.get() };
            if let Some(task) = job
                && catch_unwind(AssertUnwindSafe(|| task(thread, index))).is_err()
            {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.done.fetch_add(1, Ordering::Release);
        }
    }

    fn worker(&self, thread: usize) {
        let mut spins = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let before = self.claim.load(Ordering::Acquire);
            self.work(thread);
            if self.claim.load(Ordering::Acquire) != before {
                spins = 0;
            } else if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                self.sleepers.fetch_add(1, Ordering::SeqCst);
                // A job published before the line above took effect is seen here; a later one wakes
                // this thread.
                if self.claim.load(Ordering::SeqCst) == before && !self.stop.load(Ordering::SeqCst)
                {
                    std::thread::park();
                }
                self.sleepers.fetch_sub(1, Ordering::SeqCst);
                spins = 0;
            }
        }
    }
}

/// The compute threads of one rank.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held while a job runs; the number of the last job.
    running: Mutex<u64>,
    /// The error of a thread that the system refused to start.
    refused: Option<Error>,
}

impl Threads {
    /// Creates a pool of `count` threads, including the caller of [`Threads::run`].
    pub fn new(count: usize) -> Self {
        let shared = Arc::new(Shared {
            claim: AtomicU64::new(0),
            done: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let mut refused = None;
        let workers = (1..count)
            .filter_map(|i| {
                let shared = shared.clone();
                match spawn(&format!("compute-{i}"), move || shared.worker(i)) {
                    Ok(worker) => Some(worker),
                    Err(e) => {
                        refused.get_or_insert(e);
                        None
                    }
                }
            })
            .collect();
        Self { shared, workers, running: Mutex::new(0), refused }
    }

    /// Checks that all threads were started: with fewer, results are the same, but slower.
    ///
    /// # Errors
    /// Returns an error if the system refused to start a thread.
    pub fn check(&self) -> Result<()> {
        self.refused.clone().map_or(Ok(()), Err)
    }

    /// Returns the number of threads that work on a job.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(thread, 0)` … `task(thread, tasks - 1)`, each once and in any order, with the
    /// index of the thread that runs it; returns when all have returned.
    ///
    /// # Panics
    /// Panics if a task panics. Must not be called from inside a task.
    pub fn run(&self, tasks: usize, task: impl Fn(usize, usize) + Sync) {
        self.run_dyn(tasks, &task);
    }

    /// Runs a job; not generic, so that it is compiled once instead of for every kernel.
    fn run_dyn(&self, tasks: usize, task: Task<'_>) {
        if self.workers.is_empty() || tasks <= 1 {
            (0..tasks).for_each(|index| task(0, index));
            return;
        }
        assert!(tasks as u64 <= TASK_MASK, "{tasks} tasks in one job");
        let shared = &*self.shared;
        let mut job_number = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        *job_number += 1;
        // SAFETY: only the lifetime changes; every use of the reference ends before this function
        // returns, because it waits for all claimed tasks and no more can be claimed.
        let task: Task<'static> = unsafe { std::mem::transmute(task) };
        // SAFETY: no task of an earlier job is unfinished, so no thread reads `job` now.
        unsafe { *shared.job.get() = Some(task) };
        shared.done.store(0, Ordering::Relaxed);
        let word = *job_number << (2 * TASK_BITS) | (tasks as u64) << TASK_BITS;
        shared.claim.store(word, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            self.workers.iter().for_each(|worker| worker.thread().unpark());
        }
        shared.work(0);
        let mut spins = 0;
        while shared.done.load(Ordering::Acquire) < tasks {
            spins += 1;
            // A worker that was descheduled inside its task needs the core on which this loop
            // spins.
            if spins % 1024 == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        if shared.panicked.swap(false, Ordering::Relaxed) {
            drop(job_number);
            resume_unwind(Box::new("a compute thread panicked"));
        }
    }

    /// Calls `f` once with each item, distributed over the threads. Items are typically disjoint
    /// parts of an output.
    pub fn each<I: IntoParallelIterator<Iter: IndexedParallelIterator>>(
        &self,
        items: I,
        f: impl Fn(I::Item) + Sync,
    ) {
        let items = items.into_par_iter();
        let len = items.len();
        items.with_producer(Each { threads: self, len, f });
    }
}

/// The calls of `f` with `len` items.
struct Each<'a, F> {
    threads: &'a Threads,
    len: usize,
    f: F,
}

impl<T, F: Fn(T) + Sync> ProducerCallback<T> for Each<'_, F> {
    type Output = ();

    fn callback<P: Producer<Item = T>>(self, items: P) {
        let Self { threads, len, f } = self;
        let count = threads.count();
        if count == 1 || len <= 1 {
            return items.into_iter().for_each(f);
        }
        let mut rest = Share { items: Some(items), len };
        let shares: Vec<_> = (0..count)
            .map(|i| Mutex::new(rest.take(len * (i + 1) / count - len * i / count)))
            .collect();
        threads.run(count, |thread, _| {
            for turn in 0..count {
                let share = &shares[(thread + turn) % count];
                // A thread takes the first item of its own share and the last of others', whose
                // first ones may be in their threads' caches.
                let next = || {
                    let mut share = share.lock().unwrap_or_else(PoisonError::into_inner);
                    if turn == 0 { share.take(1).items } else { share.take_last().items }
                };
                while let Some(item) = next() {
                    item.into_iter().for_each(&f);
                }
            }
        });
    }
}

/// Items that no thread has claimed.
struct Share<P> {
    /// `None` if there are none.
    items: Option<P>,
    len: usize,
}

impl<P: Producer> Share<P> {
    /// Removes and returns the first `len` items, or all if there are fewer.
    fn take(&mut self, len: usize) -> Self {
        let len = len.min(self.len);
        let (own, rest) = self.items.take().map(|items| items.split_at(len)).unzip();
        *self = Self { items: rest.filter(|_| len < self.len), len: self.len - len };
        Self { items: own.filter(|_| len > 0), len }
    }

    /// Removes and returns the last item.
    fn take_last(&mut self) -> Self {
        let rest = self.take(self.len.saturating_sub(1));
        replace(self, rest)
    }
}

/// Collects the items into a list on the calling thread.
pub fn list<I: IndexedParallelIterator>(items: I) -> Vec<I::Item> {
    items.with_producer(List)
}

struct List;

impl<T> ProducerCallback<T> for List {
    type Output = Vec<T>;

    fn callback<P: Producer<Item = T>>(self, items: P) -> Vec<T> {
        items.into_iter().collect()
    }
}

/// Pairs each item with a chunk of `len` elements of `x`, or with `None` if `x` is empty.
pub fn with_chunks<I: IndexedParallelIterator>(
    items: I,
    x: &mut [f32],
    len: usize,
) -> impl IndexedParallelIterator<Item = (I::Item, Option<&mut [f32]>)> {
    if x.is_empty() {
        Either::Left(items.map(|item| (item, None)))
    } else {
        Either::Right(items.zip(x.par_chunks_mut(len)).map(|(item, x)| (item, Some(x))))
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of its tasks, so joining cannot fail.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Threads::new(threads);
            for tasks in (0..40).chain([1000]) {
                let hits: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, |_, i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn items_are_moved_out_and_sleepers_wake() {
        let pool = Threads::new(3);
        for _ in 0..3 {
            let mut out = vec![0; 100];
            pool.each(out.par_chunks_mut(7).enumerate(), |(i, part)| part.fill(i + 1));
            assert!(out.iter().enumerate().all(|(i, &x)| x == i / 7 + 1));
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    #[test]
    fn a_thread_begins_with_its_own_items() {
        let pool = Threads::new(2);
        let begun = AtomicUsize::new(0);
        let names = Mutex::new(vec![None; 8]);
        let start = std::time::Instant::now();
        pool.each((0..8usize).into_par_iter(), |i| {
            // The first items wait for each other, so neither thread can have both.
            if i % 4 == 0 {
                begun.fetch_add(1, Ordering::Relaxed);
                while begun.load(Ordering::Relaxed) < 2 && start.elapsed().as_secs() < 30 {
                    std::thread::yield_now();
                }
            }
            names.lock().unwrap()[i] = std::thread::current().name().map(str::to_owned);
        });
        let names = names.into_inner().unwrap();
        assert_eq!(names[4].as_deref(), Some("compute-1"));
        assert_ne!(names[0], names[4]);
    }

    #[test]
    fn shares_give_from_both_ends() {
        let share =
            |range: std::ops::Range<usize>| Share { len: range.len(), items: Some(Numbers(range)) };
        let mut all = share(0..5);
        assert_eq!(all.take(2).items.unwrap().0, 0..2);
        assert_eq!(all.take_last().items.unwrap().0, 4..5);
        assert_eq!((all.len, all.take(9).items.unwrap().0), (2, 2..4));
        assert!(all.take(1).items.is_none() && all.take_last().items.is_none());
    }

    struct Numbers(std::ops::Range<usize>);

    impl Producer for Numbers {
        type Item = usize;
        type IntoIter = std::ops::Range<usize>;

        fn into_iter(self) -> Self::IntoIter {
            self.0
        }

        fn split_at(self, at: usize) -> (Self, Self) {
            let middle = self.0.start + at;
            (Self(self.0.start..middle), Self(middle..self.0.end))
        }
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_survives() {
        let pool = Threads::new(2);
        let caught = catch_unwind(AssertUnwindSafe(|| pool.run(8, |_, i| assert_ne!(i, 5))));
        assert!(caught.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(8, |_, i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 28);
    }
}
