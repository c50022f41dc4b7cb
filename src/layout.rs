//! The layout of tensors: units, offsets, owned ranges. Integers in, integers out.

use std::ops::Range;
use std::sync::Arc;

/// Initial values of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
}

/// One named parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Unique in the model, in the field's usual spelling: `h.0.attn.c_attn.weight`.
    pub name: String,
    /// Extent of every dimension, row-major.
    pub shape: Vec<usize>,
    /// Its initial values.
    pub init: Init,
    /// Not trained, but an average: each step moves it by this part of the way to the values in its gradient.
    pub average: Option<f32>,
    /// Whether the first backward of a lane overwrites its gradient: it need not be zeroed before.
    pub overwritten: bool,
}

impl Tensor {
    /// A parameter.
    pub fn new(name: impl Into<String>, shape: &[usize], init: Init) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), init, average: None, overwritten: false }
    }

    /// A running average that a step moves by this part of the way to the step's own value.
    pub fn average(name: impl Into<String>, shape: &[usize], init: Init, rate: f32) -> Self {
        Self { average: Some(rate), ..Self::new(name, shape, init) }
    }

    /// The same, of a block whose backward overwrites its gradient when it is the first.
    pub fn overwritten(self) -> Self {
        Self { overwritten: true, ..self }
    }

    /// Its place among the tensors of a unit: decayed ones, then the other trained ones, then averages.
    pub fn order(&self) -> u8 {
        match (self.average, self.decays()) {
            (Some(_), _) => 2,
            (None, false) => 1,
            (None, true) => 0,
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether weight decay applies: to matrices, not to biases and norms.
    pub fn decays(&self) -> bool {
        self.shape.len() >= 2 && self.average.is_none()
    }
}

/// Elements of the tensors that are trained.
pub fn trained(tensors: &[Tensor]) -> usize {
    tensors.iter().filter(|tensor| tensor.average.is_none()).map(Tensor::len).sum()
}

/// The flat storage of one block's parameters: tensors one after another, decayed ones first, averages last, then padding.
#[derive(Debug, Clone, PartialEq)]
pub struct UnitLayout {
    /// Name for traces and errors.
    pub name: Arc<str>,
    /// The tensors in storage order, with their places.
    pub tensors: Vec<(Tensor, Range<usize>)>,
    /// Elements that are trained; averages come after them.
    pub trained: usize,
    /// Elements in use.
    pub used: usize,
    /// Elements stored: `used`, padded so that it can be cut into `parts` equal, aligned parts.
    pub padded: usize,
}

/// Elements that an equal part of a unit is a multiple of: a cache line of f32.
const ALIGN: usize = 16;

impl UnitLayout {
    /// Lays out `tensors` so that the unit can be cut into `parts` equal parts.
    pub fn new(name: impl Into<Arc<str>>, tensors: Vec<Tensor>, parts: usize) -> Self {
        debug_assert!(tensors.iter().is_sorted_by_key(Tensor::order), "decayed tensors come first, averages last");
        let trained = trained(&tensors);
        let mut used = 0;
        let mut placed = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let range = used..used + tensor.len();
            used = range.end;
            placed.push((tensor, range));
        }
        Self { name: name.into(), tensors: placed, trained, used, padded: used.next_multiple_of(parts * ALIGN) }
    }

    /// The elements whose gradients backwards only ever add to, so that they begin with zeros; padding is among them.
    pub fn zeroed(&self) -> Vec<Range<usize>> {
        let mut zeroed = Vec::new();
        let mut from = 0;
        for (_, range) in self.tensors.iter().filter(|(tensor, _)| tensor.overwritten) {
            zeroed.push(from..range.start);
            from = range.end;
        }
        zeroed.push(from..self.padded);
        zeroed.retain(|range| !range.is_empty());
        zeroed
    }

    /// The elements of `range` whose gradients count: all but those of averages.
    pub fn trained(&self, range: Range<usize>) -> Range<usize> {
        // Padding has no gradient, and sums are fastest over whole parts.
        let end = if self.trained == self.used { self.padded } else { self.trained };
        range.start.min(end)..range.end.min(end)
    }

    /// Part `index` of `count` equal parts of the padded unit.
    pub fn part(&self, index: usize, count: usize) -> Range<usize> {
        part(self.padded, index, count)
    }

    /// The tensors that overlap `owned`, with the overlap as a range of the tensor's own flat elements.
    pub fn pieces(&self, owned: Range<usize>) -> impl Iterator<Item = Piece<'_>> {
        self.tensors.iter().enumerate().filter_map(move |(index, (tensor, range))| {
            let overlap = range.start.max(owned.start)..range.end.min(owned.end);
            (overlap.start < overlap.end).then(|| Piece {
                index,
                tensor,
                of_tensor: overlap.start - range.start..overlap.end - range.start,
                of_owned: overlap.start - owned.start..overlap.end - owned.start,
            })
        })
    }
}

/// The part of a tensor that lies in an owned range of a unit.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece<'a> {
    /// Number of the tensor in the unit.
    pub index: usize,
    /// The tensor.
    pub tensor: &'a Tensor,
    /// The overlap, in flat elements of the tensor.
    pub of_tensor: Range<usize>,
    /// The overlap, in elements of the owned range.
    pub of_owned: Range<usize>,
}

/// Part `index` of `count` equal parts of `len` elements; `count` divides `len`.
pub fn part(len: usize, index: usize, count: usize) -> Range<usize> {
    debug_assert_eq!(len % count, 0);
    let size = len / count;
    index * size..(index + 1) * size
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

    #[test]
    fn decayed_first_then_padding() {
        let unit = unit(3);
        assert_eq!((unit.used, unit.padded), (34, 48));
        assert_eq!(unit.part(2, 3), 32..48);
    }

    #[test]
    fn what_no_backward_overwrites_is_zeroed() {
        let of = |overwritten: &[usize]| {
            let mut tensors: Vec<Tensor> = unit(3).tensors.into_iter().map(|(tensor, _)| tensor).collect();
            overwritten.iter().for_each(|&i| tensors[i].overwritten = true);
            let zeroed = UnitLayout::new("unit", tensors, 3).zeroed();
            zeroed.into_iter().map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[]), [(0, 48)]);
        assert_eq!(of(&[0]), [(15, 48)]);
        assert_eq!(of(&[1]), [(0, 15), (29, 48)]);
        assert_eq!(of(&[0, 1, 2]), [(34, 48)]);
    }

    proptest! {
        #[test]
        fn parts_cover_every_tensor_once(parts in 1usize..9) {
            let unit = unit(parts);
            let mut seen = [vec![0; 15], vec![0; 14], vec![0; 5]];
            for index in 0..parts {
                for piece in unit.pieces(unit.part(index, parts)) {
                    prop_assert_eq!(piece.of_tensor.len(), piece.of_owned.len());
                    let which = unit.tensors.iter().position(|(t, _)| t.name == piece.tensor.name).unwrap();
                    piece.of_tensor.for_each(|i| seen[which][i] += 1);
                }
            }
            prop_assert!(seen.iter().flatten().all(|&n| n == 1));
        }
    }
}
