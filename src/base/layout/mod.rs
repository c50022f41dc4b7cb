//! The layout of tensors in units: offsets and owned ranges. It computes with integers only.
//!
//! A unit (FSDP unit) is one flat buffer of parameters and one of gradients. It is sent as one
//! message, so there is no second layer of gradient buckets; it is all-gathered, freed and
//! recomputed as a whole. Decayed tensors come first, so weight decay is one range. A unit is
//! padded to a multiple of virtual ranks × 16 elements, so every layout divides it evenly and each
//! part begins on a cache line.

mod tensor_shards;

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use tensor_shards::{Cut, ShardSlab, TensorShards};

/// The initial values of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
}

/// One named parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tensor {
    /// The name, unique in the model, in the usual spelling: `h.0.attn.c_attn.weight`.
    pub name: String,
    /// The extent of every dimension, row-major.
    pub shape: Vec<usize>,
    /// The initial values.
    pub init: Init,
    /// For a running average, which is not trained: each step moves it by this fraction of the way
    /// to the values in its gradient.
    pub average: Option<f32>,
    /// Whether the first backward of a virtual rank overwrites its gradient: it need not be zeroed
    /// before.
    pub overwritten: bool,
    /// The division among virtual tensor-parallel ranks; `None` if every virtual rank has all of
    /// it.
    pub cut: Option<Cut>,
}

