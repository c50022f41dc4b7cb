//! Checks of `run.device = mixed`: ranks on CPUs beside ranks on GPUs.
//!
//! The two kinds of device round differently, so equal input must never be computed on both: each
//! parameter is updated by one rank, which sends it to the others.

use super::{Compute, Config, DeviceChoice, Interval};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::mesh::Mesh;
use hpctrain_comm::TransportChoice;
use hpctrain_parallel::Storage;

/// Checks that ranks of a configuration may compute on different kinds of device, if they do.
///
/// # Errors
/// Returns an error for the first key that does not go with `run.device = mixed`.
pub fn check(config: &Config, mesh: &Mesh) -> Result<()> {
    if config.run.device != DeviceChoice::Mixed {
        return Ok(());
    }
    let refused = |what: &str, hint: String| {
        Err(Error::input(format!("{what} is not supported with run.device = mixed")).hint(hint))
    };
    if mesh.replica > 1 && config.parallel.storage != Storage::Central {
        let (what, hint) = match mesh.shard {
            1 => ("parallel.zero = 0", "set parallel.zero to 1, 2 or 3"),
            _ => ("parallel.replica above 1", "omit parallel.replica and parallel.shard"),
        };
        let hint = format!("{hint}: each parameter is then updated by one rank");
        return refused(what, hint);
    }
    let given = &config.parallel;
    let keys = [
        ("parallel.pipeline", given.pipeline > 1),
        ("parallel.tensor", given.tensor > 1),
        ("local_sgd.sync_every", config.local_sgd.sync_every != Interval::Steps(0)),
        ("elastic.on", config.elastic.on),
        ("run.sdc_check_every", config.run.sdc_check_every > 0),
        ("offload.optimizer", config.offload.optimizer),
        ("offload.params", config.offload.params),
        ("offload.activations", config.offload.activations),
        ("device.matmul_autotune", config.device.matmul_autotune),
    ];
    if let Some((key, _)) = keys.into_iter().find(|(_, is_set)| *is_set) {
        return refused(key, "omit it".into());
    }
    if config.precision.dtype == Compute::Bf16 {
        return refused(
            "precision.dtype = bf16",
            "set precision.dtype to f32, or to tf32 for the GPUs".into(),
        );
    }
    match config.comm.transport {
        TransportChoice::Auto | TransportChoice::HostStaged => Ok(()),
        transport => refused(
            &format!("comm.transport = {transport}"),
            "omit it: messages are host-staged".into(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use crate::{Compute, Environment, Sources, load, resolve};

    fn dtype(settings: &[&str], ranks: usize) -> Result<Compute, String> {
        let overrides: Vec<String> =
            settings.iter().map(ToString::to_string).chain(["run.device=mixed".into()]).collect();
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() })
            .map_err(|e| e.to_string())?;
        let facts = Environment { ranks, threads: 1, vocabulary: Some(65), on_gpu: false };
        let plan = resolve(config, &facts).map_err(|e| e.to_string())?;
        // Resolved again it is the same.
        assert_eq!(resolve(plan.config.clone(), &facts).unwrap(), plan);
        Ok(plan.config.precision.dtype)
    }

    #[test]
    fn each_parameter_has_one_owner() {
        assert_eq!(dtype(&["parallel.zero=1"], 2), Ok(Compute::F32));
        assert_eq!(dtype(&["parallel.zero=3", "precision.dtype=tf32"], 2), Ok(Compute::Tf32));
        assert_eq!(dtype(&["parallel.zero=0", "parallel.storage=central"], 2), Ok(Compute::F32));
        for (settings, words) in [
            (&["parallel.zero=0"][..], "parallel.zero = 0 is not supported"),
            (&["parallel.zero=1", "parallel.replica=2"], "parallel.replica above 1"),
            (&["parallel.zero=1", "precision.dtype=bf16"], "precision.dtype = bf16"),
            (&["parallel.zero=1", "comm.transport=nccl"], "comm.transport = nccl"),
            (&["parallel.zero=1", "offload.optimizer=true"], "offload.optimizer"),
            (&["parallel.zero=1", "run.sdc_check_every=5"], "run.sdc_check_every"),
            (&["parallel.zero=1", "parallel.pipeline=2"], "parallel.pipeline"),
        ] {
            let refused = dtype(settings, 4).unwrap_err();
            assert!(refused.contains(words) && refused.contains("hint:"), "{refused}");
        }
    }
}
