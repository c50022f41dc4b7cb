//! Some rows of a table: the gradient of the rows whose ids a batch contains.

use std::cmp::Ordering;
use std::ops::Range;

use hpctrain_base::error::{Error, Result};

/// Rows of a table, in the order of their ids.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SparseRows {
    /// The ids, ascending.
    pub ids: Vec<u32>,
    /// The rows, one behind the other.
    pub values: Vec<f32>,
}

impl SparseRows {
    /// Adds up the rows of equal ids, in their order, as a dense gradient adds them to its zeros.
    /// `values` has a row of `width` elements for each id.
    pub fn sum(width: usize, ids: &[u32], values: &[f32]) -> Self {
        let mut places: Vec<u64> =
            (0..).zip(ids).map(|(place, id)| u64::from(*id) << 32 | place).collect();
        places.sort_unstable();
        let mut sum = Self::default();
        for place in places {
            let id = (place >> 32) as u32;
            if sum.ids.last() != Some(&id) {
                sum.ids.push(id);
                sum.values.resize(sum.values.len() + width, 0.0);
            }
            let row = &values[(place as u32) as usize * width..][..width];
            let start = sum.values.len() - width;
            sum.values[start..].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        sum
    }

    /// Adds other rows.
    pub fn add(&mut self, width: usize, other: &Self) {
        let mut all = Self {
            ids: Vec::with_capacity(self.ids.len() + other.ids.len()),
            values: Vec::with_capacity(self.values.len() + other.values.len()),
        };
        let elements = |place: usize| place * width..(place + 1) * width;
        let (mut here, mut there) = (0, 0);
        while here < self.ids.len() || there < other.ids.len() {
            let order = match (self.ids.get(here), other.ids.get(there)) {
                (Some(id), Some(other_id)) => id.cmp(other_id),
                (Some(_), None) => Ordering::Less,
                (None, _) => Ordering::Greater,
            };
            if order.is_le() {
                all.ids.push(self.ids[here]);
                all.values.extend_from_slice(&self.values[elements(here)]);
                here += 1;
            }
            if order.is_eq() {
                let sum = all.values.len() - width;
                let row = &other.values[elements(there)];
                all.values[sum..].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                there += 1;
            }
            if order.is_gt() {
                all.ids.push(other.ids[there]);
                all.values.extend_from_slice(&other.values[elements(there)]);
                there += 1;
            }
        }
        *self = all;
    }

    /// Returns the places of the rows whose ids are in `ids`.
    pub fn within(&self, ids: &Range<usize>) -> Range<usize> {
        let before = |end: usize| self.ids.partition_point(|id| (*id as usize) < end);
        before(ids.start)..before(ids.end)
    }

    /// Appends the rows whose ids are in `ids` to a message.
    pub fn encode(&self, width: usize, ids: &Range<usize>, message: &mut Vec<u8>) {
        let places = self.within(ids);
        let values = places.start * width..places.end * width;
        message.extend((places.len() as u64).to_le_bytes());
        message.extend_from_slice(bytemuck::cast_slice(&self.ids[places]));
        message.extend_from_slice(bytemuck::cast_slice(&self.values[values]));
    }

    /// Splits rows of `width` elements, whose ids must be in `ids`, off the front of a message.
    ///
    /// # Errors
    /// Returns an error if the message is malformed.
    pub fn decode(width: usize, ids: &Range<usize>, message: &mut &[u8]) -> Result<Self> {
        let count = usize::try_from(number(message)?).map_err(|_| malformed())?;
        let of_ids = elements::<u32>(message, count)?;
        let values = elements(message, count.checked_mul(width).ok_or_else(malformed)?)?;
        let is_valid = of_ids.is_sorted_by(|one, next| one < next)
            && of_ids.iter().all(|id| ids.contains(&(*id as usize)));
        if is_valid { Ok(Self { ids: of_ids, values }) } else { Err(malformed()) }
    }
}

/// Splits a number off the front of a message.
///
/// # Errors
/// Returns an error if the message is too short.
pub fn number(message: &mut &[u8]) -> Result<u64> {
    let (number, rest) = message.split_first_chunk().ok_or_else(malformed)?;
    *message = rest;
    Ok(u64::from_le_bytes(*number))
}

/// Splits elements off the front of a message.
///
/// # Errors
/// Returns an error if the message is too short.
pub fn elements<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(
    message: &mut &[u8],
    count: usize,
) -> Result<Vec<T>> {
    let bytes = count.checked_mul(size_of::<T>()).ok_or_else(malformed)?;
    let (elements, rest) = message.split_at_checked(bytes).ok_or_else(malformed)?;
    *message = rest;
    Ok(bytemuck::pod_collect_to_vec(elements))
}

/// Returns the error for a message of another rank that has no rows of tables.
pub fn malformed() -> Error {
    Error::comm("another rank sent malformed rows of embedding tables")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WIDTH: usize = 3;
    const IDS: usize = 12;

    /// Returns the dense gradient of a table: zeros, to which the rows are added in order.
    fn dense(ids: &[u32], values: &[f32]) -> Vec<f32> {
        let mut table = vec![0.0; IDS * WIDTH];
        for (id, row) in ids.iter().zip(values.chunks_exact(WIDTH)) {
            let start = *id as usize * WIDTH;
            table[start..start + WIDTH].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        table
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    /// Returns the table with these rows, and zeros elsewhere.
    fn whole(rows: &SparseRows) -> Vec<f32> {
        assert!(rows.ids.is_sorted_by(|one, next| one < next));
        dense(&rows.ids, &rows.values)
    }

    proptest! {
        /// Sums have the bits of dense ones, and messages keep them.
        #[test]
        fn sums_are_those_of_dense_tables(
            batches in prop::collection::vec(prop::collection::vec((0..IDS as u32, -9i8..9), 0..20), 1..4),
            cut in 0..=IDS,
        ) {
            let mut sum: Option<SparseRows> = None;
            let mut expected = vec![0.0; IDS * WIDTH];
            for batch in &batches {
                let ids: Vec<u32> = batch.iter().map(|(id, _)| *id).collect();
                let values: Vec<f32> = batch
                    .iter()
                    .flat_map(|(_, x)| (1..=WIDTH).map(|k| f32::from(*x) / (3.1 * k as f32)))
                    .collect();
                let rows = SparseRows::sum(WIDTH, &ids, &values);
                prop_assert_eq!(bits(&whole(&rows)), bits(&dense(&ids, &values)));
                expected.iter_mut().zip(dense(&ids, &values)).for_each(|(sum, x)| *sum += x);
                match &mut sum {
                    None => sum = Some(rows),
                    Some(sum) => sum.add(WIDTH, &rows),
                }
            }
            let sum = sum.unwrap();
            prop_assert_eq!(bits(&whole(&sum)), bits(&expected));
            let mut message = vec![];
            let parts = [0..cut, cut..IDS];
            parts.iter().for_each(|part| sum.encode(WIDTH, part, &mut message));
            let mut left = &message[..];
            let mut all = SparseRows::default();
            for part in &parts {
                let rows = SparseRows::decode(WIDTH, part, &mut left).unwrap();
                all.ids.extend(rows.ids);
                all.values.extend(rows.values);
            }
            prop_assert!(left.is_empty());
            prop_assert_eq!(all, sum);
        }
    }

    #[test]
    fn malformed_messages_are_refused() {
        let rows = SparseRows::sum(WIDTH, &[4, 2], &[1.0; 2 * WIDTH]);
        let mut message = vec![];
        rows.encode(WIDTH, &(0..IDS), &mut message);
        let decode = |mut message: &[u8], ids| SparseRows::decode(WIDTH, &ids, &mut message);
        assert_eq!(decode(&message, 2..5).unwrap(), rows);
        assert!(decode(&message, 3..5).is_err());
        assert!(decode(&message[..message.len() - 1], 0..IDS).is_err());
        assert!(decode(&[255; 8], 0..IDS).is_err());
        // The ids do not ascend.
        message.swap(8, 12);
        assert!(decode(&message, 0..IDS).is_err());
    }
}