impl Tensor {
    /// Creates a trained parameter.
    pub fn new(name: impl Into<String>, shape: &[usize], init: Init) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
            init,
            average: None,
            overwritten: false,
            cut: None,
        }
    }

    /// Creates a running average, which each step moves by the fraction `rate` of the way to the
    /// step's value.
    pub fn average(name: impl Into<String>, shape: &[usize], init: Init, rate: f32) -> Self {
        Self { average: Some(rate), ..Self::new(name, shape, init) }
    }

    /// Marks the tensor as one whose gradient the first backward overwrites.
    pub fn overwritten(self) -> Self {
        Self { overwritten: true, ..self }
    }

    /// Divides the tensor among virtual tensor-parallel ranks.
    pub fn cut(self, cut: Cut) -> Self {
        Self { cut: Some(cut), ..self }
    }

    /// Returns the sort key among the tensors of a unit: decayed tensors, then the other trained
    /// ones, then averages.
    pub fn order(&self) -> u8 {
        match (self.average, self.decays()) {
            (Some(_), _) => 2,
            (None, false) => 1,
            (None, true) => 0,
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true if the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if weight decay applies: to matrices, but not to biases and norms.
    pub fn decays(&self) -> bool {
        self.shape.len() >= 2 && self.average.is_none()
    }
}

/// Returns the number of elements of the tensors that are trained.
pub fn trained(tensors: &[Tensor]) -> usize {
    tensors.iter().filter(|tensor| tensor.average.is_none()).map(Tensor::len).sum()
}

/// The flat storage of a unit's parameters on a rank, with a section for each virtual
/// tensor-parallel rank that it holds.
///
/// A section has the virtual rank's shards of cut tensors, then a copy of every whole tensor, then
/// padding; in each of these, decayed tensors come first and averages last. Without tensor
/// parallelism there is one section with everything.
#[derive(Debug, Clone, PartialEq)]
pub struct UnitLayout {
    /// The name for traces and errors.
    pub name: Arc<str>,
    /// The tensors in storage order, with their whole shapes.
    pub tensors: Vec<Tensor>,
    /// The elements of a section, padded so that it can be divided into equal, aligned parts.
    pub section: usize,
    /// The total number of stored elements.
    pub padded: usize,
    /// The virtual ranks of the sections.
    slices: TensorShards,
    places: Vec<Place>,
    sections: Vec<Section>,
}

/// The storage of a part of a tensor.
#[derive(Debug, Clone, PartialEq)]
struct Place {
    tensor: usize,
    slab: ShardSlab,
    range: Range<usize>,
    /// Whether this is a copy of a tensor that another virtual rank's section owns.
    is_copy: bool,
}

/// The ranges of a section, in elements of the unit.
#[derive(Debug, Clone, PartialEq)]
struct Section {
    /// The elements whose gradients count.
    counted: Range<usize>,
    /// The whole tensors.
    whole: Range<usize>,
}

/// The alignment of parts of a section, in elements: a cache line of f32.
const ALIGN: usize = 16;

impl UnitLayout {
    /// Lays out whole `tensors` so that the unit can be divided into `parts` equal parts.
    pub fn new(name: impl Into<Arc<str>>, tensors: Vec<Tensor>, parts: usize) -> Self {
        Self::sharded(name, tensors, parts, &TensorShards::whole())
    }

    /// Lays out the shards of `tensors` of some virtual tensor-parallel ranks, so that each section
    /// can be divided into `parts` equal parts.
    pub fn sharded(
        name: impl Into<Arc<str>>,
        tensors: Vec<Tensor>,
        parts: usize,
        slices: &TensorShards,
    ) -> Self {
        debug_assert!(
            tensors.iter().is_sorted_by_key(Tensor::order),
            "decayed tensors come first, averages last"
        );
        let is_cut = |tensor: &Tensor| slices.total > 1 && tensor.cut.is_some();
        debug_assert!(
            tensors.iter().is_sorted_by_key(|tensor| !is_cut(tensor)),
            "cut tensors come first"
        );
        let len = |tensor: &Tensor, virtual_rank| {
            tensor.slabs(slices, virtual_rank).iter().map(|slab| slab.range.len()).sum::<usize>()
        };
        // The first virtual rank has the most elements.
        let section = tensors
            .iter()
            .map(|tensor| len(tensor, 0))
            .sum::<usize>()
            .next_multiple_of(parts * ALIGN);
        let mut places = Vec::new();
        let mut sections = Vec::new();
        for (number, virtual_rank) in slices.held.clone().enumerate() {
            let start = number * section;
            let mut end = start;
            let mut cut_end = start;
            let mut trained_end = start;
            for (index, tensor) in tensors.iter().enumerate() {
                for slab in tensor.slabs(slices, virtual_rank) {
                    let range = end..end + slab.range.len();
                    end = range.end;
                    places.push(Place {
                        tensor: index,
                        slab,
                        range,
                        is_copy: !is_cut(tensor) && virtual_rank > 0,
                    });
                }
                if is_cut(tensor) {
                    cut_end = end;
                }
                if tensor.average.is_none() {
                    trained_end = end;
                }
            }
            let counted = match virtual_rank {
                // Padding has no gradient, and sums over whole parts are the fastest.
                0 if trained_end == end => start + section,
                0 => trained_end,
                _ => cut_end,
            };
            sections.push(Section { counted: start..counted, whole: cut_end..end });
        }
        let padded = slices.held.len() * section;
        Self {
            name: name.into(),
            tensors,
            section,
            padded,
            slices: slices.clone(),
            places,
            sections,
        }
    }

    /// Returns the virtual tensor-parallel ranks of the sections.
    pub fn shards(&self) -> &TensorShards {
        &self.slices
    }

    /// Iterates over the tensors and their ranges; for units without tensor parallelism.
    pub fn ranges(&self) -> impl Iterator<Item = (&Tensor, Range<usize>)> {
        self.places.iter().map(|place| (&self.tensors[place.tensor], place.range.clone()))
    }

    /// Returns the elements whose gradients must be zeroed before the first backward, because
    /// backwards only add to them. Padding is included.
    pub fn zeroed(&self) -> Vec<Range<usize>> {
        let mut zeroed = Vec::new();
        let mut from = 0;
        for Place { range, .. } in
            self.places.iter().filter(|place| self.tensors[place.tensor].overwritten)
        {
            zeroed.push(from..range.start);
            from = range.end;
        }
        zeroed.push(from..self.padded);
        zeroed.retain(|range| !range.is_empty());
        zeroed
    }

    /// Returns the elements of `range`, which must lie within one section, whose gradients count:
    /// not those of averages, and those of whole tensors only in one virtual rank.
    pub fn counted(&self, range: Range<usize>) -> Range<usize> {
        let end = self.sections[range.start / self.section].counted.end;
        range.start..range.end.min(end).max(range.start)
    }

    /// Returns true if the section of element `at` has only a copy of tensor `tensor`, which
    /// another section owns.
    pub fn is_copy(&self, at: usize, tensor: usize) -> bool {
        self.tensors[tensor].cut.is_none() && self.slices.held.start + at / self.section > 0
    }

    /// Iterates over the elements of whole tensors, of which every section has a copy. Empty with
    /// one virtual rank.
    pub fn copies(&self) -> impl Iterator<Item = Range<usize>> {
        let is_cut = self.slices.total > 1;
        self.sections.iter().filter(move |_| is_cut).map(|section| section.whole.clone())
    }

    /// Iterates over the elements of the first tensor in each section, which is the one that other
    /// units tie to.
    pub fn first_tensor(&self) -> impl Iterator<Item = Range<usize>> {
        self.places.iter().filter(|place| place.tensor == 0).map(|place| place.range.clone())
    }

    /// Returns part `index` of `count` equal parts of the padded unit.
    pub fn part(&self, index: usize, count: usize) -> Range<usize> {
        part(self.padded, index, count)
    }

    /// Returns consecutive parts of `count` equal parts of the padded unit.
    pub fn parts(&self, parts: Range<usize>, count: usize) -> Range<usize> {
        let of_part = self.padded / count;
        parts.start * of_part..parts.end * of_part
    }

    /// Iterates over the parts of tensors in `owned`, without copies: every element of a tensor
    /// belongs to a piece of one virtual rank.
    pub fn pieces(&self, owned: Range<usize>) -> impl Iterator<Item = TensorPiece<'_>> {
        self.select(owned, false)
    }

    /// Iterates over the parts of tensors in `owned`, including copies of whole tensors.
    pub fn stored(&self, owned: Range<usize>) -> impl Iterator<Item = TensorPiece<'_>> {
        self.select(owned, true)
    }

    fn select(&self, owned: Range<usize>, copies: bool) -> impl Iterator<Item = TensorPiece<'_>> {
        self.places.iter().filter(move |place| copies || !place.is_copy).filter_map(move |place| {
            let Place { tensor: index, slab, range, .. } = place;
            let overlap = range.start.max(owned.start)..range.end.min(owned.end);
            let of_slab = |at: usize| slab.range.start + at - range.start;
            (overlap.start < overlap.end).then(|| TensorPiece {
                index: *index,
                tensor: &self.tensors[*index],
                columns: slab.columns.clone(),
                of_tensor: of_slab(overlap.start)..of_slab(overlap.end),
                of_owned: overlap.start - owned.start..overlap.end - owned.start,
            })
        })
    }
}

