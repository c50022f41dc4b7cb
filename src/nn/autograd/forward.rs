//! The operations of a forward.

use std::ops::Range;

use super::operation::{Operation, Targets};
use super::tape::{Origin, Saves, Tape, Var, unit_weight};
use super::tracked::Tracked;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::random;
use hpctrain_device::{
    Activation, Attention, Backend, Contrastive, CrossEntropy, Dropout, Gemm, Kernels, Linear,
    LossWeights, Norm, Regression, RegressionLoss, StridedCopy,
};

impl<B: Kernels> Tape<'_, B> {
    /// Computes `x·Wᵀ + bias`, where the weight (outputs × inputs) and the bias (outputs) are
    /// parameters.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit, or if the device fails.
    pub fn linear(&mut self, x: &Var<B>, weight: &Var<B>, bias: Option<&Var<B>>) -> Result<Var<B>> {
        let (outputs, inputs) = (weight.rows(), weight.width());
        let bias_len = bias.map_or(outputs, |bias| bias.meta.len());
        check_computed("linear", x)?;
        for param in std::iter::once(weight).chain(bias) {
            check_param("linear", param)?;
        }
        fits("linear", inputs == x.width() && bias_len == outputs, &[x, weight])?;
        let shape = Linear::new(x.rows(), inputs, outputs);
        let all: Vec<&Var<B>> = [x, weight].into_iter().chain(bias).collect();
        let out = [x.rows(), outputs];
        self.record(Operation::Linear, &all, out, Saves::First, 0, |b, views, y, _| {
            let bias = views.get(2).copied().unwrap_or(B::split_at(views[1], 0).0);
            b.linear(shape, views[0], views[1], bias, y)
        })
    }

    /// Computes `a·bᵀ`, the dot product of each row of `a` (rows × width) with each row of `b`; for
    /// losses and metrics. In a block the memory of a row must not depend on the number of rows.
    ///
    /// # Errors
    /// Returns an error if widths differ, outside a loss, or if the device fails.
    pub fn matmul_transposed(&mut self, a: &Var<B>, b: &Var<B>) -> Result<Var<B>> {
        self.check_exact("matmul_transposed")?;
        fits("matmul_transposed", a.width() == b.width(), &[a, b])?;
        let (m, n, k) = (a.rows(), b.rows(), a.width());
        let shape = Gemm { m, n, k, ta: false, tb: true, acc: false };
        let operation = Operation::MatmulTransposed;
        self.record(operation, &[a, b], [m, n], Saves::Inputs, 0, |backend, views, y, _| {
            backend.gemm(shape, views[0], views[1], y)
        })
    }

    /// Computes `a + b`.
    ///
    /// # Errors
    /// Returns an error if shapes differ, or if the device fails.
    pub fn add(&mut self, a: &Var<B>, b: &Var<B>) -> Result<Var<B>> {
        check_same("add", a, b)?;
        let out = [a.rows(), a.width()];
        self.record(Operation::Add, &[a, b], out, Saves::Nothing, 0, |backend, views, mut y, _| {
            backend.copy(views[1], B::reborrow(&mut y))?;
            backend.add(views[0], y)
        })
    }

    /// Computes `a - b`.
    ///
    /// # Errors
    /// Returns an error if shapes differ, or if the device fails.
    pub fn subtract(&mut self, a: &Var<B>, b: &Var<B>) -> Result<Var<B>> {
        let negative = self.scale(b, -1.0)?;
        self.add(a, &negative)
    }

    /// Computes `a·b`, elementwise.
    ///
    /// # Errors
    /// Returns an error if shapes differ, or if the device fails.
    pub fn multiply(&mut self, a: &Var<B>, b: &Var<B>) -> Result<Var<B>> {
        check_same("multiply", a, b)?;
        let out = [a.rows(), a.width()];
        let operation = Operation::Multiply;
        self.record(operation, &[a, b], out, Saves::Inputs, 0, |backend, views, mut y, _| {
            backend.copy(views[1], B::reborrow(&mut y))?;
            backend.multiply(views[0], y)
        })
    }

    /// Computes `x` times a number.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn scale(&mut self, x: &Var<B>, number: f32) -> Result<Var<B>> {
        self.activation(x, Activation::Scale(number))
    }

    /// Applies an elementwise function.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn activation(&mut self, x: &Var<B>, f: Activation) -> Result<Var<B>> {
        check_computed("activation", x)?;
        let out = [x.rows(), x.width()];
        // The slopes of these do not depend on x.
        let saves = match f {
            Activation::Scale(_) | Activation::Shift(_) => Saves::Nothing,
            _ => Saves::First,
        };
        self.record(Operation::Function(f), &[x], out, saves, 0, |b, views, y, _| {
            b.activation(f, views[0], y)
        })
    }

    /// Computes the softmax of each row.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn softmax(&mut self, x: &Var<B>) -> Result<Var<B>> {
        check_computed("softmax", x)?;
        let (rows, width) = (x.rows(), x.width());
        let out = [rows, width];
        self.record(Operation::Softmax, &[x], out, Saves::Output, 0, |b, views, y, _| {
            b.softmax(width, views[0], y)
        })
    }

    /// Computes layer normalisation of each row, with a weight and a bias of its width.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit, or if the device fails.
    pub fn layer_norm(
        &mut self,
        x: &Var<B>,
        weight: &Var<B>,
        bias: Option<&Var<B>>,
        epsilon: f32,
    ) -> Result<Var<B>> {
        self.norm("layer_norm", x, Some(weight), bias, Operation::Norm { epsilon, centred: true })
    }

    /// Computes RMS normalisation of each row, with a weight of its width.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit, or if the device fails.
    pub fn rms_norm(&mut self, x: &Var<B>, weight: &Var<B>, epsilon: f32) -> Result<Var<B>> {
        self.norm("rms_norm", x, Some(weight), None, Operation::Norm { epsilon, centred: false })
    }

    /// Scales each row to length 1. `epsilon` is added to the mean square before the root.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn normalize(&mut self, x: &Var<B>, epsilon: f32) -> Result<Var<B>> {
        self.norm("normalize", x, None, None, Operation::Norm { epsilon, centred: false })
    }

    fn norm(
        &mut self,
        what: &str,
        x: &Var<B>,
        weight: Option<&Var<B>>,
        bias: Option<&Var<B>>,
        operation: Operation,
    ) -> Result<Var<B>> {
        let (rows, width) = (x.rows(), x.width());
        check_computed(what, x)?;
        for param in weight.iter().chain(&bias) {
            check_param(what, param)?;
            fits(what, param.meta.len() == width, &[x, param])?;
        }
        let Operation::Norm { epsilon, centred } = operation else {
            return Err(Error::internal("a norm is recorded as another operation"));
        };
        let shape = Norm { rows, width, epsilon, centred };
        let of_length_1 = match (self.computes || self.device.is_none(), weight) {
            (true, None) => Some(self.constant(width, unit_weight(width))?),
            _ => None,
        };
        let all: Vec<&Var<B>> = [x].into_iter().chain(weight).chain(bias).collect();
        self.record(operation, &all, [rows, width], Saves::First, 2 * rows, |b, views, y, stats| {
            let weight = match (&of_length_1, views.get(1)) {
                (Some(Tracked { buf: Some(weight), .. }), _) => B::shorten(B::all(weight)),
                (_, Some(weight)) => B::shorten(*weight),
                _ => return Err(Error::internal("a norm without a weight")),
            };
            let bias = views.get(2).copied().unwrap_or(B::split_at(views[0], 0).0);
            let stats = stats.ok_or_else(|| Error::internal("a norm without statistics"))?;
            b.norm(shape, views[0], weight, bias, y, stats)
        })
    }

    /// Drops elements with probability `rate` in training, and scales the others. The mask is a
    /// function of the run's seed, the step, the block and the sample.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn dropout(&mut self, x: &Var<B>, rate: f32) -> Result<Var<B>> {
        self.dropouts += 1;
        let key = match &self.device {
            None => 0,
            Some(device) => match &device.cx.training {
                None => return Ok(x.clone()),
                Some(training) => random::derive(training.dropout, &[self.name, self.dropouts]),
            },
        };
        if rate == 0.0 {
            return Ok(x.clone());
        }
        let first = self.device.as_ref().map_or(0, |device| device.cx.micro.first);
        let per_sample = x.meta.len() / self.samples.max(1);
        let mask = Dropout { rate, key, offset: first * per_sample as u64 };
        let out = [x.rows(), x.width()];
        self.record(Operation::Dropout(mask), &[x], out, Saves::Nothing, 0, |b, views, mut y, _| {
            b.copy(views[0], B::reborrow(&mut y))?;
            b.dropout(mask, y)
        })
    }

    /// Computes causal attention over rows of packed queries, keys and values, each of
    /// `head_width`: `heads` of queries, then `kv_heads` of keys, then as many of values.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit, or if the device fails.
    pub fn attention(&mut self, qkv: &Var<B>, heads: usize, kv_heads: usize) -> Result<Var<B>> {
        check_computed("attention", qkv)?;
        let head_width = qkv.width() / (heads + 2 * kv_heads).max(1);
        let shape = Attention { batch: self.samples, time: self.time, heads, kv_heads, head_width };
        let fit = shape.packed_width() == qkv.width()
            && kv_heads > 0
            && heads.is_multiple_of(kv_heads)
            && qkv.rows() == self.rows();
        fits("attention", fit, &[qkv])?;
        let rows = qkv.rows();
        let out = [rows, heads * head_width];
        let operation = Operation::Attention(shape);
        let saves = Saves::FirstAndOutput;
        self.record(operation, &[qkv], out, saves, rows * heads, |b, views, y, stats| {
            let lse = stats.ok_or_else(|| Error::internal("attention without statistics"))?;
            b.attention(shape, views[0], y, lse)
        })
    }

    /// Computes SwiGLU of rows whose first half are gates: `silu(gate)·up`.
    ///
    /// # Errors
    /// Returns an error if rows have an odd number of elements, or if the device fails.
    pub fn swiglu(&mut self, x: &Var<B>) -> Result<Var<B>> {
        check_computed("swiglu", x)?;
        fits("swiglu", x.width().is_multiple_of(2), &[x])?;
        let width = x.width() / 2;
        let out = [x.rows(), width];
        self.record(Operation::Swiglu, &[x], out, Saves::First, 0, |b, views, y, _| {
            b.swiglu(width, views[0], y)
        })
    }

    /// Returns some columns.
    ///
    /// # Errors
    /// Returns an error if there are fewer columns, or if the device fails.
    pub fn columns(&mut self, x: &Var<B>, columns: Range<usize>) -> Result<Var<B>> {
        check_computed("columns", x)?;
        fits("columns", columns.end <= x.width() && columns.start <= columns.end, &[x])?;
        let (rows, count) = (x.rows(), columns.len());
        let shape = StridedCopy { rows, count, from: [x.width(), columns.start], to: [count, 0] };
        let operation = Operation::Columns(columns.start);
        self.record(operation, &[x], [rows, count], Saves::Nothing, 0, |b, views, y, _| {
            b.copy_columns(shape, views[0], y)
        })
    }

    /// Puts rows side by side.
    ///
    /// # Errors
    /// Returns an error if numbers of rows differ, or if the device fails.
    pub fn concatenate(&mut self, all: &[&Var<B>]) -> Result<Var<B>> {
        let rows = all.first().map_or(0, |first| first.rows());
        let width: usize = all.iter().map(|one| one.width()).sum();
        all.iter().try_for_each(|one| check_computed("concatenate", one))?;
        fits("concatenate", all.iter().all(|one| one.rows() == rows), all)?;
        let widths: Vec<usize> = all.iter().map(|one| one.width()).collect();
        let operation = Operation::Concatenate;
        self.record(operation, all, [rows, width], Saves::Nothing, 0, |b, views, mut y, _| {
            let mut at = 0;
            for (view, &count) in views.iter().zip(&widths) {
                let shape = StridedCopy { rows, count, from: [count, 0], to: [width, at] };
                b.copy_columns(shape, *view, B::reborrow(&mut y))?;
                at += count;
            }
            Ok(())
        })
    }

    /// Returns the sum of each row, rows × 1.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn sum_columns(&mut self, x: &Var<B>) -> Result<Var<B>> {
        check_computed("sum_columns", x)?;
        let (rows, width) = (x.rows(), x.width());
        let ones = self.ones(width)?;
        let shape = Linear::new(rows, width, 1);
        let operation = Operation::SumColumns;
        self.record(operation, &[x], [rows, 1], Saves::Nothing, 0, |b, views, y, _| {
            b.linear(shape, views[0], ones_of(&ones)?, B::split_at(views[0], 0).0, y)
        })
    }

    /// Repeats the only element of each row `width` times.
    ///
    /// # Errors
    /// Returns an error if rows have more than one element, or if the device fails.
    pub fn broadcast(&mut self, x: &Var<B>, width: usize) -> Result<Var<B>> {
        check_computed("broadcast", x)?;
        fits("broadcast", x.width() == 1, &[x])?;
        let rows = x.rows();
        let ones = self.ones(width)?;
        let shape = Linear::new(rows, 1, width);
        let operation = Operation::Broadcast;
        self.record(operation, &[x], [rows, width], Saves::Nothing, 0, |b, views, y, _| {
            b.linear(shape, views[0], ones_of(&ones)?, B::split_at(views[0], 0).0, y)
        })
    }

    /// Allocates a copy for an operation of the forward, if the autograd tape computes it or
    /// counts.
    fn scratch(&self, len: usize) -> Result<Option<Tracked<B>>> {
        match self.computes || self.device.is_none() {
            true => self.alloc(len).map(Some),
            false => Ok(None),
        }
    }

    /// Returns ones for an operation of the forward, if the autograd tape computes it or counts
    /// them.
    fn ones(&self, len: usize) -> Result<Option<Tracked<B>>> {
        match self.computes || self.device.is_none() {
            true => self.constant(len, 1.0).map(Some),
            false => Ok(None),
        }
    }

    /// Returns the rows of `table` (ids × width) of the micro-batch's ids, plus those of
    /// `positions` (time × width), if given. Each row has `per_row` ids, whose rows of the table
    /// are side by side: 1 for text.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit, or if the device fails.
    pub fn embedding(
        &mut self,
        table: &Var<B>,
        positions: Option<&Var<B>>,
        per_row: usize,
    ) -> Result<Var<B>> {
        check_param("embedding", table)?;
        let width = table.width();
        if let Some(positions) = positions {
            check_param("embedding", positions)?;
            fits("embedding", positions.width() == width, &[table, positions])?;
        }
        let rows = self.rows();
        let given = self.device.as_ref().map(|device| B::indices_len(&device.cx.micro.fields.ids));
        if let Some(given) = given.filter(|given| *given != rows * per_row) {
            return Err(Error::input(format!(
                "embedding: the samples have {given} ids in {rows} rows, not {per_row} in each"
            ))
            .hint("pass the number of ids of a row"));
        }
        let ids = self.device.as_ref().map(|device| &device.cx.micro.fields.ids);
        let all: Vec<&Var<B>> = [table].into_iter().chain(positions).collect();
        let out = [rows, per_row * width];
        self.record(Operation::Embedding, &all, out, Saves::Nothing, 0, |b, views, y, _| {
            let ids = ids.ok_or_else(|| Error::internal("a run on shapes has no ids"))?;
            let positions = views.get(1).copied().unwrap_or(B::split_at(views[0], 0).0);
            b.embedding(ids, 0, views[0], positions, y)
        })
    }

    /// Returns the cross-entropy of each row of logits, rows × 1; for losses and metrics.
    ///
    /// # Errors
    /// Returns an error outside a loss, or if the device fails.
    pub fn cross_entropy(
        &mut self,
        logits: &Var<B>,
        targets: Targets,
        smoothing: f32,
    ) -> Result<Var<B>> {
        self.check_exact("cross_entropy")?;
        let (rows, classes) = (logits.rows(), logits.width());
        let fit = targets == Targets::Classes && rows == self.rows()
            || targets == Targets::Diagonal && rows <= classes;
        fits("cross_entropy", fit, &[logits])?;
        let shape =
            CrossEntropy { rows, classes, stride: classes, scale: 0.0, gradient: false, smoothing };
        let indices = if self.computes { self.targets(targets, rows)? } else { None };
        // The kernel takes logits that it may overwrite.
        let mut copy = self.scratch(rows * classes)?;
        let operation = Operation::CrossEntropy { targets, smoothing };
        self.record(operation, &[logits], [rows, 1], Saves::First, 0, |b, views, y, _| {
            let copy = copy.as_mut().and_then(|copy| copy.buf.as_mut());
            let (Some(copy), Some(indices)) = (copy, &indices) else {
                return Err(Error::internal("a cross-entropy without logits"));
            };
            b.copy(views[0], B::all_mut(copy))?;
            let none = B::split_at(views[0], 0).0;
            let weights = LossWeights { classes: none, rows: none };
            b.cross_entropy(shape, B::all_mut(copy), indices, weights, y)
        })
    }

    /// Returns the supervised contrastive loss of each row of similarities, rows × 1, by the
    /// classes of the samples: row and column i are those of sample i. For losses and metrics.
    ///
    /// # Errors
    /// Returns an error outside a loss, if there is no row or column for each sample, or if the
    /// device fails.
    pub fn contrastive(&mut self, similarities: &Var<B>) -> Result<Var<B>> {
        self.check_exact("contrastive")?;
        let rows = similarities.rows();
        fits("contrastive", rows == similarities.width() && rows == self.rows(), &[similarities])?;
        let shape = Contrastive { rows, columns: rows, first: 0, scale: 0.0, gradient: false };
        let classes = if self.computes { self.targets(Targets::Classes, rows)? } else { None };
        let mut copy = self.scratch(rows * rows)?;
        let operation = Operation::Contrastive;
        self.record(operation, &[similarities], [rows, 1], Saves::First, 0, |b, views, y, _| {
            let copy = copy.as_mut().and_then(|copy| copy.buf.as_mut());
            let (Some(copy), Some(classes)) = (copy, &classes) else {
                return Err(Error::internal("a contrastive loss without classes"));
            };
            b.copy(views[0], B::all_mut(copy))?;
            let none = B::split_at(views[0], 0).0;
            b.contrastive(shape, B::all_mut(copy), classes, none, y)
        })
    }

    /// Returns 1 for each row of logits whose target is among its `k` largest, else 0, rows × 1;
    /// for metrics, since it has no gradient.
    ///
    /// # Errors
    /// Returns an error if the logits have a gradient, outside a metric, or if the device fails.
    pub fn hits(&mut self, logits: &Var<B>, targets: Targets, k: usize) -> Result<Var<B>> {
        self.check_exact("hits")?;
        if logits.meta.needs_grad {
            return Err(Error::input("hits has no gradient").hint("use it in a metric"));
        }
        let (rows, classes) = (logits.rows(), logits.width());
        let fit = targets == Targets::Classes && rows == self.rows()
            || targets == Targets::Diagonal && rows <= classes;
        fits("hits", fit, &[logits])?;
        let indices = if self.computes { self.targets(targets, rows)? } else { None };
        self.record(Operation::Hits, &[logits], [rows, 1], Saves::Nothing, 0, |b, views, y, _| {
            let indices = indices.as_ref();
            let indices = indices.ok_or_else(|| Error::internal("hits without targets"))?;
            b.hits(classes, classes, k, views[0], indices, y)
        })
    }

    /// Returns the classes that rows of logits should have.
    pub(super) fn targets(&self, targets: Targets, rows: usize) -> Result<Option<B::IndexBuf>> {
        let Some(device) = &self.device else { return Ok(None) };
        let classes = &device.cx.micro.fields.classes;
        match targets {
            Targets::Classes if B::indices_len(classes) != rows => Err(Error::input(format!(
                "{rows} rows, but the samples have {} classes",
                B::indices_len(classes)
            ))),
            Targets::Classes => Ok(Some(B::slice_indices(classes, 0..rows))),
            Targets::Diagonal => {
                let numbers: Vec<u32> = (0..rows as u32).collect();
                device.cx.backend.upload_indices(&numbers).map(Some)
            }
        }
    }

    /// Returns the mean deviation of each row of predictions from the samples' values, rows × 1;
    /// for losses and metrics.
    ///
    /// # Errors
    /// Returns an error outside a loss, if the samples have other values, or if the device fails.
    pub fn regression(&mut self, predictions: &Var<B>, loss: RegressionLoss) -> Result<Var<B>> {
        let (rows, width) = (predictions.rows(), predictions.width());
        let values = self.values(width)?;
        fits("regression", rows == self.rows(), &[predictions])?;
        let shape = Regression { rows, width, loss, scale: 0.0, gradient: false };
        let mut copy = self.scratch(rows * width)?;
        let operation = Operation::Regression(loss);
        let all = [predictions, &values];
        self.record(operation, &all, [rows, 1], Saves::First, 0, |b, views, y, _| {
            let copy = copy.as_mut().and_then(|copy| copy.buf.as_mut());
            let copy = copy.ok_or_else(|| Error::internal("a regression without predictions"))?;
            b.copy(views[0], B::all_mut(copy))?;
            let none = B::split_at(views[0], 0).0;
            b.regression(shape, B::all_mut(copy), views[1], none, y)
        })
    }
}

