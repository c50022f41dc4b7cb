//! `hpctrain ps auto`: picks the role of this process in a run with parameter servers from the
//! variables that cluster managers set.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Deserialize;

use super::servers::{coordinate_and_serve, coordinate_run, serve_run, work_for_run};
use super::train::RunArgs;
use crate::comm::single;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::evaluate::{Policy, SidecarOptions, TRAINER_TIMEOUT};
use crate::job::{exit_on_panic, fail};
use crate::signals;
use crate::telemetry::say;
use crate::train::{Customization, evaluate_run};

/// The variable of `TensorFlow`'s `TFConfigClusterResolver`.
const TF_CONFIG: &str = "TF_CONFIG";

/// Arguments of `hpctrain ps auto`.
#[derive(Args)]
pub struct AutoArgs {
    /// Number of parameter servers, with RANK and WORLD_SIZE; TF_CONFIG lists its own.
    #[arg(long, value_name = "N", default_value_t = 0)]
    servers: usize,
    /// Which checkpoints the evaluator of TF_CONFIG evaluates [default: latest]
    #[arg(long, value_enum)]
    policy: Option<Policy>,
    #[command(flatten)]
    run: RunArgs,
}

/// The keys that an evaluator takes from its own command; all others are those of the run.
const EVALUATOR_KEYS: [&str; 6] = [
    "run.device",
    "device.memory",
    "eval.batch",
    "eval.patience",
    "eval.min_delta",
    "comm.timeout",
];

/// The role of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PsTask {
    /// It coordinates the run.
    Coordinate {
        /// The number of servers.
        servers: usize,
        /// The number of workers.
        workers: usize,
        /// The address to listen on.
        address: Option<String>,
        /// Whether the cluster has an evaluator.
        evaluator: bool,
    },
    /// It is the first parameter server, and coordinates the run because the cluster has no chief.
    CoordinateAndServe {
        /// The number of servers, this one included.
        servers: usize,
        /// The number of workers.
        workers: usize,
        /// The address to listen on.
        address: Option<String>,
        /// Whether the cluster has an evaluator.
        evaluator: bool,
    },
    /// It is a parameter server.
    Serve {
        /// The address to listen on.
        address: Option<String>,
    },
    /// It is a worker.
    Work,
    /// It evaluates checkpoints.
    Evaluate,
}

/// The value of `TF_CONFIG`.
#[derive(Deserialize)]
struct TfConfig {
    #[serde(default)]
    cluster: Cluster,
    task: TfTask,
}

#[derive(Default, Deserialize)]
struct Cluster {
    #[serde(default)]
    chief: Vec<String>,
    #[serde(default)]
    ps: Vec<String>,
    #[serde(default)]
    worker: Vec<String>,
    #[serde(default)]
    evaluator: Vec<String>,
}

#[derive(Deserialize)]
struct TfTask {
    #[serde(rename = "type")]
    kind: String,
    index: usize,
}

/// Returns the role that the environment assigns; `servers` is the number of servers for `RANK` and
/// `WORLD_SIZE`.
fn task(env: impl Fn(&str) -> Option<String>, servers: usize) -> Result<PsTask> {
    if let Some(text) = env(TF_CONFIG) {
        return task_from_tf_config(&text);
    }
    let (Some(rank), Some(ranks)) = (number(&env, "RANK")?, number(&env, "WORLD_SIZE")?) else {
        return Err(Error::input(
            "neither TF_CONFIG nor RANK and WORLD_SIZE assign this process a role",
        )
        .hint("set one of them, or use hpctrain ps coordinator, server and worker"));
    };
    if rank >= ranks || servers + 2 > ranks || servers == 0 {
        return Err(Error::input(format!(
            "RANK={rank}, WORLD_SIZE={ranks} and --servers {servers} leave no worker"
        ))
        .hint(
            "rank 0 is the coordinator, the next N of --servers N are servers, the rest workers",
        ));
    }
    Ok(match rank {
        0 => PsTask::Coordinate {
            servers,
            workers: ranks - 1 - servers,
            address: env("MASTER_ADDR"),
            evaluator: false,
        },
        rank if rank <= servers => PsTask::Serve { address: None },
        _ => PsTask::Work,
    })
}

/// Returns the number that a variable has, or `None` if it is not set.
fn number(env: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<usize>> {
    let Some(text) = env(name) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| {
        Error::input(format!("{name}={text} is not a number"))
            .hint("torchrun sets it; unset it if nothing should")
    })
}

