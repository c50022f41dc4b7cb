//! The autograd tape: runs operations, or their shapes, and records them.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use super::operation::Operation;
use super::tracked::{Meter, Tracked};
use crate::Context;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::random;
use hpctrain_device::{Activation, Backend, Kernels, MemoryKind};

/// Where the value of a variable is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// In a buffer of its own.
    Computed,
    /// The input of the block, or the network's output in a loss.
    Input,
    /// This range of the block's unit, which is its tensor of this number.
    Param(Range<usize>, usize),
    /// The features of the micro-batch.
    Features,
    /// The target values of the micro-batch.
    Values,
}

/// The shape of a variable, and its place on the autograd tape.
#[derive(Debug, Clone)]
pub struct Meta {
    pub id: usize,
    pub rows: usize,
    pub width: usize,
    pub origin: Origin,
    pub needs_grad: bool,
}

impl Meta {
    pub fn len(&self) -> usize {
        self.rows * self.width
    }
}

/// The shared cell of a value.
type Cell<B> = Rc<RefCell<Option<Rc<Tracked<B>>>>>;

/// A matrix on a autograd tape: rows × width, or a parameter in its own shape. A clone is the same
/// variable.
pub struct Var<B: Backend> {
    pub(super) meta: Meta,
    pub(super) value: Cell<B>,
}

impl<B: Backend> Clone for Var<B> {
    fn clone(&self) -> Self {
        Self { meta: self.meta.clone(), value: self.value.clone() }
    }
}

impl<B: Backend> Var<B> {
    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.meta.rows
    }

    /// Returns the number of elements of a row.
    pub fn width(&self) -> usize {
        self.meta.width
    }
}

/// The device of a autograd tape, and what the forward reads there.
pub struct Device<'t, B: Kernels> {
    pub cx: &'t Context<'t, B>,
    /// The unit of the block; empty in a loss.
    pub unit: Option<B::View<'t>>,
    /// The input of the block, or the output of the network.
    pub input: B::View<'t>,
}

/// A value that an operation reads.
pub enum OperandView<'t, B: Backend> {
    Lent(B::View<'t>),
    Own(Rc<Tracked<B>>),
}

impl<B: Backend> OperandView<'_, B> {
    /// Returns the elements.
    pub fn view(&self) -> Result<B::View<'_>> {
        match self {
            OperandView::Lent(view) => Ok(B::shorten(*view)),
            OperandView::Own(value) => value
                .buf
                .as_ref()
                .map(B::all)
                .ok_or_else(|| Error::internal("a run on shapes has no values")),
        }
    }
}

/// A recorded operation.
pub struct Node<B: Backend> {
    pub operation: Operation,
    pub inputs: Vec<Meta>,
    pub output: Meta,
    /// The values that the backward reads.
    pub saved: Vec<Var<B>>,
}

/// The elements of a forward per row of its input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SavedSizes {
    /// Saved elements of the compute type.
    pub elements: usize,
    /// Saved elements that are f32 with any compute type.
    pub exact: usize,
}

/// Records the operations of a forward. The module's documentation says how it is used.
///
/// Operations return an error if shapes do not fit, or if the device fails.
pub struct Tape<'t, B: Kernels> {
    pub(super) device: Option<Device<'t, B>>,
    pub(super) computes: bool,
    /// Whether all variables are f32, as in losses.
    pub(super) is_exact: bool,
    pub(super) name: u64,
    pub(super) samples: usize,
    pub(super) time: usize,
    pub(super) meter: Rc<Meter>,
    variables: usize,
    pub(super) dropouts: u64,
    input: Option<Meta>,
    pub(super) nodes: Vec<Node<B>>,
}

impl<'t, B: Kernels> Tape<'t, B> {
    /// Creates a autograd tape on a device. It computes, or only records for a backward. `name`
    /// keys the masks of dropouts.
    pub(crate) fn on(device: Device<'t, B>, computes: bool, is_exact: bool, name: &str) -> Self {
        let (samples, time) = (device.cx.micro.samples, device.cx.micro.time);
        Self {
            device: Some(device),
            computes,
            is_exact,
            name: random::name(name),
            samples,
            time,
            meter: Rc::default(),
            variables: 0,
            dropouts: 0,
            input: None,
            nodes: vec![],
        }
    }

    /// Creates a autograd tape of shapes, for one sample of one row.
    pub(super) fn of_shapes() -> Self {
        Self { is_exact: false, ..Self::of_row_shapes(1) }
    }

