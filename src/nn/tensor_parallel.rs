//! Tensor parallelism in a block (Shoeybi et al., "Megatron-LM", 2019). A column-parallel linear
//! layer gives each virtual rank its own part of the output; the outputs of a row-parallel linear
//! layer are summed over all virtual ranks.
//!
//! Virtual ranks are computed one after the other and summed by one tree, on a rank and between
//! ranks, so the sum has the same bits whichever rank has a virtual rank. Narrow compute types are
//! summed in f32.
//!
//! With sequence parallelism (Korthikanti et al., "Reducing activation recomputation in large
//! transformer models", 2022) a rank holds only its own rows of the residual stream between the
//! linear layers, and sums are reduce-scatters. The gradients of norms and of row-parallel biases
//! are always computed separately for the rows of each virtual rank, so the bits are the same with
//! and without sequence parallelism.

use std::ops::Range;
use std::sync::Arc;

use super::dropout::ResidualDropout;
use super::wgrad::{GradRange, OutputGradient, ranges};
use super::{Context, Grads, Params};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::TensorShards;
use hpctrain_base::tree_sum::Tree;
use hpctrain_comm::Pending;
use hpctrain_device::{Backend, Kernels, Linear, MemoryKind, Norm, split};

/// The virtual ranks of a block, in one forward or backward.
#[derive(Clone, Copy)]
pub struct TensorParallel<'a, B: Kernels> {
    cx: &'a Context<'a, B>,
    slices: &'a TensorShards,
}

/// The gradient of the output of a residual branch.
pub struct BranchGrad<B: Backend> {
    /// This rank's rows, if dropout masks them.
    masked: Option<Arc<B::Buf>>,
    /// All rows, with sequence parallelism.
    gathered: Option<Arc<B::Buf>>,
}

/// The gradient of a virtual rank's output: a range of elements of a buffer.
pub type VirtualRankGrad<B> = (Arc<<B as Backend>::Buf>, Range<usize>);

/// A column-parallel linear layer, for its backward.
pub struct ColumnLinear<'a, B: Kernels> {
    /// The shape of each virtual rank's part.
    pub shapes: Vec<Linear>,
    /// The weight of each virtual rank.
    pub weights: Vec<B::View<'a>>,
    /// Where the gradient of each weight is.
    pub places: Vec<GradRange>,
    /// Where the gradient of each bias is.
    pub biases: Vec<Range<usize>>,
}

/// Where the gradients of a norm are, for each virtual rank.
#[derive(Clone, Copy)]
pub struct NormGradRanges<'a> {
    /// The ranges of the weight's gradient.
    pub weights: &'a [Range<usize>],
    /// The ranges of the bias's gradient.
    pub biases: &'a [Range<usize>],
}

impl<'a, B: Kernels> TensorParallel<'a, B> {
    /// Creates the computation for the virtual ranks `slices`.
    pub fn new(cx: &'a Context<'a, B>, slices: &'a TensorShards) -> Self {
        Self { cx, slices }
    }

