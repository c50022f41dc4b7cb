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

use std::f64::consts::TAU;
use std::path::PathBuf;
use std::process::ExitCode;

use hpctrain::backend::{Activation, Linear, split, split_mut};
use hpctrain::checkpoint::Reader;
use hpctrain::checkpoint::tools::resolve_path;
use hpctrain::config::Model;
use hpctrain::evaluate::predictions::{OutputSchema, RowIds};
use hpctrain::evaluate::{Predictions, model, predict};
use hpctrain::nn::gradcheck;
use hpctrain::prelude::*;
use hpctrain::run_dir::Resume;

/// The position of a layer in the network.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    First,
    Middle,
    Last,
}

/// Computes `y = x + silu(x·Wᵀ + b)`. The first layer, whose `x` are the samples, has no residual
/// connection, and the last one has neither that nor an activation.
struct Layer {
    name: String,
    inputs: usize,
    outputs: usize,
    place: Place,
}

impl Layer {
    fn linear(&self, rows: usize) -> Linear {
        Linear::new(rows, self.inputs, self.outputs)
    }

    /// Returns the lengths of the tensors, in the order of [`Block::tensors`].
    fn lens(&self) -> [usize; 2] {
        [self.outputs * self.inputs, self.outputs]
    }

    /// Returns the samples in the first layer, else the output of the previous block.
    fn input<'a, B: Kernels>(&self, cx: &Context<'a, B>, x: &'a B::Buf) -> &'a B::Buf {
        if self.place == Place::First { &cx.micro.fields.features } else { x }
    }
}

impl<B: Kernels> Block<B> for Layer {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn tensors(&self) -> Vec<Tensor> {
        let deviation = (1.0 / self.inputs as f32).sqrt();
        let weight = Tensor::new(
            format!("{}.weight", self.name),
            &[self.outputs, self.inputs],
            Init::Normal(deviation),
        );
        vec![
            weight.overwritten(),
            Tensor::new(format!("{}.bias", self.name), &[self.outputs], Init::Zeros),
        ]
    }

    fn input_per_row(&self) -> usize {
        self.inputs
    }

    fn saved_elems_per_row(&self) -> usize {
        // The input of the activation is saved.
        if self.place == Place::Last { 0 } else { self.outputs }
    }

    fn saved_f32_per_row(&self) -> usize {
        0
    }

    fn scratch_per_row(&self) -> usize {
        // The gradients of the activation's input and of the block's input.
        self.outputs + self.inputs
    }

    fn forward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let b = cx.backend;
        let rows = cx.micro.rows();
        let x = self.input(cx, x);
        let [weight, bias] = split::<B, 2>(params.own, self.lens());
        let mut h = b.alloc(MemoryKind::Activations, rows * self.outputs)?;
        b.linear(self.linear(rows), B::all(x), weight, bias, B::all_mut(&mut h))?;
        if self.place == Place::Last {
            return Ok((h, vec![]));
        }
        let mut y = b.alloc(MemoryKind::Activations, rows * self.outputs)?;
        b.activation(Activation::Silu, B::all(&h), B::all_mut(&mut y))?;
        if self.place == Place::Middle {
            b.add(B::all(x), B::all_mut(&mut y))?;
        }
        Ok((y, vec![h]))
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
        let b = cx.backend;
        let rows = cx.micro.rows();
        let x = self.input(cx, x);
        let [weight, _] = split::<B, 2>(params.own, self.lens());
        let add = !grads.first;
        let [dweight, dbias] = split_mut::<B, 2>(grads.own, self.lens());
        let mut dh = b.alloc(MemoryKind::Activations, rows * self.outputs)?;
        b.copy(B::all(&dy), B::all_mut(&mut dh))?;
        if let Some(h) = saved.first() {
            b.activation_backward(Activation::Silu, B::all(h), B::all_mut(&mut dh))?;
        }
        b.linear_backward_weight(self.linear(rows), B::all(&dh), B::all(x), dweight, dbias, add)?;
        if self.place == Place::First {
            return b.alloc(MemoryKind::Activations, 0);
        }
        let mut dx = b.alloc(MemoryKind::Activations, rows * self.inputs)?;
        b.linear_backward_input(self.linear(rows), B::all(&dh), weight, B::all_mut(&mut dx))?;
        if self.place == Place::Middle {
            b.add(B::all(&dy), B::all_mut(&mut dx))?;
        }
        Ok(dx)
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
            Box::new(Layer { name, inputs, outputs, place })
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

fn network() -> CustomModel {
    CustomModel::new(Residual { width: 16, depth: 3 })
}

fn main() -> ExitCode {
    start(|comm| {
        let world = comm.world();
        let prints = comm.rank() == 0;
        for found in gradcheck::block(
            &Layer { name: "x".into(), inputs: 5, outputs: 5, place: Place::Middle },
            4,
            5,
        )? {
            let gradcheck::Derivative { tensor, backward, differences, .. } = found;
            if prints {
                println!(
                    "{tensor:<10}  {backward:>9.5} by backward, {differences:>9.5} by differences"
                );
            }
        }

        // A whole run.
        let (flags, settings): (Vec<String>, Vec<String>) =
            std::env::args().skip(1).partition(|argument| argument == "--resume");
        let overrides: Vec<String> =
            SETTINGS.map(String::from).into_iter().chain(settings).collect();
        let (config, _) =
            world.all_ok(load(&Sources { overrides: &overrides, ..Sources::default() }))?;
        let resume = if flags.is_empty() { Resume::No } else { Resume::Auto };
        let request = TrainRequest { resume, ..TrainRequest::new(config, "spirals") };
        let splits = Splits {
            name: "two spirals".into(),
            train: Box::new(Spirals(640)),
            validation: Some(Box::new(Spirals(310))),
        };
        let mut directory = Directory::default();
        let custom = Customization {
            hooks: vec![&mut directory],
            data: Some(splits),
            network: Some(network()),
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
