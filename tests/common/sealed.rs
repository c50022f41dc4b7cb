//! A test device in host memory that detects accesses without synchronization.
//!
//! Uploads and copies are deferred until their event is queried twice or awaited; until then their
//! targets contain NaN. Addresses are offset by a constant, so that dereferencing one ends the
//! process, unless the device is created with real addresses.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use hpctrain::backend::{
    Backend, CommBuffer, DeviceCopies, DeviceEvent, DeviceSpan, Element, MemoryKind, MemoryStats,
    OrderedSum, Pinned, Profile, Scratch, SpanAtOffset,
};
use hpctrain::error::{Error, Result};

/// The offset of hidden addresses, which makes them invalid in any process.
const HIDDEN: usize = 1 << 62;

/// Host memory that is only used through pointers.
struct Words {
    at: *mut f32,
    len: usize,
}

// SAFETY: only this device uses the memory; the tests check when.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    fn new(len: usize) -> Self {
        let memory = vec![f32::NAN; len].into_boxed_slice();
        Self { at: Box::into_raw(memory).cast(), len }
    }

    #[allow(
        clippy::mut_from_ref,
        reason = "a device's memory is written by all who hold its address"
    )]
    fn slice(&self) -> &mut [f32] {
        // SAFETY: the memory lives as long as `self`; no two slices are used at once.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the pointer is the one that `new` made of a box of this length.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.at, self.len)) });
    }
}

/// A deferred operation of the device.
type Job = Box<dyn FnOnce() + Send>;

/// A queue of jobs. Numbers count all jobs that were ever queued.
#[derive(Default)]
struct Stream {
    /// Whether jobs are no longer executed.
    is_stuck: AtomicBool,
    jobs: Mutex<(usize, VecDeque<Job>)>,
}

impl Stream {
    fn queue(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        self.jobs.lock().unwrap().1.push_back(Box::new(job));
    }

    /// Returns an event that is done when all current jobs are.
    fn event(self: &Arc<Self>) -> Box<dyn DeviceEvent> {
        let jobs = self.jobs.lock().unwrap();
        Box::new(Later {
            stream: self.clone(),
            until: jobs.0 + jobs.1.len(),
            asked: AtomicBool::new(false),
        })
    }

    fn run(&self, until: usize) {
        let mut jobs = self.jobs.lock().unwrap();
        while jobs.0 < until {
            jobs.0 += 1;
            let job = jobs.1.pop_front().unwrap();
            job();
        }
    }
}

struct Later {
    stream: Arc<Stream>,
    until: usize,
    asked: AtomicBool,
}

impl DeviceEvent for Later {
    fn is_done(&self) -> Result<bool> {
        if self.stream.is_stuck.load(Ordering::SeqCst) {
            return Ok(false);
        }
        if self.asked.swap(true, Ordering::SeqCst) {
            self.stream.run(self.until);
            return Ok(true);
        }
        Ok(false)
    }

    fn wait(&self) -> Result<()> {
        self.stream.run(self.until);
        Ok(())
    }
}

struct SealedPort {
    hidden: usize,
    stream: Arc<Stream>,
    stats: Arc<MemoryStats>,
}

impl SealedPort {
    fn span<'a>(&self, words: &'a Words, range: Range<usize>) -> DeviceSpan<'a> {
        assert!(range.end <= words.len);
        // SAFETY: the words live for 'a. Hidden addresses are never passed to MPI, which the tests
        // ensure.
        unsafe {
            DeviceSpan::new(words.at.expose_provenance() + self.hidden, words.len).part(range)
        }
    }

    /// Returns the memory of a span.
    fn slice<'a>(hidden: usize, address: usize, words: usize) -> &'a mut [f32] {
        // SAFETY: spans are those of `span`, of memory that the test keeps, and jobs run one after
        // the other.
        unsafe {
            std::slice::from_raw_parts_mut(
                std::ptr::with_exposed_provenance_mut(address - hidden),
                words,
            )
        }
    }

    fn later(&self, from: DeviceSpan<'_>, to: DeviceSpan<'_>, act: fn(&mut f32, f32)) {
        assert_eq!(from.words(), to.words());
        let (hidden, from, to, words) = (self.hidden, from.address(), to.address(), to.words());
        self.stream.queue(move || {
            let from = Self::slice(hidden, from, words);
            Self::slice(hidden, to, words)
                .iter_mut()
                .zip(from)
                .for_each(|(to, from)| act(to, *from));
        });
    }
}

impl Pinned for Words {
    fn words(&mut self) -> &mut [f32] {
        self.slice()
    }
}

struct Place(Words, usize);

impl Scratch for Place {
    fn span(&self) -> DeviceSpan<'_> {
        // SAFETY: as in `SealedPort::span`.
        unsafe { DeviceSpan::new(self.0.at.expose_provenance() + self.1, self.0.len) }
    }
}

