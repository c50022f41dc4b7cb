//! `hpctrain submit`: writes the job script of a batch system, and submits it.
//!
//! `job.rs` sizes the job by the configuration and the site file, `memory.rs` checks that it fits,
//! `script.rs` writes it. The batch systems differ in directives, in how a job is requeued, and in
//! the launcher: `slurm.rs`, `pbs.rs`, `flux.rs` and `launcher.rs` have these.

mod batch_system;
mod flux;
mod job;
mod launcher;
mod memory;
mod pbs;
mod quote;
mod script;
mod site;
mod slurm;

use std::path::PathBuf;

pub use batch_system::BatchSystem;

use crate::config::{Config, Time};
use crate::error::Result;
use job::BatchJob;
use site::SiteFile;

/// The options of a job that neither the configuration nor the site file gives.
#[derive(Debug, Clone)]
pub struct SubmitOptions {
    /// The number of nodes.
    pub nodes: usize,
    /// The number of ranks on each node. Default: one per GPU, or one per group of cores.
    pub ranks_per_node: Option<usize>,
    /// The time limit. Default: that of the site file.
    pub time: Option<Time>,
    /// The name of the job. Default: the name that the run would have.
    pub name: Option<String>,
    /// The batch system. Default: that of the site file, or the one whose command is on `PATH`.
    pub scheduler: Option<BatchSystem>,
    /// The site file. Default: `hpctrain/site.toml` in the user's directory of configurations.
    pub site: Option<PathBuf>,
    /// Arguments of `hpctrain train`.
    pub arguments: Vec<String>,
}

/// A job script.
#[derive(Debug, Clone)]
pub struct BatchScript {
    /// The batch system that it is written for.
    pub system: BatchSystem,
    /// The script.
    pub text: String,
    /// The layout and the memory of a rank, in one line.
    pub plan: String,
}

/// Writes the job script that trains `config`, whose run would get the name `run`.
///
/// # Errors
/// Returns an error if the site file, the options or the configuration are invalid, if they do not
/// fit together, or if a rank does not fit into the memory of a GPU.
pub fn job_script(options: &SubmitOptions, config: &Config, run: &str) -> Result<BatchScript> {
    let site = SiteFile::read(options.site.as_deref())?;
    let system = match options.scheduler.or(site.scheduler) {
        Some(system) => system,
        None => BatchSystem::on_path()?,
    };
    let job = BatchJob::new(options, config, run, &site)?;
    let plan = memory::check(config, &job, &site)?;
    let text = script::script(system, &job, &site, &plan)?;
    Ok(BatchScript { system, text, plan })
}