/// A range of a tensor, or of some columns of a matrix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorRange {
    /// The name of the tensor.
    pub tensor: String,
    /// The columns of the matrix that the range covers; `None` for the whole tensor.
    pub columns: Option<Range<usize>>,
    /// The flat elements of the tensor, or of the matrix of these columns.
    pub range: Range<usize>,
}

/// The part of a tensor that lies in an owned range of a unit.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorPiece<'a> {
    /// The number of the tensor in the unit.
    pub index: usize,
    /// The tensor.
    pub tensor: &'a Tensor,
    /// The columns of the matrix that the piece covers; `None` for the whole tensor.
    pub columns: Option<Range<usize>>,
    /// The overlap, in flat elements of the tensor, or of the matrix of these columns.
    pub of_tensor: Range<usize>,
    /// The overlap, in elements of the owned range.
    pub of_owned: Range<usize>,
}

impl TensorPiece<'_> {
    /// Iterates over the runs of elements that are contiguous in the whole tensor: the flat index
    /// of a run's first element in the tensor, and the run in elements of the owned range.
    pub fn runs(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        // Without columns, or with all of them, the piece is a single run, like a matrix with one
        // row.
        let (columns, stride) = match (&self.columns, &self.tensor.shape[..]) {
            (Some(columns), &[_, stride]) if columns.len() < stride => (columns.clone(), stride),
            _ => (0..self.tensor.len(), self.tensor.len()),
        };
        let (width, Range { start, end }) = (columns.len().max(1), self.of_tensor.clone());
        let rows = if start < end { start / width..end.div_ceil(width) } else { 0..0 };
        rows.map(move |row| {
            let run = start.max(row * width)..end.min((row + 1) * width);
            let first = row * stride + columns.start + (run.start - row * width);
            (
                first,
                self.of_owned.start + (run.start - start)..self.of_owned.start + (run.end - start),
            )
        })
    }
}

