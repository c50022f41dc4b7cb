//! Blocks of a network by their forward alone.

use std::rc::Rc;

use super::backward::ParamGrads;
use super::tape::{Device, Origin, SavedSizes, Tape, Var};
use super::tracked::{Meter, Tracked};
use crate::{Block, Context, Grads, Params};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::Tensor;
use hpctrain_cpu::Cpu;
use hpctrain_device::{Kernels, MemoryKind};

/// A block by its parameters and its forward, as a `Module` of PyTorch is. [`block`] makes a
/// [`Block`] of it, whose backward follows from the forward.
pub trait Module: Send + Sync + 'static {
    /// Returns the name of the block.
    fn name(&self) -> String;

    /// Returns the parameters: first those with weight decay (matrices), then the others.
    fn tensors(&self) -> Vec<Tensor>;

    /// Returns the number of elements of one row of the input; 0 for the first block of a network,
    /// which reads [features](Tape::features) or [ids](Tape::embedding).
    fn input_per_row(&self) -> usize;

    /// Computes the output from the input `x` and the parameters, in the order of
    /// [`Module::tensors`]. It must record the same operations in each call with the same shapes.
    ///
    /// # Errors
    /// Returns the errors of the operations.
    fn forward<B: Kernels>(
        &self,
        tape: &mut Tape<'_, B>,
        params: &[Var<B>],
        x: &Var<B>,
    ) -> Result<Var<B>>;
}

/// Makes a block of a module. If the shapes of the module do not fit, [`Block::check`] returns the
/// error.
pub fn block<B: Kernels>(module: impl Module) -> Box<dyn Block<B>> {
    Box::new(ModuleBlock::new(module))
}

/// A module with what a run on shapes has shown of it.
struct ModuleBlock<M> {
    module: M,
    tensors: Vec<Tensor>,
    sizes: Result<BlockSizes>,
}

/// Elements per row.
#[derive(Debug, Clone, Copy, Default)]
struct BlockSizes {
    saved: SavedSizes,
    forward_scratch: usize,
    scratch: usize,
}

impl<M: Module> ModuleBlock<M> {
    fn new(module: M) -> Self {
        let mut tensors = module.tensors();
        let sizes = on_shapes(&module, &mut tensors).map_err(|e| e.at(module.name()));
        Self { module, tensors, sizes }
    }

    /// Returns the sizes, or zeros if shapes do not fit.
    fn sizes(&self) -> BlockSizes {
        self.sizes.as_ref().copied().unwrap_or_default()
    }

    /// Returns the gradients of the parameters for a backward.
    fn grads<'g, B: Kernels>(&self, grads: Grads<'g, B>) -> ParamGrads<'g, B> {
        let is_fresh =
            self.tensors.iter().map(|tensor| tensor.overwritten && grads.first).collect();
        ParamGrads { own: Some(grads.own), is_fresh, overwritten: vec![] }
    }
}

/// Runs forward and backward on shapes. Marks the tensors whose gradients a backward overwrites.
fn on_shapes<M: Module>(module: &M, tensors: &mut [Tensor]) -> Result<BlockSizes> {
    let mut tape = Tape::<Cpu>::of_shapes();
    let output = run(module, tensors, &mut tape)?;
    let saved = tape.saved_sizes();
    let meta = output.meta.clone();
    let kept = tape.finish(output)?;
    let forward_scratch = tape.meter.peak() - tape.meter.now();
    drop(kept);

    let mut tape = Tape::<Cpu>::of_shapes();
    drop(run(module, tensors, &mut tape)?);
    for var in tape.kept() {
        *var.value.borrow_mut() = Some(Rc::new(Tracked::uncounted(None)));
    }
    tape.meter = Rc::new(Meter::default());
    let mut grads =
        ParamGrads { own: None, is_fresh: vec![true; tensors.len()], overwritten: vec![] };
    drop(tape.backward(&meta, Tracked::uncounted(None), &mut grads)?);
    let scratch = tape.meter.peak().max(forward_scratch);
    for (number, tensor) in tensors.iter_mut().enumerate() {
        tensor.overwritten = grads.overwritten.contains(&number);
    }
    Ok(BlockSizes { saved, forward_scratch, scratch })
}

/// Runs the forward of a module on a autograd tape.
fn run<M: Module, B: Kernels>(
    module: &M,
    tensors: &[Tensor],
    tape: &mut Tape<'_, B>,
) -> Result<Var<B>> {
    let shapes: Vec<&[usize]> = tensors.iter().map(|tensor| &tensor.shape[..]).collect();
    let params = tape.params(&shapes);
    let width = module.input_per_row();
    let x = tape.input(tape.rows(), width, width > 0);
    let output = module.forward(tape, &params, &x)?;
    match output.meta.origin {
        Origin::Param(..) => Err(Error::input("forward returns a parameter")
            .hint("return the result of an operation, or the input")),
        _ => Ok(output),
    }
}

impl<B: Kernels, M: Module> Block<B> for ModuleBlock<M> {
    fn name(&self) -> String {
        self.module.name()
    }

    fn check(&self) -> Result<()> {
        self.sizes.clone().map(drop)
    }

    fn tensors(&self) -> Vec<Tensor> {
        self.tensors.clone()
    }

    fn input_per_row(&self) -> usize {
        self.module.input_per_row()
    }

    fn saved_elems_per_row(&self) -> usize {
        self.sizes().saved.elements
    }

    fn saved_f32_per_row(&self) -> usize {
        self.sizes().saved.exact
    }

    fn forward_scratch_per_row(&self) -> usize {
        self.sizes().forward_scratch
    }

    fn scratch_per_row(&self) -> usize {
        self.sizes().scratch
    }

    fn forward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let device = Device { cx, unit: Some(B::shorten(params.own)), input: B::all(x) };
        let mut tape = Tape::on(device, true, false, &self.module.name());
        let output = run(&self.module, &self.tensors, &mut tape)?;
        let (y, saved) = tape.finish(output)?;
        let y = y.into_buf().map_or_else(|| cx.backend.alloc(MemoryKind::Activations, 0), Ok)?;
        Ok((y, saved.into_iter().filter_map(Tracked::into_buf).collect()))
    }

    fn backward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        grads: Grads<'_, B>,
        x: &B::Buf,
        saved: Vec<B::Buf>,
        dy: B::Buf,
    ) -> Result<B::Buf> {
        let device = Device { cx, unit: Some(B::shorten(params.own)), input: B::all(x) };
        let mut tape = Tape::on(device, false, false, &self.module.name());
        let output = run(&self.module, &self.tensors, &mut tape)?;
        tape.restore(saved.into_iter().map(|buf| Tracked::uncounted(Some(buf))).collect())?;
        let input = tape.input_meta()?;
        let output = output.meta;
        let mut grads = self.grads(grads);
        let mut left = tape.backward(&output, Tracked::uncounted(Some(dy)), &mut grads)?;
        if B::len(x) == 0 {
            return cx.backend.alloc(MemoryKind::Activations, 0);
        }
        let dx = match left.take(&input) {
            Some(dx) => tape.unique(dx, input.len())?,
            // The output does not depend on the input.
            None => tape.zeros(input.len())?,
        };
        dx.into_buf().map_or_else(|| cx.backend.alloc(MemoryKind::Activations, 0), Ok)
    }
}
