//! The parts of a job script that differ between batch systems.

/// The parts of a job script that differ between batch systems.
pub(super) struct Dialect {
    /// The beginning of a line with a directive.
    pub prefix: &'static str,
    /// The directives.
    pub directives: Vec<String>,
    /// Whether the batch system signals the ranks before the time limit.
    pub has_signal: bool,
    /// The job's number, as an expression of the shell.
    pub job_id: &'static str,
    /// How often the job was requeued, as an expression of the shell.
    pub restarts: &'static str,
    /// The nodes of the job, as an expression of the shell.
    pub nodes: &'static str,
    /// A command at the beginning.
    pub setup: Option<&'static str>,
    /// The commands that requeue the job.
    pub requeue: &'static str,
}
