//! The backward of a autograd tape: its operations in reverse.

use std::ops::Range;
use std::rc::Rc;

use super::operation::{Operation, Targets};
use super::tape::{Meta, Node, Origin, Tape, Var, unit_weight};
use super::tracked::Tracked;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{
    Activation, Backend, Contrastive, CrossEntropy, Gemm, Kernels, Linear, LossWeights, MemoryKind,
    Norm, Regression, RegressionLoss, StridedCopy,
};

/// The gradients of a block's parameters.
pub struct ParamGrads<'g, B: Backend> {
    /// The gradients of the unit; `None` in a run on shapes.
    pub own: Option<B::ViewMut<'g>>,
    /// Whether the gradient of each parameter is to be overwritten: nothing has been added to it.
    pub is_fresh: Vec<bool>,
    /// The parameters whose gradients a linear layer was the first to write, in order.
    pub overwritten: Vec<usize>,
}

impl<B: Kernels> ParamGrads<'_, B> {
    /// Notes that a linear layer writes the gradient of a parameter. Returns true if it adds to
    /// what is there, and false if it overwrites.
    fn adds(&mut self, param: usize) -> bool {
        let was_fresh = std::mem::replace(&mut self.is_fresh[param], false);
        if was_fresh {
            self.overwritten.push(param);
        }
        !was_fresh
    }

    /// Returns the gradients of two parameters; none of an empty range.
    fn two(&mut self, a: &Range<usize>, b: &Range<usize>) -> Option<[B::ViewMut<'_>; 2]> {
        let own = B::reborrow(self.own.as_mut()?);
        let (first, second) = if a.start <= b.start { (a, b) } else { (b, a) };
        let (_, from) = B::split_at_mut(own, first.start);
        let (of_first, rest) = B::split_at_mut(from, first.len());
        let (_, from) = B::split_at_mut(rest, second.start.saturating_sub(first.end));
        let (of_second, _) = B::split_at_mut(from, second.len());
        Some(if a.start <= b.start { [of_first, of_second] } else { [of_second, of_first] })
    }
}

/// The gradient of a variable. Variables that were added share theirs.
type Gradient<B> = Rc<Tracked<B>>;

/// The gradients of the variables so far.
pub struct Gradients<B: Backend>(Vec<Option<Gradient<B>>>);

impl<B: Kernels> Gradients<B> {
    /// Takes the gradient of a variable.
    pub fn take(&mut self, meta: &Meta) -> Option<Gradient<B>> {
        self.0.get_mut(meta.id).and_then(Option::take)
    }
}

