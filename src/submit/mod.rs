//! `hpctrain submit`: writes the job script of a batch system, and submits it.
//!
//! `job.rs` sizes the job by the configuration and the site file, `memory.rs` checks that it fits,
//! `script.rs` writes it. The batch systems differ in directives and in how a job is requeued
//! (`slurm.rs`, `pbs.rs`, `flux.rs`), and in the launcher (`launch_command.rs`).

mod batch_system;
mod dialect;
mod flux;
mod job;
mod launch_command;
mod launcher;
mod memory;
mod pbs;
mod quote;
mod script;
mod site;
mod slurm;

pub use batch_system::BatchSystem;
pub use job::SubmitOptions;

use crate::config::Config;
use crate::error::Result;
use job::BatchJob;
use site::SiteFile;

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
