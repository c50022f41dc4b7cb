//! A custom block: an adapter, `y = x + silu(x·Dᵀ)·Uᵀ` (Houlsby et al., "Parameter-efficient
//! transfer learning for NLP", 2019). Its backward is checked by finite differences; then it is
//! trained between the last block of a small GPT and its head, in any layout.
//!
//! ```sh
//! cargo run --release --example own_block
//! mpirun -np 2 target/release/examples/own_block run.steps=50 parallel.zero=3
//! ```

use std::process::ExitCode;

use hpctrain::backend::{Activation, Linear, split, split_mut};
use hpctrain::engine::engine_with_blocks;
use hpctrain::nn::gradcheck;
use hpctrain::prelude::*;

/// An adapter whose input has `width` elements per row, with `inner` elements between its matrices.
struct Adapter {
    width: usize,
    inner: usize,
}

impl Adapter {
    /// Returns the lengths of the tensors, in the order of [`Block::tensors`].
    fn lens(&self) -> [usize; 2] {
        [self.inner * self.width, self.width * self.inner]
    }

    /// Returns the projection from `width` to `inner`.
    fn down(&self, rows: usize) -> Linear {
        Linear::new(rows, self.width, self.inner)
    }

    /// Returns the projection from `inner` to `width`.
    fn up(&self, rows: usize) -> Linear {
        Linear::new(rows, self.inner, self.width)
    }
}

impl<B: Kernels> Block<B> for Adapter {
    fn name(&self) -> String {
        "adapter".into()
    }

    fn tensors(&self) -> Vec<Tensor> {
        // The block is initialised as the identity. Gradients that the first backward overwrites
        // need not be zeroed.
        let down =
            Tensor::new("adapter.down.weight", &[self.inner, self.width], Init::Normal(0.02))
                .overwritten();
        let up =
            Tensor::new("adapter.up.weight", &[self.width, self.inner], Init::Zeros).overwritten();
        vec![down, up]
    }

    fn input_per_row(&self) -> usize {
        self.width
    }

    fn saved_elems_per_row(&self) -> usize {
        // The values before and after the activation.
        2 * self.inner
    }

    fn saved_f32_per_row(&self) -> usize {
        0
    }

    fn scratch_per_row(&self) -> usize {
        // The gradients of the inner values and of the input.
        self.inner + self.width
    }

    fn forward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let b = cx.backend;
        let rows = cx.micro.rows();
        let [down, up] = split::<B, 2>(params.own, self.lens());
        let no_bias = B::split_at(up, 0).0;
        let mut h = b.alloc(MemoryKind::Activations, rows * self.inner)?;
        b.linear(self.down(rows), B::all(x), down, no_bias, B::all_mut(&mut h))?;
        let mut a = b.alloc(MemoryKind::Activations, rows * self.inner)?;
        b.activation(Activation::Silu, B::all(&h), B::all_mut(&mut a))?;
        let mut y = b.alloc(MemoryKind::Activations, rows * self.width)?;
        b.linear(self.up(rows), B::all(&a), up, no_bias, B::all_mut(&mut y))?;
        b.add(B::all(x), B::all_mut(&mut y))?;
        Ok((y, vec![h, a]))
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
        let (b, rows, [h, a]) = (cx.backend, cx.micro.rows(), [&saved[0], &saved[1]]);
        let [down, up] = split::<B, 2>(params.own, self.lens());
        let add = !grads.first;
        let [ddown, dup] = split_mut::<B, 2>(grads.own, self.lens());
        let mut no_bias = b.alloc_f32(MemoryKind::Activations, 0)?;
        b.linear_backward_weight(
            self.up(rows),
            B::all(&dy),
            B::all(a),
            dup,
            B::all_mut(&mut no_bias),
            add,
        )?;
        let mut dh = b.alloc(MemoryKind::Activations, rows * self.inner)?;
        b.linear_backward_input(self.up(rows), B::all(&dy), up, B::all_mut(&mut dh))?;
        b.activation_backward(Activation::Silu, B::all(h), B::all_mut(&mut dh))?;
        b.linear_backward_weight(
            self.down(rows),
            B::all(&dh),
            B::all(x),
            ddown,
            B::all_mut(&mut no_bias),
            add,
        )?;
        let mut dx = b.alloc(MemoryKind::Activations, rows * self.width)?;
        b.linear_backward_input(self.down(rows), B::all(&dh), down, B::all_mut(&mut dx))?;
        b.add(B::all(&dy), B::all_mut(&mut dx))?;
        Ok(dx)
    }
}

fn main() -> ExitCode {
    start(|comm| {
        let is_first = comm.rank() == 0;
        for found in
            gradcheck::block(&Adapter { width: 6, inner: 3 }, 4, 5)?.iter().filter(|_| is_first)
        {
            let gradcheck::Derivative { tensor, backward, differences, .. } = found;
            println!(
                "{tensor:<20}  {backward:>9.5} by backward, {differences:>9.5} by differences"
            );
        }

        let settings = ["run.steps=20", "batch.global=8"].map(String::from);
        let overrides: Vec<String> = settings.into_iter().chain(std::env::args().skip(1)).collect();
        let world = comm.world();
        let (config, _) =
            world.all_ok(load(&Sources { overrides: &overrides, ..Sources::default() }))?;
        let (train, _) = world.all_ok(micro_batches::open(&config))?;
        let plan = plan(comm, config, &train, None)?;
        let mut blocks = plan.network.blocks();
        blocks.insert(
            blocks.len() - 1,
            Box::new(Adapter { width: plan.config.model.width, inner: 16 }),
        );
        let (mut engine, _) =
            engine_with_blocks(comm, &plan, blocks, Cpu::new(plan.threads), None)?;
        let mut progress = Progress::default();
        let mut feed = world.all_ok(MicroBatches::start(&engine.model, train, &plan, progress))?;
        while progress.step < plan.config.run.steps {
            let before = progress.step;
            let round = train_round(
                &plan,
                &mut engine,
                || feed.next_micro(),
                &mut progress,
                ControlFlags::empty,
            )?;
            for (taken, step) in round.steps.iter().zip(before + 1..) {
                if is_first && step.is_multiple_of(5) {
                    println!("step {step:>4}  loss {:.4}", taken.loss);
                }
            }
        }
        Ok(())
    })
}
