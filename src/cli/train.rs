//! `hpctrain train`: one rank of a job.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, Args, Command};

use super::eval::evaluate;
use super::rank_roles::{RankRole, Role, Start};
use super::servers;
use super::with_checkpoint::{patience, seconds};
use crate::comm::Launch;
use crate::config::{Config, PRESETS, Sources, load};
use crate::error::{Error, Result};
use crate::evaluate::{self, Policy};
use crate::job::{self, fail};
use crate::run_dir::{RestoreScope, Resume};
use crate::signals;
use crate::train::{Customization, TrainRequest, check_alike, train};

/// Where the configuration comes from.
#[derive(Args)]
pub struct SourceArgs {
    /// Configuration file (TOML); `hpctrain config show` prints one.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Compiled-in configuration to start from.
    #[arg(long, value_name = "NAME", value_parser = PresetParser)]
    preset: Option<String>,
    /// Override one key, such as run.steps=500; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

/// Takes any name, so that the error of one that is none names the nearest; help and completions
/// have those that are.
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
    /// The configuration, and the name of a run that has none.
    pub fn load(&self) -> Result<(Config, String)> {
        let preset = self.preset.as_deref();
        let file = self.config.as_deref();
        load(&Sources { preset, file, overrides: &self.overrides })
    }
}

/// The run that is asked for.
#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    sources: SourceArgs,
    /// Continue a run: `auto` takes the newest whole checkpoint of its directory, or starts if
    /// there is none; without run.name, that of the one unnamed run with this configuration that
    /// has saved; else the path of a checkpoint, or of a run whose newest is meant, from which
    /// another run goes on.
    #[arg(long, value_name = "auto|CHECKPOINT")]
    resume: Option<String>,
    /// Take only the parameters of the checkpoint and begin at step 0: fine-tuning.
    #[arg(long, requires = "resume", conflicts_with = "skip_optimizer")]
    weights_only: bool,
    /// Take parameters and progress of the checkpoint, but begin with a fresh optimizer.
    #[arg(long, requires = "resume")]
    skip_optimizer: bool,
    /// Go on although the training data is not that of the checkpoint; the change is noted in
    /// run.json and in checkpoints.
    #[arg(long, requires = "resume", conflicts_with = "weights_only")]
    allow_changed_data: bool,
    /// Write the activity of every thread of every rank, with its times, to FILE at the end, for
    /// ui.perfetto.dev.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Count the time of every kernel on rank 0: a table at the end, and profile.json in the run's
    /// directory.
    #[arg(long)]
    profile: bool,
}

/// Arguments of `hpctrain train`.
#[derive(Args)]
pub struct TrainArgs {
    #[command(flatten)]
    run: RunArgs,
    /// So many of the ranks evaluate checkpoints instead of training: the last ones.
    #[arg(long, value_name = "N", default_value_t = 0)]
    evaluators: usize,
    /// Which checkpoints the evaluators evaluate.
    #[arg(long, value_enum, default_value_t = Policy::Latest, requires = "evaluators")]
    policy: Policy,
    /// So many of the ranks hold the parameters instead of training, those before the evaluators:
    /// parameter servers.
    #[arg(long, value_name = "N", default_value_t = 0)]
    servers: usize,
}

impl TrainArgs {
    /// The request of the job's evaluators. The trainer tells the directory.
    fn evaluation(&self, role: &Role) -> evaluate::SidecarOptions {
        evaluate::SidecarOptions {
            run: PathBuf::new(),
            watch: true,
            policy: self.policy,
            timeout: None,
            overrides: vec![],
            threads: role.threads,
            beside_trainer: true,
        }
    }

    /// The configuration.
    pub fn config(&self) -> Result<Config> {
        self.run.sources.load().map(|(config, _)| config)
    }

    /// Ranks of the job that do not train.
    pub fn ranks_beside(&self) -> usize {
        self.evaluators + self.servers
    }
}

impl RunArgs {
    /// The run that the arguments ask for, of the ranks of one job, of which so many are servers.
    pub fn request_of_job(&self, servers: usize, threads: Option<usize>) -> Result<TrainRequest> {
        let request = self.request(threads)?;
        if servers == 0 {
            servers::check_without(&request.config)?;
        }
        Ok(request)
    }

    /// The run that the arguments ask for.
    pub fn request(&self, threads: Option<usize>) -> Result<TrainRequest> {
        let (config, name) = self.sources.load()?;
        let resume = match self.resume.as_deref() {
            None => Resume::No,
            Some("auto") => Resume::Auto,
            Some(path) => Resume::From(path.into()),
        };
        let take = match (self.weights_only, self.skip_optimizer) {
            (true, _) if resume == Resume::Auto => {
                return Err(Error::input(
                    "--weights-only with --resume auto would begin the run again at every restart",
                )
                .hint("give the path of a checkpoint the first time, and --resume auto alone afterwards"));
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
            take,
            allow_changed_data,
            trace,
            profile,
            threads,
            ..TrainRequest::new(config, name)
        })
    }
}

/// Runs one rank; returns the exit code.
pub fn run(args: &TrainArgs, launch: Option<&Launch>) -> i32 {
    if let Err(e) = signals::listen() {
        return fail(&e);
    }
    // A rank whose configuration failed still meets the others, so that all hear of it and one
    // speaks.
    let request = args.run.request_of_job(args.servers, None);
    let patience = request
        .as_ref()
        .map_or_else(|_| patience(&[]), |request| seconds(request.config.comm.timeout));
    job::run(launch, patience, |comm| {
        let request = comm.world().all_ok(request)?;
        let role =
            Role::find(comm, Start::Train { evaluators: args.evaluators, servers: args.servers })?;
        if role.part != RankRole::Evaluates {
            check_alike(&role.side.world(), &request.config)
                .inspect_err(|e| role.release_evaluators(e))?;
        }
        match role.part {
            RankRole::Evaluates => evaluate(&role, args.evaluation(&role)),
            RankRole::Trains if role.counts.1 == 0 => train_as(&role, request),
            RankRole::Trains | RankRole::Serves(_) => servers::take_part(&role, request),
        }
    })
}

/// Trains as one of the ranks that do; returns the exit code.
fn train_as(role: &Role, mut request: TrainRequest) -> Result<i32> {
    if !role.mixed {
        return train(&role.comm, &request, Customization::default(), None)
            .map(|ending| ending.exit_code());
    }
    request.config.eval.inline = false;
    request.threads = Some(role.threads);
    let ending = train(&role.comm, &request, Customization::default(), Some(&role.everyone));
    ending.inspect_err(|e| role.release_evaluators(e)).map(|ending| ending.exit_code())
}