impl<'t, B: Kernels> Tape<'t, B> {
    /// Goes through the operations in reverse, from the gradient `dy` of `output`. Adds to the
    /// gradients of parameters, and returns those of other variables that are left, such as the
    /// input's.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(super) fn backward(
        &mut self,
        output: &Meta,
        dy: Tracked<B>,
        params: &mut ParamGrads<'_, B>,
    ) -> Result<Gradients<B>> {
        let mut grads = Gradients((0..self.variables()).map(|_| None).collect());
        self.accumulate(&mut grads, output, Rc::new(dy))?;
        while let Some(node) = self.nodes.pop() {
            let Some(dy) = grads.take(&node.output) else { continue };
            self.backward_of(node, dy, &mut grads, params)?;
        }
        Ok(grads)
    }

    /// Adds to the gradient of a variable.
    fn accumulate(&self, grads: &mut Gradients<B>, meta: &Meta, more: Gradient<B>) -> Result<()> {
        if !meta.needs_grad {
            return Ok(());
        }
        let sum = match grads.take(meta) {
            None => more,
            Some(so_far) => {
                let mut sum = self.unique(so_far, meta.len())?;
                if let (Some(b), Some(more), Some(to)) = (self.backend(), &more.buf, &mut sum.buf) {
                    b.add(B::all(more), B::all_mut(to))?;
                }
                Rc::new(sum)
            }
        };
        grads.0[meta.id] = Some(sum);
        Ok(())
    }

    /// Returns a gradient that may be changed: itself, or a copy if others read it.
    pub(super) fn unique(&self, gradient: Gradient<B>, len: usize) -> Result<Tracked<B>> {
        Rc::try_unwrap(gradient).or_else(|shared| {
            let mut copy = self.alloc(len)?;
            if let (Some(b), Some(from), Some(to)) = (self.backend(), &shared.buf, &mut copy.buf) {
                b.copy(B::all(from), B::all_mut(to))?;
            }
            Ok(copy)
        })
    }

    /// Allocates a gradient and computes it with `compute`, unless this is a run on shapes.
    fn gradient(
        &self,
        len: usize,
        compute: impl FnOnce(&B, B::ViewMut<'_>) -> Result<()>,
    ) -> Result<Tracked<B>> {
        let mut gradient = self.alloc(len)?;
        if let (Some(b), Some(to)) = (self.backend(), &mut gradient.buf) {
            compute(b, B::all_mut(to))?;
        }
        Ok(gradient)
    }

    /// Changes a gradient in place, unless this is a run on shapes.
    fn change(
        &self,
        gradient: &mut Tracked<B>,
        compute: impl FnOnce(&B, B::ViewMut<'_>) -> Result<()>,
    ) -> Result<()> {
        match (self.backend(), &mut gradient.buf) {
            (Some(b), Some(to)) => compute(b, B::all_mut(to)),
            _ => Ok(()),
        }
    }

    /// Computes the gradients of the inputs of one operation.
    fn backward_of(
        &self,
        node: Node<B>,
        dy: Gradient<B>,
        grads: &mut Gradients<B>,
        params: &mut ParamGrads<'_, B>,
    ) -> Result<()> {
        let Node { operation, inputs, output, saved } = node;
        let first = &inputs[0];
        let (rows, width) = (output.rows, output.width);
        match operation {
            Operation::Linear => self.linear_backward(&inputs, &output, &saved, &dy, grads, params),
            Operation::MatmulTransposed => {
                let [a, b] = [&inputs[0], &inputs[1]];
                let (m, n, k) = (a.rows, b.rows, a.width);
                if a.needs_grad {
                    let shape = Gemm { m, n: k, k: n, ta: false, tb: false, acc: false };
                    let da = self.gradient(m * k, |device, to| {
                        device.gemm(shape, seen(&dy)?, self.held(&saved[1])?.view()?, to)
                    })?;
                    self.accumulate(grads, a, Rc::new(da))?;
                }
                if b.needs_grad {
                    let shape = Gemm { m: n, n: k, k: m, ta: true, tb: false, acc: false };
                    let db = self.gradient(n * k, |device, to| {
                        device.gemm(shape, seen(&dy)?, self.held(&saved[0])?.view()?, to)
                    })?;
                    self.accumulate(grads, b, Rc::new(db))?;
                }
                Ok(())
            }
            Operation::Add => {
                self.accumulate(grads, &inputs[1], dy.clone())?;
                self.accumulate(grads, first, dy)
            }
            Operation::Multiply => {
                for (meta, other) in inputs.iter().zip(saved.iter().rev()) {
                    if meta.needs_grad {
                        let gradient = self.gradient(meta.len(), |b, mut to| {
                            b.copy(seen(&dy)?, B::reborrow(&mut to))?;
                            b.multiply(self.held(other)?.view()?, to)
                        })?;
                        self.accumulate(grads, meta, Rc::new(gradient))?;
                    }
                }
                Ok(())
            }
            Operation::Function(Activation::Shift(_)) => self.accumulate(grads, first, dy),
            Operation::Function(f @ Activation::Scale(_)) => {
                let dx = self.gradient(first.len(), |b, to| b.activation(f, seen(&dy)?, to))?;
                self.accumulate(grads, first, Rc::new(dx))
            }
            Operation::Function(f) => {
                let mut dx = self.unique(dy, first.len())?;
                self.change(&mut dx, |b, to| {
                    b.activation_backward(f, self.held(&saved[0])?.view()?, to)
                })?;
                self.accumulate(grads, first, Rc::new(dx))
            }
            Operation::Softmax => {
                let mut dx = self.unique(dy, first.len())?;
                self.change(&mut dx, |b, to| {
                    b.softmax_backward(width, self.held(&saved[0])?.view()?, to)
                })?;
                self.accumulate(grads, first, Rc::new(dx))
            }
            Operation::Norm { epsilon, centred } => {
                let shape = Norm { rows, width, epsilon, centred };
                self.norm_backward(shape, &inputs, &saved, &dy, grads, params)
            }
            Operation::Dropout(mask) => {
                let mut dx = self.unique(dy, first.len())?;
                self.change(&mut dx, |b, to| b.dropout(mask, to))?;
                self.accumulate(grads, first, Rc::new(dx))
            }
            Operation::Attention(shape) => {
                let dx = self.gradient(first.len(), |b, to| {
                    let [qkv, y, lse] = [0, 1, 2].map(|i| self.held(&saved[i]));
                    let (qkv, y, lse) = (qkv?, y?, lse?);
                    b.attention_backward(shape, qkv.view()?, y.view()?, lse.view()?, seen(&dy)?, to)
                })?;
                self.accumulate(grads, first, Rc::new(dx))
            }
            Operation::Swiglu => {
                let dx = self.gradient(first.len(), |b, mut to| {
                    b.copy(self.held(&saved[0])?.view()?, B::reborrow(&mut to))?;
                    b.swiglu_backward(width, to, seen(&dy)?)
                })?;
                self.accumulate(grads, first, Rc::new(dx))
            }
            Operation::Columns(from) => {
                let to = [first.width, from];
                let shape = StridedCopy { rows, count: width, from: [width, 0], to };
                let dx = self.gradient(first.len(), |b, mut to| {
                    b.zero(B::reborrow(&mut to))?;
                    b.copy_columns(shape, seen(&dy)?, to)
                })?;
                self.accumulate(grads, first, Rc::new(dx))
            }
            Operation::Concatenate => {
                let mut at = 0;
                for meta in &inputs {
                    let count = meta.width;
                    let shape = StridedCopy { rows, count, from: [width, at], to: [count, 0] };
                    if meta.needs_grad {
                        let dx = self
                            .gradient(meta.len(), |b, to| b.copy_columns(shape, seen(&dy)?, to))?;
                        self.accumulate(grads, meta, Rc::new(dx))?;
                    }
                    at += count;
                }
                Ok(())
            }
            Operation::SumColumns => {
                let shape = Linear::new(rows, first.width, 1);
                self.by_ones(shape, first, &dy, grads)
            }
            Operation::Broadcast => self.by_ones(Linear::new(rows, 1, width), first, &dy, grads),
            Operation::Embedding => {
                let none = 0..0;
                let table = range_of(&inputs[0]);
                let positions = inputs.get(1).map_or(none, range_of);
                inputs.iter().for_each(|meta| mark_written(params, meta));
                let Some(device) = &self.device else { return Ok(()) };
                let Some([table, positions]) = params.two(&table, &positions) else {
                    return Ok(());
                };
                let ids = &device.cx.micro.fields.ids;
                device.cx.backend.embedding_backward(ids, 0, seen(&dy)?, table, positions)
            }
            Operation::CrossEntropy { targets, smoothing } => {
                self.cross_entropy_backward(first, &saved[0], targets, smoothing, &dy, grads)
            }
            Operation::Hits => Err(Error::internal("hits have no gradient")),
            Operation::Contrastive => {
                let shape = Contrastive { rows: first.rows, columns: first.width, ..SHAPE };
                let mut losses = self.alloc_exact(first.rows)?;
                let mut d = self.copy_of(&saved[0])?;
                let classes = self.targets(Targets::Classes, first.rows)?;
                self.change(&mut d, |b, to| {
                    let (Some(losses), Some(classes)) = (&mut losses.buf, &classes) else {
                        return Err(Error::internal("a contrastive loss without classes"));
                    };
                    b.contrastive(shape, to, classes, seen(&dy)?, B::all_mut(losses))
                })?;
                self.accumulate(grads, first, Rc::new(d))
            }
            Operation::Regression(loss) => {
                self.regression_backward(&inputs, &saved[0], loss, &dy, grads)
            }
        }
    }

    /// Computes the gradient of the input of a linear layer whose weight is ones.
    fn by_ones(
        &self,
        shape: Linear,
        input: &Meta,
        dy: &Tracked<B>,
        grads: &mut Gradients<B>,
    ) -> Result<()> {
        let ones = self.constant(shape.inputs * shape.outputs, 1.0)?;
        let dx = self.gradient(input.len(), |b, to| {
            b.linear_backward_input(shape, seen(dy)?, seen(&ones)?, to)
        })?;
        self.accumulate(grads, input, Rc::new(dx))
    }

    fn linear_backward(
        &self,
        inputs: &[Meta],
        output: &Meta,
        saved: &[Var<B>],
        dy: &Tracked<B>,
        grads: &mut Gradients<B>,
        params: &mut ParamGrads<'_, B>,
    ) -> Result<()> {
        let [x, weight] = [&inputs[0], &inputs[1]];
        let shape = Linear::new(output.rows, x.width, output.width);
        let bias = inputs.get(2).map_or(0..0, range_of);
        let adds = params.adds(number_of(weight)?);
        inputs.get(2).into_iter().for_each(|bias| mark_written(params, bias));
        if let (Some(b), Some([dweight, dbias])) =
            (self.backend(), params.two(&range_of(weight), &bias))
        {
            let x = self.held(&saved[0])?;
            b.linear_backward_weight(shape, seen(dy)?, x.view()?, dweight, dbias, adds)?;
        }
        if !x.needs_grad {
            return Ok(());
        }
        let dx = self.gradient(x.len(), |b, to| {
            b.linear_backward_input(shape, seen(dy)?, self.param(weight)?, to)
        })?;
        self.accumulate(grads, x, Rc::new(dx))
    }

    fn norm_backward(
        &self,
        shape: Norm,
        inputs: &[Meta],
        saved: &[Var<B>],
        dy: &Tracked<B>,
        grads: &mut Gradients<B>,
        params: &mut ParamGrads<'_, B>,
    ) -> Result<()> {
        let x = &inputs[0];
        inputs[1..].iter().for_each(|meta| mark_written(params, meta));
        // The kernel adds to the gradient that is there, and rounds once.
        let mut dx = match grads.take(x) {
            Some(so_far) => self.unique(so_far, x.len())?,
            None => self.zeros(x.len())?,
        };
        let of_length_1 = match inputs.get(1) {
            Some(_) => None,
            None => Some((
                self.constant(shape.width, unit_weight(shape.width))?,
                self.alloc_exact(shape.width)?,
            )),
        };
        if let (Some(b), Some(to)) = (self.backend(), &mut dx.buf) {
            let [held, stats] = [self.held(&saved[0])?, self.held(&saved[saved.len() - 1])?];
            let to = B::all_mut(to);
            match of_length_1 {
                Some((weight, mut unused)) => {
                    let mut no_bias = b.alloc_f32(MemoryKind::Activations, 0)?;
                    let unused = unused
                        .buf
                        .as_mut()
                        .ok_or_else(|| Error::internal("a norm without a gradient"))?;
                    b.norm_backward(
                        shape,
                        seen(dy)?,
                        held.view()?,
                        seen(&weight)?,
                        stats.view()?,
                        to,
                        B::all_mut(unused),
                        B::all_mut(&mut no_bias),
                    )?;
                }
                None => {
                    let weight = &inputs[1];
                    let bias = inputs.get(2).map_or(0..0, range_of);
                    if let Some([dweight, dbias]) = params.two(&range_of(weight), &bias) {
                        let (dy, x, weight) = (seen(dy)?, held.view()?, self.param(weight)?);
                        b.norm_backward(shape, dy, x, weight, stats.view()?, to, dweight, dbias)?;
                    }
                }
            }
        }
        if x.needs_grad {
            self.accumulate(grads, x, Rc::new(dx))?;
        }
        Ok(())
    }

    fn cross_entropy_backward(
        &self,
        logits: &Meta,
        saved: &Var<B>,
        targets: Targets,
        smoothing: f32,
        dy: &Tracked<B>,
        grads: &mut Gradients<B>,
    ) -> Result<()> {
        let (rows, classes) = (logits.rows, logits.width);
        let shape =
            CrossEntropy { rows, classes, stride: classes, scale: 1.0, gradient: true, smoothing };
        let indices = self.targets(targets, rows)?;
        let mut losses = self.alloc_exact(rows)?;
        let mut d = self.copy_of(saved)?;
        self.change(&mut d, |b, to| {
            let (Some(losses), Some(indices)) = (&mut losses.buf, &indices) else {
                return Err(Error::internal("a cross-entropy without targets"));
            };
            let weights = LossWeights { classes: B::split_at(seen(dy)?, 0).0, rows: seen(dy)? };
            b.cross_entropy(shape, to, indices, weights, B::all_mut(losses))
        })?;
        self.accumulate(grads, logits, Rc::new(d))
    }

    fn regression_backward(
        &self,
        inputs: &[Meta],
        saved: &Var<B>,
        loss: RegressionLoss,
        dy: &Tracked<B>,
        grads: &mut Gradients<B>,
    ) -> Result<()> {
        let predictions = &inputs[0];
        let (rows, width) = (predictions.rows, predictions.width);
        let shape = Regression { rows, width, loss, scale: 1.0, gradient: true };
        let mut losses = self.alloc_exact(rows)?;
        let mut d = self.copy_of(saved)?;
        if let Some(device) = &self.device {
            let values = B::all(&device.cx.micro.fields.values);
            self.change(&mut d, |b, to| {
                let losses = losses.buf.as_mut();
                let losses =
                    losses.ok_or_else(|| Error::internal("a regression without losses"))?;
                b.regression(shape, to, values, seen(dy)?, B::all_mut(losses))
            })?;
        }
        self.accumulate(grads, predictions, Rc::new(d))
    }
}

/// The gradient of a contrastive loss whose rows are those of all samples.
const SHAPE: Contrastive =
    Contrastive { rows: 0, columns: 0, first: 0, scale: 1.0, gradient: true };

/// Returns the elements of a gradient.
fn seen<B: Backend>(gradient: &Tracked<B>) -> Result<B::View<'_>> {
    let buf = gradient.buf.as_ref();
    buf.map(B::all).ok_or_else(|| Error::internal("a run on shapes has no gradients"))
}

/// Returns the elements of a parameter in its unit.
fn range_of(meta: &Meta) -> Range<usize> {
    match &meta.origin {
        Origin::Param(range, _) => range.clone(),
        _ => 0..0,
    }
}

/// Returns the number of a parameter.
fn number_of(meta: &Meta) -> Result<usize> {
    match meta.origin {
        Origin::Param(_, number) => Ok(number),
        _ => Err(Error::internal("the weight of a linear layer must be a parameter")),
    }
}

/// Notes that an operation adds to the gradient of a parameter: no later one may overwrite it.
fn mark_written<B: Backend>(params: &mut ParamGrads<'_, B>, meta: &Meta) {
    if let Origin::Param(_, number) = meta.origin {
        params.is_fresh[number] = false;
    }
}