/// Returns the role that `TF_CONFIG` assigns. `TensorFlow`'s guides give an evaluator a cluster of
/// its own or none, and no chief where a notebook coordinates: the first server does so
/// then.
///
/// # Errors
/// Returns an error if `text` is not JSON of that form, its task is not in the cluster, or the
/// cluster has no server or more than one chief.
pub fn task_from_tf_config(text: &str) -> Result<PsTask> {
    let hint = r#"such as {"cluster": {"chief": ["a:2222"], "ps": ["b:2222"], "worker": ["c:2222"]}, "task": {"type": "worker", "index": 0}}"#;
    let wrong = |what: String| Error::input(format!("{TF_CONFIG}: {what}")).hint(hint);
    let TfConfig { cluster, task } =
        serde_json::from_str(text).map_err(|e| wrong(e.to_string()))?;
    let Cluster { chief, ps, worker, evaluator } = cluster;
    let addresses = match task.kind.as_str() {
        "chief" | "coordinator" => &chief,
        "ps" => &ps,
        "worker" => &worker,
        // It only needs the directory of the run.
        "evaluator" => return Ok(PsTask::Evaluate),
        other => {
            return Err(wrong(format!(
                "task.type is {other:?}, not chief, ps, worker or evaluator"
            )));
        }
    };
    if task.index >= addresses.len() {
        return Err(wrong(format!(
            "task.index is {}, but cluster.{} has {}",
            task.index,
            task.kind,
            addresses.len()
        )));
    }
    if ps.is_empty() {
        return Err(wrong(
            "cluster.ps is empty: a run without servers is started by mpirun or srun".into(),
        ));
    }
    if chief.len() > 1 {
        return Err(wrong(format!("cluster.chief has {} addresses, not one", chief.len())));
    }
    if worker.is_empty() {
        return Err(wrong("cluster.worker is empty: nothing would train".into()));
    }
    let address = addresses.get(task.index).cloned();
    let servers = ps.len();
    let workers = worker.len();
    let evaluator = !evaluator.is_empty();
    Ok(match task.kind.as_str() {
        "ps" if chief.is_empty() && task.index == 0 => {
            PsTask::CoordinateAndServe { servers, workers, address, evaluator }
        }
        "ps" => PsTask::Serve { address },
        "worker" => PsTask::Work,
        _ => PsTask::Coordinate { servers, workers, address, evaluator },
    })
}

/// Returns the directory of a run, which all its processes must know.
fn directory(config: &Config) -> Result<PathBuf> {
    let name = config.run.name.as_ref().ok_or_else(|| {
        Error::input(
            "run.name is not set, but the processes of a run find each other in its directory",
        )
        .hint("--set run.name=NAME, the same for all")
    })?;
    Ok(Path::new(&config.run.root).join(name))
}

/// Runs the role of this process and returns the exit code.
pub fn run(args: &AutoArgs) -> i32 {
    exit_on_panic("role");
    run_role(args).unwrap_or_else(|e| fail(&e))
}