    /// Returns each tensor's parameters in every virtual rank. The tensors are consecutive in a
    /// virtual rank's section, and `lens(virtual_rank)` gives their lengths.
    pub fn parameters<'p, const N: usize>(
        &self,
        params: &Params<'p, B>,
        lens: impl Fn(usize) -> [usize; N],
    ) -> [Vec<B::View<'p>>; N] {
        let virtual_ranks = self.slices.held.clone().enumerate();
        let split: Vec<_> = virtual_ranks
            .map(|(k, virtual_rank)| split::<B, N>(params.virtual_rank(k), lens(virtual_rank)))
            .collect();
        std::array::from_fn(|tensor| {
            split.iter().map(|of_virtual_rank| of_virtual_rank[tensor]).collect()
        })
    }

    /// Returns the ranges of the tensors of [`TensorParallel::parameters`] in a unit with sections
    /// of `section` elements.
    pub fn places<const N: usize>(
        &self,
        section: usize,
        lens: impl Fn(usize) -> [usize; N],
    ) -> [Vec<Range<usize>>; N] {
        let virtual_ranks = self.slices.held.clone().enumerate();
        let moved =
            |k: usize, range: Range<usize>| range.start + k * section..range.end + k * section;
        let split: Vec<_> = virtual_ranks
            .map(|(k, virtual_rank)| ranges(lens(virtual_rank)).map(|range| moved(k, range)))
            .collect();
        std::array::from_fn(|tensor| {
            split.iter().map(|of_virtual_rank| of_virtual_rank[tensor].clone()).collect()
        })
    }

    /// Returns the range of a row-parallel layer's bias gradient for [`Grads::linear`]. It is empty
    /// with more than one virtual rank: [`TensorParallel::add_bias`] then adds the gradient for
    /// each virtual rank's rows.
    pub fn row_linear_bias(&self, bias: &Range<usize>) -> Range<usize> {
        if self.slices.total == 1 { bias.clone() } else { 0..0 }
    }

    /// Returns the rows of the residual stream that this rank holds.
    pub fn own_rows(&self) -> Range<usize> {
        self.slices.rows(self.cx.micro.rows())
    }

    /// Returns true if the rows of the residual stream are sharded (sequence parallelism).
    fn is_divided(&self) -> bool {
        self.slices.divides(self.cx.micro.rows())
    }

    /// Returns the rows of each virtual rank among this rank's rows, and the index of the virtual
    /// rank on this rank if it is held here.
    fn rows(&self) -> Vec<(Range<usize>, Option<usize>)> {
        (0..self.slices.total)
            .filter_map(|virtual_rank| self.rows_of_virtual_rank(virtual_rank))
            .collect()
    }

    /// Returns the element of [`TensorParallel::rows`] for a virtual rank, or `None` if it has no
    /// rows on this rank.
    fn rows_of_virtual_rank(&self, virtual_rank: usize) -> Option<(Range<usize>, Option<usize>)> {
        let rows = self.cx.micro.rows();
        let own = self.own_rows();
        let TensorShards { total, held, .. } = self.slices;
        let range = (virtual_rank * rows / total).max(own.start)
            ..((virtual_rank + 1) * rows / total).min(own.end);
        let index = held.contains(&virtual_rank).then(|| virtual_rank - held.start);
        (range.start < range.end).then(|| (range.start - own.start..range.end - own.start, index))
    }

    /// Returns true if virtual rank number `k` of this rank is the first of all ranks.
    pub fn is_first(&self, k: usize) -> bool {
        self.slices.held.start + k == 0
    }

    /// Returns true if partial sums are f32 and the compute type is narrower.
    fn sums_wide(&self) -> bool {
        self.slices.total > 1 && self.cx.backend.has_master_weights()
    }

    /// Returns all rows (of `width` elements) by an all-gather from a buffer with this rank's rows.
    /// Returns `None` without sequence parallelism.
    ///
    /// # Errors
    /// Returns an error if the device or a message fails.
    pub fn gather(&self, own: &B::Buf, width: usize) -> Result<Option<B::Buf>> {
        let Some(group) = self.cx.tensor.filter(|_| self.is_divided()) else { return Ok(None) };
        let b = self.cx.backend;
        let rows = self.own_rows();
        let mut all = b.alloc(MemoryKind::Activations, self.cx.micro.rows() * width)?;
        b.copy(B::all(own), B::view_mut(&mut all, rows.start * width..rows.end * width))?;
        group.all_gather(all).wait().map(Some)
    }

    /// Returns the result of [`TensorParallel::gather`], or the buffer itself if there is none.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`TensorParallel::gather`].
    pub fn gathered(&self, own: B::Buf, width: usize) -> Result<B::Buf> {
        Ok(self.gather(&own, width)?.unwrap_or(own))
    }

    /// Returns the sum over this rank's virtual ranks of the `len` elements that `compute(k, to)`
    /// writes for virtual rank number `k`. `spare` is a buffer of `len` elements of the compute
    /// type to reuse.
    ///
    /// # Errors
    /// Returns an error if the device or `compute` fails.
    pub fn sum(
        &self,
        len: usize,
        spare: Option<B::Buf>,
        mut compute: impl FnMut(usize, B::ViewMut<'_>) -> Result<()>,
    ) -> Result<B::Buf> {
        let b = self.cx.backend;
        let is_wide = self.sums_wide();
        let mut spare = spare.filter(|_| !is_wide);
        let mut tree = Tree::default();
        for k in 0..self.slices.held.len() {
            let mut to = match spare.take() {
                Some(buf) => buf,
                None if is_wide => b.alloc_f32(MemoryKind::Activations, len)?,
                None => b.alloc(MemoryKind::Activations, len)?,
            };
            compute(k, B::all_mut(&mut to))?;
            tree.push(to, |into: &mut B::Buf, from: B::Buf| {
                b.add(B::all(&from), B::all_mut(into))?;
                spare = Some(from);
                Ok::<_, Error>(())
            })?;
        }
        let sum =
            tree.finish(|into: &mut B::Buf, from: B::Buf| b.add(B::all(&from), B::all_mut(into)))?;
        sum.ok_or_else(|| Error::internal("a block without virtual tensor ranks"))
    }

    /// Fills the partial sums `to`, of `len` elements, with the values that `compute` writes in the
    /// compute type.
    ///
    /// # Errors
    /// Returns an error if the device or `compute` fails.
    pub fn narrow(
        &self,
        len: usize,
        to: B::ViewMut<'_>,
        compute: impl FnOnce(B::ViewMut<'_>) -> Result<()>,
    ) -> Result<()> {
        if !self.sums_wide() {
            return compute(to);
        }
        let mut narrow = self.cx.backend.alloc(MemoryKind::Activations, len)?;
        compute(B::all_mut(&mut narrow))?;
        self.cx.backend.copy(B::all(&narrow), to)
    }

    /// Starts the sum over all ranks: a reduce-scatter with sequence parallelism, else an
    /// all-reduce.
    pub fn start_sum(&self, sum: B::Buf) -> Pending<B::Buf> {
        let len = B::len(&sum);
        match self.cx.tensor {
            None => Pending::ready(sum),
            Some(group) if self.is_divided() => group.reduce_scatter(sum),
            Some(group) => group.all_reduce(sum, 0..len),
        }
    }

    /// Waits for a sum that [`TensorParallel::request`] started, and returns this rank's rows (of
    /// `width` elements).
    ///
    /// # Errors
    /// Returns an error if the device or a message fails.
    pub fn wait_sum(&self, sum: Pending<B::Buf>, width: usize) -> Result<B::Buf> {
        let sum = sum.wait()?;
        let rows = self.own_rows();
        if !self.is_divided() && !self.sums_wide() {
            return Ok(sum);
        }
        let mut own = self.cx.backend.alloc(MemoryKind::Activations, rows.len() * width)?;
        self.cx
            .backend
            .copy(B::view(&sum, rows.start * width..rows.end * width), B::all_mut(&mut own))?;
        Ok(own)
    }

    /// Returns true if there is one virtual rank, so that a matmul can add what is to be added to
    /// the sum.
    pub fn is_unsharded(&self) -> bool {
        self.slices.total == 1
    }

    /// Computes a virtual rank's part of a row-parallel linear layer. The first virtual rank adds
    /// the bias.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn row_linear(
        &self,
        k: usize,
        shape: Linear,
        x: B::View<'_>,
        weight: B::View<'_>,
        bias: Option<B::View<'_>>,
        y: B::ViewMut<'_>,
    ) -> Result<()> {
        let b = self.cx.backend;
        let Some(bias) = bias.filter(|_| self.is_first(k)) else {
            return b.linear(shape, x, weight, B::split_at(weight, 0).0, y);
        };
        if !self.sums_wide() {
            return b.linear(shape, x, weight, bias, y);
        }
        // A matmul takes a bias of the type of its result.
        let mut wide = b.alloc_f32(MemoryKind::Activations, shape.outputs)?;
        b.copy(bias, B::all_mut(&mut wide))?;
        b.linear(shape, x, weight, B::all(&wide), y)
    }

    /// Normalises this rank's rows of `x`. Returns the result and the statistics.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn norm(
        &self,
        s: Norm,
        x: &B::Buf,
        weight: B::View<'_>,
        bias: B::View<'_>,
    ) -> Result<(B::Buf, B::Buf)> {
        let b = self.cx.backend;
        self.normalised(s.width, |rows, at, y, stats| {
            b.norm(Norm { rows, ..s }, B::view(x, at), weight, bias, y, stats)
        })
    }

    /// Adds `x` to this rank's rows of the residual stream, then normalises them. Returns the
    /// result and the statistics.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn add_norm(
        &self,
        s: Norm,
        x: &B::Buf,
        stream: &mut B::Buf,
        weight: B::View<'_>,
        bias: B::View<'_>,
    ) -> Result<(B::Buf, B::Buf)> {
        let b = self.cx.backend;
        self.normalised(s.width, |rows, at, y, stats| {
            let x = B::view(x, at.clone());
            let stream = B::view_mut(stream, at);
            b.add_norm(Norm { rows, ..s }, x, stream, weight, bias, y, stats)
        })
    }

    /// Returns the result and the statistics of a norm of this rank's rows. The rows of each
    /// virtual rank are computed separately, as the backward requires. `norm(rows, at, y, stats)`
    /// computes `rows` rows, the elements `at`.
    fn normalised(
        &self,
        width: usize,
        mut norm: impl FnMut(usize, Range<usize>, B::ViewMut<'_>, B::ViewMut<'_>) -> Result<()>,
    ) -> Result<(B::Buf, B::Buf)> {
        let b = self.cx.backend;
        let rows = self.own_rows().len();
        let mut y = b.alloc(MemoryKind::Activations, rows * width)?;
        let mut stats = b.alloc_f32(MemoryKind::Activations, rows * 2)?;
        for (rows, _) in self.rows() {
            let at = rows.start * width..rows.end * width;
            let stats = B::view_mut(&mut stats, rows.start * 2..rows.end * 2);
            norm(rows.len(), at.clone(), B::view_mut(&mut y, at), stats)?;
        }
        Ok((y, stats))
    }

    /// Computes the backward of a norm on this rank's rows: accumulates the gradient of its input
    /// into `dx`, and, for the rows of each virtual rank held here, those of weight and bias at
    /// `places`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    #[expect(clippy::too_many_arguments, reason = "one argument for each tensor of the operation")]
    pub fn norm_backward(
        &self,
        s: Norm,
        dy: &B::Buf,
        x: &B::Buf,
        weight: B::View<'_>,
        stats: &B::Buf,
        dx: &mut B::Buf,
        grads: &mut Grads<'_, B>,
        places: NormGradRanges<'_>,
    ) -> Result<()> {
        let b = self.cx.backend;
        // The weight gradients of rows of virtual ranks on other ranks are computed there.
        let mut others = None;
        for (rows, held) in self.rows() {
            let (s, at) =
                (Norm { rows: rows.len(), ..s }, rows.start * s.width..rows.end * s.width);
            let stats = B::view(stats, rows.start * 2..rows.end * 2);
            let dy = B::view(dy, at.clone());
            let x = B::view(x, at.clone());
            let dx = B::view_mut(dx, at);
            let (dweight, dbias) = match held {
                Some(k) => grads.weight_and_bias(&places.weights[k], &places.biases[k]),
                None => {
                    let [weight, bias] = [places.weights, places.biases]
                        .map(|of_virtual_ranks| of_virtual_ranks[0].len());
                    let scratch = match &mut others {
                        Some(scratch) => scratch,
                        none => none.insert(b.alloc_f32(MemoryKind::Activations, weight + bias)?),
                    };
                    B::split_at_mut(B::all_mut(scratch), weight)
                }
            };
            b.norm_backward(s, dy, x, weight, stats, dx, dweight, dbias)?;
        }
        Ok(())
    }

    /// Accumulates the bias gradient of a row-parallel layer: adds each virtual rank's rows of `dy`
    /// to that virtual rank's gradient at `places`. `dy` has this rank's rows, of `width` elements.
    /// Does nothing with one virtual rank, where [`Grads::linear`] has done so.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn add_bias(
        &self,
        dy: B::View<'_>,
        width: usize,
        grads: &mut Grads<'_, B>,
        places: &[Range<usize>],
    ) -> Result<()> {
        if self.slices.total == 1 {
            return Ok(());
        }
        for (rows, held) in self.rows() {
            let Some(place) = held.map(|k| &places[k]).filter(|place| !place.is_empty()) else {
                continue;
            };
            let (_, from) = B::split_at(dy, rows.start * width);
            let (dy, _) = B::split_at(from, rows.len() * width);
            let (_, dbias) = grads.weight_and_bias(&(place.start..place.start), place);
            self.cx.backend.linear_backward_bias(rows.len(), dy, dbias)?;
        }
        Ok(())
    }

    /// Returns the gradient of a residual branch's output, before its dropout. If `is_kept`,
    /// deferred wgrad will read it later.
    ///
    /// # Errors
    /// Returns an error if the device or a message fails.
    pub fn branch(
        &self,
        dropout: ResidualDropout,
        site: usize,
        dy: &B::Buf,
        is_kept: bool,
    ) -> Result<BranchGrad<B>> {
        let mut masked = dropout.masked(self.cx, site, self.own_rows().start, dy)?;
        let gathered = self.gather(masked.as_ref().unwrap_or(dy), dropout.width)?;
        if is_kept && self.slices.held.len() > 1 && masked.is_none() && gathered.is_none() {
            // One copy for all virtual ranks.
            let mut copy = self.cx.backend.alloc(MemoryKind::Activations, B::len(dy))?;
            self.cx.backend.copy(B::all(dy), B::all_mut(&mut copy))?;
            masked = Some(copy);
        }
        Ok(BranchGrad { masked: masked.map(Arc::new), gathered: gathered.map(Arc::new) })
    }

    /// Computes the backward of a column-parallel linear layer from the gradients `dys` of the
    /// virtual ranks' outputs and all rows `x` of the input. Returns this rank's rows of the
    /// input's gradient. The sum over ranks overlaps with the computation of the weight gradients.
    ///
    /// # Errors
    /// Returns an error if the device or a message fails.
    pub fn column_backward(
        &self,
        map: &ColumnLinear<'_, B>,
        grads: &mut Grads<'_, B>,
        dys: Vec<VirtualRankGrad<B>>,
        x: B::Buf,
    ) -> Result<B::Buf> {
        let b = self.cx.backend;
        let inputs = map.shapes.first().map_or(0, |shape| shape.inputs);
        let x = Arc::new(x);
        let input = |k: usize, dx: B::ViewMut<'_>| {
            let (dy, at) = &dys[k];
            b.linear_backward_input(map.shapes[k], B::view(dy, at.clone()), map.weights[k], dx)
        };
        let len = self.cx.micro.rows() * inputs;
        if self.cx.tensor.is_none() {
            map.add_weight_grads(b, grads, &dys, &x)?;
            // The gradient reuses the input's memory, unless deferred wgrad needs the input.
            let sum = self.sum(len, Arc::into_inner(x), input)?;
            return self.wait_sum(Pending::ready(sum), inputs);
        }
        let sum = self.start_sum(self.sum(len, None, input)?);
        map.add_weight_grads(b, grads, &dys, &x)?;
        self.wait_sum(sum, inputs)
    }
}

