//! Samples in arrays of a program.

use std::fmt;
use std::sync::{Arc, OnceLock};

use ndarray::{Array, Array1, Array2, ArrayView, ArrayView2, Dimension};
use sha2::{Digest as _, Sha256};

use super::sample_fields::{SampleMut, SampleSizes};
use super::{Fingerprint, Preprocessing, Source, is_weight};
use hpctrain_base::error::{Error, Result};

/// A table of numbers with a row for each sample, shared by copies of the source.
#[derive(Clone)]
struct ArrayRows<T> {
    elements: Arc<[T]>,
    per_sample: usize,
}

impl<T> Default for ArrayRows<T> {
    fn default() -> Self {
        Self { elements: Arc::new([]), per_sample: 0 }
    }
}

impl<T: Copy> ArrayRows<T> {
    /// Copies rows, row-major, whatever their order in memory.
    fn new(rows: ArrayView2<'_, T>) -> Self {
        Self { elements: rows.iter().copied().collect(), per_sample: rows.ncols() }
    }

    /// Returns the elements of `count` samples from number `first` on.
    fn samples(&self, first: usize, count: usize) -> &[T] {
        &self.elements[first * self.per_sample..][..count * self.per_sample]
    }
}

/// Samples in arrays: the first axis of each array counts the samples. Features or ids are the
/// inputs, classes or values the targets.
///
/// Copies share the elements, so that each rank of `engine::on_threads` can have one. A checkpoint
/// records a digest of the elements, and a run is resumed only with the same ones.
///
/// The arrays are those of `ndarray` 0.17, which this crate re-exports.
///
/// ```
/// use hpctrain_data::ndarray::{Array2, Axis, array};
/// use hpctrain_data::{Arrays, Source};
///
/// let x: Array2<f32> = array![[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]];
/// let arrays = Arrays::from_features(x)?.with_classes(array![0, 1, 1])?;
/// assert_eq!(arrays.samples(), 3);
/// assert_eq!((arrays.sizes().features, arrays.sizes().classes), (2, 1));
///
/// let error = Arrays::from_features(Array2::zeros((3, 2)))?.with_values(Array2::zeros((4, 1)));
/// assert_eq!(error.unwrap_err().message(), "4 rows of values for 3 samples");
/// # Ok::<(), hpctrain_base::error::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Arrays {
    samples: usize,
    ids: ArrayRows<u32>,
    features: ArrayRows<f32>,
    classes: ArrayRows<u32>,
    values: ArrayRows<f32>,
    weights: ArrayRows<f32>,
    class_names: Vec<String>,
    /// The hash of all elements, once it is known.
    hash: OnceLock<Fingerprint>,
}

impl fmt::Debug for Arrays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = self.sizes();
        f.debug_struct("Arrays").field("samples", &self.samples).field("sizes", &sizes).finish()
    }
}

impl Arrays {
    /// Creates samples with these features, such as `Array2<f32>` for rows of numbers, or
    /// `Array4<f32>` for images: samples × height × width × channels.
    ///
    /// # Errors
    /// Returns an error if there are no samples or no features.
    pub fn from_features<D: Dimension>(features: Array<f32, D>) -> Result<Self> {
        let features = rows(features.view(), "features")?;
        let samples = features.nrows();
        Ok(Self { samples, features: ArrayRows::new(features.view()), ..Self::default() })
    }

    /// Creates samples with these ids, for networks that begin with a layer of kind `embedding`.
    /// For `embedding_tables`, use [`Arrays::from_table_ids`].
    ///
    /// ```
    /// use hpctrain_data::{Arrays, Source};
    /// use hpctrain_data::ndarray::array;
    ///
    /// let arrays = Arrays::from_ids(array![[3_i64, 1, 4], [1, 5, 9]])?
    ///     .with_classes(array![1_usize, 0])?;
    /// assert_eq!((arrays.sizes().ids, arrays.samples()), (3, 2));
    /// # Ok::<(), hpctrain_base::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there are no samples or no ids, or if an id is negative or has more than
    /// 32 bits.
    pub fn from_ids<T: Copy + fmt::Display + TryInto<u32>>(ids: Array2<T>) -> Result<Self> {
        let rows = rows(ids.view(), "ids")?;
        let ids = integers(rows.view(), "id")?;
        Ok(Self { samples: ids.nrows(), ids: ArrayRows::new(ids.view()), ..Self::default() })
    }