    /// Creates a autograd tape of shapes of a loss, for this number of rows.
    pub(super) fn of_row_shapes(rows: usize) -> Self {
        Self {
            device: None,
            computes: false,
            is_exact: true,
            name: 0,
            samples: rows,
            time: 1,
            meter: Rc::default(),
            variables: 0,
            dropouts: 0,
            input: None,
            nodes: vec![],
        }
    }

    /// Returns the number of rows of the micro-batch.
    pub fn rows(&self) -> usize {
        self.samples * self.time
    }

    /// Returns the features of the samples, in rows of `width` elements.
    ///
    /// # Errors
    /// Returns an error if the samples have features of another size.
    pub fn features(&mut self, width: usize) -> Result<Var<B>> {
        let given = self.device.as_ref().map(|device| B::len(&device.cx.micro.fields.features));
        let rows = self.rows();
        if given == Some(0) && self.is_exact {
            return Err(Error::input(format!(
                "features({width}): a loss over the whole batch has only outputs and targets"
            ))
            .hint("give the loss what it needs as values"));
        }
        if given.is_some_and(|given| given != rows * width) {
            return Err(Error::input(format!(
                "features({width}): the samples have {} features in {rows} rows",
                given.unwrap_or(0)
            )));
        }
        Ok(self.given(rows, width, Origin::Features, false))
    }

    /// Returns the values to predict, in rows of `width` elements; for losses and metrics.
    ///
    /// # Errors
    /// Returns an error if the samples have values of another size, or outside a loss.
    pub fn values(&mut self, width: usize) -> Result<Var<B>> {
        self.check_exact("values")?;
        let given = self.device.as_ref().map(|device| B::len(&device.cx.micro.fields.values));
        let rows = self.rows();
        if given.is_some_and(|given| given != rows * width) {
            return Err(Error::input(format!(
                "values({width}): the samples have {} values in {rows} rows",
                given.unwrap_or(0)
            )));
        }
        Ok(self.given(rows, width, Origin::Values, false))
    }

    /// Adds the input.
    pub(crate) fn input(&mut self, rows: usize, width: usize, needs_grad: bool) -> Var<B> {
        let input = self.given(rows, width, Origin::Input, needs_grad);
        self.input = Some(input.meta.clone());
        input
    }

    /// Returns the place of the input, which every forward has.
    pub(super) fn input_meta(&self) -> Result<Meta> {
        self.input.clone().ok_or_else(|| Error::internal("a forward without an input"))
    }

    /// Adds the parameters of these shapes, which lie one after the other.
    pub(super) fn params(&mut self, shapes: &[&[usize]]) -> Vec<Var<B>> {
        let mut end = 0;
        let mut params = Vec::with_capacity(shapes.len());
        for (number, shape) in shapes.iter().enumerate() {
            let width = shape.last().copied().unwrap_or(1);
            let len: usize = shape.iter().product();
            let range = end..end + len;
            end = range.end;
            let rows = len / width.max(1);
            params.push(self.given(rows, width, Origin::Param(range, number), true));
        }
        params
    }

    fn given(&mut self, rows: usize, width: usize, origin: Origin, needs_grad: bool) -> Var<B> {
        self.variables += 1;
        let meta = Meta { id: self.variables - 1, rows, width, origin, needs_grad };
        Var { meta, value: Rc::default() }
    }

    /// Adds the result of an operation.
    fn computed(&mut self, rows: usize, width: usize, needs_grad: bool) -> Var<B> {
        self.given(rows, width, Origin::Computed, needs_grad)
    }

    /// Returns the number of variables so far.
    pub(super) fn variables(&self) -> usize {
        self.variables
    }

