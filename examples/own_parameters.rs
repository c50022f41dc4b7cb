//! A custom training step on parameter servers: the coordinator schedules steps on workers that
//! join and leave, the workers' functions train a small network on their own data, and servers hold
//! its parameters. The network learns whether a basket of three fruits has an orange.
//!
//! ```sh
//! cargo run --release --example own_parameters                # all as threads of one process
//!
//! cargo run --release --example own_parameters -- coordinate /tmp/fruits &
//! for i in 1 2; do cargo run --release --example own_parameters -- serve /tmp/fruits & done
//! for i in 1 2 3 4; do cargo run --release --example own_parameters -- work /tmp/fruits & done
//! ```

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use hpctrain::comm;
use hpctrain::data::Lookup;
use hpctrain::error::Kind;
use hpctrain::evaluate::model;
use hpctrain::prelude::*;
use hpctrain::random::Stream;
use hpctrain::servers::{
    Coordinator, Functions, ParameterOptions, Parameters, WorkerContext, run_server, run_worker,
};

/// Time without a message after which a process counts as lost.
const TIMEOUT: Duration = Duration::from_secs(20);

const SERVERS: usize = 2;
const WORKERS: usize = 4;
const ROUNDS: usize = 4;
const STEPS_PER_ROUND: usize = 60;

const FRUITS: [&str; 7] = ["apple", "banana", "cherry", "grape", "lemon", "orange", "pear"];

/// Baskets of fruits by name, which a lookup converts to ids.
struct Baskets {
    fruits: Lookup,
    labels: Lookup,
    samples: u64,
    /// The seed of the random numbers, by which training and validation have different baskets.
    seed: u64,
}

impl Baskets {
    fn new(seed: u64, samples: u64) -> Result<Self> {
        // Id 0 is for empty values, so that "no" and "yes" have the ids 1 and 2.
        Ok(Self {
            fruits: Lookup::new(FRUITS)?,
            labels: Lookup::new(["no", "yes"])?,
            samples,
            seed,
        })
    }

    /// Returns the names of the fruits in a basket, and whether it has an orange.
    fn basket(&self, sample: u64) -> ([&'static str; 3], &'static str) {
        let random = Stream::new(self.seed);
        let fruits = [0, 1, 2].map(|place| {
            FRUITS[(random.uniform(3 * sample + place) * FRUITS.len() as f64) as usize]
        });
        (fruits, if fruits.contains(&"orange") { "yes" } else { "no" })
    }
}

impl Source for Baskets {
    fn samples(&self) -> u64 {
        self.samples
    }

    fn sizes(&self) -> SampleSizes {
        SampleSizes { ids: 3, classes: 1, ..SampleSizes::default() }
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        let (fruits, label) = self.basket(sample);
        for (id, fruit) in into.ids.iter_mut().zip(fruits) {
            *id = self.fruits.id(fruit);
        }
        into.classes[0] = self.labels.id(label) - 1;
        Ok(())
    }
}

/// The settings of the network, of a worker's batch, and of the optimizer on the servers.
fn config() -> Result<Config> {
    let settings = [
        "model.kind=layers".to_owned(),
        "model.input=[3]".into(),
        format!(
            "model.layers=[{{kind='embedding', ids={}, width=8}}, {{kind='flatten'}}, \
             {{kind='dense', units=16}}, {{kind='relu'}}, {{kind='dense', units=2}}]",
            FRUITS.len() + 1
        ),
        "batch.global=32".into(),
        format!("run.steps={}", ROUNDS * STEPS_PER_ROUND),
        "optimizer.lr=0.02".into(),
        "lr_schedule.warmup=0".into(),
        "checkpoint.keep=2".into(),
    ];
    load(&Sources { overrides: &settings, ..Sources::default() }).map(|(config, _)| config)
}

/// The state of a worker: its connection to the parameters, its model, and its data.
struct Trainer {
    parameters: Parameters,
    engine: Engine<Cpu>,
    feed: MicroBatches<Cpu>,
    samples: f64,
    step: u64,
}

impl Trainer {
    fn new(worker: &WorkerContext) -> Result<Self> {
        let parameters = worker.parameters()?;
        let mut plan = parameters.plan(None, 1)?;
        // Each worker reads the samples in another order.
        plan.config.run.seed = worker.number();
        let (engine, _) = engine(&comm::single(), &plan, Cpu::new(1), None)?;
        let train = Baskets::new(1, 4000)?;
        let feed = MicroBatches::start(&engine.model, train, &plan, Progress::default())?;
        let samples = plan.config.batch.global as f64;
        Ok(Self { parameters, engine, feed, samples, step: 0 })
    }