impl DeviceCopies for SealedPort {
    fn pinned(&self, words: usize) -> Result<Box<dyn Pinned>> {
        self.stats.record_system_alloc();
        Ok(Box::new(Words::new(words)))
    }

    fn scratch(&self, words: usize) -> Result<Box<dyn Scratch>> {
        self.stats.record_system_alloc();
        Ok(Box::new(Place(Words::new(words), self.hidden)))
    }

    unsafe fn download(
        &self,
        pieces: &[SpanAtOffset<'_>],
        host: *mut f32,
    ) -> Result<Box<dyn DeviceEvent>> {
        for (span, at) in pieces {
            let hidden = self.hidden;
            let address = span.address();
            let words = span.words();
            let to = host.expose_provenance() + at * size_of::<f32>();
            Self::slice(0, to, words).fill(f32::NAN);
            self.stream.queue(move || {
                Self::slice(0, to, words).copy_from_slice(Self::slice(hidden, address, words))
            });
        }
        Ok(self.stream.event())
    }

    unsafe fn upload(
        &self,
        host: *const f32,
        pieces: &[SpanAtOffset<'_>],
    ) -> Result<Box<dyn DeviceEvent>> {
        for (span, at) in pieces {
            let hidden = self.hidden;
            let address = span.address();
            let words = span.words();
            let from = host.expose_provenance() + at * size_of::<f32>();
            Self::slice(hidden, address, words).fill(f32::NAN);
            self.stream.queue(move || {
                Self::slice(hidden, address, words).copy_from_slice(Self::slice(0, from, words))
            });
        }
        Ok(self.stream.event())
    }

    fn add(&self, from: DeviceSpan<'_>, to: DeviceSpan<'_>) -> Result<()> {
        self.later(from, to, |to, from| *to += from);
        Ok(())
    }

    fn sum_in_order(&self, sums: &[OrderedSum<'_>]) -> Result<Box<dyn DeviceEvent>> {
        for &OrderedSum { own, number, others, .. } in sums {
            let hidden = self.hidden;
            let [to, from] = [own, others].map(DeviceSpan::address);
            let [words, others] = [own, others].map(DeviceSpan::words);
            self.stream.queue(move || {
                let own = Self::slice(hidden, to, words);
                let others = Self::slice(hidden, from, others);
                let mut terms: Vec<_> = others.chunks(words).map(<[f32]>::to_vec).collect();
                terms.insert(number, own.to_vec());
                while terms.len() > 1 {
                    terms = terms.chunks(2).map(sum_of_pair).collect();
                }
                own.copy_from_slice(&terms[0]);
            });
        }
        Ok(self.stream.event())
    }

    fn copy(&self, from: DeviceSpan<'_>, to: DeviceSpan<'_>) -> Result<()> {
        self.later(from, to, |to, from| *to = from);
        Ok(())
    }

    fn mark(&self) -> Result<Box<dyn DeviceEvent>> {
        Ok(self.stream.event())
    }
}

/// Returns the sum of two terms, or the only one.
fn sum_of_pair(pair: &[Vec<f32>]) -> Vec<f32> {
    match pair {
        [one, other] => one.iter().zip(other).map(|(one, other)| one + other).collect(),
        alone => alone.concat(),
    }
}

/// The device of one rank. Parameters are stored in bf16, two per word.
#[derive(Clone)]
pub struct Sealed {
    copies: Arc<SealedPort>,
    /// The pending work of compute.
    compute: Arc<Stream>,
    stats: Arc<MemoryStats>,
    profile: Profile,
}

impl Sealed {
    /// Creates a device with real addresses if `shown`, else with hidden ones.
    pub fn new(shown: bool) -> Self {
        let stats: Arc<MemoryStats> = Arc::default();
        let copies = SealedPort {
            hidden: if shown { 0 } else { HIDDEN },
            stream: Arc::default(),
            stats: stats.clone(),
        };
        Self {
            copies: Arc::new(copies),
            compute: Arc::default(),
            stats,
            profile: Profile::default(),
        }
    }

    /// Makes compute hang.
    pub fn hang(&self) {
        self.compute.is_stuck.store(true, Ordering::SeqCst);
    }

    fn make(&self, len: usize, per_word: usize) -> SealedBuf {
        let words = Arc::new(Words::new(len.div_ceil(per_word)));
        SealedBuf { words, len, per_word, device: self.clone() }
    }

    /// Returns the content of a buffer without waiting for pending work.
    pub fn look(&self, buf: &SealedBuf) -> Vec<f32> {
        let words = buf.words.slice();
        match buf.per_word {
            1 => words.to_vec(),
            _ => {
                let halves = words
                    .iter()
                    .flat_map(|word| [word.to_bits() << 16, word.to_bits() & 0xffff_0000]);
                halves.take(buf.len).map(f32::from_bits).collect()
            }
        }
    }
}

pub struct SealedBuf {
    words: Arc<Words>,
    len: usize,
    per_word: usize,
    device: Sealed,
}

/// A view, which is always of the whole buffer.
#[derive(Clone, Copy)]
pub struct Window<'a>(&'a SealedBuf);

pub struct WindowMut<'a>(&'a mut SealedBuf);

impl Backend for Sealed {
    const ON_HOST: bool = false;
    const WORKSPACE: usize = 0;
    type Buf = SealedBuf;
    type IndexBuf = Vec<u32>;
    type Scalar = f64;
    type View<'a> = Window<'a>;
    type ViewMut<'a> = WindowMut<'a>;

