//! `hpctrain train`: runs one rank of a training job.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, Args, Command};

use super::eval::evaluate;
use super::rank_roles::{RankAssignment, RankRole, StartCommand};
use super::servers;
use super::with_checkpoint::comm_timeout;
use crate::comm::{AlgorithmChoice, Launch, prepare_environment};
use crate::config::{Config, PRESETS, Sources, given_keys, load};
use crate::elastic;
use crate::error::{Error, Result};
use crate::evaluate::{self, Policy};
use crate::job::{self, fail};
use crate::run_dir::{RestoreScope, Resume};
use crate::signals;
use crate::train::{Customization, TrainRequest, check_same_config, train};

/// The sources of the configuration.
#[derive(Debug, Args)]
pub struct SourceArgs {
    /// Configuration file (TOML); `hpctrain config show` prints one.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Built-in configuration to start from.
    #[arg(long, value_name = "NAME", value_parser = PresetParser)]
    preset: Option<String>,
    /// Override one key, such as run.steps=500; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

/// Accepts any name, so that the error for an unknown preset can suggest the nearest one; help and
/// completions list the presets.
#[derive(Clone)]
struct PresetParser;

impl TypedValueParser for PresetParser {
    type Value = String;

    fn parse_ref(
        &self,
        cmd: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(cmd, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(PRESETS.iter().map(|(name, _)| PossibleValue::new(*name))))
    }
}

impl SourceArgs {
    fn sources(&self) -> Sources<'_> {
        let preset = self.preset.as_deref();
        let file = self.config.as_deref();
        Sources { preset, file, overrides: &self.overrides }
    }

    /// Returns the preset, the file and the overrides.
    pub fn parts(&self) -> (Option<String>, Option<PathBuf>, Vec<String>) {
        (self.preset.clone(), self.config.clone(), self.overrides.clone())
    }

    /// Loads the configuration, and returns it with the default name of the run.
    pub fn load(&self) -> Result<(Config, String)> {
        load(&self.sources())
    }
}

/// Arguments of the commands that start a run.
#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    sources: SourceArgs,
    /// Resume from a checkpoint: `auto` takes the newest valid checkpoint of the run's directory,
    /// and starts from scratch if there is none (without run.name, it looks for the only unnamed
    /// run of this configuration that has a checkpoint); CHECKPOINT, the path of a checkpoint or of
    /// a run whose newest checkpoint is taken, starts a new run from it.
    #[arg(long, value_name = "auto|CHECKPOINT")]
    resume: Option<String>,
    /// Load only the parameters of the checkpoint and start at step 0 (fine-tuning).
    #[arg(long, requires = "resume", conflicts_with = "skip_optimizer")]
    weights_only: bool,
    /// Load the parameters and progress of the checkpoint, but not the optimizer state.
    #[arg(long, requires = "resume")]
    skip_optimizer: bool,
    /// Resume although the training data differs from that of the checkpoint; the change is
    /// recorded in run.json and in checkpoints.
    #[arg(long, requires = "resume", conflicts_with = "weights_only")]
    allow_changed_data: bool,
    /// Write a timeline of every thread of every rank to FILE at the end, to be opened at
    /// ui.perfetto.dev.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Profile every kernel on rank 0: print a table at the end, and write profile.json into the
    /// run's directory.
    #[arg(long)]
    profile: bool,
}

/// Arguments of `hpctrain train`.
#[derive(Args)]
pub struct TrainArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Number of ranks, the last ones, that evaluate checkpoints instead of training.
    #[arg(long, value_name = "N", default_value_t = 0)]
    evaluators: usize,
    /// Which checkpoints the evaluators evaluate.
    #[arg(long, value_enum, default_value_t = Policy::Latest, requires = "evaluators")]
    policy: Policy,
    /// Number of ranks, those before the evaluators, that are parameter servers instead of
    /// training.
    #[arg(long, value_name = "N", default_value_t = 0)]
    servers: usize,
}

impl TrainArgs {
    /// Returns the options of the job's evaluators. The trainer sends them the run's directory.
    fn sidecar_options(&self, role: &RankAssignment) -> evaluate::SidecarOptions {
        evaluate::SidecarOptions {
            run: PathBuf::new(),
            watch: true,
            policy: self.policy,
            timeout: None,
            overrides: vec![],
            threads: role.threads,
            in_trainer_job: true,
            start_timeout: None,
        }
    }

    /// Loads the configuration.
    pub fn config(&self) -> Result<Config> {
        self.run.sources.load().map(|(config, _)| config)
    }