    /// Trains on the next batch of this worker, and returns the mean loss.
    fn step(&mut self) -> Result<f64> {
        let Self { parameters, engine, feed, .. } = self;
        parameters.pull_model(&mut engine.model)?;
        let reduced = engine.gradients(self.step, || feed.next_micro(), ControlFlags::empty)?;
        self.step += 1;
        parameters.push_model(&mut engine.model, reduced.norm)?;
        Ok(reduced.loss / self.samples)
    }
}

fn work(place: &Path) -> Result<()> {
    let functions = Functions::with_state(Trainer::new)
        .with_context("step", |trainer, (): (), _| trainer.step());
    run_worker(place, TIMEOUT, functions)
}

/// Lets the workers make the steps of a round.
fn mean_loss_of_round(coordinator: &Coordinator) -> Result<f64> {
    let steps = (0..STEPS_PER_ROUND).map(|_| coordinator.schedule("step", &()));
    let steps = steps.collect::<Result<Vec<_>>>()?;
    coordinator.join()?;
    let losses = steps.iter().map(|step| step.fetch()).collect::<Result<Vec<f64>>>()?;
    Ok(losses.iter().sum::<f64>() / losses.len() as f64)
}

fn coordinate(place: &Path) -> Result<()> {
    let coordinator = Coordinator::open(place, None, TIMEOUT)?;
    let mut servers = coordinator.create_parameters(ParameterOptions::model(config()?, SERVERS))?;
    let mut saved = servers.save()?;
    println!("{SERVERS} servers hold the parameters");
    let mut round = 0;
    while round < ROUNDS {
        match mean_loss_of_round(&coordinator) {
            Ok(loss) => {
                saved = servers.save()?;
                round += 1;
                println!("round {round}: loss {loss:.4}");
            }
            // The error names the server that was lost. The round begins again.
            Err(e) if e.kind() == Kind::Comm => {
                eprintln!("{e}");
                // Calls that still run must not push to the restored parameters.
                drop(coordinator.join());
                servers.restore(&saved)?;
                println!("restored {}", saved.display());
            }
            Err(e) => return Err(e),
        }
    }
    coordinator.end();

    let mut parameters = servers.connect()?;
    let plan = parameters.plan(None, 1)?;
    let alone = comm::single();
    let mut model = model::build(&alone, &plan, Cpu::new(1))?;
    parameters.pull_model(&mut model)?;
    let measures = Evaluator::new(Baskets::new(2, 1000)?, None, 100).measure(
        &mut model,
        &alone.world(),
        || false,
    )?;
    let accuracy = measures.and_then(|measures| measures.metrics.get("accuracy").copied());
    println!("accuracy {:.4}", accuracy.unwrap_or(0.0));
    println!("saved in {}", saved.display());
    Ok(())
}

/// Runs all roles as threads of this process.
fn run_all(place: &Path) -> Result<()> {
    std::thread::scope(|scope| {
        let servers = [(); SERVERS].map(|()| scope.spawn(|| run_server(place, TIMEOUT)));
        let workers = [(); WORKERS].map(|()| scope.spawn(|| work(place)));
        let coordinated = coordinate(place);
        let mut ended: Vec<Result<()>> = vec![coordinated];
        for thread in servers.into_iter().chain(workers) {
            ended.push(thread.join().map_err(|_| Error::internal("a thread panicked"))?);
        }
        ended.into_iter().collect()
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let name = format!("own_parameters-{}", std::process::id());
            let place: PathBuf = std::env::temp_dir().join(name);
            run_all(&place)
        }
        ["coordinate", place] => coordinate(Path::new(place)),
        ["serve", place] => run_server(Path::new(place), TIMEOUT),
        ["work", place] => work(Path::new(place)),
        _ => Err(Error::input("arguments: coordinate DIR, serve DIR, work DIR, or none")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(1))
        }
    }
}
