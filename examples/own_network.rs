//! A custom model in a whole run: residual blocks defined in this program classify points of two
//! spirals. The run has records, evaluations and checkpoints, resumes with `--resume`, and is the
//! same on any number of ranks. Then its last checkpoint is loaded in another layout, evaluated,
//! and used for predictions.
//!
//! ```sh
//! cargo run --release --example own_network -- run.name=one
//! mpirun -np 2 target/release/examples/own_network run.name=two parallel.zero=3
//! mpirun -np 2 target/release/examples/own_network --resume run.name=two run.steps=400
//! ```
//!
//! With `--evaluate`, this program is the evaluator of a run that another process trains:
//!
//! ```sh
//! target/release/examples/own_network --evaluate run.name=three &
//! target/release/examples/own_network run.name=three eval.inline=false checkpoint.every=50
//! ```

use std::f64::consts::TAU;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use hpctrain::backend::Activation;
use hpctrain::checkpoint::Reader;
use hpctrain::checkpoint::tools::resolve_path;
use hpctrain::config::Model;
use hpctrain::evaluate::predictions::{OutputSchema, RowIds};
use hpctrain::evaluate::{Policy, Predictions, SidecarOptions, model, predict};
use hpctrain::nn::gradcheck;
use hpctrain::prelude::*;
use hpctrain::run_dir::Resume;
use hpctrain::train::evaluate_run;

/// The position of a layer in the network.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    First,
    Middle,
    Last,
}

/// Computes `y = x + silu(x·Wᵀ + b)`; the backward follows from the forward. The first layer, whose
/// `x` are the samples, has no residual connection, and the last one has neither that nor an
/// activation.
struct Layer {
    name: String,
    inputs: usize,
    outputs: usize,
    place: Place,
}

impl Module for Layer {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn tensors(&self) -> Vec<Tensor> {
        let deviation = (1.0 / self.inputs as f32).sqrt();
        let weight = format!("{}.weight", self.name);
        let bias = format!("{}.bias", self.name);
        vec![
            Tensor::new(weight, &[self.outputs, self.inputs], Init::Normal(deviation)),
            Tensor::new(bias, &[self.outputs], Init::Zeros),
        ]
    }

    fn input_per_row(&self) -> usize {
        if self.place == Place::First { 0 } else { self.inputs }
    }

    fn forward<B: Kernels>(
        &self,
        tape: &mut Tape<'_, B>,
        params: &[Var<B>],
        x: &Var<B>,
    ) -> Result<Var<B>> {
        let x = match self.place {
            Place::First => tape.features(self.inputs)?,
            Place::Middle | Place::Last => x.clone(),
        };
        let h = tape.linear(&x, &params[0], Some(&params[1]))?;
        if self.place == Place::Last {
            return Ok(h);
        }
        let h = tape.activation(&h, Activation::Silu)?;
        if self.place == Place::First { Ok(h) } else { tape.add(&x, &h) }
    }
}

/// A network of two inputs, `depth` residual blocks of `width`, and one logit.
struct Residual {
    width: usize,
    depth: usize,
}

impl ModelBuilder for Residual {
    fn name(&self) -> String {
        format!("{} residual blocks of width {}", self.depth, self.width)
    }

    fn input(&self) -> Input {
        Input::Numbers(vec![2])
    }

    fn outputs(&self) -> usize {
        1
    }

    fn blocks<B: Kernels>(&self) -> Blocks<B> {
        let layer = |name: String, inputs, outputs, place| -> Box<dyn Block<B>> {
            autograd::block(Layer { name, inputs, outputs, place })
        };
        let width = self.width;
        let mut blocks = vec![layer("lift".into(), 2, width, Place::First)];
        blocks.extend(
            (0..self.depth).map(|i| layer(format!("residual.{i}"), width, width, Place::Middle)),
        );
        blocks.push(layer("logit".into(), width, 1, Place::Last));
        blocks
    }
}

/// Points of two spirals in turn.
#[derive(Clone, Copy)]
struct Spirals(u64);

impl Source for Spirals {
    fn samples(&self) -> u64 {
        self.0
    }

