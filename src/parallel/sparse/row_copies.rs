//! Copies of some rows of a table one behind the other, so that one kernel updates all of them.

use std::ops::Range;

use hpctrain_base::error::Result;
use hpctrain_cpu::{Cpu, CpuBuf};
use hpctrain_device::{Backend as _, MemoryKind};

/// Copies of some rows of a buffer.
pub struct RowCopies<'a> {
    /// The id of the buffer's first row.
    pub first: usize,
    /// Elements of a row.
    pub width: usize,
    /// The ids of the rows.
    pub ids: &'a [u32],
}

impl RowCopies<'_> {
    /// Copies the rows of a buffer one behind the other.
    ///
    /// # Errors
    /// Returns an error if memory runs out.
    pub fn copy_from(&self, cpu: &Cpu, from: &[f32]) -> Result<CpuBuf> {
        let mut rows = cpu.alloc_f32(MemoryKind::Optimizer, self.ids.len() * self.width)?;
        for (row, range) in rows.as_mut_slice().chunks_exact_mut(self.width).zip(self.ranges()) {
            row.copy_from_slice(&from[range]);
        }
        Ok(rows)
    }

    /// Copies such rows back.
    pub fn copy_to(&self, rows: &[f32], to: &mut [f32]) {
        for (row, range) in rows.chunks_exact(self.width).zip(self.ranges()) {
            to[range].copy_from_slice(row);
        }
    }

    /// Iterates over the elements of the rows in the buffer.
    fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.ids.iter().map(|id| {
            let row = *id as usize - self.first;
            elements_of(row..row + 1, self.width)
        })
    }
}

/// Returns the elements of rows.
pub fn elements_of(rows: Range<usize>, width: usize) -> Range<usize> {
    rows.start * width..rows.end * width
}