    pub(super) fn backend(&self) -> Option<&'t B> {
        self.device.as_ref().map(|device| device.cx.backend)
    }

    /// Allocates a buffer of the autograd tape's type.
    pub(super) fn alloc(&self, len: usize) -> Result<Tracked<B>> {
        if self.is_exact {
            return self.alloc_exact(len);
        }
        let buf = self.backend().map(|b| b.alloc(MemoryKind::Activations, len)).transpose()?;
        Ok(Tracked::new(buf, len, &self.meter))
    }

    /// Allocates a buffer in f32, which counts as two elements of bf16.
    pub(super) fn alloc_exact(&self, len: usize) -> Result<Tracked<B>> {
        let buf = self.backend().map(|b| b.alloc_f32(MemoryKind::Activations, len)).transpose()?;
        Ok(Tracked::new(buf, 2 * len, &self.meter))
    }

    /// Allocates a value in a forward. A autograd tape that computes nothing allocates only on
    /// shapes, where lifetimes count.
    fn value(&self, len: usize, is_exact: bool) -> Result<Option<Tracked<B>>> {
        if self.device.is_some() && !self.computes {
            return Ok(None);
        }
        let value = if is_exact { self.alloc_exact(len) } else { self.alloc(len) };
        value.map(Some)
    }

    /// Returns the value of a variable.
    pub(super) fn held(&self, var: &Var<B>) -> Result<OperandView<'t, B>> {
        let device =
            || self.device.as_ref().ok_or_else(|| Error::internal("a run on shapes has no values"));
        Ok(match &var.meta.origin {
            Origin::Computed => OperandView::Own(
                var.value
                    .borrow()
                    .clone()
                    .ok_or_else(|| Error::internal("a value of a backward was not saved"))?,
            ),
            Origin::Input => OperandView::Lent(device()?.input),
            Origin::Features => OperandView::Lent(B::all(&device()?.cx.micro.fields.features)),
            Origin::Values => OperandView::Lent(B::all(&device()?.cx.micro.fields.values)),
            Origin::Param(..) => OperandView::Lent(self.param(&var.meta)?),
        })
    }

    /// Returns the elements of a parameter.
    pub(super) fn param(&self, meta: &Meta) -> Result<B::View<'t>> {
        let unit = self.device.as_ref().and_then(|device| device.unit);
        let (Origin::Param(range, _), Some(unit)) = (&meta.origin, unit) else {
            return Err(Error::internal("a variable is not a parameter here"));
        };
        let (_, from) = B::split_at(unit, range.start);
        Ok(B::split_at(from, range.len()).0)
    }

    /// Returns the ones by which rows are summed and repeated.
    pub(super) fn constant(&self, len: usize, value: f32) -> Result<Tracked<B>> {
        let zeros = self.zeros(len)?;
        let mut ones = self.alloc(len)?;
        if let (Some(b), Some(zeros), Some(ones)) = (self.backend(), &zeros.buf, &mut ones.buf) {
            b.activation(Activation::Shift(value), B::all(zeros), B::all_mut(ones))?;
        }
        Ok(ones)
    }

    /// Returns zeros.
    pub(super) fn zeros(&self, len: usize) -> Result<Tracked<B>> {
        let mut zeros = self.alloc(len)?;
        if let (Some(b), Some(zeros)) = (self.backend(), &mut zeros.buf) {
            b.zero(B::all_mut(zeros))?;
        }
        Ok(zeros)
    }

    pub(super) fn check_exact(&self, what: &str) -> Result<()> {
        if self.is_exact {
            return Ok(());
        }
        Err(Error::input(format!("{what} is for losses and metrics, which are computed in f32")))
    }

    /// Records an operation and computes it with `compute`, which writes the value and the
    /// statistics of `stats` elements that its backward reads.
    pub(super) fn record(
        &mut self,
        operation: Operation,
        inputs: &[&Var<B>],
        [rows, width]: [usize; 2],
        saves: Saves,
        stats: usize,
        compute: impl FnOnce(&B, &[B::View<'_>], B::ViewMut<'_>, Option<B::ViewMut<'_>>) -> Result<()>,
    ) -> Result<Var<B>> {
        let needs_grad = inputs.iter().any(|input| input.meta.needs_grad);
        let output = self.computed(rows, width, needs_grad);
        let statistics = (stats > 0).then(|| self.computed(stats, 1, false));
        let mut value = self.value(rows * width, self.is_exact)?;
        let mut numbers =
            statistics.as_ref().map(|_| self.value(stats, true)).transpose()?.flatten();
        if let (true, Some(b)) = (self.computes, self.backend()) {
            let held = inputs.iter().map(|input| self.held(input)).collect::<Result<Vec<_>>>()?;
            let views = held.iter().map(OperandView::view).collect::<Result<Vec<_>>>()?;
            let to = value.as_mut().and_then(|value| value.buf.as_mut());
            let to = to.ok_or_else(|| Error::internal("a value without a buffer"))?;
            let numbers = numbers.as_mut().and_then(|numbers| numbers.buf.as_mut());
            compute(b, &views, B::all_mut(to), numbers.map(B::all_mut))?;
        }
        *output.value.borrow_mut() = value.map(Rc::new);
        if let Some(statistics) = &statistics {
            *statistics.value.borrow_mut() = numbers.map(Rc::new);
        }
        if needs_grad {
            let mut saved: Vec<Var<B>> = match saves {
                Saves::Nothing => vec![],
                Saves::Inputs => inputs.iter().map(|input| (*input).clone()).collect(),
                Saves::First => inputs.first().map(|input| (*input).clone()).into_iter().collect(),
                Saves::Output => vec![output.clone()],
                Saves::FirstAndOutput => {
                    let first = inputs.first().map(|input| (*input).clone());
                    first.into_iter().chain([output.clone()]).collect()
                }
            };
            saved.extend(statistics);
            let inputs = inputs.iter().map(|input| input.meta.clone()).collect();
            self.nodes.push(Node { operation, inputs, output: output.meta.clone(), saved });
        }
        Ok(output)
    }

    /// Ends the forward: returns the output, and the values that the backward reads.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(super) fn finish(&mut self, output: Var<B>) -> Result<(Tracked<B>, Vec<Tracked<B>>)> {
        let kept = self.kept();
        // The value is moved out, unless the backward needs it too, or it belongs to somebody else.
        let is_shared = output.meta.origin != Origin::Computed
            || kept.iter().any(|one| one.meta.id == output.meta.id);
        let y = match is_shared {
            true => self.copy_of(&output)?,
            false => taken(&output)?,
        };
        drop(output);
        self.nodes.clear();
        let saved = kept.iter().map(taken).collect::<Result<Vec<_>>>()?;
        Ok((y, saved))
    }

    /// Returns the sizes of what the forward saves.
    pub(super) fn saved_sizes(&self) -> SavedSizes {
        let mut sizes = SavedSizes::default();
        let statistics: Vec<usize> = self
            .nodes
            .iter()
            .filter(|node| node.operation.has_statistics())
            .filter_map(|node| node.saved.last().map(|stats| stats.meta.id))
            .collect();
        for var in self.kept() {
            match statistics.contains(&var.meta.id) {
                true => sizes.exact += var.meta.len(),
                false => sizes.elements += var.meta.len(),
            }
        }
        sizes
    }

    /// Returns the variables whose values a backward reads from separate buffers, each once, in
    /// the order in which they are saved.
    pub(super) fn kept(&self) -> Vec<Var<B>> {
        let mut kept: Vec<Var<B>> = vec![];
        for var in self.nodes.iter().flat_map(|node| &node.saved) {
            let is_new = kept.iter().all(|one| one.meta.id != var.meta.id);
            if var.meta.origin == Origin::Computed && is_new {
                kept.push(var.clone());
            }
        }
        kept
    }

    /// Gives the saved values of a forward to the autograd tape of its backward.
    ///
    /// # Errors
    /// Returns an error if the forward saved another number of values.
    pub(super) fn restore(&mut self, saved: Vec<Tracked<B>>) -> Result<()> {
        let kept = self.kept();
        if kept.len() != saved.len() {
            return Err(Error::internal(format!(
                "a forward saved {} values, its backward reads {}",
                saved.len(),
                kept.len()
            )));
        }
        for (var, value) in kept.iter().zip(saved) {
            *var.value.borrow_mut() = Some(Rc::new(value));
        }
        Ok(())
    }

    /// Returns a copy of a value.
    pub(super) fn copy_of(&self, var: &Var<B>) -> Result<Tracked<B>> {
        let mut copy = self.alloc(var.meta.len())?;
        if let (Some(b), Some(to)) = (self.backend(), &mut copy.buf) {
            b.copy(self.held(var)?.view()?, B::all_mut(to))?;
        }
        Ok(copy)
    }
}

impl Operation {
    /// Returns true if the last value that it saves are statistics in f32.
    fn has_statistics(self) -> bool {
        matches!(self, Operation::Norm { .. } | Operation::Attention(_))
    }
}

/// The values that the backward of an operation reads.
pub enum Saves {
    Nothing,
    Inputs,
    First,
    Output,
    FirstAndOutput,
}

/// Returns the weight that gives a normalised row length 1.
pub fn unit_weight(width: usize) -> f32 {
    1.0 / (width as f32).sqrt()
}

/// Takes the value out of a variable.
fn taken<B: Backend>(var: &Var<B>) -> Result<Tracked<B>> {
    let value = var.value.borrow_mut().take();
    let value = value.ok_or_else(|| Error::internal("a value was not computed"))?;
    Rc::try_unwrap(value).map_err(|_| Error::internal("a value is still in use"))
}
