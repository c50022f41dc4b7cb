//! The site file: the facts about a cluster and an account that every job script needs.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::batch_system::BatchSystem;
use super::launcher::{Launcher, MpiLibrary};
use super::quote::check_line;
use crate::config::{Size, Time};
use crate::error::{Error, Result};

/// The keys of a site file. All are optional.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SiteFile {
    /// The batch system: `slurm`, `pbs` or `flux`. Default: the one whose command is on `PATH`.
    pub scheduler: Option<BatchSystem>,
    /// The partition of Slurm, or the queue of PBS and Flux; `queue` is the same key.
    #[serde(alias = "queue")]
    pub partition: Option<String>,
    /// The account (Slurm, PBS) or bank (Flux) that the job is charged to.
    pub account: Option<String>,
    /// The quality of service; only Slurm has one.
    pub qos: Option<String>,
    /// Environment modules to load: those that hpctrain was built with.
    #[serde(default)]
    pub modules: Vec<String>,
    /// Lines of shell that run after the modules, such as exports.
    #[serde(default)]
    pub setup: Vec<String>,
    /// GPUs of a node; 0, the default, for jobs on CPUs.
    #[serde(default)]
    pub gpus_per_node: usize,
    /// Cores of a node that the ranks of a job divide.
    pub cores_per_node: Option<usize>,
    /// Memory of a GPU that a rank may use, such as `74GiB`. A job that does not fit is refused.
    pub gpu_memory: Option<Size>,
    /// The MPI library: `open-mpi` (the default), `mpich` or `intel-mpi`.
    #[serde(default)]
    pub mpi: MpiLibrary,
    /// The launcher of the ranks: `srun`, `mpirun` or `flux run`. Default: that of the batch
    /// system.
    pub launcher: Option<Launcher>,
    /// The path of hpctrain on the nodes. Default: that of the program that writes the script.
    pub program: Option<PathBuf>,
    /// The time limit of jobs without `--time`, such as `4h`. Default: that of the batch system.
    pub time: Option<Time>,
    /// More directives of the batch system, such as `--constraint=a100`, verbatim.
    #[serde(default)]
    pub extra: Vec<String>,
    /// The path of the file, for messages.
    #[serde(skip)]
    pub path: PathBuf,
}

impl SiteFile {
    /// Reads a site file. Without a path it is the user's; that one may be missing.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is invalid.
    pub(super) fn read(given: Option<&Path>) -> Result<Self> {
        let path =
            given.map_or_else(|| default_path(|name| std::env::var_os(name)), Path::to_owned);
        match std::fs::read_to_string(&path) {
            Ok(text) => Self::parse(&text, path),
            Err(e) if given.is_none() && e.kind() == std::io::ErrorKind::NotFound => {
                Ok(Self { path, ..Self::default() })
            }
            Err(e) => Err(Error::io("read the site file", &path, e)),
        }
    }

    /// Parses the text of the file at `path`.
    pub(super) fn parse(text: &str, path: PathBuf) -> Result<Self> {
        let site: Self = toml::from_str(text).map_err(|e| {
            let line = e
                .span()
                .map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            let message = e.message().lines().next().unwrap_or_default();
            let (message, known) = message.split_once(", expected ").unwrap_or((message, ""));
            let hint = match known {
                "" => "docs/cluster.md lists the keys of a site file".to_owned(),
                known => format!("use {known}; docs/cluster.md explains the keys of a site file"),
            };
            let message = message.replace("unknown field", "unknown key");
            Error::input(format!("{}:{line}: {message}", path.display())).hint(hint)
        })?;
        let site = Self { path, ..site };
        site.check().map_err(|e| e.at(site.path.display()))?;
        Ok(site)
    }

    /// Returns the names and the values of keys that become directives of one word.
    fn names(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let names =
            [("partition", &self.partition), ("account", &self.account), ("qos", &self.qos)];
        names.into_iter().filter_map(|(key, value)| Some((key, value.as_deref()?)))
    }

