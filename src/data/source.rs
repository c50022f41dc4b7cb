//! Sources of samples: files, or a program's own code.

use super::sample_fields::{SampleMut, SampleSizes};
use super::{Dataset, Fingerprint, Preprocessing, Tokenizer, preprocessing};
use hpctrain_base::error::Result;

/// Numbered samples for training or evaluation. [`Dataset`] is one, of HDF5 files; a program may
/// have others, of other files or made in code.
///
/// Every rank has a source of its own and is asked for the samples of its part of each batch. Which
/// sample stands at which position of a run follows from seed, epoch and position alone
/// ([`Sampler`](super::Sampler)); so if a number always gives the same sample, on every rank, a run
/// has the same bits on any number of ranks and after every restart. Random parts of a sample are
/// therefore to be drawn from its number, as with [`random`](hpctrain_base::random).
///
/// A whole run looks at each sample, for ids and classes that the network does not know and numbers
/// that are none; in a loop of one's own, `engine::Splits::checked` does.
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
    /// Number of samples; at least one.
    fn samples(&self) -> u64;

    /// Elements of a sample's parts: the inputs of the network, and its targets. Of text, as many
    /// ids as classes; of rows, ids or features, and one class or some values, and if samples are
    /// not to count alike in training, a weight.
    fn sizes(&self) -> SampleSizes;

    /// Overwrites `into`, whose parts have the lengths that [`Source::sizes`] gives, with sample
    /// number `sample`.
    ///
    /// # Errors
    /// Any failure to read the sample: it ends the run.
    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()>;

    /// Overwrites `into` with `count` samples from number `first` on, one after the other, as pass
    /// number `epoch` over the data sees them. Unless a source knows better, each is read by itself
    /// and every pass sees the same.
    ///
    /// # Errors
    /// As [`Source::read`].
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

    /// Samples of each of the data sets that it is made of, one after the other.
    fn parts(&self) -> Vec<u64> {
        vec![self.samples()]
    }

    /// Identity of the samples: a checkpoint keeps it, and a run goes on from there only with the
    /// same ones. Unless a source knows better, it is their number only. `None` makes no claim at
    /// all.
    fn fingerprint(&self) -> Option<Fingerprint> {
        Some(Fingerprint::of_samples(self.samples()))
    }

    /// Most bytes that it caches.
    fn cache_limit(&self) -> usize {
        0
    }

    /// Bytes that it caches now.
    fn cached(&self) -> usize {
        0
    }

    /// A note on samples that were left out when the source was made.
    fn left_out(&self) -> Option<String> {
        None
    }

    /// A warning of one line, if the network is given unscaled bytes.
    fn unscaled(&self) -> Option<String> {
        None
    }

    /// Predictions of a sample; of text, positions.
    fn context(&self) -> usize {
        self.sizes().classes.max(1)
    }

    /// All ids of a text are below this; 0 where the data does not say, or has none.
    fn vocabulary(&self) -> usize {
        0
    }

    /// Elements of inputs that all samples have together, for people.
    fn tokens(&self) -> u64 {
        let SampleSizes { ids, features, .. } = self.sizes();
        self.samples().saturating_mul((ids + features) as u64)
    }

    /// The tokenizer, if there is one.
    fn tokenizer(&self) -> Option<&Tokenizer> {
        None
    }

    /// Preprocessing of samples as they are read. A program that makes its samples itself has a
    /// tokenizer at most.
    fn preprocessing(&self) -> Preprocessing {
        Preprocessing { tokenizer: self.tokenizer().cloned(), ..Preprocessing::default() }
    }

    /// Converts samples from now on to the preprocessing `to` that a network was trained with.
    /// Returns a description of each conversion. Samples that a program makes itself are left as
    /// they are.
    ///
    /// # Errors
    /// They cannot be brought to it, or the tokenizers differ.
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

    fn fingerprint(&self) -> Option<Fingerprint> {
        Some(self.fingerprint())
    }

    fn cache_limit(&self) -> usize {
        self.cache_limit()
    }

    fn cached(&self) -> usize {
        self.cached()
    }

    fn left_out(&self) -> Option<String> {
        self.left_out()
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

    fn fingerprint(&self) -> Option<Fingerprint> {
        (**self).fingerprint()
    }

    fn cache_limit(&self) -> usize {
        (**self).cache_limit()
    }

    fn cached(&self) -> usize {
        (**self).cached()
    }

    fn left_out(&self) -> Option<String> {
        (**self).left_out()
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
