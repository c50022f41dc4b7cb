//! The size and the name of a job, by its options, the configuration and the site file.

use std::path::{Path, PathBuf};

use super::batch_system::BatchSystem;
use super::quote::check_line;
use super::site::SiteFile;
use crate::config::{Config, DeviceChoice, Time};
use crate::error::{Error, Result};

/// The cores of a rank that computes on the CPU, unless `--ranks-per-node` says otherwise.
const CORES_OF_A_RANK: usize = 4;

/// The longest time before the limit at which a run is asked to save and end, in seconds.
const LONGEST_LEAD: u64 = 120;

/// The longest name of a job, which PBS sets.
const LONGEST_NAME: usize = 230;

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

/// A job.
#[derive(Debug, Clone)]
pub(super) struct BatchJob {
    /// The name.
    pub name: String,
    /// The directory in which it runs.
    pub directory: String,
    /// The path of hpctrain.
    pub program: String,
    /// The number of nodes.
    pub nodes: usize,
    /// The number of ranks on each node.
    pub ranks_per_node: usize,
    /// The number of GPUs on each node that it uses.
    pub gpus_per_node: usize,
    /// The number of cores of a rank, if the site file has that of a node.
    pub cores_per_rank: Option<usize>,
    /// The time limit in seconds.
    pub seconds: Option<u64>,
    /// Whether the configuration has a time limit of its own.
    pub has_run_limit: bool,
    /// The directory of runs.
    pub run_root: String,
    /// The name of the run, if the configuration has one.
    pub run_name: Option<String>,
    /// The arguments of `hpctrain train`.
    pub arguments: Vec<String>,
}

impl BatchJob {
    /// Creates the job that trains `config`, whose run would get the name `run`.
    ///
    /// # Errors
    /// Returns an error if the options, the configuration and the site file do not fit together.
    pub(super) fn new(
        options: &SubmitOptions,
        config: &Config,
        run: &str,
        site: &SiteFile,
    ) -> Result<Self> {
        let on_gpus = match config.run.device {
            DeviceChoice::Auto => site.gpus_per_node > 0,
            DeviceChoice::Cuda | DeviceChoice::CudaAt(_) => true,
            DeviceChoice::Cpu => false,
            DeviceChoice::Mixed => {
                return Err(Error::input("run.device = mixed is not supported by submit")
                    .hint("set run.device=cuda or cpu, or write the script: docs/cluster.md"));
            }
        };
        let ranks_per_node = ranks_per_node(options, on_gpus, site)?;
        let cores_per_rank = site.cores_per_node.map(|cores| cores / ranks_per_node);
        if cores_per_rank == Some(0) {
            return Err(too_many(site, ranks_per_node, "cores_per_node", site.cores_per_node));
        }
        let seconds = options.time.or(site.time).map(|Time(time)| time.as_secs());
        if seconds == Some(0) {
            return Err(Error::input("a time limit of 0 s").hint("--time 4h"));
        }
        let directory = std::env::current_dir()
            .map_err(|e| Error::io("find the directory", Path::new("."), e))?;
        let program = match &site.program {
            Some(program) => program.clone(),
            None => std::env::current_exe()
                .map_err(|e| Error::internal(format!("cannot find this program: {e}")))?,
        };
        let mut arguments = options.arguments.clone();
        // A rank without a GPU is then an error, and not a rank on the CPU.
        if on_gpus && config.run.device == DeviceChoice::Auto {
            arguments.extend(["--set", "run.device=cuda"].map(Into::into));
        }
        Ok(Self {
            name: options.name.as_deref().map_or_else(|| Ok(default_name(run)), given_name)?,
            directory: text(&directory)?,
            program: text(&program)?,
            nodes: options.nodes,
            ranks_per_node,
            gpus_per_node: if on_gpus { ranks_per_node } else { 0 },
            cores_per_rank,
            seconds,
            has_run_limit: config.run.time_limit.is_some(),
            run_root: config.run.root.clone(),
            run_name: config.run.name.clone(),
            arguments,
        })
    }

    /// Returns true if the ranks compute on GPUs.
    pub(super) fn has_gpus(&self) -> bool {
        self.gpus_per_node > 0
    }

    /// Returns the number of ranks.
    pub(super) fn ranks(&self) -> usize {
        self.nodes * self.ranks_per_node
    }

    /// Returns how many seconds before the time limit the run is asked to save and end: two
    /// minutes, and at most a quarter of a short limit.
    pub(super) fn lead(&self) -> Option<u64> {
        self.seconds.map(|seconds| (seconds / 4).clamp(1, LONGEST_LEAD))
    }

    /// Returns the time limit as hours, minutes and seconds, which Slurm and PBS read.
    pub(super) fn clock(&self) -> Option<String> {
        let seconds = self.seconds?;
        Some(format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60))
    }
}

fn ranks_per_node(options: &SubmitOptions, on_gpus: bool, site: &SiteFile) -> Result<usize> {
    let gpus = site.gpus_per_node;
    let path = site.path.display();
    match (options.ranks_per_node, on_gpus) {
        (Some(ranks), true) if gpus > 0 && ranks > gpus => {
            Err(too_many(site, ranks, "gpus_per_node", Some(gpus)))
        }
        (Some(ranks), _) => Ok(ranks),
        (None, true) if gpus > 0 => Ok(gpus),
        (None, true) => {
            Err(Error::input("run.device = cuda, but the GPUs of a node are not known")
                .hint(format!("set gpus_per_node in {path}, or give --ranks-per-node N")))
        }
        (None, false) => match site.cores_per_node {
            Some(cores) => Ok((cores / CORES_OF_A_RANK).max(1)),
            None => Err(Error::input("the cores of a node are not known")
                .hint(format!("set cores_per_node in {path}, or give --ranks-per-node N"))),
        },
    }
}