fn ones_of<B: Backend>(ones: &Option<Tracked<B>>) -> Result<B::View<'_>> {
    let ones = ones.as_ref().and_then(|ones| ones.buf.as_ref());
    ones.map(B::all).ok_or_else(|| Error::internal("a sum without ones"))
}

/// Refuses operands whose shapes do not fit.
fn fits<B: Backend>(what: &str, fit: bool, operands: &[&Var<B>]) -> Result<()> {
    if fit {
        return Ok(());
    }
    let shapes = operands.iter().map(|var| format!("{}×{}", var.rows(), var.width()));
    let shapes = shapes.collect::<Vec<_>>().join(" and ");
    Err(Error::input(format!("{what}: the shapes {shapes} do not fit")))
}

fn check_same<B: Backend>(what: &str, a: &Var<B>, b: &Var<B>) -> Result<()> {
    check_computed(what, a)?;
    check_computed(what, b)?;
    fits(what, a.rows() == b.rows() && a.width() == b.width(), &[a, b])
}

/// Refuses a parameter where gradients of parameters are not computed.
fn check_computed<B: Backend>(what: &str, var: &Var<B>) -> Result<()> {
    if matches!(var.meta.origin, Origin::Param(..)) {
        return Err(Error::input(format!("{what} takes no parameter"))
            .hint("parameters are operands of linear, layer_norm, rms_norm and embedding"));
    }
    Ok(())
}

fn check_param<B: Backend>(what: &str, var: &Var<B>) -> Result<()> {
    if matches!(var.meta.origin, Origin::Param(..)) {
        return Ok(());
    }
    Err(Error::input(format!("{what}: the weight must be a parameter"))
        .hint("pass one of the parameters that forward is given"))
}
