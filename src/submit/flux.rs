//! The parts of a job script that are Flux's.

use super::batch_system::BatchSystem;
use super::dialect::Dialect;
use super::job::BatchJob;
use super::site::SiteFile;
use crate::error::Result;

/// Submits the script again to the instance that the job runs in, under the name of the run. The
/// new job gets this one's environment.
const REQUEUE: &str =
    r#"    RUN_NAME=$run_name RESTARTS=$((restarts + 1)) flux --parent batch "$0""#;

/// Flux sends the signal to the script, too, which must live on until the ranks have saved.
const SETUP: &str = "trap : USR1";

/// Returns Flux's parts of a job script.
///
/// # Errors
/// Returns an error for a key of the site file that Flux does not have.
pub(super) fn dialect(job: &BatchJob, site: &SiteFile) -> Result<Dialect> {
    if let Some(qos) = &site.qos {
        let error = site.refuse("qos", qos, BatchSystem::Flux);
        return Err(error.hint("omit the key; write an option of the site into extra"));
    }
    let mut directives = vec![
        format!("--job-name={}", job.name),
        format!("--nodes={}", job.nodes),
        format!("--nslots={}", job.ranks()),
    ];
    directives.extend(job.cores_per_rank.map(|cores| format!("--cores-per-slot={cores}")));
    directives.extend(job.has_gpus().then(|| "--gpus-per-slot=1".into()));
    directives.extend(job.seconds.map(|seconds| format!("--time-limit={seconds}s")));
    directives.extend(site.partition.as_ref().map(|queue| format!("--queue={queue}")));
    directives.extend(site.account.as_ref().map(|bank| format!("--bank={bank}")));
    directives.extend(job.lead().map(|lead| format!("--signal=SIGUSR1@{lead}s")));
    directives.push(format!("--output={}-{{{{id}}}}.log", job.name));
    Ok(Dialect {
        prefix: "#flux:",
        directives,
        // Before flux-core 0.51 the signal does not reach the ranks.
        has_signal: false,
        job_id: r#"$(flux job id --to=dec "$(flux getattr jobid)")"#,
        restarts: "${RESTARTS:-0}",
        nodes: "$(flux getattr hostlist)",
        setup: Some(SETUP),
        requeue: REQUEUE,
    })
}