/// Returns part `index` of `count` equal parts of `len` elements. `count` must divide `len`.
pub fn part(len: usize, index: usize, count: usize) -> Range<usize> {
    debug_assert_eq!(len % count, 0);
    let size = len / count;
    index * size..(index + 1) * size
}

/// Returns part `index` of `count` parts of `len` elements, which differ by at most one element where
/// `count` does not divide `len`.
pub fn share(len: usize, index: usize, count: usize) -> Range<usize> {
    index * len / count..(index + 1) * len / count
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn unit(parts: usize) -> UnitLayout {
        let tensors = vec![
            Tensor::new("w", &[3, 5], Init::Normal(0.02)),
            Tensor::new("u", &[7, 2], Init::Zeros),
            Tensor::new("b", &[5], Init::Ones),
        ];
        UnitLayout::new("block", tensors, parts)
    }

    /// Returns the ranges that are zeroed if a backward pass overwrites some tensors.
    fn zeroed(overwritten: &[usize]) -> Vec<(usize, usize)> {
        let mut tensors: Vec<Tensor> = unit(3).tensors;
        overwritten.iter().for_each(|&i| tensors[i].overwritten = true);
        let zeroed = UnitLayout::new("unit", tensors, 3).zeroed();
        zeroed.into_iter().map(|range| (range.start, range.end)).collect()
    }

    #[test]
    fn decayed_first_then_padding() {
        let unit = unit(3);
        assert_eq!((unit.ranges().last().map(|(_, range)| range.end), unit.padded), (Some(34), 48));
        assert_eq!(unit.part(2, 3), 32..48);
    }

    #[test]
    fn what_no_backward_overwrites_is_zeroed() {
        assert_eq!(zeroed(&[]), [(0, 48)]);
        assert_eq!(zeroed(&[0]), [(15, 48)]);
        assert_eq!(zeroed(&[1]), [(0, 15), (29, 48)]);
        assert_eq!(zeroed(&[0, 1, 2]), [(34, 48)]);
    }

    proptest! {
        #[test]
        fn parts_cover_every_tensor_once(parts in 1usize..9) {
            let unit = unit(parts);
            let mut seen = [vec![0; 15], vec![0; 14], vec![0; 5]];
            for index in 0..parts {
                for piece in unit.pieces(unit.part(index, parts)) {
                    prop_assert_eq!(piece.of_tensor.len(), piece.of_owned.len());
                    let which = unit.tensors.iter().position(|t| t.name == piece.tensor.name).unwrap();
                    piece.of_tensor.for_each(|i| seen[which][i] += 1);
                }
            }
            prop_assert!(seen.iter().flatten().all(|&n| n == 1));
        }

        #[test]
        fn runs_follow_each_other_in_the_tensor(
            columns in prop_oneof![Just(None), (0usize..7).prop_flat_map(|a| (Just(a), a + 1..8)).prop_map(Some)],
            ends in (0usize..=35, 0usize..=35),
            before in 0usize..9,
        ) {
            let tensor = Tensor::new("w", &[5, 7], Init::Zeros);
            let columns: Option<Range<usize>> = columns.map(|(start, end)| start..end);
            // The indices in the tensor of the elements that the piece covers.
            let counted: Vec<usize> =
                (0..35).filter(|i| columns.as_ref().is_none_or(|columns| columns.contains(&(i % 7)))).collect();
            let of_tensor = ends.0.min(ends.1).min(counted.len())..ends.0.max(ends.1).min(counted.len());
            let of_owned = before..before + of_tensor.len();
            let all = columns.as_ref().is_none_or(|columns| columns.len() == 7);
            let piece = TensorPiece { index: 0, tensor: &tensor, columns, of_tensor: of_tensor.clone(), of_owned };
            let mut found = Vec::new();
            let mut at = before;
            for (first, run) in piece.runs() {
                prop_assert!(!run.is_empty() && run.start == at);
                at = run.end;
                found.extend(first..first + run.len());
            }
            prop_assert_eq!(found, &counted[of_tensor]);
            prop_assert!(!all || piece.runs().count() <= 1);
        }
    }
}
