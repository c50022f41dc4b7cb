//! A custom loss over the whole batch, and a custom metric: two views of the same thing get similar
//! embeddings, with all other samples of the global batch as negatives (InfoNCE; van den Oord, Li
//! and Vinyals, "Representation learning with contrastive predictive coding", 2018), in both
//! directions, as in CLIP (Radford et al., 2021). The outputs of all ranks are all-gathered, so the
//! run has the same bits on any number of ranks.
//!
//! ```sh
//! cargo run --release --example own_loss -- run.name=one
//! mpirun -np 4 target/release/examples/own_loss run.name=four parallel.zero=3
//! ```

use std::process::ExitCode;

use hpctrain::backend::Activation;
use hpctrain::prelude::*;
use hpctrain::random::{Stream, derive};

/// Elements of a view, and of the hidden cause of both views of a sample.
const VIEW: usize = 12;
const CAUSE: usize = 4;

/// Elements of an embedding.
const EMBEDDING: usize = 8;

/// One encoder for both views: its output is the embedding of the first view, then that of the
/// second one.
struct Encoder;

impl Module for Encoder {
    fn name(&self) -> String {
        "encoder".into()
    }

    fn tensors(&self) -> Vec<Tensor> {
        vec![
            Tensor::new("encoder.hidden.weight", &[32, VIEW], Init::Normal(0.3)),
            Tensor::new("encoder.out.weight", &[EMBEDDING, 32], Init::Normal(0.2)),
        ]
    }

    fn input_per_row(&self) -> usize {
        0
    }

    fn forward<B: Kernels>(
        &self,
        tape: &mut Tape<'_, B>,
        params: &[Var<B>],
        _: &Var<B>,
    ) -> Result<Var<B>> {
        let views = tape.features(2 * VIEW)?;
        let mut embeddings = vec![];
        for view in [0..VIEW, VIEW..2 * VIEW] {
            let h = tape.columns(&views, view)?;
            let h = tape.linear(&h, &params[0], None)?;
            let h = tape.activation(&h, Activation::Gelu)?;
            embeddings.push(tape.linear(&h, &params[1], None)?);
        }
        tape.concatenate(&embeddings.iter().collect::<Vec<_>>())
    }
}

/// The network of two views.
struct TwoViews;

impl ModelBuilder for TwoViews {
    fn name(&self) -> String {
        "an encoder of two views".into()
    }

    fn input(&self) -> Input {
        Input::Numbers(vec![2 * VIEW])
    }

    fn outputs(&self) -> usize {
        2 * EMBEDDING
    }

    fn blocks<B: Kernels>(&self) -> Blocks<B> {
        vec![autograd::block(Encoder)]
    }
}

/// Returns the similarities of all first views with all second ones.
fn similarities<B: Kernels>(tape: &mut Tape<'_, B>, output: &Var<B>) -> Result<[Var<B>; 2]> {
    let first = tape.columns(output, 0..EMBEDDING)?;
    let second = tape.columns(output, EMBEDDING..2 * EMBEDDING)?;
    let first = tape.normalize(&first, 1e-12)?;
    let second = tape.normalize(&second, 1e-12)?;
    let of_first = tape.matmul_transposed(&first, &second)?;
    let of_second = tape.matmul_transposed(&second, &first)?;
    Ok([of_first, of_second])
}

/// InfoNCE in both directions.
struct InfoNce {
    temperature: f32,
}

impl LossFunction for InfoNce {
    fn name(&self) -> String {
        "info_nce".into()
    }

    fn target(&self, _: usize) -> Target {
        // Samples need no target: they are positives of themselves.
        Target::Unknown
    }

    fn over_batch(&self) -> bool {
        true
    }

    fn forward<B: Kernels>(&self, tape: &mut Tape<'_, B>, output: &Var<B>) -> Result<Var<B>> {
        let mut losses = vec![];
        for similarities in similarities(tape, output)? {
            let logits = tape.scale(&similarities, 1.0 / self.temperature)?;
            losses.push(tape.cross_entropy(&logits, Targets::Diagonal, 0.0)?);
        }
        let sum = tape.add(&losses[0], &losses[1])?;
        tape.scale(&sum, 0.5)
    }
}

/// The fraction of samples whose second view is the nearest one to the first.
struct Recall;

impl MetricFunction for Recall {
    fn name(&self) -> String {
        "recall_at_1".into()
    }

    fn forward<B: Kernels>(&self, tape: &mut Tape<'_, B>, output: &Var<B>) -> Result<Var<B>> {
        let [similarities, _] = similarities(tape, output)?;
        tape.hits(&similarities, Targets::Diagonal, 1)
    }
}

/// Two noisy views of a hidden cause, by fixed random matrices.
struct Views {
    samples: u64,
    seed: u64,
}

impl Source for Views {
    fn samples(&self) -> u64 {
        self.samples
    }

    fn sizes(&self) -> SampleSizes {
        SampleSizes { features: 2 * VIEW, ..SampleSizes::default() }
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        let mut matrix = [0.0; 2 * VIEW * CAUSE];
        Stream::new(1).fill_normal(&mut matrix);
        let mut cause = [0.0; CAUSE];
        Stream::new(derive(self.seed, &[sample, 0])).fill_normal(&mut cause);
        let mut noise = [0.0; 2 * VIEW];
        Stream::new(derive(self.seed, &[sample, 1])).fill_normal(&mut noise);
        for ((to, row), noise) in into.features.iter_mut().zip(matrix.chunks(CAUSE)).zip(noise) {
            let signal: f32 = row.iter().zip(&cause).map(|(a, b)| a * b).sum();
            *to = signal.tanh() + 0.1 * noise;
        }
        Ok(())
    }
}

const SETTINGS: [&str; 7] = [
    "run.steps=300",
    "batch.global=64",
    "batch.micro=8",
    "parallel.virtual_ranks=8",
    "optimizer.lr=1e-2",
    "eval.every=100",
    "eval.batch=64",
];

fn main() -> ExitCode {
    start(|comm| {
        let overrides: Vec<String> =
            SETTINGS.map(String::from).into_iter().chain(std::env::args().skip(1)).collect();
        let (config, _) =
            comm.world().all_ok(load(&Sources { overrides: &overrides, ..Sources::default() }))?;
        let data = Splits {
            name: "two views".into(),
            train: Box::new(Views { samples: 2048, seed: 2 }),
            validation: Some(Box::new(Views { samples: 256, seed: 3 })),
        };
        let custom = Customization {
            data: Some(data),
            network: Some(CustomModel::new(TwoViews)),
            loss: Some(CustomLoss::new(InfoNce { temperature: 0.1 })),
            metrics: vec![CustomMetric::new(Recall)],
            ..Customization::default()
        };
        train(comm, &TrainRequest::new(config, "views"), custom, None).map(drop)
    })
}