    fn alloc(&self, what: MemoryKind, len: usize) -> Result<SealedBuf> {
        Ok(self.make(len, if what == MemoryKind::Parameters { 2 } else { 1 }))
    }

    fn alloc_f32(&self, _: MemoryKind, len: usize) -> Result<SealedBuf> {
        Ok(self.make(len, 1))
    }

    fn has_master_weights(&self) -> bool {
        true
    }

    fn write(&self, host: &[f32], to: WindowMut<'_>) -> Result<()> {
        let words = to.0.words.clone();
        let values: Vec<f32> = match to.0.per_word {
            1 => host.to_vec(),
            _ => {
                let half = |x: Option<&f32>| x.map_or(0, |x| x.to_bits() >> 16);
                host.chunks(2)
                    .map(|pair| f32::from_bits(half(pair.first()) | half(pair.get(1)) << 16))
                    .collect()
            }
        };
        self.compute.queue(move || words.slice().copy_from_slice(&values));
        Ok(())
    }

    fn download(&self, from: Window<'_>, host: &mut [f32]) -> Result<()> {
        self.compute.event().wait()?;
        host.copy_from_slice(&self.look(from.0));
        Ok(())
    }

    fn read(&self, scalar: f64) -> Result<f64> {
        Ok(scalar)
    }

    fn peek(&self, scalar: &f64) -> Result<f64> {
        Ok(*scalar)
    }

    fn upload_indices(&self, host: &[u32]) -> Result<Vec<u32>> {
        Ok(host.to_vec())
    }

    fn download_indices(&self, ints: &Vec<u32>, host: &mut [u32]) -> Result<()> {
        host.copy_from_slice(ints);
        Ok(())
    }

    fn indices_len(ints: &Vec<u32>) -> usize {
        ints.len()
    }

    fn slice_indices(ints: &Vec<u32>, range: Range<usize>) -> Vec<u32> {
        ints[range].to_vec()
    }

    fn view(buf: &SealedBuf, _: Range<usize>) -> Window<'_> {
        Window(buf)
    }

    fn view_mut(buf: &mut SealedBuf, _: Range<usize>) -> WindowMut<'_> {
        WindowMut(buf)
    }

    fn shared<'a>(view: &'a WindowMut<'_>) -> Window<'a> {
        Window(view.0)
    }

    fn shorten<'short, 'long: 'short>(view: Window<'long>) -> Window<'short> {
        view
    }

    fn reborrow<'a>(view: &'a mut WindowMut<'_>) -> WindowMut<'a> {
        WindowMut(view.0)
    }

    fn len(buf: &SealedBuf) -> usize {
        buf.len
    }

    fn element_of(buf: &SealedBuf) -> Element {
        if buf.per_word == 1 { Element::F32 } else { Element::Bf16 }
    }

    fn split_at(_: Self::View<'_>, _: usize) -> (Self::View<'_>, Self::View<'_>) {
        unimplemented!("windows are whole buffers here")
    }

    fn split_at_mut(_: Self::ViewMut<'_>, _: usize) -> (Self::ViewMut<'_>, Self::ViewMut<'_>) {
        unimplemented!("windows are whole buffers here")
    }

    fn comm_buffer(buf: &mut SealedBuf, range: Range<usize>) -> Result<CommBuffer<'_>> {
        let n = buf.per_word;
        if !range.start.is_multiple_of(n) || !(range.end.is_multiple_of(n) || range.end == buf.len)
        {
            return Err(Error::internal(format!("{range:?} cuts a word")));
        }
        let copies = buf.device.copies.clone();
        Ok(CommBuffer::Device(
            copies.span(&buf.words, range.start / n..range.end.div_ceil(n)),
            copies,
        ))
    }

    fn record_event(buf: &SealedBuf) -> Result<Option<Box<dyn DeviceEvent>>> {
        Ok(Some(buf.device.compute.event()))
    }

    fn trim(&self) {}

    fn memory_stats(&self) -> &MemoryStats {
        &self.stats
    }

    fn profile(&self) -> &Profile {
        &self.profile
    }
}