    /// Creates samples with an id for each category, for networks that begin with a layer of kind
    /// `embedding_tables`. Each column counts from 0; `tables` has the number of rows of each
    /// table, the layer's key `ids`.
    ///
    /// # Errors
    /// Returns an error if there are no samples, if the numbers of columns and of tables differ, or
    /// if a table does not have an id.
    pub fn from_table_ids<T: Copy + fmt::Display + TryInto<u32>>(
        ids: Array2<T>,
        tables: &[usize],
    ) -> Result<Self> {
        if ids.ncols() != tables.len() {
            let columns = ids.ncols();
            return Err(Error::input(format!(
                "{columns} columns of ids for {} tables",
                tables.len()
            ))
            .hint("give one column for each table"));
        }
        let mut all = integers(rows(ids.view(), "ids")?.view(), "id")?;
        let mut first = 0;
        for (column, (mut ids, rows)) in all.columns_mut().into_iter().zip(tables).enumerate() {
            if let Some((sample, id)) =
                ids.iter().enumerate().find(|(_, id)| **id as usize >= *rows)
            {
                return Err(Error::input(format!(
                    "id {id} of sample {sample} in column {column}, but its table has {rows} rows"
                ))
                .hint("give the table more rows, or the id of unknown values"));
            }
            ids += first;
            first += *rows as u32;
        }
        Ok(Self { samples: all.nrows(), ids: ArrayRows::new(all.view()), ..Self::default() })
    }

    /// Adds features to samples of [`Arrays::from_table_ids`].
    ///
    /// # Errors
    /// Returns an error unless there is a row for each sample.
    pub fn with_features(mut self, features: Array2<f32>) -> Result<Self> {
        self.features = ArrayRows::new(self.check_rows(features.view(), "features")?);
        self.hash = OnceLock::new();
        Ok(self)
    }

    /// Adds the class of each sample, as the target.
    ///
    /// # Errors
    /// Returns an error unless there is a class for each sample, and if a class is negative or has
    /// more than 32 bits.
    pub fn with_classes<T: Copy + fmt::Display + TryInto<u32>>(
        mut self,
        classes: Array1<T>,
    ) -> Result<Self> {
        let column = classes.view().insert_axis(ndarray::Axis(1));
        let classes = integers(self.check_rows(column, "classes")?, "class")?;
        self.classes = ArrayRows::new(classes.view());
        self.hash = OnceLock::new();
        Ok(self)
    }

    /// Adds the numbers to predict, a row for each sample, as the target.
    ///
    /// # Errors
    /// Returns an error unless there is a row for each sample.
    pub fn with_values(mut self, values: Array2<f32>) -> Result<Self> {
        self.values = ArrayRows::new(self.check_rows(values.view(), "values")?);
        self.hash = OnceLock::new();
        Ok(self)
    }

    /// Adds the factor of each sample's loss in training.
    ///
    /// # Errors
    /// Returns an error unless there is a finite number of 0 or more for each sample.
    pub fn with_weights(mut self, weights: Array1<f32>) -> Result<Self> {
        if let Some((sample, weight)) =
            weights.iter().enumerate().find(|(_, weight)| !is_weight(**weight))
        {
            return Err(Error::input(format!("weight {weight} of sample {sample}"))
                .hint("give finite numbers of 0 or more"));
        }
        let column = weights.view().insert_axis(ndarray::Axis(1));
        self.weights = ArrayRows::new(self.check_rows(column, "weights")?);
        self.hash = OnceLock::new();
        Ok(self)
    }

    /// Sets the names of the classes in the order of their numbers. Checkpoints record them, and
    /// predictions have them.
    #[must_use]
    pub fn with_class_names(mut self, names: &[&str]) -> Self {
        self.class_names = names.iter().map(|name| (*name).to_owned()).collect();
        self
    }

