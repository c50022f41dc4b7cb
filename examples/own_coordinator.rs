//! Custom functions on workers that join and leave: each call trains a small network with another
//! learning rate on one of the workers, and the coordinator prints the losses and the best learning
//! rate.
//!
//! ```sh
//! cargo run --release --example own_coordinator -- coordinate /tmp/search &
//! cargo run --release --example own_coordinator -- work /tmp/search &
//! cargo run --release --example own_coordinator -- work /tmp/search
//! ```

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use hpctrain::prelude::*;
use hpctrain::servers::{Coordinator, Functions, run_worker};

/// Time without a message after which a worker counts as lost, and its call is rescheduled.
const TIMEOUT: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["coordinate", place] => coordinate(Path::new(place)),
        ["work", place] => {
            run_worker(Path::new(place), TIMEOUT, Functions::default().with("loss_of", loss_of))
        }
        _ => Err(Error::input("arguments: coordinate DIR, or work DIR")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}

fn coordinate(place: &Path) -> Result<()> {
    let coordinator = Coordinator::open(place, None, TIMEOUT)?;
    let rates = [1e-4, 1e-3, 1e-2, 1e-1];
    let handles = rates
        .iter()
        .map(|rate| coordinator.schedule("loss_of", rate))
        .collect::<Result<Vec<_>>>()?;
    coordinator.join()?;
    let mut best = (f64::INFINITY, 0.0);
    for (rate, handle) in rates.into_iter().zip(handles) {
        let loss: f64 = handle.fetch()?;
        println!("learning rate {rate:.0e}: loss {loss:.4}");
        if loss < best.0 {
            best = (loss, rate);
        }
    }
    println!("best: {:.0e}", best.1);
    coordinator.end();
    Ok(())
}

/// Returns the loss of a small GPT after some steps with a learning rate.
fn loss_of(rate: f64) -> Result<f64> {
    let settings = [
        "model.layers=1",
        "model.width=32",
        "model.heads=2",
        "run.steps=40",
        "lr_schedule.warmup=5",
    ];
    let mut overrides: Vec<String> = settings.map(String::from).to_vec();
    overrides.push(format!("optimizer.lr={rate}"));
    let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() })?;
    let (train, _) = micro_batches::open(&config)?;
    let losses = on_threads(1, |comm| {
        let plan = plan(comm, config.clone(), &train, Some(1))?;
        let (mut engine, _) = engine(comm, &plan, Cpu::new(1), None)?;
        let mut progress = Progress::default();
        let mut feed =
            MicroBatches::start(&engine.model, micro_batches::open(&config)?.0, &plan, progress)?;
        let mut loss = f64::INFINITY;
        while progress.step < plan.config.run.steps {
            let round = train_round(
                &plan,
                &mut engine,
                || feed.next_micro(),
                &mut progress,
                ControlFlags::empty,
            )?;
            loss = round.steps[0].loss;
        }
        Ok(loss)
    })?;
    Ok(losses[0])
}
