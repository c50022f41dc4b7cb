//! The values of a checkpoint, of which each rank reads a share and sends it to the others.
//!
//! A rank that cannot read continues with zeros until the last message, because the others wait for
//! it, and returns its error afterwards.

use std::ops::Range;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::UnitLayout;
use hpctrain_comm::Group;
use hpctrain_device::Kernels;

/// Reads the values of a range of a tensor, as described at [`Sharded::restore`](super::Sharded::restore).
pub type Read<'a> =
    dyn FnMut(&str, usize, Option<&Range<usize>>, Range<usize>, &mut [f32]) -> Result<()> + 'a;

/// The number of elements that all ranks of a group together send at once.
const CHUNK: usize = 1 << 24;

/// The source of the values to restore.
pub struct Source<'a> {
    /// Reads values.
    pub read: &'a mut Read<'a>,
    /// The first error of this rank.
    pub failed: Option<Error>,
}

impl Source<'_> {
    /// Keeps the error of a result, if it is the first.
    pub fn keep_error(&mut self, done: Result<()>) {
        self.failed = self.failed.take().or(done.err());
    }

    /// Returns the values of `range`, of which this rank reads `mine` and the others of the group
    /// read the rest, each at most `longest` elements; 0 if nothing is exchanged.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    pub fn gathered<B: Kernels>(
        &mut self,
        layout: &UnitLayout,
        part: usize,
        range: Range<usize>,
        mine: Range<usize>,
        group: &Group<B>,
        longest: usize,
    ) -> Result<Vec<f32>> {
        let mut values = vec![0.0; range.len()];
        if self.failed.is_none() {
            let read = self.read(
                layout,
                part,
                &mine,
                &mut values[mine.start - range.start..][..mine.len()],
            );
            self.keep_error(read);
        }
        let group = group.with_label(&layout.name);
        let chunk = (CHUNK / group.size()).max(1);
        let steps = if group.size() == 1 { 0 } else { longest.div_ceil(chunk) };
        for step in 0..steps {
            let sent = (mine.start + step * chunk).min(mine.end)
                ..(mine.start + (step + 1) * chunk).min(mine.end);
            let message =
                message(sent.start, &values[sent.start - range.start..sent.end - range.start]);
            for theirs in group.gather_bytes(message).wait()? {
                put(&theirs, &range, &mut values)?;
            }
        }
        Ok(values)
    }

    /// Reads a range of a unit into `out`.
    fn read(
        &mut self,
        layout: &UnitLayout,
        part: usize,
        range: &Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        for piece in layout.stored(range.clone()) {
            let tensor = &piece.tensor.name;
            let columns = piece.columns.as_ref();
            (self.read)(tensor, part, columns, piece.of_tensor, &mut out[piece.of_owned])?;
        }
        Ok(())
    }
}

/// Encodes the elements of a unit from `start` on as a message.
fn message(start: usize, values: &[f32]) -> Vec<u8> {
    [&(start as u64).to_le_bytes()[..], bytemuck::cast_slice(values)].concat()
}

/// Copies the elements of a message to their place in the values of `range`.
fn put(message: &[u8], range: &Range<usize>, values: &mut [f32]) -> Result<()> {
    let len = message.len();
    let malformed =
        || Error::comm(format!("a malformed message of {len} bytes for values of {range:?}"));
    let (start, sent) = message.split_first_chunk().ok_or_else(malformed)?;
    let start = u64::from_le_bytes(*start) as usize;
    let first = start.checked_sub(range.start).ok_or_else(malformed)?;
    let into: &mut [u8] = bytemuck::cast_slice_mut(values);
    let into = into.get_mut(first * size_of::<f32>()..).and_then(|into| into.get_mut(..sent.len()));
    into.ok_or_else(malformed)?.copy_from_slice(sent);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_put_in_place_or_refused() {
        let mut values = [0.0; 4];
        put(&message(11, &[1.0, 2.0]), &(10..14), &mut values).unwrap();
        put(&message(10, &[]), &(10..14), &mut values).unwrap();
        assert_eq!(values, [0.0, 1.0, 2.0, 0.0]);
        for refused in [message(9, &[1.0]), message(13, &[1.0, 2.0]), message(15, &[]), vec![1, 2]]
        {
            assert_eq!(
                put(&refused, &(10..14), &mut values).unwrap_err().kind(),
                hpctrain_base::error::Kind::Comm
            );
        }
        assert_eq!(values, [0.0, 1.0, 2.0, 0.0]);
    }
}