    /// Returns the rows, of which there must be one for each sample.
    fn check_rows<'a, T>(&self, rows: ArrayView2<'a, T>, name: &str) -> Result<ArrayView2<'a, T>> {
        if rows.nrows() == self.samples {
            return Ok(rows);
        }
        let message = format!("{} rows of {name} for {} samples", rows.nrows(), self.samples);
        Err(Error::input(message).hint("give as many of each: the first axis counts the samples"))
    }

    /// Returns the fingerprint of all elements.
    fn digest(&self) -> Fingerprint {
        let mut hash = Sha256::new();
        for rows in [&self.ids, &self.classes] {
            hash.update(rows.per_sample.to_le_bytes());
            rows.elements.iter().for_each(|element| hash.update(element.to_le_bytes()));
        }
        for rows in [&self.features, &self.values, &self.weights] {
            hash.update(rows.per_sample.to_le_bytes());
            rows.elements.iter().for_each(|element| hash.update(element.to_le_bytes()));
        }
        Fingerprint::of_content(self.samples as u64, "arrays", hash)
    }
}

/// Returns an array as a row for each index of its first axis.
fn rows<'a, T: Copy, D: Dimension>(array: ArrayView<'a, T, D>, name: &str) -> Result<Array2<T>> {
    let shape = array.shape().to_vec();
    let (samples, per_sample) = match shape.split_first() {
        Some((samples, rest)) if !rest.is_empty() => (*samples, rest.iter().product()),
        _ => (0, 0),
    };
    if samples == 0 || per_sample == 0 {
        return Err(Error::input(format!("an array of {name} of shape {shape:?}"))
            .hint("give an array of samples × elements, with at least one of each"));
    }
    let elements: Vec<T> = array.iter().copied().collect();
    Array2::from_shape_vec((samples, per_sample), elements)
        .map_err(|e| Error::internal(format!("an array of {name}: {e}")))
}

/// Returns integers as 32 bits.
fn integers<T: Copy + fmt::Display + TryInto<u32>>(
    rows: ArrayView2<'_, T>,
    name: &str,
) -> Result<Array2<u32>> {
    let converted = rows.indexed_iter().map(|((sample, _), value)| {
        let of_sample = || Error::input(format!("{name} {value} of sample {sample}"));
        (*value).try_into().map_err(|_| of_sample().hint("give integers from 0 to 4294967295"))
    });
    let converted: Vec<u32> = converted.collect::<Result<_>>()?;
    Array2::from_shape_vec(rows.dim(), converted)
        .map_err(|e| Error::internal(format!("an array of integers: {e}")))
}

impl Source for Arrays {
    fn samples(&self) -> u64 {
        self.samples as u64
    }

    fn sizes(&self) -> SampleSizes {
        SampleSizes {
            ids: self.ids.per_sample,
            features: self.features.per_sample,
            classes: self.classes.per_sample,
            values: self.values.per_sample,
            weights: self.weights.per_sample,
        }
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        self.read_run(sample, 1, 0, into)
    }

    fn read_run(&mut self, first: u64, count: usize, _: u64, into: SampleMut<'_>) -> Result<()> {
        let first = first as usize;
        into.ids.copy_from_slice(self.ids.samples(first, count));
        into.features.copy_from_slice(self.features.samples(first, count));
        into.classes.copy_from_slice(self.classes.samples(first, count));
        into.values.copy_from_slice(self.values.samples(first, count));
        into.weights.copy_from_slice(self.weights.samples(first, count));
        Ok(())
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        Some(self.hash.get_or_init(|| self.digest()).clone())
    }

