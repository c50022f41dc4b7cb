//! `hpctrain eval --checkpoint`: what a checkpoint is worth on any data. Nothing is written into a run.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::used::{self, Part};
use crate::backend::Kernels;
use crate::checkpoint::Reader;
use crate::comm::Comm;
use crate::config::{Config, Plan};
use crate::data::Split;
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Measures, model};
use crate::job;
use crate::placement::{cpu, place};
use crate::telemetry::{grouped, say};
use crate::topology::Topology;
use crate::train::feed;

/// Arguments of a measurement.
pub struct Request {
    /// A checkpoint, or a run, of which the newest is taken.
    pub checkpoint: PathBuf,
    /// The data; that of the checkpoint's run without.
    pub data: Option<PathBuf>,
    /// Which part of it.
    pub split: Option<Part>,
    /// Print one object of JSON.
    pub json: bool,
    /// Settings over those of the checkpoint.
    pub overrides: Vec<String>,
}

/// The object of `--json`.
#[derive(Serialize)]
struct Report<'a> {
    checkpoint: &'a Path,
    id: &'a str,
    step: u64,
    data: &'a str,
    split: &'a str,
    /// Digest of the data, as records of runs have it.
    fingerprint: Option<&'a str>,
    samples: u64,
    /// Null if it is not finite.
    loss: f64,
    /// Of language models.
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity: Option<f64>,
    /// Of other networks, by name.
    metrics: &'a std::collections::BTreeMap<String, f64>,
}

/// Runs one rank; returns the exit code.
pub fn run(request: &Request, launched: bool) -> i32 {
    job::run(launched, |comm| {
        let world = comm.world();
        let threads = Topology::gather(&world, comm.node().host)?.threads();
        // Held until all is read.
        let (reader, _lease) = used::open(&world, &request.checkpoint)?;
        let config = world.agree(config(request, &reader))?;
        match place(comm, &config)? {
            None => on(comm, request, reader, config, threads, cpu),
            Some(gpu) => on(&comm.on(), request, reader, config, threads, |plan| gpu.backend(plan)),
        }
    })
}

fn config(request: &Request, reader: &Reader) -> Result<Config> {
    let config = used::config(reader, &request.overrides, request.data.as_deref())?;
    if config.data.path.is_empty() && config.data.mix.is_empty() {
        return Err(Error::input(format!("{}: the checkpoint was imported and tells no data", reader.dir().display()))
            .hint("give some with --data PATH: shards of hpctrain data import, or an HDF5 file"));
    }
    Ok(config)
}

fn on<B: Kernels>(
    comm: &Comm<B>,
    request: &Request,
    mut reader: Reader,
    config: Config,
    threads: usize,
    backend: impl FnOnce(&Plan) -> Result<B>,
) -> Result<i32> {
    let world = comm.world();
    let plan = world.agree(model::plan(config, world.size(), threads, !B::ON_HOST))?;
    let opened = || {
        let split = used::split(&plan.config, request.split)?;
        let mut data = feed::measured(&plan.config, split)?;
        let notes = reader.manifest().conform(&mut data)?;
        Ok((split, data, notes))
    };
    let (split, data, notes) = world.agree(opened())?;
    used::warn(&notes, world.rank());
    let backend = world.agree(backend(&plan))?;
    let mut engine = model::engine(comm, &plan, backend)?;
    world.agree(reader.check_files(world.rank(), world.size()).and_then(|()| model::load(&mut engine, &mut reader)))?;
    let mut evaluator = Evaluator::new(data, plan.config.eval.samples, plan.config.eval.batch);
    let measured = evaluator.measure(&mut engine, &world, || false)?;
    let measures = measured.ok_or_else(|| Error::internal("an evaluation that nobody interrupts was interrupted"))?;
    if world.rank() == 0 {
        say(told(&reader, &plan, split, &evaluator, &measures, request.json)?);
    }
    Ok(0)
}

/// The result as a line of text, or as JSON.
fn told(reader: &Reader, plan: &Plan, split: Split, set: &Evaluator, found: &Measures, json: bool) -> Result<String> {
    let (checkpoint, data, samples) = (reader.dir(), plan.config.data.told(), set.samples());
    if !json {
        let (measures, samples) = (found.told(), grouped(samples));
        return Ok(format!("{}: {measures} over {samples} samples of {data} ({split})", checkpoint.display()));
    }
    let manifest = reader.manifest();
    let (id, step, split) = (&manifest.id[..], manifest.step, split.name());
    let Measures { loss, metrics } = found;
    let perplexity = plan.network.is_language().then(|| loss.exp());
    let (data, fingerprint) = (&data[..], set.digest());
    let report = Report { checkpoint, id, step, data, split, fingerprint, samples, loss: *loss, perplexity, metrics };
    serde_json::to_string(&report).map_err(|e| Error::internal(format!("report: {e}")))
}