fn too_many(site: &SiteFile, ranks: usize, key: &str, most: Option<usize>) -> Error {
    let most = most.unwrap_or_default();
    Error::input(format!(
        "{ranks} ranks on each node, but {key} = {most} in {}",
        site.path.display()
    ))
    .hint(format!("--ranks-per-node {most} or less, or more --nodes"))
}

/// Returns a path as text.
fn text(path: &Path) -> Result<String> {
    let text = path.to_str().ok_or_else(|| {
        Error::input(format!("{} is not UTF-8", path.display())).hint("use another path")
    })?;
    check_line("path", text)?;
    Ok(text.to_owned())
}

/// Returns true if all batch systems accept the character in the name of a job.
fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_.-".contains(c)
}

/// Returns the name of `--name`.
fn given_name(name: &str) -> Result<String> {
    let is_valid = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(is_of_name)
        && name.len() <= LONGEST_NAME;
    match is_valid {
        true => Ok(name.to_owned()),
        false => Err(Error::input(format!("--name {name:?} cannot name a job"))
            .hint("use letters, digits, '.', '_' and '-', and begin with a letter")),
    }
}

/// Returns the name of a job by that of its run.
fn default_name(run: &str) -> String {
    let name: String = run.chars().map(|c| if is_of_name(c) { c } else { '-' }).collect();
    match name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        true => name.chars().take(LONGEST_NAME).collect(),
        false => "hpctrain".into(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::config::{Sources, load};

    /// Returns a job of two nodes with two ranks of four cores each.
    pub(in super::super) fn small_job() -> BatchJob {
        BatchJob {
            name: "small".into(),
            directory: "/home/me/my project".into(),
            program: "/opt/hpctrain/bin/hpctrain".into(),
            nodes: 2,
            ranks_per_node: 2,
            gpus_per_node: 0,
            cores_per_rank: Some(4),
            seconds: Some(4 * 3600),
            has_run_limit: false,
            run_root: "runs".into(),
            run_name: None,
            arguments: ["--config", "my.toml", "--set", "run.steps=500"].map(Into::into).to_vec(),
        }
    }

    fn job(site: &str, ranks_per_node: Option<usize>, settings: &[&str]) -> Result<BatchJob> {
        let overrides: Vec<String> = settings.iter().map(ToString::to_string).collect();
        let (config, run) = load(&Sources { overrides: &overrides, ..Sources::default() })?;
        let options = SubmitOptions {
            nodes: 2,
            ranks_per_node,
            time: None,
            name: None,
            scheduler: None,
            site: None,
            arguments: vec![],
        };
        BatchJob::new(&options, &config, &run, &SiteFile::parse(site, "/s.toml".into())?)
    }

    #[test]
    fn ranks_follow_the_device() {
        let sizes = |site: &str, ranks: Option<usize>, device: &str| {
            let job = job(site, ranks, &[&format!("run.device={device}")]).unwrap();
            (job.ranks_per_node, job.gpus_per_node, job.cores_per_rank)
        };
        let site = "gpus_per_node = 4\ncores_per_node = 32";
        assert_eq!(sizes(site, None, "auto"), (4, 4, Some(8)));
        assert_eq!(sizes(site, None, "cpu"), (8, 0, Some(4)));
        assert_eq!(sizes(site, Some(2), "cuda"), (2, 2, Some(16)));
        assert_eq!(sizes("", Some(3), "auto"), (3, 0, None));
        assert_eq!(sizes("", Some(3), "cuda"), (3, 3, None));
        assert_eq!(sizes("cores_per_node = 2", None, "auto"), (1, 0, Some(2)));
        let cuda = ["--set", "run.device=cuda"];
        assert_eq!(job(site, None, &[]).unwrap().arguments, cuda);
        assert!(job(site, None, &["run.device=cpu"]).unwrap().arguments.is_empty());
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        for (site, ranks, device, words) in [
            (
                "",
                None,
                "auto",
                "the cores of a node are not known\nhint: set cores_per_node in /s.toml",
            ),
            (
                "",
                None,
                "cuda",
                "the GPUs of a node are not known\nhint: set gpus_per_node in /s.toml",
            ),
            (
                "gpus_per_node = 4",
                Some(5),
                "auto",
                "5 ranks on each node, but gpus_per_node = 4 in /s.toml",
            ),
            ("cores_per_node = 4", Some(5), "auto", "5 ranks on each node, but cores_per_node = 4"),
            ("gpus_per_node = 4", None, "mixed", "run.device = mixed is not supported"),
            ("time = 0", Some(1), "auto", "a time limit of 0 s"),
        ] {
            let error = job(site, ranks, &[&format!("run.device={device}")]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn names_are_those_that_batch_systems_accept() {
        assert_eq!(given_name("a-B_3.x").unwrap(), "a-B_3.x");
        for name in ["", "3a", "a b", "a/b", "-a", "a\n", "é"] {
            assert!(given_name(name).unwrap_err().to_string().contains("\nhint: "), "{name}");
        }
        assert_eq!(default_name("my run"), "my-run");
        assert_eq!(default_name("7"), "hpctrain");
    }

    #[test]
    fn times_are_written_as_clocks() {
        let at = |seconds| BatchJob { seconds: Some(seconds), ..small_job() };
        assert_eq!(at(100 * 3600 + 61).clock().unwrap(), "100:01:01");
        assert_eq!(
            [at(60), at(14_400), at(1)].map(|job| job.lead()),
            [Some(15), Some(120), Some(1)]
        );
        assert_eq!(BatchJob { seconds: None, ..small_job() }.lead(), None);
    }
}