    fn preprocessing(&self) -> Preprocessing {
        Preprocessing { classes: self.class_names.clone(), ..Preprocessing::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array3, Axis, ShapeBuilder as _, array};

    /// Returns the features and classes of samples.
    fn read(arrays: &mut Arrays, first: u64, count: usize) -> (Vec<f32>, Vec<u32>) {
        let sizes = arrays.sizes().times(count);
        let mut features = vec![0.0; sizes.features];
        let mut classes = vec![0; sizes.classes];
        let into =
            SampleMut { features: &mut features, classes: &mut classes, ..SampleMut::default() };
        arrays.read_run(first, count, 0, into).unwrap();
        (features, classes)
    }

    #[test]
    fn samples_are_rows_whatever_the_order_in_memory() {
        let images = Array3::from_shape_fn((3, 2, 2), |(i, j, k)| (100 * i + 10 * j + k) as f32);
        let wanted = (vec![100., 101., 110., 111., 200., 201., 210., 211.], vec![7, 0]);
        let mut columns_first = Array3::zeros((3, 2, 2).f());
        columns_first.assign(&images);
        assert!(!columns_first.is_standard_layout());
        for features in [images.clone(), columns_first] {
            let classes = array![4_i64, 7, 0];
            let mut arrays =
                Arrays::from_features(features).unwrap().with_classes(classes).unwrap();
            assert_eq!(read(&mut arrays, 1, 2), wanted);
            assert_eq!(read(&mut arrays.clone(), 2, 1).1, [0]);
        }
        let mut reversed = images;
        reversed.invert_axis(Axis(0));
        let mut arrays = Arrays::from_features(reversed).unwrap();
        assert_eq!(read(&mut arrays, 2, 1).0, [0., 1., 10., 11.]);
    }

    #[test]
    fn ids_of_several_tables_count_through_all_of_them() {
        let ids = array![[1_u32, 0], [4, 2]];
        let mut arrays = Arrays::from_table_ids(ids.clone(), &[5, 3])
            .unwrap()
            .with_features(array![[0.5], [1.5]])
            .unwrap();
        let mut found = [0; 4];
        let mut numbers = [0.0; 2];
        let into = SampleMut { ids: &mut found, features: &mut numbers, ..SampleMut::default() };
        arrays.read_run(0, 2, 0, into).unwrap();
        assert_eq!((found, numbers), ([1, 5, 4, 7], [0.5, 1.5]));
        let error = Arrays::from_table_ids(ids.clone(), &[5, 2]).err().unwrap();
        assert_eq!(error.message(), "id 2 of sample 1 in column 1, but its table has 2 rows");
        let error = Arrays::from_table_ids(ids, &[5]).err().unwrap();
        assert_eq!(error.message(), "2 columns of ids for 1 tables");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let three = || Arrays::from_features(Array2::zeros((3, 2))).unwrap();
        let refused = |arrays: Result<Arrays>, wanted: &str| {
            assert_eq!(arrays.err().unwrap().message(), wanted);
        };
        refused(three().with_classes(array![0, 1]), "2 rows of classes for 3 samples");
        refused(three().with_classes(array![0, -1, 1]), "class -1 of sample 1");
        refused(three().with_classes(array![0, 1, 1_usize << 32]), "class 4294967296 of sample 2");
        refused(three().with_values(Array2::zeros((4, 1))), "4 rows of values for 3 samples");
        refused(three().with_weights(array![1.0]), "1 rows of weights for 3 samples");
        refused(three().with_weights(array![1.0, f32::NAN, 1.0]), "weight NaN of sample 1");
        refused(
            Arrays::from_features(Array2::zeros((0, 2))),
            "an array of features of shape [0, 2]",
        );
        refused(Arrays::from_features(array![1.0, 2.0]), "an array of features of shape [2]");
        refused(Arrays::from_ids(array![[-3]]), "id -3 of sample 0");
    }

    #[test]
    fn the_fingerprint_is_of_the_elements() {
        let features = array![[0.0, 1.0], [2.0, 3.0]];
        let of = |arrays: &Arrays| arrays.fingerprint().unwrap();
        let first = Arrays::from_features(features.clone()).unwrap();
        let before = of(&first);
        assert_eq!(before, of(&Arrays::from_features(features.clone()).unwrap()));
        // Also after the first fingerprint was computed.
        let labelled = first.clone().with_classes(array![0, 1]).unwrap();
        let others =
            Arrays::from_features(features.clone()).unwrap().with_classes(array![1, 1]).unwrap();
        let shaped =
            Arrays::from_features(features.into_shape_with_order((1, 4)).unwrap()).unwrap();
        for other in [labelled, others, shaped] {
            assert_ne!(of(&other).digest(), before.digest());
        }
        let changed = of(&Arrays::from_features(array![[0.0, 1.0], [2.0, 4.0]]).unwrap());
        assert_eq!(changed.difference(&before).as_deref(), Some("arrays has other content"));
    }
}
