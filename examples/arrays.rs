//! Training on arrays in memory: a small network learns which of three ellipses a point lies in,
//! from an `Array2` of points and an `Array1` of classes. Then the program reads a tensor of the
//! last checkpoint as an array, and predicts the classes of new points into another one.
//!
//! ```sh
//! cargo run --release --example arrays
//! mpirun -np 2 target/release/examples/arrays run.name=two parallel.zero=3
//! ```

use std::path::Path;
use std::process::ExitCode;

use hpctrain::checkpoint::Reader;
use hpctrain::checkpoint::tools::resolve_path;
use hpctrain::data::Arrays;
use hpctrain::data::ndarray::{Array1, Array2, Axis};
use hpctrain::evaluate::{model, predict_array};
use hpctrain::prelude::*;
use hpctrain::random::{Stream, derive, name};

/// The centres of the ellipses.
const CENTRES: [[f32; 2]; 3] = [[-1.0, 0.0], [1.0, 0.5], [0.0, -1.0]];

const SETTINGS: [&str; 9] = [
    "model.kind=layers",
    "model.input=[2]",
    "model.layers=[{kind='dense', units=16}, {kind='tanh'}, {kind='dense', units=3}]",
    "run.steps=200",
    "batch.global=32",
    "optimizer.lr=1e-2",
    "lr_schedule.warmup=10",
    "parallel.virtual_ranks=2",
    "eval.every=100",
];

/// Returns points of the ellipses in turn, and their classes. The same on every rank.
fn points(split: &str, count: usize) -> (Array2<f32>, Array1<usize>) {
    let random = Stream::new(derive(1, &[name(split)]));
    let classes = Array1::from_shape_fn(count, |i| i % CENTRES.len());
    let points = Array2::from_shape_fn((count, 2), |(i, axis)| {
        let noise = random.uniform((2 * i + axis) as u64) as f32 - 0.5;
        CENTRES[classes[i]][axis] + [1.2, 0.8][axis] * noise
    });
    (points, classes)
}

fn main() -> ExitCode {
    start(|comm| {
        let world = comm.world();
        let overrides: Vec<String> =
            SETTINGS.map(String::from).into_iter().chain(std::env::args().skip(1)).collect();
        let (config, _) =
            world.all_ok(load(&Sources { overrides: &overrides, ..Sources::default() }))?;
        let run = Path::new(&config.run.root).join(config.run.name.as_deref().unwrap_or("arrays"));

        let arrays = |split, count| {
            let (points, classes) = points(split, count);
            let arrays = Arrays::from_features(points)?.with_classes(classes)?;
            Ok(arrays.with_class_names(&["left", "right", "bottom"]))
        };
        let train_arrays = world.all_ok(arrays("train", 3000))?;
        let validation = world.all_ok(arrays("validation", 300))?;
        let data = Splits {
            name: "three ellipses".into(),
            train: Box::new(train_arrays),
            validation: Some(Box::new(validation)),
        };
        let custom = Customization { data: Some(data), ..Customization::default() };
        train(comm, &TrainRequest::new(config, "arrays"), custom, None)?;

        // The network of the last checkpoint, sharded over these ranks.
        let (path, _lease) = resolve_path::checkpoint_collective(&world, &run)?;
        let mut reader = Reader::open_collective(&world, &path, || Reader::open(&path))?;
        let config = world.all_ok(model::config_on(&reader, &[], None))?;
        let plan = world.all_ok(model::plan(config, comm.size(), 1, false))?;
        let mut model = model::build(comm, &plan, Cpu::new(plan.threads))?;
        model::load(&world, &mut model, &mut reader)?;

        let (new, classes) = points("new", 90);
        let rows = world.all_ok(Arrays::from_features(new))?;
        let Some(logits) = predict_array(&mut model, rows, 40)? else { return Ok(()) };
        if world.rank() == 0 {
            let mut whole = Reader::open(&path)?;
            let weight = whole.tensor("layers.0.weight", whole.inference_part())?;
            println!("layers.0.weight is {:?}, norm {:.3}", weight.shape(), norm(weight.iter()));
            let likeliest = logits.map_axis(Axis(1), |row| {
                (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap_or(0)
            });
            let right = likeliest.iter().zip(&classes).filter(|(a, b)| a == b).count();
            println!("{right} of {} new points are in the right class", classes.len());
        }
        Ok(())
    })
}

/// Returns the 2-norm of numbers.
fn norm<'a>(numbers: impl Iterator<Item = &'a f32>) -> f32 {
    numbers.map(|x| x * x).sum::<f32>().sqrt()
}
