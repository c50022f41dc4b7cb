//! The parts of a sample: input ids and numbers, target classes and numbers, and a weight.

/// One value for each part of a sample: `I` for parts that are integers, `F` for the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SampleFields<I, F> {
    /// Ids of the input: tokens of text, or rows of embedding tables; the ids of several tables
    /// count through all of them, as [`Ids::Tables`](super::Ids::Tables) describes.
    pub ids: I,
    /// Numbers of the input.
    pub features: F,
    /// Classes to predict.
    pub classes: I,
    /// Numbers to predict.
    pub values: F,
    /// The factor of the sample's loss in training, 0 or more; empty if all samples have the same
    /// weight.
    pub weights: F,
}

/// The number of elements of each part of a sample; 0 if samples have no such part.
pub type SampleSizes = SampleFields<usize, usize>;

/// Buffers for samples: each part has the length that [`Dataset::sizes`](super::Dataset::sizes)
/// gives, times the number of samples.
pub type SampleMut<'a> = SampleFields<&'a mut [u32], &'a mut [f32]>;

impl<I, F> SampleFields<I, F> {
    /// Applies `ints` to the parts that are integers and `floats` to the others.
    pub fn map<J, G>(
        self,
        mut ints: impl FnMut(I) -> J,
        mut floats: impl FnMut(F) -> G,
    ) -> SampleFields<J, G> {
        SampleFields {
            ids: ints(self.ids),
            features: floats(self.features),
            classes: ints(self.classes),
            values: floats(self.values),
            weights: floats(self.weights),
        }
    }

    /// Pairs each part with the same part of `other`.
    pub fn zip<J, G>(self, other: SampleFields<J, G>) -> SampleFields<(I, J), (F, G)> {
        SampleFields {
            ids: (self.ids, other.ids),
            features: (self.features, other.features),
            classes: (self.classes, other.classes),
            values: (self.values, other.values),
            weights: (self.weights, other.weights),
        }
    }

    /// Returns references to the parts.
    pub fn as_ref(&self) -> SampleFields<&I, &F> {
        let Self { ids, features, classes, values, weights } = self;
        SampleFields { ids, features, classes, values, weights }
    }

    /// Returns mutable references to the parts.
    pub fn as_mut(&mut self) -> SampleFields<&mut I, &mut F> {
        let Self { ids, features, classes, values, weights } = self;
        SampleFields { ids, features, classes, values, weights }
    }
}

impl<T> SampleFields<T, T> {
    /// Returns the parts in order.
    pub fn all(self) -> [T; 5] {
        [self.ids, self.features, self.classes, self.values, self.weights]
    }
}

impl SampleSizes {
    /// Returns the sizes of `count` samples.
    pub fn times(self, count: usize) -> Self {
        self.map(|ids| ids * count, |numbers| numbers * count)
    }
}

impl SampleMut<'_> {
    /// Returns the number of elements of each part.
    pub(super) fn lens(&self) -> SampleSizes {
        self.as_ref().map(|ids| ids.len(), |numbers| numbers.len())
    }

    /// Borrows the same buffers for a shorter lifetime.
    pub fn reborrow(&mut self) -> SampleMut<'_> {
        self.as_mut().map(|ids| &mut **ids, |numbers| &mut **numbers)
    }

    /// Returns the buffers of the samples `first..first + count`, which have the given `sizes`.
    pub(super) fn samples(
        &mut self,
        sizes: SampleSizes,
        first: usize,
        count: usize,
    ) -> SampleMut<'_> {
        let of = |size: usize| first * size..(first + count) * size;
        self.as_mut()
            .zip(sizes)
            .map(|(ids, size)| &mut ids[of(size)], |(numbers, size)| &mut numbers[of(size)])
    }
}

impl<'a> SampleMut<'a> {
    /// Returns buffers of text: ids and the ids that follow them.
    pub fn text(ids: &'a mut [u32], classes: &'a mut [u32]) -> Self {
        Self { ids, classes, ..Self::default() }
    }
}
