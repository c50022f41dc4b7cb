//! Losses and metrics of the rows of a network's output, in f32.

use super::backward::ParamGrads;
use super::tape::{Device, OperandView, Tape, Var};
use super::tracked::Tracked;
use crate::Context;
use crate::custom_loss::RowValues;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Activation, Kernels, MemoryKind};

/// The rows of a network's output, in f32.
pub struct OutputRows<'a, B: Kernels> {
    /// The elements.
    pub elements: &'a B::Buf,
    /// The number of rows.
    pub rows: usize,
    /// The number of elements of a row.
    pub width: usize,
}

/// Returns a value for each row, without gradients.
///
/// # Errors
/// Returns an error if the forward returns another shape, or if the device fails.
pub fn values<B: Kernels>(
    cx: &Context<'_, B>,
    name: &str,
    function: &dyn RowValues<B>,
    output: OutputRows<'_, B>,
) -> Result<B::Buf> {
    let mut tape = on_tape(cx, name, &output);
    let x = tape.input(output.rows, output.width, false);
    let y = checked(name, output.rows, function.forward(&mut tape, &x))?;
    copied(cx, &tape.held(&y)?, output.rows)
}

/// Returns the loss of each row, times its weight, and the gradient of their sum times `scale`.
/// `weights` has a number for each row, or is empty.
///
/// # Errors
/// Returns an error if the forward returns another shape, or if the device fails.
pub fn losses<B: Kernels>(
    cx: &Context<'_, B>,
    name: &str,
    function: &dyn RowValues<B>,
    output: OutputRows<'_, B>,
    weights: &B::Buf,
    scale: f32,
) -> Result<(B::Buf, B::Buf)> {
    let b = cx.backend;
    let rows = output.rows;
    let width = output.width;
    let mut tape = on_tape(cx, name, &output);
    let x = tape.input(rows, width, true);
    let y = checked(name, rows, function.forward(&mut tape, &x))?;
    let mut losses = copied(cx, &tape.held(&y)?, rows)?;
    // The gradient of the sum by each row: the scale, times the weight of the row.
    let mut dy = b.alloc_f32(MemoryKind::Activations, rows)?;
    let mut zeros = b.alloc_f32(MemoryKind::Activations, rows)?;
    b.zero(B::all_mut(&mut zeros))?;
    b.activation(Activation::Shift(scale), B::all(&zeros), B::all_mut(&mut dy))?;
    drop(zeros);
    if B::len(weights) > 0 {
        b.multiply(B::all(weights), B::all_mut(&mut losses))?;
        b.multiply(B::all(weights), B::all_mut(&mut dy))?;
    }
    let mut none = ParamGrads { own: None, is_fresh: vec![], overwritten: vec![] };
    let result = y.meta.clone();
    drop(y);
    let mut left = tape.backward(&result, Tracked::uncounted(Some(dy)), &mut none)?;
    let gradient = match left.take(&x.meta) {
        Some(gradient) => tape.unique(gradient, rows * width)?,
        None => tape.zeros(rows * width)?,
    };
    let gradient = gradient.into_buf();
    Ok((losses, gradient.ok_or_else(|| Error::internal("a loss without a gradient"))?))
}

/// Returns the most elements (f32) that [`losses`] allocates at once.
///
/// # Errors
/// Returns an error if shapes do not fit.
pub fn peak_elements<B: Kernels>(
    name: &str,
    function: &dyn RowValues<B>,
    rows: usize,
    width: usize,
) -> Result<usize> {
    let mut tape = Tape::of_row_shapes(rows);
    let x = tape.input(rows, width, true);
    let y = checked(name, rows, function.forward(&mut tape, &x))?;
    let mut none = ParamGrads { own: None, is_fresh: vec![], overwritten: vec![] };
    let result = y.meta.clone();
    drop(y);
    tape.backward(&result, Tracked::uncounted(None), &mut none)?;
    // The meter counts an f32 as two elements of bf16. Losses and their gradients are not on it.
    Ok(tape.meter.peak() / 2 + 3 * rows)
}

fn on_tape<'t, B: Kernels>(
    cx: &'t Context<'t, B>,
    name: &str,
    output: &OutputRows<'t, B>,
) -> Tape<'t, B> {
    Tape::on(Device { cx, unit: None, input: B::all(output.elements) }, true, true, name)
}

/// Checks that a forward returns a number for each row.
fn checked<B: Kernels>(name: &str, rows: usize, y: Result<Var<B>>) -> Result<Var<B>> {
    let y = y.map_err(|e| e.at(name))?;
    if (y.rows(), y.width()) == (rows, 1) {
        return Ok(y);
    }
    let (found, width) = (y.rows(), y.width());
    Err(Error::input(format!("{name}: its forward returns {found}×{width}, not {rows}×1"))
        .hint("return one number for each row of the output, such as by Tape::sum_columns"))
}

/// Copies the numbers of rows to a buffer.
fn copied<B: Kernels>(
    cx: &Context<'_, B>,
    from: &OperandView<'_, B>,
    rows: usize,
) -> Result<B::Buf> {
    let mut numbers = cx.backend.alloc_f32(MemoryKind::Activations, rows)?;
    cx.backend.copy(from.view()?, B::all_mut(&mut numbers))?;
    Ok(numbers)
}
