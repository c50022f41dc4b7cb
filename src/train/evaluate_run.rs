//! The evaluator of a run as a program of its own, on the device of `run.device`.

use super::hooks::{Hooks, Outcome};
use super::run::Customization;
use crate::evaluate::{CustomEvaluation, Metrics, SidecarOptions, watch};
use hpctrain_base::error::Result;
use hpctrain_checkpoint::run_dir::RunOutcome;
use hpctrain_comm::Comm;
use hpctrain_config::gpu_assignment::{assign_gpus, open_cpu};
use hpctrain_config::{Config, overlay};
use hpctrain_cpu::Cpu;

/// Evaluates the checkpoints of a run beside its trainer, like `hpctrain eval --run`, with the data
/// and the network of `custom`: those that the trainer was given, and its loss and metrics.
/// Collective over the world of `comm`. The device is that of `run.device` in the overrides of
/// `options`.
///
/// After each evaluation, [`Hook::evaluation`](super::Hook::evaluation) of the hooks is called on
/// all ranks; a request to stop is passed to the trainer. At the end,
/// [`Hook::end`](super::Hook::end) is called, with the step of the last evaluation. No other method
/// is called.
///
/// # Errors
/// Returns an error if the device cannot be used, there is no such run, its data, network or
/// loss differ from `custom`, no trainer has held the run for the timeout, or a hook fails.
pub fn evaluate_run(
    comm: &Comm<Cpu>,
    options: &SidecarOptions,
    custom: Customization<'_>,
) -> Result<RunOutcome> {
    let config = comm.world().all_ok(overlay(&Config::default(), &options.overrides))?;
    let Customization { hooks, data, network, loss, metrics } = custom;
    let mut hooks = Hooks::new(hooks);
    let mut last = 0;
    let mut evaluated = |step: u64, measures: &Metrics| {
        last = step;
        let stop = hooks.call(|hook| hook.evaluation(step, measures));
        hooks.failure().map(|()| stop)
    };
    let evaluated = Some(Box::new(&mut evaluated) as _);
    let custom = CustomEvaluation { data, network, loss, metrics, evaluated };
    let result = match assign_gpus(comm, &config)? {
        None => watch(comm, options, custom, open_cpu),
        Some(gpu) => watch(&gpu.device_comm(comm), options, custom, move |plan| gpu.backend(plan)),
    };
    let outcome = Outcome { step: last, directory: &options.run, result: result.as_ref() };
    let ended = hooks.end(&outcome);
    match result {
        Ok(ending) => comm.world().all_ok(ended).map(|()| ending),
        Err(e) => {
            ended.unwrap_or_else(|e| log::error!("{e}"));
            Err(e)
        }
    }
}