impl<B: Kernels> ColumnLinear<'_, B> {
    /// Adds the weight and bias gradients of every virtual rank.
    fn add_weight_grads(
        &self,
        backend: &B,
        grads: &mut Grads<'_, B>,
        dys: &[VirtualRankGrad<B>],
        x: &Arc<B::Buf>,
    ) -> Result<()> {
        for (k, (dy, at)) in dys.iter().enumerate() {
            let dy = OutputGradient::Unchanged(dy, at.clone());
            let (weight, bias) = (self.places[k].clone(), self.biases[k].clone());
            grads.linear(backend, self.shapes[k], dy, x, weight, bias)?;
        }
        Ok(())
    }
}

impl<B: Kernels> BranchGrad<B> {
    /// Returns this rank's rows.
    pub fn own_rows<'a>(&'a self, dy: &'a B::Buf) -> B::View<'a> {
        B::all(self.masked.as_deref().unwrap_or(dy))
    }

    /// Returns all rows.
    pub fn all<'a>(&'a self, dy: &'a B::Buf) -> B::View<'a> {
        self.gathered.as_deref().map_or_else(|| self.own_rows(dy), B::all)
    }

    /// Returns all rows, as [`Grads::linear`] takes them.
    pub fn of_output<'a>(&'a self, dy: &'a B::Buf) -> OutputGradient<'a, B> {
        match self.gathered.as_ref().or(self.masked.as_ref()) {
            Some(kept) => OutputGradient::Unchanged(kept, 0..B::len(kept)),
            None => OutputGradient::Changing(dy),
        }
    }
}
