//! A custom data source: a small network classifies points of three spirals, which are computed
//! from their indices. The run has records and checkpoints, and is the same on any number of ranks,
//! as if the samples were in files.
//!
//! ```sh
//! cargo run --release --example own_data
//! mpirun -np 2 target/release/examples/own_data run.name=two parallel.zero=2
//! mpirun -np 3 target/release/examples/own_data run.name=served --servers=1
//! ```

use std::f64::consts::TAU;
use std::process::ExitCode;

use hpctrain::prelude::*;
use hpctrain::random::{Stream, derive, name};
use hpctrain::servers;

/// The number of spirals, which is the number of classes.
const ARMS: u64 = 3;

/// Points of the arms in turn, each at a random position along its arm with some noise.
struct Spirals {
    /// The key of the random numbers, by which training and validation have different points.
    key: u64,
    samples: u64,
}

impl Source for Spirals {
    fn samples(&self) -> u64 {
        self.samples
    }

    fn sizes(&self) -> SampleSizes {
        SampleSizes { features: 2, classes: 1, ..SampleSizes::default() }
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        let arm = sample % ARMS;
        let random = Stream::new(derive(self.key, &[sample]));
        let along = random.uniform(0);
        let noise = random.uniform(1) - 0.5;
        let angle = TAU * (arm as f64 / ARMS as f64 + 0.8 * along) + 0.5 * noise;
        let radius = 0.2 + 0.8 * along;
        into.features
            .copy_from_slice(&[(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]);
        into.classes[0] = arm as u32;
        Ok(())
    }
}

const SETTINGS: [&str; 10] = [
    "model.kind=layers",
    "model.input=[2]",
    "model.layers=[{kind='dense', units=32}, {kind='silu'}, {kind='dense', units=32}, {kind='silu'}, {kind='dense', units=3}]",
    "run.steps=400",
    "batch.global=32",
    "optimizer.lr=1e-2",
    "lr_schedule.warmup=20",
    "parallel.virtual_ranks=2",
    "eval.every=100",
    "eval.batch=100",
];

fn main() -> ExitCode {
    start(|comm| {
        let (flags, settings): (Vec<String>, Vec<String>) =
            std::env::args().skip(1).partition(|argument| argument.starts_with("--"));
        let servers = comm.world().all_ok(server_count(&flags))?;
        let overrides: Vec<String> =
            SETTINGS.map(String::from).into_iter().chain(settings).collect();
        let (config, _) =
            comm.world().all_ok(load(&Sources { overrides: &overrides, ..Sources::default() }))?;
        let spirals =
            |split, samples| Box::new(Spirals { key: derive(1, &[name(split)]), samples });
        let data = Splits {
            name: "three spirals".into(),
            train: spirals("train", 3000),
            validation: Some(spirals("validation", 600)),
        };
        let custom = Customization { data: Some(data), ..Customization::default() };
        // Without servers, this is the same as `train(comm, &request, custom, None)`.
        let request = TrainRequest::new(config, "spirals");
        servers::train(comm, &request, custom, servers).map(drop)
    })
}

/// Returns the number of ranks, the last ones, that are parameter servers.
fn server_count(flags: &[String]) -> Result<usize> {
    let Some(flag) = flags.last() else { return Ok(0) };
    let count = flag.strip_prefix("--servers=").and_then(|count| count.parse().ok());
    count.ok_or_else(|| Error::input(format!("{flag}: the only flag is --servers=N")))
}