/// Runs the role that the environment assigns and returns the exit code.
fn run_role(args: &AutoArgs) -> Result<i32> {
    signals::record_signals()?;
    let env = |name: &str| std::env::var(name).ok();
    if args.policy.is_some() && env(TF_CONFIG).is_none() {
        return Err(Error::input("--policy, but without TF_CONFIG no process is an evaluator")
            .hint("hpctrain eval --run DIR --watch --policy POLICY evaluates beside the run"));
    }
    let task = task(env, args.servers)?;
    let mut request = args.run.request(None)?;
    let run = directory(&request.config)?;
    let timeout = Duration::from_secs(request.config.parameter_server.timeout);
    if let PsTask::Coordinate { evaluator: true, .. }
    | PsTask::CoordinateAndServe { evaluator: true, .. } = &task
        && request.config.eval.inline
        && args.run.given_keys(&["eval.inline"])?.is_empty()
    {
        say("TF_CONFIG: cluster.evaluator evaluates: eval.inline = false");
        request.config.eval.inline = false;
    }
    match task {
        PsTask::Coordinate { servers, workers, address, .. } => {
            request.config.parameter_server.address =
                request.config.parameter_server.address.or(address);
            Ok(coordinate_run(request, servers, Some(workers)))
        }
        PsTask::CoordinateAndServe { servers, workers, address, .. } => {
            say("TF_CONFIG: cluster.chief is empty: ps 0 coordinates the run and serves, too");
            request.config.parameter_server.address =
                request.config.parameter_server.address.or(address);
            coordinate_and_serve(request, servers, workers)
        }
        PsTask::Serve { address } => {
            serve_run(&run, address.or(request.config.parameter_server.address), timeout)
                .map(|()| 0)
        }
        PsTask::Work => work_for_run(&run, timeout),
        PsTask::Evaluate => {
            let options = SidecarOptions {
                policy: args.policy.unwrap_or(Policy::Latest),
                overrides: args.run.given_keys(&EVALUATOR_KEYS)?,
                start_timeout: Some(TRAINER_TIMEOUT),
                ..SidecarOptions::new(run)
            };
            let custom = Customization::default();
            evaluate_run(&single(), &options, custom).map(|outcome| outcome.exit_code())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tf(kind: &str, index: usize) -> String {
        let cluster = r#"{"chief": ["a:2222"], "ps": ["b:2222", "b2:2222"], "worker": ["c:2222", "d:2222"], "evaluator": ["e:2222"]}"#;
        format!(r#"{{"cluster": {cluster}, "task": {{"type": "{kind}", "index": {index}}}}}"#)
    }

    /// Returns the role that an environment with these variables assigns.
    fn assigned(vars: &[(&str, &str)], servers: usize) -> Result<PsTask> {
        task(
            |name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into()),
            servers,
        )
    }

    #[test]
    fn tf_config_assigns_the_role() {
        let chief = PsTask::Coordinate {
            servers: 2,
            workers: 2,
            address: Some("a:2222".into()),
            evaluator: true,
        };
        assert_eq!(task_from_tf_config(&tf("chief", 0)).unwrap(), chief);
        assert_eq!(
            task_from_tf_config(&tf("ps", 1)).unwrap(),
            PsTask::Serve { address: Some("b2:2222".into()) }
        );
        assert_eq!(task_from_tf_config(&tf("worker", 1)).unwrap(), PsTask::Work);
        assert_eq!(task_from_tf_config(&tf("evaluator", 0)).unwrap(), PsTask::Evaluate);
        let wrong = |text: &str, words: &str| {
            let error = task_from_tf_config(text).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("hint: such as"), "{error}");
        };
        wrong("{", "TF_CONFIG: EOF while parsing an object at line 1 column 1");
        wrong(
            r#"{"cluster": {"ps": "b"}, "task": {}}"#,
            "invalid type: string \"b\", expected a sequence at line 1 column",
        );
        wrong(r#"{"cluster": {}}"#, "missing field `task`");
        wrong(&tf("worker", 2), "task.index is 2, but cluster.worker has 2");
        wrong(&tf("master", 0), "task.type is \"master\"");
        wrong(
            r#"{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}"#,
            "cluster.ps is empty",
        );
        wrong(
            r#"{"cluster": {"chief": ["a", "b"], "ps": ["c"]}, "task": {"type": "ps", "index": 0}}"#,
            "cluster.chief has 2 addresses, not one",
        );
        wrong(
            r#"{"cluster": {"ps": ["c"]}, "task": {"type": "ps", "index": 0}}"#,
            "cluster.worker is empty",
        );
        wrong(r#"{"task": {"type": "worker", "index": 0}}"#, "task.index is 0, but cluster.worker");
    }

    #[test]
    fn tf_config_may_lack_the_chief() {
        let tf = |kind: &str, index: usize| {
            let cluster =
                r#"{"worker": ["c:2222", "d:2222", "e:2222"], "ps": ["a:2222", "b:2222"]}"#;
            let task = format!(r#"{{"type": "{kind}", "index": {index}}}"#);
            task_from_tf_config(&format!(r#"{{"cluster": {cluster}, "task": {task}}}"#))
        };
        let address = |host: &str| Some(format!("{host}:2222"));
        assert_eq!(
            tf("ps", 0).unwrap(),
            PsTask::CoordinateAndServe {
                servers: 2,
                workers: 3,
                address: address("a"),
                evaluator: false
            }
        );
        assert_eq!(tf("ps", 1).unwrap(), PsTask::Serve { address: address("b") });
        assert_eq!(tf("worker", 2).unwrap(), PsTask::Work);
        assert_eq!(tf("evaluator", 0).unwrap(), PsTask::Evaluate);
        let error = tf("chief", 0).unwrap_err().to_string();
        assert!(error.contains("task.index is 0, but cluster.chief has 0"), "{error}");
    }

    #[test]
    fn tf_config_of_an_evaluator_needs_no_other_process() {
        for cluster in ["", r#""cluster": {"evaluator": ["host1:2222"]}, "#, r#""cluster": {}, "#] {
            let text = format!(r#"{{{cluster}"task": {{"type": "evaluator", "index": 0}}}}"#);
            assert_eq!(task_from_tf_config(&text).unwrap(), PsTask::Evaluate, "{text}");
        }
    }

    #[test]
    fn rank_and_world_size_assign_the_role() {
        let of_rank = |rank| {
            assigned(&[("RANK", rank), ("WORLD_SIZE", "5"), ("MASTER_ADDR", "a")], 2).unwrap()
        };
        assert_eq!(
            of_rank("0"),
            PsTask::Coordinate {
                servers: 2,
                workers: 2,
                address: Some("a".into()),
                evaluator: false
            }
        );
        assert_eq!((of_rank("2"), of_rank("3")), (PsTask::Serve { address: None }, PsTask::Work));
        let refused =
            |vars: &[(&str, &str)], servers| assigned(vars, servers).unwrap_err().to_string();
        assert!(refused(&[], 1).contains("neither TF_CONFIG nor RANK"));
        assert!(
            refused(&[("RANK", "x"), ("WORLD_SIZE", "5")], 1).contains("RANK=x is not a number")
        );
        assert!(refused(&[("RANK", "0"), ("WORLD_SIZE", "3")], 2).contains("leave no worker"));
        assert!(refused(&[("RANK", "0"), ("WORLD_SIZE", "3")], 0).contains("leave no worker"));
    }
}
