//! A block's work on its virtual tensor ranks (Shoeybi et al., "Megatron-LM", 2019): maps whose columns are
//! divided give each virtual rank an output of its own; the outputs of maps whose inputs are divided are
//! summed over all virtual ranks.
//!
//! Virtual ranks are computed one after the other and summed by one tree, on a rank and between ranks:
//! whichever rank has a virtual rank, the sum has the same bits. Narrow compute types are summed in f32.
//!
//! With sequence parallelism (Korthikanti et al., "Reducing activation recomputation in large
//! transformer models", 2022) a rank keeps its own rows of the stream between the maps, and sums
//! leave each rank its rows. The gradients of norms and of biases of sums are always taken over the
//! rows of each virtual rank apart, so that both ways have the same bits.

use std::ops::Range;
use std::sync::Arc;

use super::dropout::ResidualDropout;
use super::wgrad::{At, OutputGradient, ranges};
use super::{Context, Grads, Params};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::TensorShards;
use hpctrain_base::tree_sum::Tree;
use hpctrain_comm::Pending;
use hpctrain_device::{Backend, Kernels, Linear, MemoryKind, Norm, split};

/// The virtual ranks of a block, in one computation.
#[derive(Clone, Copy)]
pub struct TensorParallel<'a, B: Kernels> {
    cx: &'a Context<'a, B>,
    slices: &'a TensorShards,
}

/// The gradient of the output of a residual branch.
pub struct Branch<B: Backend> {
    /// This rank's rows, where dropout masks them.
    masked: Option<Arc<B::Buf>>,
    /// All rows, where ranks divide them.
    gathered: Option<Arc<B::Buf>>,
}

/// The gradient of a virtual rank's output: elements of a buffer.
pub type OfVirtualRank<B> = (Arc<<B as Backend>::Buf>, Range<usize>);

/// A map whose outputs are divided among virtual ranks, in its backward.
pub struct Column<'a, B: Kernels> {
    /// The sizes of each virtual rank.
    pub shapes: Vec<Linear>,
    /// The weight of each virtual rank.
    pub weights: Vec<B::View<'a>>,
    /// The place of each weight's gradient.
    pub places: Vec<At>,
    /// The place of each bias's gradient.
    pub biases: Vec<Range<usize>>,
}

/// The places of a norm's gradients in the section of each virtual rank.
#[derive(Clone, Copy)]
pub struct Places<'a> {
    /// Of its weight.
    pub weights: &'a [Range<usize>],
    /// Of its bias.
    pub biases: &'a [Range<usize>],
}

impl<'a, B: Kernels> TensorParallel<'a, B> {
    /// The virtual ranks of `slices`.
    pub fn new(cx: &'a Context<'a, B>, slices: &'a TensorShards) -> Self {
        Self { cx, slices }
    }

    /// The parameters of each virtual rank, of tensors one after the other in its section, whose lengths
    /// `lens(virtual_rank)` has.
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

    /// As [`TensorParallel::parameters`], their ranges in a unit with sections of so many elements.
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

    /// The place of the bias of a summed map's gradient for [`Grads::linear`]: more virtual ranks than one
    /// take their rows apart, in [`TensorParallel::add_bias`].
    pub fn bias_of_sum(&self, bias: &Range<usize>) -> Range<usize> {
        if self.slices.total == 1 { bias.clone() } else { 0..0 }
    }

    /// Rows of the stream that this rank has.
    pub fn own(&self) -> Range<usize> {
        self.slices.rows(self.cx.micro.rows())
    }

    /// Whether ranks divide the rows of the stream.
    fn is_divided(&self) -> bool {
        self.slices.divides(self.cx.micro.rows())
    }

    /// The rows of each virtual rank, of this rank's rows; and the number of the virtual rank among those of this
    /// rank, if it is one.
    fn rows(&self) -> Vec<(Range<usize>, Option<usize>)> {
        let rows = self.cx.micro.rows();
        let own = self.own();
        let total = self.slices.total;
        let of_virtual_rank = |virtual_rank: usize| {
            let range = (virtual_rank * rows / total).max(own.start)
                ..((virtual_rank + 1) * rows / total).min(own.end);
            let held = self
                .slices
                .held
                .contains(&virtual_rank)
                .then(|| virtual_rank - self.slices.held.start);
            (range.start < range.end)
                .then(|| (range.start - own.start..range.end - own.start, held))
        };
        (0..total).filter_map(of_virtual_rank).collect()
    }

    /// Whether virtual rank number `k` of this rank is the first of all.
    pub fn is_first(&self, k: usize) -> bool {
        self.slices.held.start + k == 0
    }

    /// Whether partial sums are of another type than the compute type.
    fn sums_wide(&self) -> bool {
        self.slices.total > 1 && self.cx.backend.has_master_weights()
    }

