//! The parts of a job script that are those of OpenPBS and PBS Professional.

use super::batch_system::BatchSystem;
use super::dialect::Dialect;
use super::job::BatchJob;
use super::site::SiteFile;
use crate::error::Result;

/// Submits the script again under the name of the run: `qrerun`, which would keep the job's number,
/// is for operators and managers of PBS only. PBS runs a copy of the script, which is `$0`.
const REQUEUE: &str = r#"    qsub -v "RUN_NAME=$run_name,RESTARTS=$((restarts + 1))" "$0" ||
        echo "qsub refused the job: continue with qsub -v RUN_NAME=$run_name and the script" >&2"#;

/// Returns the parts of a job script that are those of PBS.
///
/// # Errors
/// Returns an error for a key of the site file that PBS does not have.
pub(super) fn dialect(job: &BatchJob, site: &SiteFile) -> Result<Dialect> {
    if let Some(qos) = &site.qos {
        let error = site.refuse("qos", qos, BatchSystem::Pbs);
        return Err(error.hint("omit the key; write a directive of the site into extra"));
    }
    let ranks = job.ranks_per_node;
    let cores = job.cores_per_rank.unwrap_or(1);
    let mut select =
        format!("select={}:ncpus={}:mpiprocs={ranks}:ompthreads={cores}", job.nodes, cores * ranks);
    if job.has_gpus() {
        select += &format!(":ngpus={}", job.gpus_per_node);
    }
    let mut directives = vec![format!("-N {}", job.name), "-S /bin/bash".into()];
    directives.extend([format!("-l {select}"), "-l place=scatter".into()]);
    directives.extend(job.clock().map(|clock| format!("-l walltime={clock}")));
    directives.extend(site.partition.as_ref().map(|queue| format!("-q {queue}")));
    directives.extend(site.account.as_ref().map(|account| format!("-A {account}")));
    // The output is a file with the job's name and number.
    directives.extend(["-r y", "-j oe"].map(Into::into));
    Ok(Dialect {
        prefix: "#PBS",
        directives,
        has_signal: false,
        job_id: "${PBS_JOBID%%.*}",
        restarts: "${RESTARTS:-0}",
        nodes: r#"$(sort -u "$PBS_NODEFILE" | paste -sd, -)"#,
        setup: None,
        requeue: REQUEUE,
    })
}
