//! The trait of sources of samples: files, or code of a program.

use super::sample_fields::{SampleMut, SampleSizes};
use super::{Dataset, Fingerprint, Preprocessing, Tokenizer, preprocessing};
use hpctrain_base::error::Result;

/// Numbered samples for training or evaluation. [`Dataset`] implements it for HDF5 files; a program
/// may implement it for other files or for samples that it generates.
///
/// Every rank has its own source and requests the samples of its part of each batch. Seed, epoch
/// and position alone determine which sample is at which position of a run
/// ([`Sampler`](super::Sampler)). So if a number always gives the same sample on every rank, a run
/// has the same bits on any number of ranks and after every restart. Random parts of a sample
/// should therefore be derived from its number, as with [`random`](hpctrain_base::random).
///
/// A whole run checks each sample for ids and classes that the network does not have and for
/// numbers that are not finite; in a custom loop, `engine::Splits::checked` does.
///
/// ```
/// use hpctrain_data::{SampleMut, SampleSizes, Source};
/// use hpctrain_base::error::Result;
///
/// /// Points of a parabola: a number in, its square out.
/// struct Parabola;
///
/// impl Source for Parabola {
///     fn samples(&self) -> u64 {
///         1000
///     }
///
///     fn sizes(&self) -> SampleSizes {
///         SampleSizes { features: 1, values: 1, ..SampleSizes::default() }
///     }
///
///     fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
///         let x = sample as f32 / 500.0 - 1.0;
///         into.features[0] = x;
///         into.values[0] = x * x;
///         Ok(())
///     }
/// }
///
/// let mut x = [0.0];
/// let mut y = [0.0];
/// Parabola.read(750, SampleMut { features: &mut x, values: &mut y, ..SampleMut::default() })?;
/// assert_eq!((x[0], y[0]), (0.5, 0.25));
/// # Ok::<(), hpctrain_base::error::Error>(())
/// ```
pub trait Source: Send {
    /// Returns the number of samples; at least one.
    fn samples(&self) -> u64;

    /// Returns the number of elements of a sample's parts: the inputs of the network, and its
    /// targets. Text has as many ids as classes; rows have ids or features, and one class or some
    /// values, and a weight if samples have different weights in training.
    fn sizes(&self) -> SampleSizes;

    /// Overwrites `into`, whose parts have the lengths that [`Source::sizes`] returns, with sample
    /// number `sample`.
    ///
    /// # Errors
    /// Returns an error if the sample cannot be read, which ends the run.
    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()>;

    /// Overwrites `into` with `count` samples from number `first` on, one after the other, as in
    /// epoch `epoch`. The default reads each by itself, and the same samples in every epoch.
    ///
    /// # Errors
    /// Returns an error if [`Source::read`] does.
    fn read_run(
        &mut self,
        first: u64,
        count: usize,
        epoch: u64,
        mut into: SampleMut<'_>,
    ) -> Result<()> {
        let _ = epoch;
        let sizes = self.sizes();
        for i in 0..count {
            self.read(first + i as u64, into.samples(sizes, i, 1))?;
        }
        Ok(())
    }

    /// Returns the number of samples of each of the data sets that it is made of.
    fn parts(&self) -> Vec<u64> {
        vec![self.samples()]
    }

    /// Returns the number of samples of each file, in the order of their numbers. With
    /// `data.order = "files"` a rank reads only some of the files. The default is one file.
    fn files(&self) -> Vec<u64> {
        vec![self.samples()]
    }

    /// Returns the identity of the samples: a checkpoint records it, and a run is resumed only with
    /// the same samples. The default is their number. `None` disables the check.
    fn fingerprint(&self) -> Option<Fingerprint> {
        Some(Fingerprint::of_samples(self.samples()))
    }

    /// Returns the largest number of bytes that it caches.
    fn cache_limit(&self) -> usize {
        0
    }

    /// Returns the number of bytes that it caches now.
    fn cached(&self) -> usize {
        0
    }

    /// Returns a note on samples that were skipped when the source was created.
    fn skipped_note(&self) -> Option<String> {
        None
    }

    /// Returns a warning of one line if the network would get unscaled bytes.
    fn unscaled(&self) -> Option<String> {
        None
    }

