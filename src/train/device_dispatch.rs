//! Training on the device of `run.device`.

use std::path::Path;

use super::run::{Customization, DeviceTable, RankGpu, TrainRequest, bytes_before, train_on};
use crate::evaluate::RunAnnouncement;
use crate::planner::{SearchEnvironment, search_layouts_here};
use hpctrain_base::error::{Error, Result};
use hpctrain_checkpoint::run_dir::RunOutcome;
use hpctrain_comm::Comm;
use hpctrain_config::gpu_assignment::{Devices, assign_devices, check_cpu, open_cpu};
use hpctrain_config::telemetry::say;
use hpctrain_config::{LayoutMode, ResolvedConfig};
use hpctrain_cpu::Cpu;
use hpctrain_device::Kernels;

/// Runs a whole training on the device of `run.device`, like `hpctrain train`. Collective over the
/// world of `comm`. `announcement` is that of a job with evaluators, as in [`train_on`].
///
/// Signals end the process at once unless [`signals::listen`](hpctrain_base::signals::record_signals) was
/// called before; then the run saves first.
///
/// # Errors
/// Returns an error if the device does not exist or cannot be used, or if [`train_on`] fails.
pub fn train(
    comm: &Comm<Cpu>,
    request: &TrainRequest,
    custom: Customization<'_>,
    announcement: Option<&RunAnnouncement>,
) -> Result<RunOutcome> {
    let request =
        &TrainRequest { config: custom.with_custom_network(&request.config), ..request.clone() };
    let vocabulary =
        custom.data.as_ref().map(|splits| splits.train.vocabulary()).filter(|ids| *ids > 0);
    let threads = request.threads;
    let devices = assign_devices(comm, &request.config)?;
    let notes = devices.notes();
    let Devices { gpu, is_mixed, table } = devices;
    let comm = &if is_mixed { comm.with_mixed_devices() } else { comm.clone() };
    if gpu.is_none() || is_mixed {
        comm.world().all_ok(check_cpu(&request.config))?;
    }
    let request = &TrainRequest { devices: DeviceTable { ranks: table, notes }, ..request.clone() };
    match gpu {
        None => {
            let backend = open_cpu;
            let here =
                SearchEnvironment { comm, backend, gpu: None, threads, vocabulary, replaced: 0 };
            let request = laid_out(request, here)?;
            train_on(comm, &request, custom, announcement, open_cpu)
        }
        Some(gpu) => {
            let comm = &gpu.device_comm(comm);
            let backend = |plan: &ResolvedConfig| gpu.backend(plan);
            let place = RankGpu {
                includes_nccl: gpu.includes_nccl,
                memory: gpu.memory,
                id: gpu.device().id.clone(),
                sharers: gpu.sharers,
            };
            let memory = Some(gpu.memory);
            let here =
                SearchEnvironment { comm, backend, gpu: memory, threads, vocabulary, replaced: 0 };
            let request = TrainRequest { gpu: Some(place), ..laid_out(request, here)? };
            train_on(comm, &request, custom, announcement, backend)
        }
    }
}

/// Returns the request with the fastest layout for this machine if `parallel.layout = auto`, else
/// unchanged. Collective.
fn laid_out<B: Kernels, F: Fn(&ResolvedConfig) -> Result<B>>(
    request: &TrainRequest,
    here: SearchEnvironment<'_, B, F>,
) -> Result<TrainRequest> {
    if request.config.parallel.layout == LayoutMode::Given {
        return Ok(request.clone());
    }
    let run = &request.config.run;
    let replaced = match &run.name {
        Some(name) => {
            let path = Path::new(&run.root).join(name);
            bytes_before(&here.comm.world(), &request.config.memory_checkpoint, &path)?
        }
        // Its directory is not known yet.
        None => 0,
    };
    let here = SearchEnvironment { replaced, ..here };
    let (choice, _) = search_layouts_here(&request.config, &here)?;
    let fitting = choice.proposals.len();
    let best = choice
        .proposals
        .into_iter()
        .next()
        .ok_or_else(|| Error::internal("a choice without a layout"))?;
    if here.comm.rank() == 0 {
        let step = 1e3 * best.time.step;
        say(format_args!(
            "parallel.layout = auto: {} of {fitting} that fit, {step:.2} ms a step as measured\n",
            best.keys
        ));
    }
    Ok(TrainRequest { config: best.keys.config(&request.config), ..request.clone() })
}
