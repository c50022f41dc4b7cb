//! The parts of a sample: ids and numbers to take, classes and numbers to predict, a weight.

/// One value for each part of a sample: `I` for parts that are whole numbers, `F` for the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SampleFields<I, F> {
    /// Ids of the input: tokens of text, or rows of embedding tables; those of several tables count
    /// through all of them, as [`Ids::Tables`](super::Ids::Tables) says.
    pub ids: I,
    /// Numbers of the input.
    pub features: F,
    /// Classes to predict.
    pub classes: I,
    /// Numbers to predict.
    pub values: F,
    /// A factor of 0 or more of the sample's loss in training; none where all samples count alike.
    pub weights: F,
}

/// Elements of each part of a sample; 0 where samples have no such part.
pub type SampleSizes = SampleFields<usize, usize>;

/// Buffers for samples: each part has the length that [`Dataset::sizes`](super::Dataset::sizes)
/// gives, times the number of samples.
pub type SampleMut<'a> = SampleFields<&'a mut [u32], &'a mut [f32]>;

impl<I, F> SampleFields<I, F> {
    /// Applies `ints` to the parts of whole numbers and `floats` to the others.
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

    /// Each part beside the same part of `other`.
    pub fn zip<J, G>(self, other: SampleFields<J, G>) -> SampleFields<(I, J), (F, G)> {
        SampleFields {
            ids: (self.ids, other.ids),
            features: (self.features, other.features),
            classes: (self.classes, other.classes),
            values: (self.values, other.values),
            weights: (self.weights, other.weights),
        }
    }

    /// References to the parts.
    pub fn as_ref(&self) -> SampleFields<&I, &F> {
        let Self { ids, features, classes, values, weights } = self;
        SampleFields { ids, features, classes, values, weights }
    }

    /// Mutable references to the parts.
    pub fn as_mut(&mut self) -> SampleFields<&mut I, &mut F> {
        let Self { ids, features, classes, values, weights } = self;
        SampleFields { ids, features, classes, values, weights }
    }
}

impl<T> SampleFields<T, T> {
    /// The parts in order.
    pub fn all(self) -> [T; 5] {
        [self.ids, self.features, self.classes, self.values, self.weights]
    }
}

impl SampleSizes {
    /// Sizes of so many samples.
    pub fn times(self, count: usize) -> Self {
        self.map(|ids| ids * count, |numbers| numbers * count)
    }
}

impl SampleMut<'_> {
    /// Elements of each part.
    pub(super) fn lens(&self) -> SampleSizes {
        self.as_ref().map(|ids| ids.len(), |numbers| numbers.len())
    }

    /// The same buffers, for a while.
    pub fn reborrow(&mut self) -> SampleMut<'_> {
        self.as_mut().map(|ids| &mut **ids, |numbers| &mut **numbers)
    }

    /// The part `first..first + count` of samples of `sizes`.
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
    /// Buffers of text: ids and the ids that follow them.
    pub fn text(ids: &'a mut [u32], classes: &'a mut [u32]) -> Self {
        Self { ids, classes, ..Self::default() }
    }
}
