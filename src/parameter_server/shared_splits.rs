//! The samples of a program, which a worker opens again each time that it joins.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hpctrain_base::error::Result;
use hpctrain_data::{Fingerprint, Preprocessing, SampleMut, SampleSizes, Source, Tokenizer};
use hpctrain_engine::Splits;

/// The sources of a program. A worker that joins a second time reads the same ones.
pub struct SharedSplits {
    name: String,
    train: SharedSource,
    validation: Option<SharedSource>,
}

impl SharedSplits {
    /// Shares the sources of a program.
    pub fn new(splits: Splits) -> Self {
        Self {
            name: splits.name,
            train: SharedSource::new(splits.train),
            validation: splits.validation.map(SharedSource::new),
        }
    }

    /// Returns the sources.
    pub fn splits(&self) -> Splits {
        let validation = self.validation.clone();
        Splits {
            name: self.name.clone(),
            train: Box::new(self.train.clone()),
            validation: validation.map(|source| Box::new(source) as Box<dyn Source>),
        }
    }
}

/// A source with several owners, of which one reads: those of earlier sessions have ended.
#[derive(Clone)]
struct SharedSource {
    source: Arc<Mutex<Box<dyn Source>>>,
    /// A copy, because no reference outlives the lock.
    tokenizer: Option<Tokenizer>,
}

impl SharedSource {
    fn new(source: Box<dyn Source>) -> Self {
        let tokenizer = source.tokenizer().cloned();
        Self { source: Arc::new(Mutex::new(source)), tokenizer }
    }

    fn lock(&self) -> MutexGuard<'_, Box<dyn Source>> {
        self.source.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Source for SharedSource {
    fn samples(&self) -> u64 {
        self.lock().samples()
    }

    fn sizes(&self) -> SampleSizes {
        self.lock().sizes()
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        self.lock().read(sample, into)
    }

    fn read_run(
        &mut self,
        first: u64,
        count: usize,
        epoch: u64,
        into: SampleMut<'_>,
    ) -> Result<()> {
        self.lock().read_run(first, count, epoch, into)
    }

    fn parts(&self) -> Vec<u64> {
        self.lock().parts()
    }

    fn files(&self) -> Vec<u64> {
        self.lock().files()
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        self.lock().fingerprint()
    }

    fn cache_limit(&self) -> usize {
        self.lock().cache_limit()
    }

    fn cached(&self) -> usize {
        self.lock().cached()
    }

    fn skipped_note(&self) -> Option<String> {
        self.lock().skipped_note()
    }

    fn unscaled(&self) -> Option<String> {
        self.lock().unscaled()
    }

    fn context(&self) -> usize {
        self.lock().context()
    }

    fn vocabulary(&self) -> usize {
        self.lock().vocabulary()
    }

    fn tokens(&self) -> u64 {
        self.lock().tokens()
    }

    fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    fn preprocessing(&self) -> Preprocessing {
        self.lock().preprocessing()
    }

    fn conform(&mut self, to: &Preprocessing) -> Result<Vec<String>> {
        self.lock().conform(to)
    }
}
