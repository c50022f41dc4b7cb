//! A custom training loop, with a learning-rate schedule and gradient clipping that the
//! configuration does not have. Data, network and layout come from the configuration, by default
//! the bundled text and a small GPT.
//!
//! ```sh
//! cargo run --release --example training_loop -- run.steps=100
//! mpirun -np 2 target/release/examples/training_loop run.steps=100 parallel.zero=3
//! ```

use std::process::ExitCode;

use hpctrain::prelude::*;

fn main() -> ExitCode {
    start(|comm| {
        let overrides: Vec<String> = std::env::args().skip(1).collect();
        let world = comm.world();
        let (config, _) =
            world.all_ok(load(&Sources { overrides: &overrides, ..Sources::default() }))?;
        let (train, validation) = world.all_ok(micro_batches::open(&config))?;
        let plan = plan(comm, config, &train, None)?;
        let (mut engine, _) = engine(comm, &plan, Cpu::new(plan.threads), None)?;
        let mut progress = Progress::default();
        let mut feed = world.all_ok(MicroBatches::start(&engine.model, train, &plan, progress))?;

        while progress.step < plan.config.run.steps {
            // Compute the gradients of this rank's part of the batch; loss and norm are those of
            // the whole batch.
            let ReducedStep { loss, norm, .. } =
                engine.gradients(progress.step, || feed.next_micro(), ControlFlags::empty)?;
            progress.step += 1;
            progress.updates += 1;
            progress.position += plan.config.batch.global;

            // Inverse square root decay after a short warm-up.
            let step = progress.step as f32;
            let warmup = 20.0;
            let lr = 3e-3 * (step / warmup).min((warmup / step).sqrt());
            let grad_scale = (1.0 / norm).min(1.0) as f32;
            let hyper = Hyper { lr, weight_decay: 0.1, step: progress.updates, grad_scale };
            engine.model.sharded.update(hyper)?;
            if comm.rank() == 0 && progress.step.is_multiple_of(10) {
                let loss = loss / plan.tokens_per_step() as f64;
                println!("step {:>4}  loss {loss:.4}  norm {norm:.3}  lr {lr:.2e}", progress.step);
            }
        }

        if let Some(validation) = validation {
            let mut evaluator = Evaluator::new(validation, Some(100), plan.config.eval.batch);
            let measures = evaluator.measure(&mut engine.model, &world, || false)?;
            if let Some(measures) = measures.filter(|_| comm.rank() == 0) {
                println!("{measures}");
            }
        }
        Ok(())
    })
}