    /// All rows (of `width` elements) of a buffer with this rank's rows, where ranks divide them.
    ///
    /// # Errors
    /// The device or a message failed.
    pub fn gather(&self, own: &B::Buf, width: usize) -> Result<Option<B::Buf>> {
        let Some(group) = self.cx.tensor.filter(|_| self.is_divided()) else { return Ok(None) };
        let b = self.cx.backend;
        let rows = self.own();
        let mut all = b.alloc(MemoryKind::Activations, self.cx.micro.rows() * width)?;
        b.copy(B::all(own), B::view_mut(&mut all, rows.start * width..rows.end * width))?;
        group.all_gather(all).wait().map(Some)
    }

    /// As [`TensorParallel::gather`], or the buffer itself.
    ///
    /// # Errors
    /// As there.
    pub fn gathered(&self, own: B::Buf, width: usize) -> Result<B::Buf> {
        Ok(self.gather(&own, width)?.unwrap_or(own))
    }

    /// The sum over this rank's virtual ranks of the `len` elements that `product(k, to)` writes for virtual rank
    /// number `k`. `spare` is memory of as many elements of the compute type.
    ///
    /// # Errors
    /// The device failed, or of `product`.
    pub fn sum(
        &self,
        len: usize,
        spare: Option<B::Buf>,
        mut product: impl FnMut(usize, B::ViewMut<'_>) -> Result<()>,
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
            product(k, B::all_mut(&mut to))?;
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

    /// Fills partial sums `to`, of `len` elements, with numbers that `compute` gives in the compute
    /// type.
    ///
    /// # Errors
    /// The device failed, or of `compute`.
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

    /// Starts to add the sums of all ranks.
    pub fn request(&self, sum: B::Buf) -> Pending<B::Buf> {
        let len = B::len(&sum);
        match self.cx.tensor {
            None => Pending::ready(sum),
            Some(group) if self.is_divided() => group.reduce_scatter(sum),
            Some(group) => group.all_reduce(sum, 0..len),
        }
    }

    /// This rank's rows (of `width` elements) of a sum that was requested.
    ///
    /// # Errors
    /// The device or a message failed.
    pub fn settle(&self, sum: Pending<B::Buf>, width: usize) -> Result<B::Buf> {
        let sum = sum.wait()?;
        let rows = self.own();
        if !self.is_divided() && !self.sums_wide() {
            return Ok(sum);
        }
        let mut own = self.cx.backend.alloc(MemoryKind::Activations, rows.len() * width)?;
        self.cx
            .backend
            .copy(B::view(&sum, rows.start * width..rows.end * width), B::all_mut(&mut own))?;
        Ok(own)
    }

    /// Whether sums over virtual ranks are the products of one: what is added to the sum can be added to
    /// the product.
    pub fn is_uncut(&self) -> bool {
        self.slices.total == 1
    }

    /// A virtual rank's part of a map whose inputs are divided. The first virtual rank adds the bias.
    ///
    /// # Errors
    /// The device failed.
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
        // A product takes a bias of the type of its result.
        let mut wide = b.alloc_f32(MemoryKind::Activations, shape.outputs)?;
        b.copy(bias, B::all_mut(&mut wide))?;
        b.linear(shape, x, weight, B::all(&wide), y)
    }

    /// Normalises this rank's rows of `x`; also returns the statistics.
    ///
    /// # Errors
    /// The device failed.
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

    /// Adds `x` to this rank's rows of the stream, then normalises it; also returns the statistics.
    ///
    /// # Errors
    /// The device failed.
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

    /// The results of a norm of this rank's rows: each virtual rank's by themselves, as the backward wants
    /// their statistics. `norm(rows, at, y, stats)` computes some rows, elements `at`.
    fn normalised(
        &self,
        width: usize,
        mut norm: impl FnMut(usize, Range<usize>, B::ViewMut<'_>, B::ViewMut<'_>) -> Result<()>,
    ) -> Result<(B::Buf, B::Buf)> {
        let b = self.cx.backend;
        let rows = self.own().len();
        let mut y = b.alloc(MemoryKind::Activations, rows * width)?;
        let mut stats = b.alloc_f32(MemoryKind::Activations, rows * 2)?;
        for (rows, _) in self.rows() {
            let at = rows.start * width..rows.end * width;
            let stats = B::view_mut(&mut stats, rows.start * 2..rows.end * 2);
            norm(rows.len(), at.clone(), B::view_mut(&mut y, at), stats)?;
        }
        Ok((y, stats))
    }

    /// Adds to the gradient `dx` of the norm's input, this rank's rows; and, for the rows of each
    /// of its virtual ranks, to the virtual rank's gradients of weight and bias, at `places`.
    ///
    /// # Errors
    /// The device failed.
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
        places: Places<'_>,
    ) -> Result<()> {
        let b = self.cx.backend;
        // Of rows of other ranks' virtual ranks those ranks have the gradients of the weight.
        let mut others = None;
        for (rows, held) in self.rows() {
            let (s, at) =
                (Norm { rows: rows.len(), ..s }, rows.start * s.width..rows.end * s.width);
            let stats = B::view(stats, rows.start * 2..rows.end * 2);
            let dy = B::view(dy, at.clone());
            let x = B::view(x, at.clone());
            let dx = B::view_mut(dx, at);
            let (dweight, dbias) = match held {
                Some(k) => grads.pair(&places.weights[k], &places.biases[k]),
                None => {
                    let [weight, bias] = [places.weights, places.biases]
                        .map(|of_virtual_ranks| of_virtual_ranks[0].len());
                    let scratch = match &mut others {
                        Some(scratch) => scratch,
                        none => none.insert(b.alloc_f32(MemoryKind::Activations, weight + bias)?),
                    };
                    B::cut_mut(B::all_mut(scratch), weight)
                }
            };
            b.norm_backward(s, dy, x, weight, stats, dx, dweight, dbias)?;
        }
        Ok(())
    }

