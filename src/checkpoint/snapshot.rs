//! A rank's shards of a checkpoint: copied to the host at once and written later, or written unit
//! by unit.

use std::ops::Range;
use std::path::Path;

use super::manifest::ShardFileInfo;
use super::shard::{Extent, ShardFile, ShardWriter, file_name};
use hpctrain_base::error::Result;
use hpctrain_base::layout::{TensorPiece, UnitLayout};
use hpctrain_device::{Kernels, MemoryKind, MemoryStats};
use hpctrain_parallel::{Owned, Sharded, Values};

/// The location in a snapshot of one part of a unit's owned range.
struct Place {
    part: usize,
    data: Range<usize>,
    /// The extents in the range, and their places in it.
    extents: Vec<(usize, Range<usize>)>,
}

/// A copy of a rank's parameters and optimizer state, in a buffer that is reused for every save.
pub struct Snapshot<B: Kernels> {
    backend: B,
    extents: Vec<Extent>,
    places: Vec<Place>,
    data: Vec<f32>,
}

impl<B: Kernels> Snapshot<B> {
    /// Allocates the buffer for a copy and touches its pages, so that the first save is as fast as
    /// the others.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    pub fn new(backend: &B, sharded: &mut Sharded<B>) -> Result<Self> {
        let mut extents = Vec::new();
        let mut places = Vec::new();
        let mut len = 0;
        for unit in sharded.owned()? {
            let first = extents.len();
            extents.extend(extents_of(&unit));
            for part in 0..=unit.state.len() {
                let data = len..len + unit.range.len();
                len = data.end;
                places.push(Place { part, data, extents: within(&unit, first) });
            }
        }
        backend.memory_stats().record_alloc(MemoryKind::Checkpoint, len * size_of::<f32>());
        let mut data = Vec::with_capacity(len);
        data.extend(std::iter::repeat_n(0.0, len));
        Ok(Self { backend: backend.clone(), extents, places, data })
    }

    /// Copies the current state.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn take(&mut self, sharded: &mut Sharded<B>) -> Result<()> {
        let mut places = self.places.iter();
        for unit in sharded.owned()? {
            for values in parts(&unit) {
                if let Some(place) = places.next() {
                    values.read(&mut self.data[place.data.clone()])?;
                }
            }
        }
        Ok(())
    }

    /// Writes the copy into the file of `rank` in `dir`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write(&self, dir: &Path, rank: usize, state: &[&str]) -> Result<ShardFile> {
        let mut writer = ShardWriter::create(dir, &file_name(rank), state, &self.extents)?;
        for Place { part, data, extents } in &self.places {
            let values = &self.data[data.clone()];
            extents.iter().try_for_each(|(extent, values_range)| {
                writer.write(*extent, *part, &values[values_range.clone()])
            })?;
        }
        writer.finish()
    }
}

impl<B: Kernels> Drop for Snapshot<B> {
    fn drop(&mut self) {
        let stats: &MemoryStats = self.backend.memory_stats();
        stats.record_free(MemoryKind::Checkpoint, self.data.len() * size_of::<f32>());
    }
}

/// Writes the state into the file of `rank` in `dir`, with at most one part of one unit in host
/// memory.
///
/// # Errors
/// Returns an error if the file cannot be written, or the device fails.
pub fn write_through<B: Kernels>(
    sharded: &mut Sharded<B>,
    dir: &Path,
    rank: usize,
    state: &[&str],
) -> Result<ShardFile> {
    let units = sharded.owned()?;
    let extents: Vec<Extent> = units.iter().flat_map(extents_of).collect();
    let mut writer = ShardWriter::create(dir, &file_name(rank), state, &extents)?;
    let mut first = 0;
    let mut host = Vec::new();
    for unit in &units {
        host.resize(unit.range.len(), 0.0);
        let extents = within(unit, first);
        for (part, values) in parts(unit).enumerate() {
            values.read(&mut host)?;
            extents.iter().try_for_each(|(extent, host_range)| {
                writer.write(*extent, part, &host[host_range.clone()])
            })?;
        }
        first += extents.len();
    }
    writer.finish()
}

/// A range of a unit in host memory.
pub struct Ranged<'a> {
    /// The unit.
    pub layout: &'a UnitLayout,
    /// The range of its elements.
    pub range: Range<usize>,
    /// The parameters, then each state buffer.
    pub parts: Vec<&'a [f32]>,
}

/// Writes ranges into the file of `rank` in `dir`, and reads it back. Returns the table of its
/// content.
///
/// # Errors
/// Returns an error if the file cannot be written, or does not read back as written.
pub fn write_ranges(
    dir: &Path,
    rank: usize,
    state: &[&str],
    ranges: &[Ranged<'_>],
) -> Result<ShardFileInfo> {
    let extents: Vec<Extent> =
        ranges.iter().flat_map(|ranged| extents(ranged.layout, &ranged.range)).collect();
    let mut writer = ShardWriter::create(dir, &file_name(rank), state, &extents)?;
    let mut extent = 0;
    for Ranged { layout, range, parts } in ranges {
        for piece in layout.pieces(range.clone()) {
            for (part, values) in parts.iter().enumerate() {
                writer.write(extent, part, &values[piece.of_owned.clone()])?;
            }
            extent += 1;
        }
    }
    let file = writer.finish()?;
    file.read_back()?;
    Ok(file.written().clone())
}

/// Returns the extents that the rank owns in a unit.
fn extents_of<B: Kernels>(unit: &Owned<'_, B>) -> Vec<Extent> {
    extents(unit.layout, &unit.range)
}

/// Returns the extents of tensors in a range of a unit.
fn extents(layout: &UnitLayout, range: &Range<usize>) -> Vec<Extent> {
    layout.pieces(range.clone()).map(extent).collect()
}

/// Returns the extent of a tensor that is a piece of a unit.
fn extent(piece: TensorPiece<'_>) -> Extent {
    Extent {
        tensor: piece.tensor.name.clone(),
        shape: piece.tensor.shape.clone(),
        columns: piece.columns,
        range: piece.of_tensor,
    }
}

/// Returns the same extents as places in the owned range, numbered from `first`.
fn within<B: Kernels>(unit: &Owned<'_, B>, first: usize) -> Vec<(usize, Range<usize>)> {
    (first..).zip(unit.layout.pieces(unit.range.clone()).map(|piece| piece.of_owned)).collect()
}

/// Returns the parameters and the state buffers of a unit.
fn parts<'a, 'b, B: Kernels>(unit: &'b Owned<'a, B>) -> impl Iterator<Item = &'b Values<'a, B>> {
    std::iter::once(&unit.params).chain(&unit.state)
}
