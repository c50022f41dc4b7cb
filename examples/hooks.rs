//! Hooks: callbacks for the steps, evaluations, checkpoints and the end of a run. The hooks of this
//! example write a table of losses, and stop the run on all ranks once the validation loss is low
//! enough.
//!
//! ```sh
//! cargo run --release --example hooks
//! mpirun -np 2 target/release/examples/hooks run.name=two eval.every=20
//! ```

use std::fs::File;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use hpctrain::prelude::*;
use hpctrain::signals;

/// Collects the losses, and writes them to a file at the end. On rank 0.
#[derive(Default)]
struct Table(Vec<(u64, f64)>);

impl Hook for Table {
    fn name(&self) -> &str {
        "table of losses"
    }

    fn step(&mut self, step: &Step) -> Result<ControlFlow<String>> {
        self.0.push((step.step, step.loss));
        Ok(ControlFlow::Continue(()))
    }

    fn end(&mut self, outcome: &Outcome<'_>) -> Result<()> {
        let path: PathBuf = outcome.directory.join("losses.csv");
        let write = || {
            let mut file = File::create(&path)?;
            writeln!(file, "step,loss")?;
            self.0.iter().try_for_each(|(step, loss)| writeln!(file, "{step},{loss}"))
        };
        write().map_err(|e| Error::io("write", &path, e))
    }
}

/// Stops a run once its loss is low enough, and prints where its checkpoints are.
struct Enough {
    loss: f64,
    /// Whether this rank prints.
    prints: bool,
}

impl Hook for Enough {
    fn evaluation(&mut self, step: u64, measures: &Metrics) -> Result<ControlFlow<String>> {
        Ok(match measures.loss < self.loss {
            true => ControlFlow::Break(format!(
                "a loss of {:.4} at step {step} is enough",
                measures.loss
            )),
            false => ControlFlow::Continue(()),
        })
    }

    fn checkpoint(&mut self, step: u64, directory: &Path) -> Result<ControlFlow<String>> {
        if self.prints {
            println!("step {step} is saved in {}", directory.display());
        }
        Ok(ControlFlow::Continue(()))
    }

    fn end(&mut self, outcome: &Outcome<'_>) -> Result<()> {
        match outcome.result {
            Ok(ending) if self.prints => println!("after {} steps: {ending:?}", outcome.step),
            Err(e) if self.prints => println!("after {} steps: {}", outcome.step, e.message()),
            _ => {}
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    start(|comm| {
        // With this, a job that receives a signal to end saves first.
        comm.world().all_ok(signals::record_signals())?;
        let settings = [
            "run.steps=300",
            "eval.every=20",
            "eval.samples=100",
            "checkpoint.every=50",
            "log.sample_tokens=0",
        ];
        let overrides: Vec<String> =
            settings.map(String::from).into_iter().chain(std::env::args().skip(1)).collect();
        let (config, _) =
            comm.world().all_ok(load(&Sources { overrides: &overrides, ..Sources::default() }))?;

        let prints = comm.rank() == 0;
        let mut table = Table::default();
        let mut enough = Enough { loss: 3.2, prints };
        let mut custom = Customization { hooks: vec![&mut enough], ..Customization::default() };
        if prints {
            custom.hooks.push(&mut table);
        }
        train(comm, &TrainRequest::new(config, "hooks"), custom, None).map(drop)
    })
}