    fn sizes(&self) -> SampleSizes {
        SampleSizes { features: 2, values: 1, ..SampleSizes::default() }
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        let arm = (sample % 2) as f64;
        let along = (sample / 2) as f64 / (self.0 / 2) as f64;
        let angle = TAU * (arm / 2.0 + along);
        let radius = 0.2 + 0.8 * along;
        into.features
            .copy_from_slice(&[(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]);
        into.values[0] = arm as f32;
        Ok(())
    }
}

/// A hook that keeps the directory of the run.
#[derive(Default)]
struct Directory(PathBuf);

impl Hook for Directory {
    fn end(&mut self, outcome: &Outcome<'_>) -> Result<()> {
        self.0 = outcome.directory.to_path_buf();
        Ok(())
    }
}

const SETTINGS: [&str; 9] = [
    "loss.kind=binary-cross-entropy",
    "run.steps=200",
    "batch.global=32",
    "optimizer.lr=5e-3",
    "lr_schedule.warmup=20",
    "parallel.virtual_ranks=2",
    "eval.every_epochs=10",
    "eval.batch=100",
    "run.device=cpu",
];

/// The arguments that are not overrides of keys.
const FLAGS: [&str; 2] = ["--resume", "--evaluate"];

fn network() -> CustomModel {
    CustomModel::new(Residual { width: 16, depth: 3 })
}

fn splits() -> Splits {
    Splits {
        name: "two spirals".into(),
        train: Box::new(Spirals(640)),
        validation: Some(Box::new(Spirals(310))),
    }
}

/// Evaluates the checkpoints of a run while another process trains it.
fn evaluate_beside(comm: &Comm<Cpu>, config: &Config) -> Result<()> {
    let name = config.run.name.as_deref().unwrap_or("spirals");
    let run = Path::new(&config.run.root).join(name);
    let options = SidecarOptions { policy: Policy::Every, ..SidecarOptions::new(run) };
    let custom = Customization {
        data: Some(splits()),
        network: Some(network()),
        ..Customization::default()
    };
    evaluate_run(comm, &options, custom).map(drop)
}

fn main() -> ExitCode {
    start(|comm| {
        let world = comm.world();
        let prints = comm.rank() == 0;
        let layer = Layer { name: "x".into(), inputs: 5, outputs: 5, place: Place::Middle };
        for found in gradcheck::block(&*autograd::block(layer), 4, 5)? {
            let gradcheck::Derivative { tensor, backward, differences, .. } = found;
            if prints {
                println!(
                    "{tensor:<10}  {backward:>9.5} by backward, {differences:>9.5} by differences"
                );
            }
        }

        // A whole run.
        let (flags, settings): (Vec<String>, Vec<String>) =
            std::env::args().skip(1).partition(|argument| FLAGS.contains(&argument.as_str()));
        let overrides: Vec<String> =
            SETTINGS.map(String::from).into_iter().chain(settings).collect();
        let (config, _) =
            world.all_ok(load(&Sources { overrides: &overrides, ..Sources::default() }))?;
        if flags.iter().any(|flag| flag == FLAGS[1]) {
            return evaluate_beside(comm, &config);
        }
        let resume = if flags.is_empty() { Resume::No } else { Resume::Auto };
        let request = TrainRequest { resume, ..TrainRequest::new(config, "spirals") };
        let mut directory = Directory::default();
        let custom = Customization {
            hooks: vec![&mut directory],
            data: Some(splits()),
            network: Some(network()),
            ..Customization::default()
        };
        train(comm, &request, custom, None)?;

        // All ranks load its last checkpoint together, in another layout.
        let (path, _lease) = resolve_path::checkpoint_collective(&world, &directory.0)?;
        let mut reader = Reader::open_collective(&world, &path, || Reader::open(&path))?;
        let mut config = world.all_ok(model::config(&reader.manifest().config, &[]))?;
        config.model = Model::from_custom(network());
        let plan = world.all_ok(model::plan(config, comm.size(), 1, false))?;
        let mut model = model::build(comm, &plan, Cpu::new(plan.threads))?;
        model::load(&world, &mut model, &mut reader)?;
        let measures =
            Evaluator::new(Spirals(310), None, 100).measure(&mut model, &world, || false)?;
        if let Some(measures) = measures.filter(|_| prints) {
            println!("step {}: {measures}", reader.manifest().step);
        }
        let out = directory.0.join(format!("predictions-{}.h5", reader.manifest().step));
        let schema = OutputSchema::for_plan(&plan, reader.manifest().preprocessing.as_ref());
        let file = prints.then(|| Predictions::create(&out, 310, schema, RowIds::numbers()));
        let file = world.all_ok(file.transpose())?;
        predict(&mut model, Spirals(310), 100, file)
    })
}
