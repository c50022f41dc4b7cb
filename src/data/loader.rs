//! Reading of batches ahead of the training step, on a separate thread.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::sample_fields::{SampleFields, SampleSizes};
use super::sample_order::Drawing;
use super::{Draw, SampleOrder, Source};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::{Activity, ActivityKind, Track, span};
use hpctrain_base::spawn::spawn;

/// The samples of one micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// The positions of the samples in the run.
    pub positions: Range<u64>,
    /// Each part, sample after sample.
    pub parts: SampleFields<Vec<u32>, Vec<f32>>,
}

impl Batch {
    /// Creates an empty batch with capacity for `samples` samples.
    fn with_room(sizes: SampleSizes, samples: usize) -> Self {
        let parts = sizes.times(samples).map(Vec::with_capacity, Vec::with_capacity);
        Self { positions: 0..0, parts }
    }

    /// Reads samples `numbers` of a data set, which have the positions `positions` in the run.
    ///
    /// # Errors
    /// Returns an error if [`Source::read_run`] does.
    pub fn read(
        dataset: &mut dyn Source,
        positions: Range<u64>,
        numbers: impl Iterator<Item = u64>,
    ) -> Result<Self> {
        let mut batch = Self::with_room(dataset.sizes(), positions.clone().count());
        batch.fill(dataset, positions, numbers.map(|sample| Draw { sample, epoch: 0 }))?;
        Ok(batch)
    }

    /// Reads samples like [`Batch::read`], into the existing buffers, which are resized.
    fn fill(
        &mut self,
        dataset: &mut dyn Source,
        positions: Range<u64>,
        draws: impl Iterator<Item = Draw>,
    ) -> Result<()> {
        let sizes = dataset.sizes();
        let samples = positions.clone().count();
        self.positions = positions;
        let lens = sizes.times(samples);
        self.parts
            .as_mut()
            .zip(lens)
            .map(|(ids, len)| ids.resize(len, 0), |(numbers, len)| numbers.resize(len, 0.0));
        let mut into = self.parts.as_mut().map(Vec::as_mut_slice, Vec::as_mut_slice);
        let mut draws = draws.take(samples).peekable();
        let mut i = 0;
        while let Some(Draw { sample: first, epoch }) = draws.next() {
            let mut count = 1;
            while draws.next_if_eq(&Draw { sample: first + count as u64, epoch }).is_some() {
                count += 1;
            }
            dataset.read_run(first, count, epoch, into.samples(sizes, i, count))?;
            i += count;
        }
        Ok(())
    }

    /// Returns the bytes that the buffers take.
    fn bytes(&self) -> usize {
        let elements = self.parts.as_ref().map(Vec::capacity, Vec::capacity);
        elements.all().into_iter().sum::<usize>() * size_of::<u32>()
    }
}

/// The number of batches besides those that are ready: one being read, one in use.
const BESIDE_READY: usize = 2;

/// Returns batches in the order given at the start, read in advance.
///
/// One thread is enough: plain reads keep up with a network, and HDF5 serialises its callers.
pub struct Loader {
    /// `None` only while dropping.
    batches: Option<Receiver<Result<Batch>>>,
    used: SyncSender<Batch>,
    reader: Option<JoinHandle<()>>,
    /// The bytes of all batches, and of the data set's cache.
    held: Arc<AtomicUsize>,
    waited: Duration,
}

impl Loader {
    /// Starts to read `batches`, each a range of positions that `order` maps to samples, and keeps
    /// at most `depth` of them ready besides the one being read.
    pub fn start(
        dataset: impl Source + 'static,
        order: impl Into<SampleOrder>,
        batches: impl Iterator<Item = Range<u64>> + Send + 'static,
        depth: usize,
    ) -> Result<Self> {
        let (ready, receiver) = sync_channel(depth);
        // Capacity for all batches that will exist: an unbounded channel would allocate now and
        // then.
        let (used, recycled) = sync_channel(depth + BESIDE_READY);
        let held = Arc::new(AtomicUsize::new(0));
        let counter = held.clone();
        let order = order.into();
        let activity = Activity::current();
        let reader = spawn("hpctrain-data", move || {
            activity.inspect(|activity| activity.register_thread(Track::Loader));
            read_ahead(dataset, &order, batches, depth, &ready, &recycled, &counter);
        })?;
        Ok(Self {
            batches: Some(receiver),
            used,
            reader: Some(reader),
            held,
            waited: Duration::ZERO,
        })
    }

    /// Returns the next batch, and waits for it if necessary.
    ///
    /// Returns an error if the batch cannot be read, and in every call after that or after the last
    /// batch.
    #[expect(
        clippy::should_implement_trait,
        reason = "the end is an error here: the caller knows the schedule"
    )]
    pub fn next(&mut self) -> Result<Batch> {
        let start = Instant::now();
        let _wait = span(ActivityKind::Loading, None);
        let received = self.batches.as_ref().and_then(|batches| batches.recv().ok());
        self.waited += start.elapsed();
        received.unwrap_or_else(|| {
            Err(Error::internal(
                "no batch is left: the loader was asked for more than its schedule",
            ))
        })
    }

    /// Hands the buffers of a batch back to the loader, to be filled again.
    pub fn recycle(&self, batch: Batch) {
        // A reader that has ended, or has enough buffers, does not need this one.
        let _ = self.used.try_send(batch);
    }

    /// Returns the bytes of the batches that were read ahead, are being read, or are in use, and of
    /// the data set's cache.
    pub fn buffered_bytes(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Returns the total time that [`next`](Self::next) has waited.
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Without a receiver the reader's next send fails, even if it is blocked.
        self.batches = None;
        if let Some(reader) = self.reader.take() {
            // A panic of the reader has been reported by its thread and ended the batches.
            let _ = reader.join();
        }
    }
}

/// Sends all batches; after an error, sends the error and stops.
fn read_ahead(
    mut dataset: impl Source,
    order: &SampleOrder,
    batches: impl Iterator<Item = Range<u64>>,
    depth: usize,
    ready: &SyncSender<Result<Batch>>,
    recycled: &Receiver<Batch>,
    held: &AtomicUsize,
) {
    let mut batches = batches.peekable();
    // All batches that will ever exist, so that memory does not depend on the reader's progress:
    // those ready, one being read, one in use.
    let samples = batches.peek().map_or(0, |positions| positions.clone().count());
    let sizes = dataset.sizes();
    let empty = || Batch::with_room(sizes, samples);
    let mut unused: Vec<Batch> = std::iter::repeat_with(empty).take(depth + BESIDE_READY).collect();
    let of_batches: usize = unused.iter().map(Batch::bytes).sum();
    held.store(of_batches, Ordering::Relaxed);
    let mut drawing = Drawing::new(order);
    for positions in batches {
        let mut batch = unused.pop().or_else(|| recycled.try_recv().ok()).unwrap_or_else(empty);
        let reading = span(ActivityKind::Reading, None);
        let draws = positions.clone().map(|position| drawing.draw(position));
        let batch = batch.fill(&mut dataset, positions, draws).map(|()| batch);
        drop(reading);
        held.store(of_batches + dataset.cached(), Ordering::Relaxed);
        let failed = batch.is_err();
        if ready.send(batch).is_err() || failed {
            return;
        }
    }
}