    /// Returns the number of predictions per sample; for text, of positions.
    fn context(&self) -> usize {
        self.sizes().classes.max(1)
    }

    /// Returns a bound that all ids of text are below; 0 if it is not known, or if there are no
    /// ids.
    fn vocabulary(&self) -> usize {
        0
    }

    /// Returns the number of input elements of all samples together, for display.
    fn tokens(&self) -> u64 {
        let SampleSizes { ids, features, .. } = self.sizes();
        self.samples().saturating_mul((ids + features) as u64)
    }

    /// Returns the tokenizer, if there is one.
    fn tokenizer(&self) -> Option<&Tokenizer> {
        None
    }

    /// Returns the preprocessing of samples as they are read. For samples that a program generates,
    /// it has a tokenizer at most.
    fn preprocessing(&self) -> Preprocessing {
        Preprocessing { tokenizer: self.tokenizer().cloned(), ..Preprocessing::default() }
    }

    /// Makes later reads convert samples to the preprocessing `to` that a network was trained with.
    /// Returns a description of each conversion. The default does not convert samples.
    ///
    /// # Errors
    /// Returns an error if samples cannot be converted to it, or if the tokenizers differ.
    fn conform(&mut self, to: &Preprocessing) -> Result<Vec<String>> {
        preprocessing::tokenizer(self.tokenizer(), to.tokenizer.as_ref()).map(|_| vec![])
    }
}

impl Source for Dataset {
    fn samples(&self) -> u64 {
        self.samples()
    }

    fn sizes(&self) -> SampleSizes {
        self.sizes()
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        self.read(sample, into)
    }

    fn read_run(
        &mut self,
        first: u64,
        count: usize,
        epoch: u64,
        into: SampleMut<'_>,
    ) -> Result<()> {
        self.read_run(first, count, epoch, into)
    }

    fn parts(&self) -> Vec<u64> {
        self.parts().to_vec()
    }

    fn files(&self) -> Vec<u64> {
        self.samples_of_shards()
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        Some(self.fingerprint())
    }

    fn cache_limit(&self) -> usize {
        self.cache_limit()
    }

    fn cached(&self) -> usize {
        self.cached()
    }

    fn skipped_note(&self) -> Option<String> {
        self.skipped_note()
    }

    fn unscaled(&self) -> Option<String> {
        self.unscaled()
    }

    fn context(&self) -> usize {
        self.context()
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary()
    }

    fn tokens(&self) -> u64 {
        self.tokens()
    }

    fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer()
    }

    fn preprocessing(&self) -> Preprocessing {
        self.preprocessing().clone()
    }

    fn conform(&mut self, to: &Preprocessing) -> Result<Vec<String>> {
        self.conform(to)
    }
}

impl<S: Source + ?Sized> Source for Box<S> {
    fn samples(&self) -> u64 {
        (**self).samples()
    }

    fn sizes(&self) -> SampleSizes {
        (**self).sizes()
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        (**self).read(sample, into)
    }

    fn read_run(
        &mut self,
        first: u64,
        count: usize,
        epoch: u64,
        into: SampleMut<'_>,
    ) -> Result<()> {
        (**self).read_run(first, count, epoch, into)
    }

    fn parts(&self) -> Vec<u64> {
        (**self).parts()
    }

    fn files(&self) -> Vec<u64> {
        (**self).files()
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        (**self).fingerprint()
    }

    fn cache_limit(&self) -> usize {
        (**self).cache_limit()
    }

    fn cached(&self) -> usize {
        (**self).cached()
    }

    fn skipped_note(&self) -> Option<String> {
        (**self).skipped_note()
    }

    fn unscaled(&self) -> Option<String> {
        (**self).unscaled()
    }

    fn context(&self) -> usize {
        (**self).context()
    }

    fn vocabulary(&self) -> usize {
        (**self).vocabulary()
    }

    fn tokens(&self) -> u64 {
        (**self).tokens()
    }

    fn tokenizer(&self) -> Option<&Tokenizer> {
        (**self).tokenizer()
    }

    fn preprocessing(&self) -> Preprocessing {
        (**self).preprocessing()
    }

    fn conform(&mut self, to: &Preprocessing) -> Result<Vec<String>> {
        (**self).conform(to)
    }
}