    /// Adds to each virtual rank's gradient of the bias of a summed map, at `places`, the virtual rank's rows of
    /// `dy`: this rank's rows, of `width` elements. With one virtual rank [`Grads::linear`] has done so.
    ///
    /// # Errors
    /// The device failed.
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
            let (_, dbias) = grads.pair(&(place.start..place.start), place);
            self.cx.backend.linear_backward_bias(rows.len(), dy, dbias)?;
        }
        Ok(())
    }

    /// The gradient of a residual branch's output, behind its dropout.
    ///
    /// # Errors
    /// The device or a message failed.
    pub fn branch(
        &self,
        dropout: ResidualDropout,
        site: usize,
        dy: &B::Buf,
        is_kept: bool,
    ) -> Result<Branch<B>> {
        let mut masked = dropout.masked(self.cx, site, self.own().start, dy)?;
        let gathered = self.gather(masked.as_ref().unwrap_or(dy), dropout.width)?;
        if is_kept && self.slices.held.len() > 1 && masked.is_none() && gathered.is_none() {
            // One copy for all virtual ranks.
            let mut copy = self.cx.backend.alloc(MemoryKind::Activations, B::len(dy))?;
            self.cx.backend.copy(B::all(dy), B::all_mut(&mut copy))?;
            masked = Some(copy);
        }
        Ok(Branch { masked: masked.map(Arc::new), gathered: gathered.map(Arc::new) })
    }

    /// The gradients of a map whose outputs are divided: of weights and biases, from those of the
    /// virtual ranks' outputs and all rows of the input; and this rank's rows of the input's gradient. The
    /// ranks' sum is under way while weights are computed.
    ///
    /// # Errors
    /// The device or a message failed.
    pub fn column_backward(
        &self,
        map: &Column<'_, B>,
        grads: &mut Grads<'_, B>,
        dys: Vec<OfVirtualRank<B>>,
        x: B::Buf,
    ) -> Result<B::Buf> {
        let b = self.cx.backend;
        let inputs = map.shapes.first().map_or(0, |shape| shape.inputs);
        let x = Arc::new(x);
        let add_weights = |grads: &mut Grads<'_, B>| {
            dys.iter().enumerate().try_for_each(|(k, (dy, at))| {
                let dy = OutputGradient::Kept(dy, at.clone());
                grads.linear(b, map.shapes[k], dy, &x, map.places[k].clone(), map.biases[k].clone())
            })
        };
        let input = |k: usize, dx: B::ViewMut<'_>| {
            let (dy, at) = &dys[k];
            b.linear_backward_input(map.shapes[k], B::view(dy, at.clone()), map.weights[k], dx)
        };
        let len = self.cx.micro.rows() * inputs;
        if self.cx.tensor.is_none() {
            add_weights(grads)?;
            // The input's memory takes its gradient, unless weights want it later.
            let sum = self.sum(len, Arc::into_inner(x), input)?;
            return self.settle(Pending::ready(sum), inputs);
        }
        let sum = self.request(self.sum(len, None, input)?);
        add_weights(grads)?;
        self.settle(sum, inputs)
    }
}

impl<B: Kernels> Branch<B> {
    /// This rank's rows.
    pub fn own<'a>(&'a self, dy: &'a B::Buf) -> B::View<'a> {
        B::all(self.masked.as_deref().unwrap_or(dy))
    }

    /// All rows.
    pub fn all<'a>(&'a self, dy: &'a B::Buf) -> B::View<'a> {
        self.gathered.as_deref().map_or_else(|| self.own(dy), B::all)
    }

    /// The same, for [`Grads::linear`].
    pub fn of_output<'a>(&'a self, dy: &'a B::Buf) -> OutputGradient<'a, B> {
        match self.gathered.as_ref().or(self.masked.as_ref()) {
            Some(kept) => OutputGradient::Kept(kept, 0..B::len(kept)),
            None => OutputGradient::Changing(dy),
        }
    }
}