    fn check(&self) -> Result<()> {
        for (key, value) in self.names() {
            check_line(key, value)?;
            if value.is_empty() || value.contains(char::is_whitespace) {
                return Err(Error::input(format!("{key} = {value:?} is not one word"))
                    .hint("omit the key, or write the name that the batch system shows"));
            }
        }
        for (key, lines) in
            [("modules", &self.modules), ("setup", &self.setup), ("extra", &self.extra)]
        {
            lines.iter().try_for_each(|line| check_line(key, line))?;
        }
        match self.cores_per_node {
            Some(0) => {
                Err(Error::input("cores_per_node = 0").hint("write the number, or omit the key"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the error of a key with this value that the batch system does not have.
    pub(super) fn refuse(&self, key: &str, value: &str, system: BatchSystem) -> Error {
        Error::input(format!(
            "{}: {key} = {value:?} is not supported for {system}",
            self.path.display()
        ))
    }
}

/// Returns the path of the user's site file: in `$XDG_CONFIG_HOME`, else in `~/.config`.
fn default_path(env: impl Fn(&str) -> Option<std::ffi::OsString>) -> PathBuf {
    let absolute = |name: &str| env(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = absolute("XDG_CONFIG_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".config")))
        .unwrap_or_default();
    folder.join("hpctrain/site.toml")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        let error = SiteFile::parse(text, "/etc/site.toml".into()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    }

    #[test]
    fn errors_name_the_file_the_line_and_the_key() {
        let error = refused("partition = 'gpu'\nacount = 'x'\n");
        assert!(
            error.starts_with(
                "/etc/site.toml:2: unknown key `acount`\nhint: use one of `scheduler`, "
            ),
            "{error}"
        );
        let error = refused("scheduler = 'lsf'");
        assert!(
            error.contains("site.toml:1: unknown variant `lsf`")
                && error.contains("`slurm`, `pbs`"),
            "{error}"
        );
        for (text, words) in [
            ("partition = 'a b'", "partition = \"a b\" is not one word"),
            ("qos = ''", "qos = \"\" is not one word"),
            ("account = \"a\\nb\"", "account = \"a\\nb\" has a control character"),
            ("extra = [\"--x\\n#SBATCH --y\"]", "extra = "),
            ("setup = ['export A=1', \"b\\u0007\"]", "setup = "),
            ("cores_per_node = 0", "cores_per_node = 0"),
            ("gpu_memory = 'much'", "is not a size"),
            ("time = 'soon'", "is not a time"),
        ] {
            let error = refused(text);
            assert!(
                error.contains("/etc/site.toml")
                    && error.contains(words)
                    && error.contains("\nhint: "),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn the_page_explains_every_key() {
        let page = include_str!("../../docs/cluster.md");
        let block = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next());
        let site = SiteFile::parse(block.unwrap(), "docs/cluster.md".into()).unwrap();
        assert_eq!((site.gpus_per_node, site.extra.len()), (4, 2));
        let error = refused("x = 1");
        let keys: Vec<&str> = error.split('`').skip(3).step_by(2).collect();
        assert!(keys.len() > 12, "{error}");
        for key in keys {
            assert!(
                page.contains(&format!("| `{key}` |"))
                    || page.contains(&format!("or `{key}` |"))
                    || page.contains(&format!("| `{key}` or")),
                "{key}"
            );
        }
    }

    #[test]
    fn the_queue_is_the_partition() {
        let site = SiteFile::parse("queue = 'q'\nlauncher = 'flux run'", "x".into()).unwrap();
        assert_eq!(
            (site.partition.as_deref(), site.launcher),
            (Some("q"), Some(Launcher::FluxRun))
        );
    }

    #[test]
    fn the_path_follows_the_directory_of_configurations() {
        let path = |config: &str, home: &str| {
            default_path(|name| match name {
                "XDG_CONFIG_HOME" => Some(config.into()),
                _ => Some(home.into()),
            })
        };
        assert_eq!(path("/c", "/h"), Path::new("/c/hpctrain/site.toml"));
        // The specification ignores relative paths.
        for ignored in ["", "c"] {
            assert_eq!(path(ignored, "/h"), Path::new("/h/.config/hpctrain/site.toml"));
        }
    }
}