    /// Returns an error if the job has ranks that do not train, which no elastic job has.
    fn check_elastic(&self) -> Result<()> {
        let flag = match (self.evaluators, self.servers) {
            (0, 0) => return Ok(()),
            (0, _) => "--servers",
            _ => "--evaluators",
        };
        Err(Error::input(format!("elastic.on = true is not supported with {flag}")).hint(
            "evaluate in a job of its own, with hpctrain eval --watch, or inside the trainer",
        ))
    }

    /// Returns the number of ranks of the job that do not train.
    pub fn non_training_ranks(&self) -> usize {
        self.evaluators + self.servers
    }
}

impl RunArgs {
    /// Returns those of `keys` that `--config` and `--set` give, as overrides.
    pub fn given_keys(&self, keys: &[&str]) -> Result<Vec<String>> {
        given_keys(&self.sources.sources(), keys)
    }

    /// Returns the run of a job of which `servers` ranks are parameter servers; refuses keys of
    /// parameter servers if there are none.
    pub fn job_request(&self, servers: usize, threads: Option<usize>) -> Result<TrainRequest> {
        let request = self.request(threads)?;
        if servers == 0 {
            servers::check_no_server_keys(&request.config)?;
        }
        Ok(request)
    }

    /// Returns the run that the arguments describe.
    pub fn request(&self, threads: Option<usize>) -> Result<TrainRequest> {
        let (config, name) = self.sources.load()?;
        let resume = match self.resume.as_deref() {
            None => Resume::No,
            Some("auto") => Resume::Auto,
            Some(path) => Resume::From(path.into()),
        };
        let scope = match (self.weights_only, self.skip_optimizer) {
            (true, _) if resume == Resume::Auto => {
                return Err(Error::input(
                    "--weights-only with --resume auto would start the run from step 0 at every restart",
                )
                .hint("give the path of a checkpoint at the first start, and --resume auto alone afterwards"));
            }
            (true, _) => RestoreScope::Weights,
            (_, true) => RestoreScope::NoOptimizer,
            _ => RestoreScope::Everything,
        };
        let trace = self.trace.clone();
        let profile = self.profile;
        let allow_changed_data = self.allow_changed_data;
        Ok(TrainRequest {
            resume,
            take: scope,
            allow_changed_data,
            trace,
            profile,
            threads,
            ..TrainRequest::new(config, name)
        })
    }
}

/// Returns true if the gradients of a run may be summed by the collectives of MPI or NCCL.
pub fn may_use_vendor(config: &Config) -> bool {
    match config.comm.algorithm {
        AlgorithmChoice::Vendor => true,
        AlgorithmChoice::Auto => !config.comm.deterministic,
        _ => false,
    }
}

/// Runs one rank and returns its exit code.
pub fn run(args: &TrainArgs, launch: Option<&Launch>) -> i32 {
    if let Err(e) = signals::record_signals() {
        return fail(&e);
    }
    // A rank whose configuration failed still joins the others, so that all end with the error and
    // one of them prints it.
    let request = args.run.job_request(args.servers, None);
    prepare_environment(request.as_ref().is_ok_and(|request| may_use_vendor(&request.config)));
    if let Ok(elastic) = &request
        && elastic.config.elastic.on
    {
        return match args.check_elastic() {
            Ok(()) => elastic::run(launch, elastic.clone()),
            Err(e) => fail(&e),
        };
    }
    let patience = request
        .as_ref()
        .map_or_else(|_| comm_timeout(&[]), |request| request.config.comm.unmeasured_timeout());
    job::run(launch, patience, |comm| {
        let request = comm.world().all_ok(request)?;
        let role = RankAssignment::find(
            comm,
            StartCommand::Train { evaluators: args.evaluators, servers: args.servers },
        )?;
        if role.role != RankRole::Evaluates
            && let Err(e) = check_same_config(&role.peers.world(), &request.config)
        {
            return role.end_evaluators(e);
        }
        match role.role {
            RankRole::Evaluates => evaluate(&role, args.sidecar_options(&role)),
            RankRole::Trains if role.counts.1 == 0 => train_as(&role, request),
            RankRole::Trains | RankRole::Serves(_) => servers::run_rank(&role, request),
        }
    })
}

/// Runs a training rank and returns its exit code.
fn train_as(role: &RankAssignment, mut request: TrainRequest) -> Result<i32> {
    if !role.mixed {
        return train(&role.comm, &request, Customization::default(), None)
            .map(|outcome| outcome.exit_code());
    }
    request.config.eval.inline = false;
    request.threads = Some(role.threads);
    let outcome = train(&role.comm, &request, Customization::default(), Some(&role.announcement));
    outcome.map(|outcome| outcome.exit_code()).or_else(|e| role.end_evaluators(e))
}
